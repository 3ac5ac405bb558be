"""What a training step computes and sends over each link, and how long that takes: arithmetic, nothing is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ligermodels.errors import InputError
from ligermodels.layers import BlockConfig
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.expert import mixtures, of_experts


@dataclass(frozen=True)
class Hardware:
    """A GPU and its links: what a training step reaches, below the data sheet's numbers.

    flops: operations per second in bfloat16 matrix products. host_bandwidth, network_bandwidth: bytes per second that
    a GPU sends within its host (NVLink) and beyond it. The defaults are those of an H200 with NVLink and one 400 Gb/s
    network adapter for each GPU.
    """

    flops: float = 600e12
    host_bandwidth: float = 350e9
    network_bandwidth: float = 45e9
    gpus_per_host: int = 8

    def bandwidth(self, ranks: int, stride: int) -> float:
        """Of a collective of so many ranks, each `stride` after the one before. Beyond a host, its members in one host
        share what they exchange with the others: each part crosses the network once."""
        if ranks * stride <= self.gpus_per_host:
            return self.host_bandwidth
        return min(self.host_bandwidth, self.network_bandwidth * max(1, self.gpus_per_host // stride))

    def exchange_s(self, sent: float, ranks: int, stride: int) -> float:
        """Seconds of an all-to-all in which a GPU sends so many bytes to the others, as much to each. Nothing is
        shared here: what goes to other hosts crosses the network by the GPU's own adapter."""
        if ranks == 1:
            return 0.0
        near = min(ranks, max(1, self.gpus_per_host // stride))
        beyond = sent * (ranks - near) / (ranks - 1)
        return max((sent - beyond) / self.host_bandwidth, beyond / self.network_bandwidth)


@dataclass(frozen=True)
class ModelSize:
    """What the cost of a model's step depends on.

    weights, gradients: bytes of all parameters, and of those that are trained. used: parameters that a token is
    multiplied by; trained: those of them whose gradient is computed. attention: over all layers, channels of the query
    heads; keys_values: those of keys and values. num_layers and hidden_size as in the config; itemsize: bytes of an
    activation's element. experts, expert_gradients: of `weights` and `gradients`, those of experts that can be spread
    over ranks. Over all layers, routed: experts that a token is sent to; gathered: channels that tensor parallelism
    gathers.
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
    routed: int = 0
    gathered: int = 0

    @classmethod
    def of(cls, model: CausalLM) -> ModelSize:
        """Of a model, which may be on the meta device."""
        lookups = {id(p) for p in model.decoder.embed.parameters()} - {id(p) for p in model.head.parameters()}
        parts = [
            (p, _share_used(config) if p.ndim == 3 else 1.0)
            for block, config in zip(model.decoder.blocks, model.config.blocks, strict=True)
            for p in block.parameters()
        ]
        inner = {id(p) for p, _ in parts}
        others = [p for p in model.parameters() if id(p) not in inner and id(p) not in lookups]
        counted = [(p, share * p.numel()) for p, share in [*parts, *((p, 1.0) for p in others)]]
        found = [block.mixer.info() for block in model.config.blocks]
        experts = [p for _, mixture in mixtures(model) for p in of_experts(mixture).values()]
        return cls(
            weights=sum(p.nbytes for p in model.parameters()),
            gradients=sum(p.nbytes for p in model.parameters() if p.requires_grad),
            used=sum(count for _, count in counted),
            trained=sum(count for p, count in counted if p.requires_grad),
            attention=sum(each.get("heads", 0) * each.get("head_dim", 0) for each in found),
            num_layers=len(model.config.blocks),
            hidden_size=model.config.hidden_size,
            itemsize=model.dtype.itemsize,
            keys_values=sum(2 * each.get("kv_heads", 0) * each.get("head_dim", 0) for each in found),
            experts=sum(p.nbytes for p in experts),
            expert_gradients=sum(p.nbytes for p in experts if p.requires_grad),
            gathered=sum(linear.out_features for linear in gathered_linears(model)),
            routed=sum(block.mlp.info().get("experts_per_token", 0) for block in model.config.blocks),
        )


def gathered_linears(model: nn.Module) -> Iterator[Any]:
    """Linear layers whose outputs tensor parallelism gathers."""
    for module in model.modules():
        for name, rule in getattr(type(module), "tensor_parallel", {}).items():
            if rule == "columns_to_all":
                yield getattr(module, name)


def _share_used(block: BlockConfig) -> float:
    """Of a mixture's experts, whose weights are stacked, how many a token meets."""
    info = block.mlp.info()
    return float(info["experts_per_token"] / info["experts"]) if "experts" in info else 1.0


@dataclass(frozen=True)
class StepCost:
    """Of one optimizer step on each GPU: operations, bytes that it sends for each degree of the plan, and seconds.

    Gathers of parameters and sums of gradients overlap with the computation; what `tensor`, `context` and `expert`
    exchange does not.
    """

    flops: float
    sent: Mapping[str, float]
    compute_s: float
    sent_s: Mapping[str, float]

    @property
    def overlapped_s(self) -> float:
        """Of what is sent while the GPU computes."""
        return self.sent_s["shard"] + self.sent_s["replicate"]

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max(self.compute_s, self.overlapped_s) + sum(self.sent_s[name] for name in EXPOSED)


EXPOSED = ("tensor", "context", "expert")
"""Degrees whose exchanges the GPU waits for."""
KNOWN = ("replicate", "shard", "context", "tensor", "expert")
"""Degrees of a plan whose cost is known here."""


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

    A token costs 2 operations for each parameter it meets, in the forward pass and for the gradient of its input, and 2
    for each trained one; its attention to half of `seq_len` tokens 2 * seq_len for each channel of the query heads,
    3.5 times that in both passes (Dao, 2023, https://arxiv.org/abs/2307.08691). "full" checkpointing adds a forward
    pass; "selective" repeats no large product. Rings of n ranks send (n - 1) / n of what is gathered or scattered, and
    twice that of what is summed for all. FSDP2 gathers parameters for the forward and for the backward pass; experts
    that are spread over `expert` ranks are gathered over the others of `shard` and `context` alone. Each token's hidden
    state goes to its experts and comes back, and so do the gradients, and with checkpointing the hidden states again;
    of n ranks (n - 1) / n of them, as routers that balance perfectly send them.

    Args:
        size: of the model.
        tokens: per forward pass of a GPU (of all of a `tensor` or `context` group together).
        seq_len: tokens per sequence.
        degrees: of "replicate", "shard", "context", "tensor" and "expert", by default 1: see `ParallelPlan`.
        passes: forward passes per step.
        hardware: by default an H200.

    Raises InputError for a number below 1, a degree that is unknown, and an `expert` that does not divide the ranks of
    `shard` and `context`.
    """
    hardware = hardware or Hardware()
    for name, number in (("tokens", tokens), ("seq_len", seq_len), ("passes", passes), *degrees.items()):
        if number < 1:
            raise InputError(f"{name}: must be at least 1, got {number}")
    for name, number in degrees.items():
        if number > 1 and name not in KNOWN:
            raise InputError(f"{name}: the cost of this degree is not known; known are {', '.join(KNOWN)}")
    replicate, shard, context, tensor, expert = (degrees.get(name, 1) for name in KNOWN)
    divided = shard * context  # ranks over which FSDP2 shards
    if divided % expert:
        raise InputError(f"expert: {expert} does not divide the {divided} ranks (shard x context)")
    repeated = 1 + (activation_checkpointing == "full")
    attention = 2.0 * seq_len * size.attention
    per_token = 2 * size.used * (repeated + 1) + 2 * size.trained + attention * (repeated + 2.5)
    flops = passes * tokens * per_token / (tensor * context)
    spread = size.experts if expert > 1 else 0, size.expert_gradients if expert > 1 else 0
    weights, gradients = (size.weights - spread[0]) / tensor, (size.gradients - spread[1]) / tensor
    own_weights, own_gradients = (each / expert for each in spread)
    activations = tokens * size.hidden_size * size.itemsize * size.num_layers
    gathered = tokens * size.gathered * size.itemsize
    routed = tokens / context * size.routed * size.hidden_size * size.itemsize
    exchanges = 2 * (2 + (activation_checkpointing != "none"))  # to the experts and back, in each pass
    sharded = passes * (2 * weights + gradients) * _ring(divided)
    own_sharded = passes * (2 * own_weights + own_gradients) * _ring(divided // expert)
    sent = {
        "replicate": passes * 2 * (gradients + own_gradients * expert) / divided * _ring(replicate),
        "shard": sharded + own_sharded,
        # keys and values in a forward pass, and their gradients
        "context": passes * (repeated + 1) * tokens * size.keys_values / tensor * size.itemsize * _ring(context),
        # two sums in a block's forward pass, and two in its backward pass; what is gathered, and its gradient
        "tensor": passes * (repeated + 1) * (4 * activations + gathered) / context * _ring(tensor),
        "expert": passes * exchanges * routed * _ring(expert),
    }
    groups = {"tensor": (tensor, 1), "context": (context, tensor), "replicate": (replicate, tensor * divided)}
    sent_s = {name: sent[name] / hardware.bandwidth(*group) for name, group in groups.items()}
    sent_s["shard"] = sharded / hardware.bandwidth(divided, tensor)
    sent_s["shard"] += own_sharded / hardware.bandwidth(divided // expert, tensor * expert)
    sent_s["expert"] = hardware.exchange_s(sent["expert"], expert, tensor)
    return StepCost(flops, sent, flops / hardware.flops, sent_s)


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks
