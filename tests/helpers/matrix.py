"""What the tests show of each family: runs those in CAPABILITIES and writes docs/matrix.md from their outcomes.

With `--check` runs nothing, and fails unless the page is the one that would be written if all of them passed.
"""

import argparse
import sys
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

import pytest
from zoo import CONFIGS, MULTIMODAL, NEEDED

from ligermodels.archs import FAMILIES

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "matrix.md"

TINY = {**CONFIGS, **MULTIMODAL}

CAPABILITIES = {
    "load": ["archs/test_families.py::test_logits_*", "archs/test_multimodal.py::test_logits_*"],
    "loss": ["archs/test_families.py::test_logits_*", "archs/test_multimodal.py::test_logits_*"],
    "gradients": ["archs/test_families.py::test_logits_*", "archs/test_multimodal.py::test_logits_*"],
    "packed": ["archs/test_families.py::test_packed_*"],
    "generate": ["archs/test_families.py::test_greedy_tokens_*", "archs/test_multimodal.py::test_greedy_tokens_*"],
    "Medusa heads": ["archs/test_families.py::test_medusa_*", "speculative/test_medusa.py::*"],
    "export": ["archs/test_families.py::test_export_*", "archs/test_multimodal.py::test_export_*"],
    "nativize": ["nativize/test_nativize.py::test_a_native_model_*"],
    "MTP heads": ["archs/test_newer_families.py::test_new_mtp_heads_are_lossless_*"],
    "LoRA": [
        "adapt/test_adapter_commands.py::test_adapters_of_every_kind_*",
        "integrations/test_lora_peft.py::test_ours_in_peft",
    ],
    "int4": ["archs/test_newer_families.py::test_decoding_in_four_bits_*"],
    "float8": ["adapt/test_float8_families.py::test_gradients_beside_float32"],
    "shard, context, tensor": ["parallel/test_every_kind.py::test_losses_every_gradient_and_tokens"],
}
"""The tests that show each capability; of which families is in their parameters, or else in their names."""

BY_KIND = {"MTP heads", "int4", "float8", "shard, context, tensor"}
"""Capabilities whose code goes by layers, shown in configurations that together have every kind of layer."""

BY_LAYERS = {"packed", "generate", "Medusa heads", "nativize", "LoRA"} | BY_KIND
"""Capabilities whose code goes by layers, not by families: shown in one configuration of each type."""

REFUSALS = {"nativize": ["nativize/test_nativize.py::test_layers_without_a_counterpart_*"]}
"""The tests that show which types refuse a capability: their cell is "error"."""

HEAD = """# What the tests show

Of each family, by `model_type`: ✓ where all tests of a capability pass, and ✗ where one does not. Every configuration
named here is loaded, trained and exported; packed documents, generation and Medusa heads are tested in one of each
type, and in those that together have every kind of layer with every option; MTP heads, int4 and
parallel plans (FSDP2, context and tensor parallelism on two ranks) only in the latter ("by kind"); training in float8
in some that have every kind of layer, of other sizes. The logits and gradients of LoRA are PEFT's, in all
configurations but two. "error" is shown by a test too: `nativize` refuses the type by name, and changes nothing. The
tests hold tiny random models of awkward sizes to transformers' own. `make matrix` runs them and writes this page.
"""


class Matrix:
    """A pytest plugin that selects the tests of CAPABILITIES, and keeps how those of each cell ended."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.refusals: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.configs: dict[str, list[str]] = {
            family: [name for name, config in TINY.items() if config["model_type"] == family] for family in FAMILIES
        }
        self.unused = set(all_patterns())
        self.passed: dict[str, bool] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        """Sort the tests into their cells, and drop the others."""
        for item in items:
            name = f"{item.path.relative_to(TESTS)}::{item.originalname}"
            for tests, group in ((self.cells, CAPABILITIES), (self.refusals, REFUSALS)):
                for capability, patterns in group.items():
                    if found := {pattern for pattern in patterns if fnmatch(name, pattern)}:
                        for family in families_of(item):
                            self.unused -= found
                            tests[family, capability].add(item.nodeid)
        wanted = set().union(*self.cells.values(), *self.refusals.values())
        items[:] = [item for item in items if item.nodeid in wanted]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test passes if its setup, its call and its teardown do."""
        self.passed[report.nodeid] = self.passed.get(report.nodeid, True) and report.passed

    def faults(self) -> list[str]:
        """What CAPABILITIES names in vain, and what no test shows."""
        names = [f"no test of a family is called {pattern}" for pattern in sorted(self.unused)]
        return names + [
            f"no test shows {capability} of {family}" + (", or its refusal" if capability in REFUSALS else "")
            for family in FAMILIES
            for capability in CAPABILITIES
            if FAMILIES[family].text is None
            and capability not in BY_KIND
            and not (self.cells[family, capability] or self.refusals[family, capability])
        ]

    def page(self) -> str:
        """docs/matrix.md; a test that has not been run counts as passed."""
        rows = [["", "configurations", *CAPABILITIES], ["---"] * 2 + [":-:"] * len(CAPABILITIES)]
        for family, configs in self.configs.items():
            rows.append([f"`{family}`", ", ".join(configs), *(self._cell(family, each) for each in CAPABILITIES)])
        table = ["| " + " | ".join(row) + " |" for row in rows]
        sources = [f"- {each}: " + ", ".join(f"`{name}`" for name in CAPABILITIES[each]) for each in CAPABILITIES]
        sources += [f"- error, of {each}: " + ", ".join(f"`{name}`" for name in REFUSALS[each]) for each in REFUSALS]
        return "\n".join([HEAD, *table, "", "The tests, in `tests/`:", "", *sources, ""])

    def _cell(self, family: str, capability: str) -> str:
        tests, text = self.cells[family, capability], FAMILIES[family].text
        if not tests and (refusals := self.refusals[family, capability]):
            return "error" if self._pass(refusals) else "✗"
        if not tests and text is not None:
            return f"as `{text(NEEDED.get(family, {}))['model_type']}`"
        if not tests and capability in BY_KIND:
            return "by kind"
        shown = [any(f"[{config}]" in test for test in tests) for config in self.configs[family]]
        enough = capability in BY_KIND or (any(shown) if capability in BY_LAYERS else all(shown))
        return "✓" if tests and enough and self._pass(tests) else "✗"

    def _pass(self, tests: set[str]) -> bool:
        return all(self.passed.get(test, True) for test in tests)


def all_patterns() -> list[str]:
    """The tests of all cells."""
    return [pattern for group in (CAPABILITIES, REFUSALS) for patterns in group.values() for pattern in patterns]


def families_of(item: pytest.Function) -> list[str]:
    """Those whose configurations are among a test's parameters, or else the one in its name."""
    given = [*item.callspec.params.values()] if hasattr(item, "callspec") else []
    given += [each for several in given if isinstance(several, list | tuple) for each in several]
    by_parameter = [TINY[each]["model_type"] for each in given if isinstance(each, str) and each in TINY]
    by_name = sorted((family for family in FAMILIES if f"_{family}_" in item.originalname), key=len)
    return by_parameter or by_name[-1:]


def main(check: bool) -> int | str:
    """Exit status, or what is wrong."""
    matrix = Matrix()
    files = sorted({str(TESTS / pattern.partition("::")[0]) for pattern in all_patterns()})
    status = pytest.main([*files, "--every-case", *(["--collect-only", "-qq"] if check else ["-q"])], plugins=[matrix])
    if faults := matrix.faults():
        return "\n".join(faults)
    if not check:
        PAGE.write_text(matrix.page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != matrix.page():
        return f"docs/{PAGE.name} is not what the tests say: make matrix"
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run the tests of all families; write docs/matrix.md.")
    parser.add_argument("--check", action="store_true", help="run no test; fail if the page would change if all passed")
    sys.exit(main(parser.parse_args().check))
