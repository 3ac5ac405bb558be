"""Balancing the load of a mixture's experts by the selection biases of its routers, without a loss.

A router with a selection bias chooses by scores plus bias; the bias does not count for the weights of the chosen
experts. After each optimizer step the bias of an expert with less than the mean load rises by a fixed rate, and the
bias of an expert with more falls (Wang et al., 2024, https://arxiv.org/abs/2408.15664; DeepSeek-V3, section 2.1.2).
`load_metrics` has metrics of the load.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from ligermodels.arguments import check_number
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import Router
from ligermodels.layers.modules import modules_of
from ligermodels.models.decoder import Decoder
from ligermodels.ops.runtime.checks import check_plain
from ligermodels.parallel.ranks import DataRanks


def load_metrics(tokens_per_expert: Tensor) -> list[dict[str, float]]:
    """Metrics of the load of several steps, each a mean over layers.

    Args:
        tokens_per_expert: long (steps, layers, E), how many tokens each expert computed in each step.

    Returns:
        For each step:

        router_max_violation: the highest load divided by the mean load, less 1: 0 for an even load, E / top_k - 1 if
            all tokens go to the same experts (MaxVio of Wang et al., 2024).
        router_load_entropy: entropy of the load, divided by log(E): 1 for an even load.
        router_unused_experts: fraction of the experts that computed no token.
    """
    load = tokens_per_expert.double()
    share = load / load.sum(-1, keepdim=True)
    size = load.shape[-1]
    metrics = {
        "router_max_violation": share.amax(-1) * size - 1,
        "router_load_entropy": torch.special.entr(share).sum(-1) / math.log(max(size, 2)),
        "router_unused_experts": (load == 0).double().mean(-1),
    }
    rows = torch.stack([value.mean(-1) for value in metrics.values()], dim=1).tolist()
    return [dict(zip(metrics, row, strict=True)) for row in rows]


NO_BIAS = (
    "the routers of this model have no selection bias; DeepSeek-V3, GLM-4.5, GLM-4.7-Flash and MiniMax-M2 have one, "
    "other mixtures are balanced by router_aux_loss_coef in config.json"
)


def biased_routers(model: nn.Module) -> list[Router]:
    """The routers of a model, in the order of its layers.

    Raises:
        InputError: there are none, or one has no selection bias.
    """
    # Routers of draft heads beside the decoder are not counted in `tokens_per_expert`.
    decoders: list[nn.Module] = [*modules_of(model, Decoder)] or [model]
    routers = [router for decoder in decoders for router in modules_of(decoder, Router)]
    if not routers or any(router.selection_bias is None for router in routers):
        raise InputError(f"update_router_bias: {NO_BIAS}")
    return routers


@torch.no_grad()
def update_router_bias(model: nn.Module, tokens_per_expert: Tensor, rate: float) -> None:
    """Move the selection biases of a model's routers towards an even load: bias += rate * sign(mean load - load).

    Call it after the optimizer's step. Nothing waits for the GPU. On several ranks all call it; the loads of the ranks
    with different data are summed.

    Args:
        model: the model, or a module that contains one model.
        tokens_per_expert: long (layers with experts, experts), how many tokens each expert computed in the step:
            `tokens_per_expert` of the model's outputs, summed over micro-batches.
        rate: the change of a bias, above 0; the papers have 0.001.

    Raises:
        InputError: the routers have no selection bias, the counts are no tensor or of another shape, or the rate is
            not above 0.

    Examples:
        >>> out = model(input_ids, labels=labels)
        >>> out.loss.backward()
        >>> optimizer.step()
        >>> update_router_bias(model, out.tokens_per_expert, rate=0.001)
    """
    routers = biased_routers(model)
    check_number("rate", rate, positive=True)
    check_plain("tokens_per_expert", tokens_per_expert, torch.int64, torch.int32)
    expected = len(routers), routers[0].config.num_experts
    if tuple(tokens_per_expert.shape) != expected:
        shape = tuple(tokens_per_expert.shape)
        raise InputError(f"tokens_per_expert: must be (layers, experts), here {expected}, got {shape}")
    load = DataRanks.of(model).sum(tokens_per_expert).double()
    for router, direction in zip(routers, (load.mean(-1, keepdim=True) - load).sign().unbind(), strict=True):
        bias = cast(Tensor, router.selection_bias)
        bias.add_(direction.to(bias), alpha=rate)


def balance_routers(model: nn.Module) -> None:
    """Prepare a model for `update_router_bias` in a run: checkpoints then hold the selection biases.

    Raises:
        ConfigError: its routers have no selection bias.
    """
    try:
        routers = biased_routers(model)
    except InputError:
        raise ConfigError(f"router_bias_update_rate: {NO_BIAS}") from None
    for router in routers:
        router.trained_buffers = ("selection_bias",)
