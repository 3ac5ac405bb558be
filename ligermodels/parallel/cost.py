"""Operations, communication and time of a training step, by arithmetic; nothing is run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ligermodels.errors import InputError
from ligermodels.layers import BlockConfig
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.expert import mixtures, of_experts
from ligermodels.parallel.plan import DtypeName


@dataclass(frozen=True)
class Hardware:
    """Speed of a GPU and its links that training steps reach; data sheets have higher numbers.

    The defaults are for an H200 with NVLink and one 400 Gb/s network adapter per GPU.

    Args:
        flops: operations per second in bfloat16 matrix products.
        host_bandwidth: bytes per second that a GPU sends within its host (NVLink).
        network_bandwidth: bytes per second that a GPU sends to other hosts.
        gpus_per_host: GPUs in a host.
        memory_bandwidth: bytes per second that a GPU copies to or from its host's memory (PCIe 5).
    """

    flops: float = 600e12
    host_bandwidth: float = 350e9
    network_bandwidth: float = 45e9
    gpus_per_host: int = 8
    memory_bandwidth: float = 50e9

    def bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes per second of a collective of `ranks` GPUs, with `stride` between neighbours.

        Between hosts, data crosses the network once for all members in a host, over all of their adapters.
        """
        if ranks * stride <= self.gpus_per_host:
            return self.host_bandwidth
        return min(self.host_bandwidth, self.network_bandwidth * max(1, self.gpus_per_host // stride))

    def exchange_s(self, sent: float, ranks: int, stride: int) -> float:
        """Seconds of an all-to-all. Each GPU sends data for other hosts over its own adapter.

        Args:
            sent: bytes that a GPU sends, in equal parts to all others.
            ranks: number of GPUs.
            stride: distance between neighbours.
        """
        if ranks == 1:
            return 0.0
        near = min(ranks, max(1, self.gpus_per_host // stride))
        beyond = sent * (ranks - near) / (ranks - 1)
        return max((sent - beyond) / self.host_bandwidth, beyond / self.network_bandwidth)


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model that determine the cost of a step.

    Args:
        weights: bytes of all parameters.
        gradients: bytes of the gradients of the trained parameters, as ranks sum them.
        used: elements of parameters that a token is multiplied by.
        trained: elements among these that are trained.
        attention: channels of the query heads, summed over all layers.
        num_layers: number of layers.
        hidden_size: channels of the hidden states.
        itemsize: bytes of an element of the activations.
        keys_values: channels of keys and values, summed over all layers.
        experts: bytes of experts that can be spread over ranks, included in `weights`.
        expert_gradients: bytes of gradients of trained experts that can be spread over ranks, included in `gradients`.
        routed: experts per token, of each layer with experts.
        gathered: output channels that tensor parallelism gathers, summed over all layers.
    """

    weights: float
    gradients: float
    used: float
    trained: float
    attention: int
    num_layers: int
    hidden_size: int
    itemsize: int = 2
    keys_values: int = 0
    experts: float = 0
    expert_gradients: float = 0
    routed: tuple[int, ...] = ()
    gathered: int = 0

    @classmethod
    def of(cls, model: CausalLM, reduce_dtype: DtypeName | None = None) -> ModelSize:
        """The sizes of a model on any device, the meta device included. `reduce_dtype`: as in `ParallelPlan`."""
        itemsize = None if reduce_dtype is None else getattr(torch, reduce_dtype).itemsize

        def gradients(parameters: Iterable[nn.Parameter]) -> int:
            return sum(p.numel() * (itemsize or p.itemsize) for p in parameters if p.requires_grad)

        counts = _multiplied(model)
        parameters = list(model.parameters())
        sizes = [block.info() for block in model.config.blocks]
        experts = [p for _, mixture in mixtures(model) for p in of_experts(mixture).values()]
        return cls(
            weights=_bytes(parameters),
            gradients=gradients(parameters),
            used=sum(count for _, count in counts),
            trained=sum(count for p, count in counts if p.requires_grad),
            attention=sum(info.get("heads", 0) * info.get("head_dim", 0) for info in sizes),
            num_layers=len(model.config.blocks),
            hidden_size=model.config.hidden_size,
            itemsize=model.dtype.itemsize,
            keys_values=sum(2 * info.get("kv_heads", 0) * info.get("head_dim", 0) for info in sizes),
            experts=_bytes(experts),
            expert_gradients=gradients(experts),
            gathered=sum(linear.out_features for linear in gathered_linears(model)),
            routed=tuple(info["experts_per_token"] for info in sizes if "experts_per_token" in info),
        )


def _multiplied(model: CausalLM) -> list[tuple[nn.Parameter, float]]:
    """Each parameter that tokens are multiplied by, and how many of its elements a token meets.

    The embedding is only looked up, unless the head shares it. Of stacked experts a token meets a fraction.
    """
    in_blocks = [
        (p, p.numel() * (_share_used(config) if p.ndim == 3 else 1.0))
        for block, config in zip(model.decoder.blocks, model.config.blocks, strict=True)
        for p in block.parameters()
    ]
    looked_up = {id(p) for p in model.decoder.embed.parameters()} - {id(p) for p in model.head.parameters()}
    skipped = looked_up | {id(p) for p, _ in in_blocks}
    return in_blocks + [(p, float(p.numel())) for p in model.parameters() if id(p) not in skipped]


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.nbytes for p in parameters)


def gathered_linears(model: nn.Module) -> Iterator[Any]:
    """Linear layers with outputs that tensor parallelism gathers."""
    for module in model.modules():
        for name, rule in getattr(type(module), "tensor_parallel", {}).items():
            if rule == "columns_to_all":
                yield getattr(module, name)


def _share_used(block: BlockConfig) -> float:
    """Fraction of a mixture's experts that a token is sent to; 1 for other feed-forward layers."""
    info = block.info()
    return float(info["experts_per_token"] / info["experts"]) if "experts" in info else 1.0


@dataclass(frozen=True)
class StepCost:
    """Cost of an optimizer step for each GPU.

    Gathering parameters, summing gradients and copies between GPU and host overlap with the computation. Exchanges of
    tensor, context and expert parallelism do not.

    Args:
        flops: operations.
        sent: degree of the plan -> bytes that a GPU sends for it.
        compute_s: seconds of the computation.
        sent_s: degree of the plan -> seconds of its communication.
        copied_s: seconds of the copies to and from host memory.
    """

    flops: float
    sent: Mapping[str, float]
    compute_s: float
    sent_s: Mapping[str, float]
    copied_s: float = 0.0

    @property
    def overlapped_s(self) -> float:
        """Seconds of communication that overlaps with the computation."""
        return self.sent_s["shard"] + self.sent_s["replicate"]

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return max(self.compute_s, self.overlapped_s, self.copied_s) + sum(self.sent_s[name] for name in EXPOSED)


EXPOSED = ("tensor", "context", "expert")
"""Degrees with communication that the GPU waits for."""
KNOWN = ("replicate", "shard", "context", "tensor", "expert")
"""Degrees of a plan that `step_cost` supports."""


def step_cost(
    size: ModelSize,
    tokens: int,
    seq_len: int,
    degrees: Mapping[str, int],
    *,
    passes: int = 1,
    activation_checkpointing: str = "none",
    hardware: Hardware | None = None,
) -> StepCost:
    """The cost of an optimizer step.

    Computation: each parameter element that a token meets costs 2 operations in the forward pass and 2 for the gradient
    of its input; a trained element costs 2 more. A token attends to seq_len / 2 tokens on average, which costs
    2 * seq_len operations per channel of the query heads, and 3.5 times as much for both passes (Dao, 2023,
    https://arxiv.org/abs/2307.08691). "full" and "offload" checkpointing add a forward pass; "selective" repeats no
    large product. "offload" also copies the input of each block to host memory and back, beside the computation.

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
        hardware: speed of a GPU and its links; by default an H200.

    Raises:
        InputError: a number below 1, an unknown degree, or an `expert` that does not divide shard x context.
    """
    hardware = hardware or Hardware()
    for name, number in (("tokens", tokens), ("seq_len", seq_len), ("passes", passes), *degrees.items()):
        if number < 1:
            raise InputError(f"{name}: must be at least 1, got {number}")
    for name, number in degrees.items():
        if number > 1 and name not in KNOWN:
            raise InputError(f"{name}: the cost of this degree is not known; known are {', '.join(KNOWN)}")
    replicate, shard, context, tensor, expert = (degrees.get(name, 1) for name in KNOWN)
    divided = shard * context  # FSDP2 shards over these ranks
    if divided % expert:
        raise InputError(f"expert: {expert} does not divide the {divided} ranks (shard x context)")
    repeated = 1 + (activation_checkpointing in ("full", "offload"))
    attention = 2.0 * seq_len * size.attention
    per_token = 2 * size.used * (repeated + 1) + 2 * size.trained + attention * (repeated + 2.5)
    flops = passes * tokens * per_token / (tensor * context)
    expert_weights, expert_gradients = (size.experts, size.expert_gradients) if expert > 1 else (0, 0)
    weights, gradients = (size.weights - expert_weights) / tensor, (size.gradients - expert_gradients) / tensor
    own_weights, own_gradients = expert_weights / expert, expert_gradients / expert
    activations = tokens * size.hidden_size * size.itemsize * size.num_layers
    gathered = tokens * size.gathered * size.itemsize
    routed = tokens / context * sum(_ranks_reached(expert, k) for k in size.routed) * size.hidden_size * size.itemsize
    exchanges = 4 + (activation_checkpointing != "none")  # to the experts and back, in each pass
    sharded = passes * (2 * weights + gradients) * _ring(divided)
    own_sharded = passes * (2 * own_weights + own_gradients) * _ring(divided // expert)
    sent = {
        "replicate": passes * 2 * (gradients + own_gradients * expert) / divided * _ring(replicate),
        "shard": sharded + own_sharded,
        # keys and values in the forward pass, and their gradients
        "context": passes * (repeated + 1) * tokens * size.keys_values / tensor * size.itemsize * _ring(context),
        # two sums in a block's forward pass and two in its backward pass; gathered outputs and their gradients
        "tensor": passes * (repeated + 1) * (4 * activations + gathered) / context * _ring(tensor),
        "expert": passes * exchanges * routed,
    }
    groups = {"tensor": (tensor, 1), "context": (context, tensor), "replicate": (replicate, tensor * divided)}
    sent_s = {name: sent[name] / hardware.bandwidth(*group) for name, group in groups.items()}
    sent_s["shard"] = sharded / hardware.bandwidth(divided, tensor)
    sent_s["shard"] += own_sharded / hardware.bandwidth(divided // expert, tensor * expert)
    sent_s["expert"] = hardware.exchange_s(sent["expert"], expert, tensor)
    copied = passes * 2 * activations / (tensor * context) if activation_checkpointing == "offload" else 0
    return StepCost(flops, sent, flops / hardware.flops, sent_s, copied / hardware.memory_bandwidth)


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def _ranks_reached(ranks: int, top_k: int) -> float:
    """Mean number of other ranks that a token with `top_k` experts is sent to."""
    return (ranks - 1) * (1 if ranks <= top_k else 1 - (1 - 1 / ranks) ** top_k)
