"""Sizes of a model that determine the cost of a training step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ligermodels.layers import BlockConfig
from ligermodels.layers.modules import modules_of
from ligermodels.layers.quantized import Codes
from ligermodels.models.causal_lm import CausalLM
from ligermodels.ops.runtime.tensors import dtype_named
from ligermodels.parallel.expert import mixtures, of_experts
from ligermodels.parallel.plan import DtypeName


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
        expert_channels: channels of the inputs and of the inner activations of a token's experts, summed over its
            experts and over all layers.
        updated: bytes of the trained parameters, which the optimizer updates.
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
    expert_channels: int = 0
    updated: float = 0
    gathered: int = 0

    @classmethod
    def of(cls, model: CausalLM, reduce_dtype: DtypeName | None = None) -> ModelSize:
        """The sizes of a model on any device, the meta device included. `reduce_dtype`: as in `ParallelPlan`."""
        itemsize = None if reduce_dtype is None else dtype_named(reduce_dtype).itemsize

        def gradients(parameters: Iterable[nn.Parameter]) -> int:
            return sum(p.numel() * (itemsize or p.itemsize) for p in parameters if p.requires_grad)

        counts = _multiplied(model)
        parameters = list(model.parameters())
        sizes = [block.info() for block in model.config.blocks]
        experts = [p for _, mixture in mixtures(model) for p in of_experts(mixture).values()]
        routed = [(info["experts_per_token"], info["mlp_size"]) for info in sizes if "experts_per_token" in info]
        return cls(
            weights=_bytes(parameters),
            gradients=gradients(parameters),
            used=sum(count for _, count in counts),
            trained=sum(count for p, count in counts if p.requires_grad),
            attention=sum(info.get("heads", 0) * info.get("head_dim", 0) for info in sizes),
            num_layers=len(model.config.blocks),
            hidden_size=(hidden := model.config.hidden_size),
            itemsize=model.dtype.itemsize,
            keys_values=sum(2 * info.get("kv_heads", 0) * info.get("head_dim", 0) for info in sizes),
            experts=_bytes(experts),
            expert_gradients=gradients(experts),
            gathered=sum(linear.out_features for linear in gathered_linears(model)),
            routed=tuple(top_k for top_k, _ in routed),
            expert_channels=sum(top_k * (hidden + inner) for top_k, inner in routed),
            updated=_bytes(p for p in parameters if p.requires_grad),
        )


def _multiplied(model: CausalLM) -> list[tuple[nn.Parameter, float]]:
    """Each parameter that tokens are multiplied by, and how many of its elements a token meets.

    The embedding is only looked up, unless the head shares it. Of stacked experts a token meets a fraction.
    """
    in_blocks = [
        (p, math.prod(shape) * (_share_used(config) if len(shape) == 3 else 1.0))
        for block, config in zip(model.decoder.blocks, model.config.blocks, strict=True)
        for p, shape in _shapes(block)
    ]
    looked_up = {id(p) for p in model.decoder.embed.parameters()} - {id(p) for p in model.head.parameters()}
    skipped = looked_up | {id(p) for p, _ in in_blocks}
    others = [(p, float(math.prod(shape))) for p, shape in _shapes(model) if id(p) not in skipped]
    return in_blocks + others


def _shapes(module: nn.Module) -> list[tuple[nn.Parameter, Sequence[int]]]:
    """Each parameter and its shape. Of a quantised weight the codes have the shape of the weight, and the scales 0."""
    coded: dict[int, Sequence[int]] = {}
    for codes in modules_of(module, Codes):
        coded |= {id(codes.scales): (0,), id(codes.codes): codes.shape}
    return [(p, coded.get(id(p), p.shape)) for p in module.parameters()]


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
