"""`python -m benchmarks.training [CASE ...] [--out FILE]`: a full fine-tuning step, AdamW in bf16, beside transformers.

Every provider is first checked: with the weights of a model of two layers that transformers saved, its loss and
gradient must be those of transformers in fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import ligermodels as lm
from benchmarks.measure import facts, relative_error
from benchmarks.models import CONFIGS
from ligermodels.training.fused_adamw import FusedAdamW

ERROR_LIMIT = 0.05
STEPS = 8
COLUMNS = ("step_ms", "tokens_per_s", "peak_gib", "error")


@dataclass(frozen=True)
class Case:
    """A model, its batch, what share of the labels is ignored, and what ours does beyond a plain step."""

    model: str
    batch: int
    length: int
    ignored: float = 0.0
    recompute: str = "nothing"
    in_backward: bool = False

    @property
    def name(self) -> str:
        """Model and batch."""
        return f"{self.model} {self.batch}x{self.length}" + (f" {self.ignored:.0%} ignored" if self.ignored else "")


CASES = [
    Case("llama-3-8b", 1, 4096),
    Case("llama-3-8b", 4, 4096, recompute="activations"),
    Case("llama-3-8b", 5, 4096, recompute="activations"),
    Case("llama-3.2-1b", 4, 4096),
    Case("llama-3.2-1b", 4, 4096, ignored=0.5),
    Case("gemma-2-2b", 2, 4096),
    Case("mistral-7b", 2, 4096),
    Case("qwen2.5-7b", 2, 4096),
    Case("qwen3-1.7b", 4, 4096),
]


def _ours(config: dict[str, Any], folder: Path | None) -> nn.Module:
    if folder is not None:
        return lm.from_pretrained(folder, dtype=torch.bfloat16, device="cuda")
    return lm.from_config(config, dtype=torch.bfloat16, device="cuda")


def _transformers(config: dict[str, Any], folder: Path | None, dtype: torch.dtype = torch.bfloat16) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    # SDPA leaves out Gemma 2's softcap of the scores, which random weights hardly notice; it is what is fastest there.
    with torch.device("cuda"):
        if folder is not None:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        else:
            made = AutoConfig.for_model(**config)
            model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    return model.cuda()


def _liger(config: dict[str, Any], folder: Path | None) -> nn.Module:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    model = _transformers(config, folder)
    _apply_liger_kernel_to_instance(model=model)
    return model


def _compiled(make: Callable[..., nn.Module], **options: Any) -> Callable[[dict[str, Any], Path | None], nn.Module]:
    def made(config: dict[str, Any], folder: Path | None) -> nn.Module:
        compiled: Any = torch.compile(make(config, folder), **options)
        return cast(nn.Module, compiled)

    return made


PROVIDERS: dict[str, Callable[[dict[str, Any], Path | None], nn.Module]] = {
    "ligermodels": _ours,
    "ligermodels + torch.compile": _compiled(_ours, fullgraph=True),
    "transformers": _transformers,
    "transformers + torch.compile": _compiled(_transformers),
    "transformers + liger": _liger,
}
"""Liger comes last: it changes transformers for the whole process."""


def _loss_and_gradient(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """The loss, and the gradient of the first layer's input norm."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    names = ("blocks.0.attention_norm.weight", "model.layers.0.input_layernorm.weight")
    found = next(p.grad for n, p in model.named_parameters() if n.removeprefix("_orig_mod.") in names)
    return loss.detach(), found


def verify(case: Case, providers: list[str]) -> dict[str, float]:
    """Each provider's relative error of loss and gradient on two layers, against transformers in fp32."""
    config = CONFIGS[case.model] | {"num_hidden_layers": 2}
    ids = torch.randint(config["vocab_size"], (1, 512), device="cuda")
    errors = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        _transformers(config, None).save_pretrained(folder)
        truth = _loss_and_gradient(_transformers(config, Path(folder), torch.float32), ids)
        for provider in providers:
            found = _loss_and_gradient(PROVIDERS[provider](config, Path(folder)), ids)
            errors[provider] = max(
                relative_error(a, b) for a, b in zip(found, truth, strict=True) if a is not None and b is not None
            )
    return errors


def measure(case: Case, provider: str) -> dict[str, float]:
    """Median step time, and most memory allocated, over STEPS steps."""
    config = CONFIGS[case.model]
    torch.manual_seed(0)
    model = PROVIDERS[provider](config, None).train()
    ids = torch.randint(config["vocab_size"], (case.batch, case.length), device="cuda")
    labels = torch.where(torch.rand(ids.shape, device="cuda") < case.ignored, -100, ids)
    optimizer: torch.optim.Optimizer
    if provider.startswith("ligermodels"):
        getattr(model, "_orig_mod", model).recompute = case.recompute
        optimizer = FusedAdamW(model.parameters(), lr=1e-6)
        if case.in_backward:
            optimizer.step_in_backward()
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    seconds = sorted(times)[STEPS // 2]
    tokens = case.batch * case.length
    return {
        "step_ms": seconds * 1e3,
        "tokens_per_s": tokens / seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("cases", nargs="*", help="parts of the names of cases (all)")
    parser.add_argument("--providers", nargs="*", default=["ligermodels", "transformers + liger"], choices=PROVIDERS)
    parser.add_argument("--recompute", help="what ours computes again, in place of what the cases say")
    parser.add_argument("--in-backward", action="store_true", help="ours runs the optimizer in the backward pass")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    cases = [c for c in CASES if not arguments.cases or any(part in c.name for part in arguments.cases)]
    common, console = facts(), Console(width=160)
    table = Table("case", "provider", *COLUMNS)
    errors: dict[tuple[str, str], float] = {}
    for provider in (p for p in PROVIDERS if p in arguments.providers):
        for case in cases:
            changed = asdict(case) | {"in_backward": arguments.in_backward}
            changed |= {"recompute": arguments.recompute} if arguments.recompute else {}
            case = Case(**changed)
            record: dict[str, Any] = {"case": case.name, "provider": provider, **changed}
            try:
                if (case.model, provider) not in errors:
                    errors[case.model, provider] = verify(case, [provider])[provider]
                record["error"] = errors[case.model, provider]
                gc.collect()
                torch.cuda.empty_cache()
                if not record["error"] < ERROR_LIMIT:
                    raise ValueError(f"wrong by {record['error']:.2g}")
                record |= measure(case, provider)
            except Exception as failure:  # What a peer cannot do, running out of memory included, is a result.
                record["failed"] = f"{type(failure).__name__}: {failure}"[:200]
            cells = [f"{record[c]:.4g}" if c in record else "-" for c in COLUMNS]
            print(case.name, provider, *cells, record.get("failed", ""), flush=True)
            table.add_row(case.name, provider, *cells)
            torch._dynamo.reset()
            with contextlib.suppress(RuntimeError):
                gc.collect()
                torch.cuda.empty_cache()
            if arguments.out:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**record, **common}) + "\n")
    console.print(table)


if __name__ == "__main__":
    main()
