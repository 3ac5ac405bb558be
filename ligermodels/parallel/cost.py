"""Operations, communication and time of a training step, by arithmetic; nothing is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ligermodels.errors import InputError
from ligermodels.parallel.hardware import Hardware
from ligermodels.parallel.model_size import ModelSize
from ligermodels.parallel.plan import FsdpUnit


@dataclass(frozen=True)
class StepCost:
    """Cost of an optimizer step for each GPU.

    Gathering parameters and summing gradients overlap with the computation, which they make slower. Copies between GPU
    and host overlap with all of it, and so does the work of the CPU. Exchanges of tensor, context and expert
    parallelism do not overlap.

    Args:
        flops: operations.
        sent: degree of the plan -> bytes that a GPU sends for it.
        compute_s: seconds of the computation alone.
        sent_s: degree of the plan -> seconds of its communication.
        contention: seconds that computation takes longer for each second of communication beside it.
        copied_s: seconds of the copies to and from host memory.
        packed_s: seconds of FSDP2's copies into and out of its buffers.
        update_s: seconds of the optimizer.
        launch_s: seconds of the CPU to launch all kernels; 0 where `train` launches short steps as one.
        exposed: degrees with communication that a GPU waits for.
    """

    flops: float
    sent: Mapping[str, float]
    compute_s: float
    sent_s: Mapping[str, float]
    contention: float = 0.0
    copied_s: float = 0.0
    packed_s: float = 0.0
    update_s: float = 0.0
    launch_s: float = 0.0
    exposed: tuple[str, ...] = ("tensor", "context", "expert")

    @property
    def overlapped_s(self) -> float:
        """Seconds of communication that overlaps with the computation."""
        return sum(seconds for name, seconds in self.sent_s.items() if name not in self.exposed)

    @property
    def exposed_s(self) -> float:
        """Seconds in which a GPU waits for communication."""
        return sum(self.sent_s[name] for name in self.exposed) + max(0.0, self.overlapped_s - self.compute_s)

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        slower = self.contention * min(self.overlapped_s, self.compute_s)
        gpu_s = self.compute_s + slower + self.packed_s + self.update_s + self.exposed_s
        return max(gpu_s, self.copied_s, self.launch_s)


EXPERT_PASSES = 16
"""How often a channel of a token's experts is read or written in both passes, beside dense products' rate: fitted to
recorded steps of Qwen3-30B-A3B and Mixtral."""
FSDP_LAUNCHES = {"block": 1.0, "model": 0.75}
"""The CPU's work for FSDP2, relative to the kernels of a block, for each block; fitted to recorded steps."""
EXCHANGE_LAUNCHES = 2.2
"""The same for the exchange of a mixture's tokens, in which the CPU also waits for the number of rows."""
UPDATE_PASSES = 7
"""AdamW reads a parameter, its gradient and two moments, and writes all but the gradient."""


def step_cost(
    size: ModelSize,
    tokens: int,
    seq_len: int,
    degrees: Mapping[str, int],
    *,
    passes: int = 1,
    activation_checkpointing: str = "none",
    reshard_after_forward: bool = True,
    fsdp_unit: FsdpUnit = "block",
    hardware: Hardware | None = None,
) -> StepCost:
    """The cost of an optimizer step.

    Computation: each parameter element that a token meets costs 2 operations in the forward pass and 2 for the gradient
    of its input; a trained element costs 2 more. A token attends to seq_len / 2 tokens on average, which costs
    2 * seq_len operations per channel of the query heads, and 3.5 times as much for both passes (Dao, 2023,
    https://arxiv.org/abs/2307.08691). "full" and "offload" checkpointing add a forward pass; "selective" repeats no
    large product. "offload" also copies the input of each block to host memory and back, beside the computation. The
    rows of a token's experts are also read and written (EXPERT_PASSES). The optimizer is AdamW.

    Communication: a ring of n ranks sends (n - 1) / n of the bytes for a gather or a scatter, and twice as much for a
    sum on all ranks. FSDP2 gathers parameters for the forward and the backward pass. Experts on `expert` ranks are
    gathered over the other ranks of `shard` and `context`. Hidden states travel to the experts and back, and so do
    their gradients; with checkpointing, hidden states travel there once more. A token is sent once to each other rank
    if there are no more ranks than experts per token, and otherwise to the ranks of its experts, here of a router that
    chooses ranks at random.

    Args:
        size: sizes of the model.
        tokens: tokens per forward pass of a GPU; with tensor or context parallelism, of the whole group.
        seq_len: tokens per sequence.
        degrees: degrees of a `ParallelPlan`: "replicate", "shard", "context", "tensor", "expert"; 1 by default.
        passes: forward passes per optimizer step.
        activation_checkpointing: "none", "selective", "full" or "offload".
        reshard_after_forward: whether blocks are gathered again for the backward pass, as in `ParallelPlan`.
        fsdp_unit: what FSDP2 gathers at once, as in `ParallelPlan`; the whole model is gathered before a forward pass
            and reduced after a backward pass, beside no computation.
        hardware: speed of a GPU and its links; by default an H200.

    Raises:
        InputError: a number below 1, an unknown degree, or an `expert` that does not divide shard x context.
    """
    hardware = hardware or Hardware()
    for name, number in (("tokens", tokens), ("seq_len", seq_len), ("passes", passes)):
        if number < 1:
            raise InputError(f"{name}: must be at least 1, got {number}")
    ranks = Degrees.of(degrees)
    width = ranks.context * ranks.tensor  # GPUs of a forward pass
    repeated = 1 + (activation_checkpointing in ("full", "offload"))
    attention = 2.0 * seq_len * size.attention
    per_token = 2 * size.used * (repeated + 1) + 2 * size.trained + attention * (repeated + 2.5)
    flops = passes * tokens * per_token / width
    rows = passes * tokens * size.expert_channels * size.itemsize * EXPERT_PASSES / width
    inputs = tokens * size.hidden_size * size.itemsize  # bytes of a layer's inputs
    copied = passes * 2 * size.num_layers * inputs / width if activation_checkpointing == "offload" else 0
    sums = 4 * size.num_layers * inputs + tokens * size.gathered * size.itemsize
    keys_values = tokens * size.keys_values * size.itemsize
    routed = sum(_ranks_reached(ranks.expert, top_k) for top_k in size.routed)
    exchanges = 4 + (activation_checkpointing != "none")  # to the experts and back, in each pass
    gathers = 2 if reshard_after_forward and fsdp_unit == "block" else 1
    shards = {unit: passes * unit.moved(gathers) * _ring(unit.ranks) for unit in ranks.units(size)}
    sent = {
        "replicate": passes * 2 * sum(unit.gradients / unit.ranks for unit in shards) * _ring(ranks.replicate),
        "shard": sum(shards.values()),
        # keys and values in the forward pass, and their gradients
        "context": passes * (repeated + 1) * keys_values / ranks.tensor * _ring(ranks.context),
        # two sums in a block's forward pass and two in its backward pass; gathered outputs and their gradients
        "tensor": passes * (repeated + 1) * sums / ranks.context * _ring(ranks.tensor),
        "expert": passes * exchanges * inputs / ranks.context * routed,
    }
    sent_s = {
        name: sent[name] / hardware.bandwidth(number, stride) for name, (number, stride) in ranks.collectives().items()
    }
    sent_s["shard"] = sum(moved / hardware.bandwidth(unit.ranks, unit.stride) for unit, moved in shards.items())
    sent_s["expert"] = hardware.exchange_s(sent["expert"], ranks.expert, ranks.tensor)
    packed = sum(unit.moved(gathers) for unit in shards if unit.ranks * ranks.replicate > 1)
    return StepCost(
        flops,
        sent,
        compute_s=flops / hardware.flops + rows / hardware.memory_bandwidth,
        sent_s=sent_s,
        contention=hardware.contention,
        copied_s=copied / hardware.host_memory_bandwidth,
        packed_s=passes * 2 * packed / hardware.memory_bandwidth,  # read and written
        update_s=UPDATE_PASSES * size.updated / (ranks.divided * ranks.tensor) / hardware.memory_bandwidth,
        launch_s=passes * ranks.launches(size, fsdp_unit) * hardware.launch_s * (repeated + 2) / 3,  # 2/3: backward
        exposed=StepCost.exposed + ("shard", "replicate") * (fsdp_unit == "model"),
    )


class _Unit(NamedTuple):
    """Parameters that FSDP2 shards over the same ranks.

    weights, gradients: bytes of them on one rank while they are gathered.
    ranks: number of ranks.
    stride: distance between neighbours.
    """

    weights: float
    gradients: float
    ranks: int
    stride: int

    def moved(self, gathers: int) -> float:
        """Bytes that FSDP2 gathers and reduces in both passes. `gathers`: times that it gathers the weights."""
        return gathers * self.weights + self.gradients


class Degrees(NamedTuple):
    """Degrees of a `ParallelPlan`."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def of(cls, degrees: Mapping[str, int]) -> Degrees:
        """The degrees; raises InputError as `step_cost`."""
        for name, number in degrees.items():
            if number < 1:
                raise InputError(f"{name}: must be at least 1, got {number}")
            if number > 1 and name not in cls._fields:
                raise InputError(f"{name}: the cost of this degree is not known; known are {', '.join(cls._fields)}")
        ranks = cls(**{name: number for name, number in degrees.items() if name in cls._fields})
        if ranks.divided % ranks.expert:
            raise InputError(f"expert: {ranks.expert} does not divide the {ranks.divided} ranks (shard x context)")
        return ranks

    @property
    def divided(self) -> int:
        """Ranks over which FSDP2 shards."""
        return self.shard * self.context

    def units(self, size: ModelSize) -> tuple[_Unit, _Unit]:
        """The parameters of a model on a rank: those of experts that are spread over ranks, and the others."""
        weights, gradients = (size.experts, size.expert_gradients) if self.expert > 1 else (0, 0)
        others = (size.weights - weights) / self.tensor, (size.gradients - gradients) / self.tensor
        own = weights / self.expert, gradients / self.expert
        return _Unit(*own, self.divided // self.expert, self.tensor * self.expert), _Unit(
            *others, self.divided, self.tensor
        )

    def collectives(self) -> dict[str, tuple[int, int]]:
        """Ranks of a collective of each kind, and the distance between neighbours."""
        replicas = self.replicate, self.tensor * self.divided
        return {"tensor": (self.tensor, 1), "context": (self.context, self.tensor), "replicate": replicas}

    def launches(self, size: ModelSize, fsdp_unit: FsdpUnit) -> float:
        """How often a pass takes the time `Hardware.launch_s`; 0 where `train` records short steps in CUDA graphs."""
        if self.context * self.tensor * self.expert == 1:
            return 0
        of_fsdp = (self.replicate * self.divided > 1) * FSDP_LAUNCHES[fsdp_unit]
        return size.num_layers * (1 + of_fsdp) + len(size.routed) * (1 + (self.expert > 1) * EXCHANGE_LAUNCHES)


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def _ranks_reached(ranks: int, top_k: int) -> float:
    """Mean number of other ranks that a token with `top_k` experts is sent to."""
    return (ranks - 1) * (1 if ranks <= top_k else 1 - (1 - 1 / ranks) ** top_k)
