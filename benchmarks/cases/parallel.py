"""`python -m benchmarks parallel [CASE ...] [--gpus N ...] [--out FILE]`: a training step on several GPUs of one host.

Each case is a model, a plan and the batch of each rank. `--gpus 1 4` runs every case on one and on four GPUs: on one
GPU without a process group. The peer is transformers with Liger's kernels, whose layers are sharded by FSDP2. AdamW in
bf16 trains all parameters, LoRA in cases with a `lora_rank`, or Medusa heads alone in cases with `medusa_heads`. Speeds
are tokens per second and GPU.

Routers with random weights choose few experts for most tokens, so under expert parallelism ranks wait for the one that
has these experts. `--balanced` gives random experts to each token of our models in place of the routers' choice, as
routers choose that were trained to balance.

Every number of GPUs is a process group of its own: this command starts torchrun, and rank 0 writes the record.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import nn

import ligermodels as lm
from benchmarks.cases import trees
from benchmarks.cases.peers import FLOAT8, PROVIDERS
from benchmarks.cases.training import timed
from benchmarks.reporting import recording
from benchmarks.timing import measure
from benchmarks.timing.profile import profile_of_rank
from ligermodels.parallel.memory import step_memory
from ligermodels.training.fused_adamw import FusedAdamW

OURS, PEER = "ligermodels", "transformers + liger"
WARM_UP_TOKENS = 8192
NAMES = (OURS, FLOAT8, PEER)


@dataclass(frozen=True)
class Case:
    """A model and its plan. `batch`: sequences of each group of ranks that share data. `layers`: all if None.
    `medusa_heads`: heads that are trained on the frozen model."""

    model: str
    batch: int
    length: int
    plan: dict[str, Any] = field(default_factory=dict)
    layers: int | None = None
    lora_rank: int | None = None
    medusa_heads: int = 0

    @property
    def name(self) -> str:
        """Model, layers, batch, what is trained, and plan."""
        layers = "" if self.layers is None else f" {self.layers} layers"
        lora = "" if self.lora_rank is None else f" LoRA {self.lora_rank}"
        plan = "".join(f", {key.replace('activation_', '')} {value}" for key, value in self.plan.items())
        medusa = f" Medusa {self.medusa_heads}" if self.medusa_heads else ""
        return f"{self.model}{layers} {self.batch}x{self.length}{lora}{medusa}{plan}"


SELECTIVE, FULL, OFFLOAD = ({"activation_checkpointing": mode} for mode in ("selective", "full", "offload"))
GATHERED_ONCE = {"reshard_after_forward": False}
CASES = [
    Case("llama-3-8b", 1, 4096),
    Case("llama-3-8b", 1, 4096, GATHERED_ONCE),
    Case("llama-3-8b", 2, 4096),
    Case("llama-3-8b", 4, 4096, SELECTIVE),
    Case("llama-3-8b", 2, 4096, {"replicate": 2}),
    Case("llama-3.2-1b", 4, 4096),
    Case("llama-3.2-1b", 4, 4096, {"fsdp_unit": "model"}),
    Case("qwen3-0.6b", 2, 2048),
    Case("qwen3-0.6b", 2, 2048, {"fsdp_unit": "model"}),
    Case("llama-3-8b", 4, 4096, medusa_heads=3),
    Case("llama-3-8b", 4, 4096, GATHERED_ONCE, medusa_heads=3),
    Case("llama-3-8b", 1, 8192, {"tensor": 2}),
    Case("llama-3-8b", 1, 8192, {"tensor": 4}),
    Case("llama-3-8b", 1, 8192, SELECTIVE),
    Case("qwen3-30b-a3b", 2, 4096, layers=12),
    Case("qwen3-30b-a3b", 2, 4096, {"expert": 2}, layers=12),
    Case("qwen3-30b-a3b", 2, 4096, {"expert": 2, "fsdp_unit": "model"}, layers=12),
    Case("qwen3-30b-a3b", 2, 4096, {"expert": 4}, layers=12),
    Case("qwen3.5-9b", 1, 16384, {"context": 2, **SELECTIVE}, layers=16),
    Case("qwen3-30b-a3b", 2, 4096, FULL),
    Case("qwen3-30b-a3b", 2, 4096, {"expert": 4, **FULL}),
    Case("qwen3-8b", 1, 262144, {"context": 4, **FULL}),
    Case("llama-3-8b", 1, 131072, {"context": 2, **FULL}),
    Case("llama-3-8b", 1, 262144, {"context": 2, **FULL}),
    Case("llama-3-8b", 1, 262144, OFFLOAD),
    Case("llama-3-70b", 1, 4096, FULL, lora_rank=16),
]


def has_peer(case: Case) -> bool:
    """Whether the case is full fine-tuning by FSDP2 over all ranks."""
    return case.lora_rank is None and not case.medusa_heads and not set(case.plan) - set(FULL)


def our_model(case: Case, provider: str, plan: lm.ParallelPlan) -> nn.Module:
    """Our model on this rank, with random weights."""

    def prepare(model: lm.CausalLM) -> None:
        if case.lora_rank is not None:
            lm.add_lora(model, case.lora_rank)
        if provider == FLOAT8:
            lm.float8(model)

    config = trees.config_of(case.model, layers=case.layers)
    if case.medusa_heads:
        base = lm.from_config(config, dtype=torch.bfloat16, device=measure.DEVICE, prepare=prepare)
        return lm.parallelize(lm.MedusaModel.from_base(base.requires_grad_(False), case.medusa_heads), plan)
    return lm.from_config(config, dtype=torch.bfloat16, device=measure.DEVICE, plan=plan, prepare=prepare)


def peer(case: Case) -> nn.Module:
    """transformers with Liger's kernels; on several ranks FSDP2 shards each layer and the rest."""
    model: Any = PROVIDERS[PEER](trees.config_of(case.model, layers=case.layers), None)
    if case.plan:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if torch.distributed.is_initialized():
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return cast(nn.Module, model)


def random_experts(model: lm.CausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Experts of tokens (B, T), all equally likely: (B, T, layers with experts, experts per token)."""
    routers = model.decoder.expert_routers.values()
    if not routers:
        raise ValueError("--balanced: the model has no experts")
    scores = [(torch.rand(*ids.shape, router.num_experts, device=ids.device), router.top_k) for router in routers]
    return torch.stack([score.topk(top_k).indices for score, top_k in scores], dim=2)


def timed_once(step: trees.Step, warm_up: trees.Step) -> dict[str, Any]:
    """Time of one step, and its peak memory.

    Args:
        step: Takes a step.
        warm_up: Takes a short step, which compiles the kernels.
    """
    warm_up()
    torch.cuda.reset_peak_memory_stats()
    seconds, _ = trees.clocked(step)
    return {"step_ms": seconds * 1e3, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def run(
    case: Case, provider: str, steps: int, once: bool = False, profiled: bool = False, balanced: bool = False
) -> dict[str, Any]:
    """The record of a case on these ranks: median step time, tokens per second and GPU, and peak memory of this rank.

    Args:
        case: The case.
        provider: One of NAMES.
        steps: Number of timed steps.
        once: Whether one step is timed, after one with the first `WARM_UP_TOKENS`.
        profiled: Whether one more step is profiled.
        balanced: Whether the experts of our models are chosen at random.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    degrees = degrees_of(case, world)
    together = degrees["context"] * degrees["tensor"]
    torch.manual_seed(0)
    model = (peer(case) if provider == PEER else our_model(case, provider, plan_of(case, world))).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True) if provider == PEER else FusedAdamW(trained, lr=1e-6)
    torch.manual_seed(rank // together)
    vocabulary = trees.config_of(case.model, layers=case.layers)["vocab_size"]
    ids = torch.randint(vocabulary, (case.batch, case.length), device=measure.DEVICE)
    inputs = {"routing": random_experts(cast(lm.CausalLM, model), ids)} if balanced and provider != PEER else {}
    step = trees.training_step(model, optimizer, ids, ids, **inputs)
    if once:
        short = ids[:, :WARM_UP_TOKENS]
        record = timed_once(step, trees.training_step(model, optimizer, short, short))
    else:
        record = timed(step, steps)
    record["balanced"] = bool(inputs)
    tokens = case.batch * case.length * world // together
    record["tokens_per_s_per_gpu"] = tokens / world / record["step_ms"] * 1e3
    record["gpus"], record["degrees"] = world, degrees
    if profiled:
        record |= profile_of_rank(step)
    return record


def plan_of(case: Case, world: int) -> lm.ParallelPlan:
    """The plan of a case; on one GPU its activation checkpointing alone."""
    return lm.ParallelPlan(**{k: v for k, v in case.plan.items() if world > 1 or k in FULL})


def degrees_of(case: Case, world: int) -> dict[str, int]:
    """Ranks of each kind."""
    return plan_of(case, world).degrees(world)


def planned_gib(case: Case, world: int) -> float:
    """Memory of a rank by the planner, which runs the step on the meta device."""
    config = trees.config_of(case.model, layers=case.layers)
    model = lm.from_config(config, dtype=torch.bfloat16, device="meta")
    if case.lora_rank is not None:
        lm.add_lora(model, case.lora_rank)
    model.activation_checkpointing = case.plan.get("activation_checkpointing", "none")
    plan = plan_of(case, world)
    degrees: dict[str, Any] = {"expert": plan.expert, **plan.degrees(world)}
    names = "param_dtype", "reduce_dtype", "reshard_after_forward", "fsdp_unit"
    degrees |= {name: getattr(plan, name) for name in names}
    return step_memory(model, case.batch, case.length, **degrees).total / 2**30


def as_a_rank(case: Case, provider: str, arguments: argparse.Namespace) -> None:
    """Run one case in this process, and write its record from rank 0."""
    device = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", device))
    record: dict[str, Any] = {"case": case.name, "provider": provider, **asdict(case)}
    try:
        record |= run(case, provider, arguments.steps, arguments.once, arguments.profile, arguments.balanced)
    except Exception as failure:  # A failing peer, out of memory for instance, is a result.
        record |= {"gpus": int(os.environ.get("WORLD_SIZE", 1)), "failed": f"{type(failure).__name__}: {failure}"[:200]}
    if int(os.environ.get("RANK", 0)) == 0:
        if provider == OURS and not case.medusa_heads:
            record["planned_gib"] = planned_gib(case, record["gpus"])
        recording.write(arguments.out, [{**record, **recording.facts()}])
        shown = {k: round(v, 2) for k, v in record.items() if isinstance(v, float)}
        profiles = [record[name] for name in ("exposed_ms", "profile_ms") if name in record]
        print(record["gpus"], "GPUs:", case.name, provider, shown, *profiles, record.get("failed", ""), flush=True)
    os._exit("failed" in record)  # A rank that failed would wait for the others.


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(case.name for case in CASES)}")
    parser.add_argument("--gpus", nargs="+", type=int, default=[torch.cuda.device_count()], help="numbers of GPUs")
    parser.add_argument("--providers", nargs="+", default=[OURS, PEER], choices=NAMES)
    parser.add_argument("--steps", type=int, default=5, help="number of timed steps; the median counts")
    parser.add_argument("--once", action="store_true", help="time one step, after a short one: for steps of minutes")
    parser.add_argument("--profile", action="store_true", help="profile one step, on rank 0")
    parser.add_argument("--balanced", action="store_true", help="choose experts of our models at random")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    by_name = {case.name: case for case in CASES}
    if unknown := set(arguments.cases) - set(by_name):
        parser.error(f"unknown cases: {', '.join(unknown)}; there are: {', '.join(by_name)}")
    cases = [by_name[name] for name in arguments.cases] or CASES
    if arguments.rank:
        as_a_rank(cases[0], arguments.providers[0], arguments)
    failed = []
    for case, provider, gpus in itertools.product(cases, arguments.providers, arguments.gpus):
        if provider == PEER and not has_peer(case):
            continue
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        command = [sys.executable, *(torchrun if gpus > 1 else []), "-m", "benchmarks", "parallel", case.name, "--rank"]
        command += ["--providers", provider, "--steps", str(arguments.steps)]
        command += ["--profile"] * arguments.profile + ["--balanced"] * arguments.balanced
        command += ["--once"] * arguments.once
        command += ["--out", str(arguments.out)] if arguments.out else []
        if subprocess.run(command, check=False).returncode:
            failed.append(f"{case.name}, {provider}, {gpus} GPUs")
    if failed:
        raise SystemExit("failed: " + "; ".join(failed))
