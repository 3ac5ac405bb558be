"""Parts of families with mixtures of experts: layouts of stored experts, and routers composed from config fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from ligermodels.archs.compose import STACKED_EXPERTS, Fields, gate_activation
from ligermodels.archs.fields import DENSE, SPARSE
from ligermodels.errors import ConfigError
from ligermodels.layers import MLPConfig, MoEConfig, RouterConfig

TRANSPOSED_EXPERTS = {
    "experts.router": STACKED_EXPERTS["experts.router"],
    "experts.gate_up_transposed": STACKED_EXPERTS["experts.gate_up"],
    "experts.down_transposed": STACKED_EXPERTS["experts.down"],
}
"""Part of a mixture -> name of its tensor, where matrices are also transposed: (E, H, 2 I) and (E, I, H)."""


def expert_layouts(
    names: Mapping[str, str] | None = None, stacked: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Three layouts: a tensor for each expert, one tensor for all experts (transformers 5), and this one transposed.

    Args:
        names: part -> name in this family, in all layouts.
        stacked: part -> name, where it differs in the layouts with one tensor for all experts.
    """
    layouts = [{}, {**STACKED_EXPERTS, **(stacked or {})}, {**TRANSPOSED_EXPERTS, **(stacked or {})}]
    return [{"names": {**(names or {}), **layout}} for layout in layouts]


def published_layouts(published: Mapping[str, str], own: Mapping[str, str]) -> list[dict[str, Any]]:
    """The layouts of a family whose published checkpoints have other names than the modules of transformers.

    Args:
        published: part -> name in published checkpoints. With one tensor for all experts too.
        own: part -> name of the module in transformers.
    """
    usual, *stacked = expert_layouts(published, stacked=published)
    return [usual, *expert_layouts(own)[1:], *stacked]


def mixture(fields: Fields, shared_size: int | None = None) -> MoEConfig:
    """A mixture of experts as in Qwen's models.

    Args:
        fields: the config.
        shared_size: intermediate channels of a shared expert with a gate; None for no shared expert.

    Raises:
        ConfigError: a field is missing or bad; the message names it.
    """
    router = RouterConfig(*fields.experts("num_experts"), normalize=fields.flag("norm_topk_prob", False))
    activation = gate_activation(fields)
    shared = None if shared_size is None else MLPConfig(shared_size, activation)
    size = fields.size("moe_intermediate_size")
    return MoEConfig(router, size, activation, shared=shared, shared_gate=shared is not None)


def sparse_layers(fields: Fields, shared_size: int | None = None) -> Callable[[int, MLPConfig], MLPConfig | MoEConfig]:
    """The argument `mlp` of `compose.decoder` for Qwen's mixtures: `decoder_sparse_step` and `mlp_only_layers` decide
    for each layer whether it is a mixture (with a shared expert of `shared_size` channels, if given) or dense.

    ConfigError, naming the field, if a field is missing or bad.
    """
    step, dense = fields.size("decoder_sparse_step"), fields.layers("mlp_only_layers")
    sparse = mixture(fields, shared_size)
    return lambda layer, gated: gated if layer in dense or (layer + 1) % step else sparse


def shared_and_routed(
    fields: Fields,
    router: RouterConfig,
    is_dense: Callable[[int], bool] = lambda layer: False,
    shared: str = "n_shared_experts",
) -> Callable[[int, MLPConfig], MLPConfig | MoEConfig]:
    """The argument `mlp` of `compose.decoder` for mixtures with shared experts, which are one layer without a gate.

    Args:
        fields: the config.
        router: router of all mixtures.
        is_dense: function (layer number) -> whether its feed-forward layer is dense instead of a mixture.
        shared: name of the field with the number of shared experts.
    """
    size, count = fields.size("moe_intermediate_size"), fields.size(shared)

    def mlp(layer: int, gated: MLPConfig) -> MLPConfig | MoEConfig:
        if is_dense(layer):
            return gated
        return MoEConfig(router, size, gated.activation, shared=replace(gated, size=count * size), aux_loss=False)

    return mlp


def feed_forwards(fields: Fields, first_dense: int, *, types_decide: bool = False) -> list[str]:
    """The kind of each layer's feed-forward layer, DENSE or SPARSE.

    Args:
        fields: the config; `mlp_layer_types` names the kinds, or `first_k_dense_replace` the number of first, dense
            layers.
        first_dense: default of `first_k_dense_replace`.
        types_decide: whether `mlp_layer_types` decides where the fields differ, as in families of which transformers
            writes both fields and reads this one. Default: False, that is an error.

    Raises:
        ConfigError: the two fields contradict each other.
    """
    first = fields.size("first_k_dense_replace", first_dense, zero=True)
    listed = [DENSE if layer < first else SPARSE for layer in range(fields.size("num_hidden_layers"))]
    kinds = fields.kinds("mlp_layer_types", (DENSE, SPARSE), listed.__getitem__)
    if fields.config.get("first_k_dense_replace") is not None and kinds != listed and not types_decide:
        raise ConfigError(f"{fields.where}: first_k_dense_replace = {first} contradicts mlp_layer_types; remove one")
    return kinds


def check_groups(fields: Fields, experts: str, count: int, chosen: int, groups: int, best: int, least: int = 2) -> None:
    """ConfigError, naming the fields, unless a token's experts can be chosen from its best groups.

    Args:
        fields: the config.
        experts: name of the field with the number of experts.
        count: its value.
        chosen: num_experts_per_tok.
        groups: n_group.
        best: topk_group.
        least: the least number of experts in a group.
    """
    if count % groups:
        raise ConfigError(f"{fields.where}: n_group {groups} does not divide {experts} {count}")
    if best > groups:
        raise ConfigError(f"{fields.where}: topk_group {best} is above n_group {groups}")
    if best < groups and count // groups < least:
        raise ConfigError(f"{fields.where}: n_group {groups} leaves one of {experts} {count} in a group; it needs two")
    if chosen > (reached := best * (count // groups)):
        raise ConfigError(
            f"{fields.where}: num_experts_per_tok {chosen} is above {reached}, the experts in topk_group {best} of "
            f"n_group {groups} groups of {experts} {count}"
        )


def grouped_router(
    fields: Fields, experts: str = "n_routed_experts", scores: Literal["softmax", "sigmoid"] = "sigmoid"
) -> RouterConfig:
    """The router of DeepSeek-V3 and of families with the same router.

    Args:
        fields: the config. Null as `norm_topk_prob` means false.
        experts: name of the field with the number of experts.
        scores: "sigmoid"; or "softmax", without a selection bias and with weights and logits in the model's dtype
            (Mistral 4).

    Raises:
        ConfigError: a field is missing, bad or not implemented; the message names it.
    """
    fields.choices("scoring_func", scores, default=scores)
    if scores == "sigmoid":
        fields.choices("topk_method", "noaux_tc", default="noaux_tc")
    count, chosen = fields.experts(experts)
    groups, best = fields.size("n_group"), fields.size("topk_group")
    check_groups(fields, experts, count, chosen, groups, best)
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
        float32_weight=scores == "sigmoid",
    )
