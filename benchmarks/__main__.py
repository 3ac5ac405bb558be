"""`python -m benchmarks NAME [ARGUMENT ...]` runs one benchmark; with `--help` it lists its arguments.

A benchmark is a module with a function `main` that reads `sys.argv`. Only the module that runs is imported.
"""

from __future__ import annotations

import importlib
import sys

ROOMS = {
    "cases": (
        "ops", "attention", "delta", "training", "command_line", "medusa", "draft", "decoding", "quantized_decoding",
        "expert_decoding",
        "cpu_decoding", "float8_block", "float8_scaled_mm", "float8_loss", "needed_tokens", "loading", "demo",
        "compare", "mixtures", "parallel", "resume", "grpo", "batch_invariant", "weight_update", "all",
    ),
    "reporting": ("report",),
}  # fmt: skip
MODULES = {name: f"benchmarks.{room}.{name}" for room, names in ROOMS.items() for name in names}


def main() -> None:
    """Run the benchmark named by the first argument with the arguments that follow."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in MODULES:
        sys.exit(f"usage: python -m benchmarks NAME [ARGUMENT ...]\n{name or 'NAME'}: give one of {', '.join(MODULES)}")
    sys.argv = [f"python -m benchmarks {name}", *sys.argv[2:]]
    importlib.import_module(MODULES[name]).main()


if __name__ == "__main__":
    main()
