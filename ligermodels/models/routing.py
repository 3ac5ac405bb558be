"""Routing of a model with mixtures of experts: the experts that a caller gives, and the results of the routers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers import (
    Block,
    RouterConfig,
    RouterOutput,
    count_tokens_per_expert,
    load_balancing_loss,
    router_z_loss,
)
from ligermodels.layers.layer import Layer, declared
from ligermodels.layers.router import ROUTING_DTYPES
from ligermodels.layers.tokens import TokenLayout
from ligermodels.ops import NOT_ROUTED
from ligermodels.ops.runtime.checks import assert_async, check_plain

if TYPE_CHECKING:
    from ligermodels.models.causal_lm import CausalLM
    from ligermodels.models.decoder import Decoder


class RouterResults(NamedTuple):
    """The results of the routers of a pass, as the fields of `CausalLMOutput`."""

    aux_loss: Tensor | None = None
    router_z_loss: Tensor | None = None
    tokens_per_expert: Tensor | None = None
    routing: Tensor | None = None


def router_loss(model: CausalLM, results: Any) -> Tensor | None:
    """The weighted sum of the routers' losses.

    Args:
        model: the model, for the weights `config.router_aux_loss_coef` and `router_z_loss_coef`.
        results: has `aux_loss` and `router_z_loss`, each a scalar or None.

    Returns:
        A scalar; None without a loss that has a weight.
    """
    coefficients = model.config.router_aux_loss_coef, model.router_z_loss_coef
    weighted = zip(coefficients, (results.aux_loss, results.router_z_loss), strict=True)
    terms = [weight * loss for weight, loss in weighted if weight and loss is not None]
    return sum(terms[1:], terms[0]) if terms else None


def with_router_loss(model: CausalLM, output: Any, share: Tensor | float) -> Tensor:
    """The loss of an output and `share` times the `router_loss`; a loss for each token stays as it is.

    Args:
        model: the model, for the weights of the routers' losses.
        output: the output of a pass, with its loss.
        share: factor on `router_loss`, a number or a scalar.
    """
    of_routers = router_loss(model, output)
    loss: Tensor = output.loss
    return loss if of_routers is None or loss.ndim else loss + share * of_routers


def _checked_routers(decoder: Decoder, name: str) -> Mapping[int, RouterConfig]:
    """The configs of the routers of a decoder by number of the block, for the argument `name`.

    Raises:
        InputError: the model has no experts, or its layers send tokens to different numbers of experts.
    """
    routers = decoder.expert_routers
    if not routers:
        raise InputError(f"{name}: is for mixtures of experts, and this model has no native layer with experts")
    if len({(router.num_experts, router.top_k) for router in routers.values()}) > 1:
        raise InputError(f"{name}: the layers of this model have different numbers of experts")
    return routers


def check_routing(decoder: Decoder, routing: Any, return_routing: bool, tokens: Tensor) -> None:
    """Check a routing: that the model has one, and the type and shape of the given one.

    Args:
        decoder: the model's decoder.
        routing: the argument `routing` of `CausalLM.forward`.
        return_routing: the argument `return_routing` of `CausalLM.forward`.
        tokens: the inputs (B, T, ...).

    Raises:
        InputError: it does not fit the model or the tokens; the model has no experts, or a layer with experts does not
            declare that it uses given experts.
    """
    routers = _checked_routers(decoder, "return_routing" if routing is None else "routing")
    if routing is None:
        return
    for number in routers:
        mlp = cast(Layer, cast(Block, decoder.blocks[number]).mlp)
        if not declared(mlp).reads_experts:
            raise InputError(
                f"routing: blocks[{number}].mlp ({type(mlp).__name__}) would ignore the given experts: its class does "
                "not declare `reads_experts`. Derive it from ligermodels.layers.Layer, pass `context.experts` to its "
                "router, and set `reads_experts = True`"
            )
    check_plain("routing", routing, *ROUTING_DTYPES)
    top_k, blocks = next(iter(routers.values())).top_k, len(decoder.blocks)
    batch = tuple(tokens.shape[:2])
    if tuple(routing.shape) not in {(*batch, count, top_k) for count in (len(routers), blocks)}:
        layers = f"{len(routers)} layers with experts"
        layers += "" if blocks == len(routers) else f" (or all {blocks} layers)"
        raise InputError(
            f"routing: must be (batch, tokens, layers, experts per token), here {(*batch, len(routers), top_k)} for "
            f"{layers}; got {tuple(routing.shape)}. Fill tokens whose experts are not known with {NOT_ROUTED}"
        )
    if routing.device != tokens.device:
        raise InputError(f"routing: must be on {tokens.device}, as the inputs are, got {routing.device}")


def given_experts(
    decoder: Decoder, routing: Tensor | None, layout: TokenLayout, attention_mask: Tensor | None
) -> dict[int, Tensor] | None:
    """The argument `routing` of `Decoder.forward`.

    Args:
        decoder: the model's decoder.
        routing: (B, T, layers, top_k), checked by `check_routing`; or None.
        layout: layout of the pass.
        attention_mask: (B, T), 0 on padding that the layout keeps; or None.

    Returns:
        For each block with experts its number -> int32 (rows, length, top_k), in the layout; None without a routing.

    Raises:
        InputError: an expert that the model does not have, or a token with the same expert twice.
    """
    if routing is None:
        return None
    routers, routing = decoder.expert_routers, routing.int()
    if routing.shape[2] != len(routers):  # also of layers without experts
        routing = routing[:, :, list(routers)]
    if attention_mask is not None:
        routing = routing.masked_fill(attention_mask[:, :, None, None] == 0, NOT_ROUTED)
    num_experts = next(iter(routers.values())).num_experts
    unknown = (routing == NOT_ROUTED).all(-1, keepdim=True)
    message = f"routing: experts must lie in [0, {num_experts}), or be {NOT_ROUTED} for all of a token's experts"
    assert_async(((routing >= 0) & (routing < num_experts)) | unknown, message, routing, "routing")
    ordered = routing.sort(-1).values
    distinct = (ordered[..., 1:] != ordered[..., :-1]).all(-1) | unknown[..., 0]
    message = "routing: the experts of a token must differ; servers fill tokens that they did not record with zeros"
    assert_async(distinct, f"{message}, fill these with {NOT_ROUTED}", routing[..., 0], "the first expert at ")
    taken = layout.take(routing, NOT_ROUTED)
    return {number: taken[:, :, layer] for layer, number in enumerate(routers)}


def router_results(
    model: CausalLM,
    outputs: Sequence[RouterOutput],
    layout: TokenLayout,
    *,
    with_losses: bool,
    with_routing: bool,
    replayed: bool,
) -> RouterResults:
    """The results of the routers of a pass.

    Args:
        model: the model.
        outputs: the routers' outputs, in the order of the layers, for all tokens of the pass.
        layout: layout of the pass.
        with_losses: compute the losses and count the tokens of each expert. Tokens without padding count.
        with_routing: return the routing.
        replayed: whether the caller gave experts; the load-balancing loss then counts these.

    Raises:
        InputError: the routing is asked for, and a layer does not return its experts; or layers differ in their number
            of experts, and a loss of the routers has a weight. Without a weight that loss is None.
    """
    losses: dict[str, Tensor] = {}
    if with_losses and outputs:
        mask = None if layout.packing.mask is None else layout.take(layout.packing.mask, False)
        balanced = [output for output in outputs if output.aux_loss]
        if balanced and _alike(balanced, "router_aux_loss_coef", model.config.router_aux_loss_coef):
            losses["aux_loss"] = load_balancing_loss(balanced, mask, layout.shard, replayed=replayed)
        z_loss_coef = model.router_z_loss_coef if model.training else 0.0
        if _alike(outputs, "router_z_loss_coef", z_loss_coef) and z_loss_coef:
            losses["router_z_loss"] = router_z_loss(outputs, mask, layout.shard)
        if _alike(outputs) and all(output.experts is not None for output in outputs):
            losses["tokens_per_expert"] = count_tokens_per_expert(outputs, mask, layout.shard)
    return RouterResults(**losses, routing=_routing(model, outputs, layout) if with_routing else None)


def _alike(outputs: Sequence[RouterOutput], name: str = "", weight: float = 0.0) -> bool:
    """Whether all layers have the same numbers of experts and of experts per token. InputError if not, and the loss
    that needs this has a `weight`, the value of the setting `name`."""
    sizes = {(output.logits.shape, output.top_k) for output in outputs}
    if len(sizes) > 1 and weight:
        raise InputError(
            f"{name}: the loss of the routers needs the same numbers of experts and of experts per token in all layers "
            f"of a model, and this model's layers differ; set {name} to 0"
        )
    return len(sizes) == 1


def _routing(model: CausalLM, outputs: Sequence[RouterOutput], layout: TokenLayout) -> Tensor:
    """The experts of each token, int16 (B, T, layers, top_k), with `NOT_ROUTED` on padding."""
    routers = model.decoder.expert_routers
    experts = [output.experts for output in outputs if output.experts is not None]
    if len(experts) != len(routers):
        raise InputError(
            f"return_routing: {len(routers)} layers have experts by the model's config, and {len(experts)} returned "
            "those of their tokens; a layer was replaced by another, which must return a RouterOutput with experts"
        )
    rows = layout.shape[0] if layout.cu_seqlens is None else 1
    tokens = torch.stack(experts, dim=1).int().unflatten(0, (rows, -1))  # NCCL sends no int16
    return layout.restore(tokens, NOT_ROUTED).to(torch.int16)
