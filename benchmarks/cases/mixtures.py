"""`python -m benchmarks mixtures [CASE ...] [--out FILE]`: a training step of mixtures of experts, beside transformers.

Models have the published sizes and fewer layers, so that a step with AdamW in bf16 fits into 80 GB; the vocabulary is
cut by the same factor. gpt-oss-20b is whole, with LoRA on the linear layers of attention. transformers computes experts
by its implementation "grouped_mm". Both providers run the same batch, in the same dtype, with the same checkpointing of
activations. TFLOP/s count the operations of `ligermodels.parallel.step_cost` without recomputation. First, the losses
of both providers must match in a model of four layers and eight experts.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import ligermodels as lm
from benchmarks.cases import trees
from benchmarks.cases.training import ERROR_LIMIT, timed, with_lora
from benchmarks.reporting import recording
from benchmarks.timing import measure
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.cost import ModelSize, step_cost
from ligermodels.training.fused_adamw import FusedAdamW


@dataclass(frozen=True)
class Case:
    """A model and its batch of sequences. `layers`: number of layers, all if None. `attention`: of transformers."""

    model: str
    batch: int
    length: int = 4096
    layers: int | None = None
    lora_rank: int | None = None
    full_checkpointing: bool = False
    attention: str = "sdpa"

    @property
    def name(self) -> str:
        """Model, layers, batch and options."""
        layers = "" if self.layers is None else f" {self.layers} layers"
        lora = "" if self.lora_rank is None else f" LoRA {self.lora_rank}"
        return (
            f"{self.model}{layers} {self.batch}x{self.length}{lora}" + ", full checkpointing" * self.full_checkpointing
        )


CASES = [
    Case("qwen3-30b-a3b", 2, layers=8),
    Case("mixtral-8x7b", 2, layers=3),
    Case("qwen3.5-35b-a3b", 2, layers=4),
    Case("gpt-oss-20b", 1, lora_rank=16, full_checkpointing=True, attention="flex_attention"),
]
FEW_EXPERTS = {"num_experts": 8, "num_local_experts": 8}
PROVIDERS = ("ligermodels", "transformers")


def transformers_model(config: dict[str, Any], attention: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model of transformers with random weights.

    Args:
        config: Config of the model.
        attention: Implementation of attention.
        dtype: Dtype of the parameters.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"attn_implementation": attention, "experts_implementation": "grouped_mm"}
    with torch.device(measure.DEVICE):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype, **options)
    model.config.use_cache = False
    return model


def agreement(case: Case) -> float:
    """Relative difference between the losses of both providers, in a model of few layers and experts."""
    config = trees.config_of(case.model, layers=4)
    config |= {key: value for key, value in FEW_EXPERTS.items() if key in config}
    torch.manual_seed(0)
    ids = torch.randint(config["vocab_size"], (1, 512), device=measure.DEVICE)
    theirs = transformers_model(config, "eager" if case.attention == "flex_attention" else case.attention)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = lm.from_pretrained(folder, dtype=torch.bfloat16, device=measure.DEVICE)
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids).loss for model in (ours, theirs)]
    return measure.relative_error(*losses)


def run(case: Case, provider: str, steps: int) -> dict[str, Any]:
    """Median step time, tokens and operations per second, and peak memory.

    Args:
        case: The case.
        provider: One of PROVIDERS.
        steps: Number of timed steps.
    """
    config = trees.config_of(case.model, layers=case.layers)
    torch.manual_seed(0)
    if provider == "ligermodels":
        model: nn.Module = lm.from_config(config, dtype=torch.bfloat16, device=measure.DEVICE)
    else:
        model = transformers_model(config, case.attention)
    if case.lora_rank is not None:
        model = with_lora(model, case.lora_rank)
    trained = [p for p in model.train().parameters() if p.requires_grad]
    if isinstance(model, CausalLM):
        model.activation_checkpointing = "full" if case.full_checkpointing else "none"
        optimizer: torch.optim.Optimizer = FusedAdamW(trained, lr=1e-6)
    else:
        if case.full_checkpointing:
            peer = cast(Any, model)
            peer.enable_input_require_grads()  # blocks with frozen inputs would get no gradient
            peer.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
    ids = torch.randint(config["vocab_size"], (case.batch, case.length), device=measure.DEVICE)
    record = timed(trees.training_step(model, optimizer, ids, ids), steps)
    tokens = case.batch * case.length
    record["tokens_per_s"] = tokens / record["step_ms"] * 1e3
    record["tflops"] = operations(case) / record["step_ms"] * 1e-9
    return record


def operations(case: Case) -> float:
    """Operations of a step without recomputation."""
    config = trees.config_of(case.model, layers=case.layers)
    model = lm.from_config(config, dtype=torch.bfloat16, device="meta")
    if case.lora_rank is not None:
        lm.add_lora(model, case.lora_rank)
    return step_cost(ModelSize.of(model), case.batch * case.length, case.length, {}).flops


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks mixtures", description=__doc__)
    parser.add_argument("cases", nargs="*", help="names of models, or parts of them (all)")
    parser.add_argument("--providers", nargs="*", default=PROVIDERS, choices=PROVIDERS)
    parser.add_argument("--attention", help="of transformers, in place of the case's")
    parser.add_argument("--steps", type=int, default=5, help="number of timed steps; the median counts")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    cases = [c for c in CASES if not arguments.cases or any(part in c.name for part in arguments.cases)]
    if not cases:
        parser.error(f"no case of {arguments.cases}; there are: {', '.join(case.name for case in CASES)}")
    facts, records = recording.facts(), []
    for case in cases:
        error = agreement(case)
        for provider in arguments.providers:
            record: dict[str, Any] = {"case": case.name, "provider": provider, **asdict(case), "error": error}
            if provider == "transformers":
                record["attention"] = arguments.attention or case.attention
            try:
                measure.free()
                if not error < ERROR_LIMIT.get(provider, 0.05):
                    raise ValueError(f"wrong by {error:.2g}")
                record |= run(Case(**{**asdict(case), "attention": record["attention"]}), provider, arguments.steps)
            except Exception as failure:  # A failing peer, out of memory for instance, is a result.
                record["failed"] = f"{type(failure).__name__}: {failure}"[:200]
            records.append(record)
            recording.write(arguments.out, [{**record, **facts}])
            keys = ("step_ms", "tokens_per_s", "tflops", "peak_gib", "error")
            cells = [f"{key} {record[key]:.4g}" for key in keys if key in record]
            print(case.name, provider, *cells, record.get("failed", ""), flush=True)
    recording.end(records)
