"""Balancing the load of a mixture's experts by the selection biases of its routers, without a loss.

A router with a selection bias chooses by scores plus bias; the bias does not count for the weights of the chosen
experts. After each optimizer step the bias of an expert with less than the mean load rises by a fixed rate, and the
bias of an expert with more falls (Wang et al., 2024, https://arxiv.org/abs/2408.15664; DeepSeek-V3, section 2.1.2).
"""

from __future__ import annotations

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
