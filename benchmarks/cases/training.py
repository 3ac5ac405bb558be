"""`python -m benchmarks training [CASE ...] [--out FILE]`: a training step, AdamW in bf16, beside transformers.

All parameters are trained; in cases with a `lora_rank`, LoRA on all linear layers of the blocks, beside PEFT's LoRA on
transformers. Every provider is first checked without LoRA: a model of a few layers loads weights that transformers
saved, and its loss and gradient must match transformers in fp32. `--roofline` first measures the lower bound of each
case's step (`benchmarks.cases.roofline`), in the precision of each provider. `--profile` adds the time of our kernels
by class.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import ligermodels as lm
from benchmarks.cases.models import CONFIGS, LOSS_ALONE, NOT_IN_FP32, few_layers
from benchmarks.cases.peers import FLOAT8, PROVIDERS, TORCHAO, ours, transformers
from benchmarks.cases.projections import IN_BF16, IN_FLOAT8, Products
from benchmarks.cases.roofline import BOTH, FROZEN, training_roofline
from benchmarks.reporting import recording
from benchmarks.reporting.runs import is_float8
from benchmarks.timing import measure
from benchmarks.timing.profile import profile
from ligermodels.layers.checkpointing import ActivationCheckpointing
from ligermodels.models.causal_lm import CausalLM
from ligermodels.training.fused_adamw import FusedAdamW

ERROR_LIMIT = {FLOAT8: 0.3, TORCHAO: 0.3}
"""Largest relative error of the providers in float8; the other providers have 0.05."""
FIRST_NORM = (
    *("blocks.0.mixer_norm.weight", "layers.0.input_layernorm.weight", "layers.0.operator_norm.weight"),
    "layers.0.norm.weight",
)
"""Ends of the name of the first layer's input norm, here and in transformers."""
WARM_UP, STEPS = 2, 5
COLUMNS = ("step_ms", "tokens_per_s", "of_floor", "peak_gib", "error")


@dataclass(frozen=True)
class Case:
    """A model and its batch. `ignored`: the fraction of labels that are -100. The other fields are options of ours."""

    model: str
    batch: int
    length: int
    ignored: float = 0.0
    activation_checkpointing: ActivationCheckpointing = "none"
    in_backward: bool = False
    lora_rank: int | None = None

    @property
    def name(self) -> str:
        """Model, batch and options."""
        ignored = f" {self.ignored:.0%} ignored" if self.ignored else ""
        lora = "" if self.lora_rank is None else f" LoRA {self.lora_rank}"
        return f"{self.model} {self.batch}x{self.length}{ignored}{lora}" + " AdamW in backward" * self.in_backward


CASES = [
    Case("llama-3-8b", 1, 4096),
    Case("llama-3-8b", 4, 4096, activation_checkpointing="selective"),
    Case("llama-3-8b", 5, 4096, activation_checkpointing="selective"),
    Case("llama-3.2-1b", 4, 4096),
    Case("llama-3.2-1b", 4, 4096, ignored=0.5),
    Case("gemma-2-2b", 2, 4096),
    Case("mistral-7b", 2, 4096),
    Case("qwen2.5-7b", 2, 4096),
    Case("qwen3-1.7b", 4, 4096),
    Case("llama-3-8b", 4, 4096, lora_rank=16),
    Case("qwen3.5-9b", 1, 4096),
    Case("gemma-4-e4b", 1, 4096),
    Case("gemma-4-e4b", 1, 4096, ignored=0.75),
    Case("ministral-3-8b", 2, 4096),
    Case("smollm2-135m", 1, 2048),
    Case("smollm2-135m", 8, 2048),
    Case("qwen3-0.6b", 2, 2048),
    Case("lfm2-1.2b", 4, 4096),
    Case("granite-4.0-h-micro", 1, 4096),
    Case("granite-4-layers", 1, 1024),
    Case("granite-4-layers", 2, 4096),
    Case("muse-glimmer-4-layers", 2, 4096),
    Case("nemotron-3-nano-4-layers", 2, 4096),
    Case("falcon-h1-1.5b", 1, 4096),
    Case("llama-3-8b", 2, 4096, lora_rank=16),
    Case("qwen3-0.6b", 8, 2048, lora_rank=16),
]


def chosen(parts: Sequence[str]) -> list[Case]:
    """Cases whose name is in `parts`, or contains a part that is no full name; all cases without parts."""
    names = {case.name for case in CASES}
    return [
        case
        for case in CASES
        if not parts or any(part == case.name if part in names else part in case.name for part in parts)
    ]


def _loss_and_gradient(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """The loss, and the gradient of the first layer's input norm."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradient = next(p.grad for n, p in model.named_parameters() if n.endswith(FIRST_NORM))
    return loss.detach(), gradient


class Verifier:
    """Checks a provider on a model of a few layers, with weights that transformers saves in `folder`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.truths: dict[str, tuple[Tensor, tuple[Tensor, Tensor | None]]] = {}
        self.errors: dict[tuple[str, str], float] = {}

    def error(self, name: str, provider: str) -> float:
        """Relative error of the loss and a gradient against transformers in fp32."""
        if (name, provider) not in self.errors:
            config, folder = few_layers(name), self.folder / name
            if name not in self.truths:
                torch.manual_seed(0)
                transformers(config, None).save_pretrained(folder)
                ids = torch.randint(config["vocab_size"], (1, 512), device=measure.DEVICE)
                exact = transformers if name not in NOT_IN_FP32 else ours
                self.truths[name] = ids, _loss_and_gradient(exact(config, folder, torch.float32), ids)
            ids, truth = self.truths[name]
            result = _loss_and_gradient(PROVIDERS[provider](config, folder), ids)
            self.errors[name, provider] = max(
                measure.relative_error(a, b)
                for a, b in zip(result[: 1 if name in LOSS_ALONE else 2], truth, strict=False)
                if a is not None and b is not None
            )
            measure.free()
        return self.errors[name, provider]


def with_lora(model: nn.Module, rank: int) -> nn.Module:
    """Add LoRA in bf16 to all linear layers of the blocks."""
    if isinstance(model, CausalLM):
        return lm.add_lora(model, rank)
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def run(case: Case, provider: str, profiled: bool = False, steps: int = STEPS) -> dict[str, Any]:
    """Median step time and peak memory over `steps` steps; with `profiled`, the kernels of one more step by class."""
    config = CONFIGS[case.model]
    torch.manual_seed(0)
    plain = provider == FLOAT8 and case.lora_rank is not None  # float8 is applied after LoRA
    model = PROVIDERS["ligermodels" if plain else provider](config, None).train()
    if case.lora_rank is not None:
        model = with_lora(model, case.lora_rank)
        model = lm.float8(model) if provider == FLOAT8 and isinstance(model, CausalLM) else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ids = torch.randint(config["vocab_size"], (case.batch, case.length), device=measure.DEVICE)
    labels = torch.where(torch.rand(ids.shape, device=measure.DEVICE) < case.ignored, -100, ids)
    optimizer: torch.optim.Optimizer
    handles = []
    if provider.startswith("ligermodels"):
        getattr(model, "_orig_mod", model).activation_checkpointing = case.activation_checkpointing
        optimizer = FusedAdamW(trained, lr=1e-6)
        if case.in_backward:
            handles = optimizer.step_in_backward()
    else:
        optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    def step() -> None:
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    record = timed(step, steps)
    record["tokens_per_s"] = case.batch * case.length / record["step_ms"] * 1e3
    if profiled:
        record["profile_ms"] = profile(step)
    for handle in handles:  # They would keep the model alive.
        handle.remove()
    return record


def timed(step: Callable[[], None], steps: int) -> dict[str, Any]:
    """Median time of steps back to back, without synchronisation in between, as in training; and peak memory.

    Args:
        step: Takes a step.
        steps: Number of timed steps.
    """
    for _ in range(WARM_UP):
        step()
    measure.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step_ms = measure.one_after_another(step, steps)
    return {"step_ms": step_ms, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def products_of(provider: str) -> Products:
    """The products of the blocks' projections, in the precision of a provider."""
    return IN_FLOAT8 if is_float8(provider) else IN_BF16


def rooflines_of(cases: Iterable[Case], providers: Iterable[str]) -> dict[tuple[Case, Products], dict[str, float]]:
    """The lower bound of each case in each precision of the providers, as fields of their records."""
    rooflines, precisions = {}, dict.fromkeys(map(products_of, providers))
    for case in cases:
        gradients = BOTH if case.lora_rank is None else FROZEN
        for products in precisions:
            try:
                least = training_roofline(
                    CONFIGS[case.model], case.batch, case.length, case.ignored, products, gradients
                )
                rooflines[case, products] = {"floor_ms": least}
            except (ValueError, RuntimeError) as failure:  # The case has no lower bound.
                print(case.name, f"no lower bound: {failure}", flush=True)
            measure.free()
    return rooflines


def record_of(
    case: Case, provider: str, verifier: Verifier, least: dict[str, float], profiled: bool, steps: int = STEPS
) -> dict[str, Any]:
    """The record of one provider and case; `failed` has the error."""
    record: dict[str, Any] = {"case": case.name, "provider": provider, **asdict(case), **least}
    try:
        record["error"] = verifier.error(case.model, provider)
        record["held_before_gib"] = measure.free()
        if not record["error"] < ERROR_LIMIT.get(provider, 0.05):
            raise ValueError(f"wrong by {record['error']:.2g}")
        record |= run(case, provider, profiled and provider in ("ligermodels", FLOAT8), steps)
        if least:
            record["of_floor"] = least["floor_ms"] / record["step_ms"]
    except Exception as failure:  # A failing peer, out of memory for instance, is a result.
        record["failed"] = f"{type(failure).__name__}: {failure}"[:200]
    with contextlib.suppress(RuntimeError):
        measure.free()
    return record


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("cases", nargs="*", help="names of cases, or parts of them (all)")
    parser.add_argument("--providers", nargs="*", default=["ligermodels", "transformers + liger"], choices=PROVIDERS)
    parser.add_argument("--activation-checkpointing", help="for ours, in place of the setting of each case")
    parser.add_argument("--in-backward", action="store_true", help="ours runs the optimizer in the backward pass")
    parser.add_argument("--steps", type=int, default=STEPS, help="number of timed steps; the median counts")
    parser.add_argument("--roofline", "--floor", action="store_true", help="first measure the lower bound of each case")
    parser.add_argument("--profile", action="store_true", help="profile one step of ours")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: at least 1")
    if not chosen(arguments.cases):
        parser.error(f"no case of {arguments.cases}; there are: {', '.join(case.name for case in CASES)}")
    cases = [
        replace(
            c,
            in_backward=arguments.in_backward,
            activation_checkpointing=arguments.activation_checkpointing or c.activation_checkpointing,
        )
        for c in chosen(arguments.cases)
    ]
    common, records = recording.facts(), []
    rooflines = rooflines_of(cases, arguments.providers) if arguments.roofline else {}
    table = Table("case", "provider", *COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        verifier = Verifier(folder)
        for provider in (p for p in PROVIDERS if p in arguments.providers):
            for case in cases:
                least = rooflines.get((case, products_of(provider)), {})
                record = record_of(case, provider, verifier, least, arguments.profile, arguments.steps)
                records.append(record)
                recording.write(arguments.out, [{**record, **common}])
                cells = [f"{record[c]:.4g}" if c in record else "-" for c in COLUMNS]
                print(case.name, provider, *cells, record.get("failed", record.get("profile_ms", "")), flush=True)
                table.add_row(case.name, provider, *cells)
    Console(width=160).print(table)
    recording.end(records)
