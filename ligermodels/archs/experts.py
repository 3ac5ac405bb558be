"""What families with mixtures of experts share: how checkpoints store experts, and routers read from their fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from ligermodels.archs.compose import STACKED_EXPERTS, gate_activation
from ligermodels.archs.fields import Fields
from ligermodels.errors import ConfigError
from ligermodels.layers import MLPConfig, MoEConfig, RouterConfig

TRANSPOSED_EXPERTS = {
    "experts.router": STACKED_EXPERTS["experts.router"],
    "experts.gate_up_transposed": STACKED_EXPERTS["experts.gate_up"],
    "experts.down_transposed": STACKED_EXPERTS["experts.down"],
}
"""As STACKED_EXPERTS, of transposed matrices: (E, H, 2 I) and (E, I, H)."""


def expert_layouts(
    names: Mapping[str, str] | None = None, stacked: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The layouts of a family: a tensor for each expert, one for all experts (transformers 5), and that transposed.

    Args:
        names: the family's own names of parts, in all layouts.
        stacked: those that differ where one tensor is for all experts.
    """
    each = [{}, {**STACKED_EXPERTS, **(stacked or {})}, {**TRANSPOSED_EXPERTS, **(stacked or {})}]
    return [{"names": {**(names or {}), **layout}} for layout in each]


def mixture(fields: Fields, shared_size: int | None = None) -> MoEConfig:
    """A mixture of Qwen's, with intermediate channels of a shared expert with a gate, if it has one.

    Raises ConfigError naming the field that is missing or bad.
    """
    router = RouterConfig(*fields.experts("num_experts"), normalize=fields.flag("norm_topk_prob", False))
    activation = gate_activation(fields)
    shared = None if shared_size is None else MLPConfig(shared_size, activation)
    size = fields.size("moe_intermediate_size")
    return MoEConfig(router, size, activation, shared=shared, shared_gate=shared is not None)


def sparse_layers(fields: Fields, shared_size: int | None = None) -> Callable[[int, MLPConfig], MLPConfig | MoEConfig]:
    """The feed-forward layers of Qwen's mixtures, for `compose.decoder`: by the fields `decoder_sparse_step` and
    `mlp_only_layers` some layers are mixtures, the others dense. `shared_size` and errors as of `mixture`."""
    step, dense = fields.size("decoder_sparse_step"), fields.layers("mlp_only_layers")
    sparse = mixture(fields, shared_size)
    return lambda layer, gated: gated if layer in dense or (layer + 1) % step else sparse


def grouped_router(
    fields: Fields, experts: str = "n_routed_experts", scores: Literal["softmax", "sigmoid"] = "sigmoid"
) -> RouterConfig:
    """The router of DeepSeek-V3 and of the families after it, whose field `experts` has the number of experts; their
    defaults have norm_topk_prob, whose null means false. With `scores` "softmax" there is no selection bias, and
    logits are in the dtype of the model (Mistral 4).

    Raises ConfigError naming the field that is missing, bad or not implemented.
    """
    fields.choices("scoring_func", scores, default=scores)
    if scores == "sigmoid":
        fields.choices("topk_method", "noaux_tc", default="noaux_tc")
    count, chosen = fields.experts(experts)
    groups, best = fields.size("n_group"), fields.size("topk_group")
    if count % groups:
        raise ConfigError(f"{fields.where}: n_group {groups} does not divide {experts} {count}")
    if best > groups:
        raise ConfigError(f"{fields.where}: topk_group {best} is above n_group {groups}")
    if best < groups == count:
        raise ConfigError(f"{fields.where}: n_group {groups} leaves one of {experts} {count} in a group; it needs two")
    if chosen > (reached := best * (count // groups)):
        raise ConfigError(
            f"{fields.where}: num_experts_per_tok {chosen} is above {reached}, the experts in topk_group {best} of "
            f"n_group {groups} groups of {experts} {count}"
        )
    return RouterConfig(
        count,
        chosen,
        scores=scores,
        selection_bias=scores == "sigmoid",
        num_groups=groups,
        top_k_groups=best,
        normalize=fields.flag("norm_topk_prob", False),
        eps=1e-20,
        scale=fields.number("routed_scaling_factor"),
        float32_logits=scores == "sigmoid",
    )
