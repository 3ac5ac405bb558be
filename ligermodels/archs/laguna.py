"""Laguna (Poolside): windows in most layers, a gate of each head, and experts beside a shared one."""

from __future__ import annotations

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder, gate_activation
from ligermodels.archs.experts import expert_layouts, published_layouts
from ligermodels.archs.fields import DENSE, FULL, MOST, ONLY_NEW_ROPE, SLIDING, SPARSE, UNREAD_ROPE
from ligermodels.convert.json_values import is_int, is_list_of
from ligermodels.errors import ConfigError, short
from ligermodels.layers import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    MoEConfig,
    NormConfig,
    QKNormConfig,
    RouterConfig,
)

DEFAULTS = {
    "vocab_size": 100352,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 40,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
    "moe_routed_scaling_factor": 1.0,
    "router_aux_loss_coef": 0.001,
}
ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
"""The ropes of a config that names none."""
FIXED = {
    "moe_apply_router_weight_on_input": False,
    "moe_router_logit_softcapping": 0,
    "norm_topk_prob": True,
    "output_router_logits": False,
    "moe_router_score_func": "sigmoid",
    "swa_attention_sink_enabled": False,
    "swa_rope_parameters": None,
}
"""Field -> its only implemented value. transformers does not read the last three, vLLM does."""


def laguna(config: Config) -> DecoderConfig:
    """The composed config of a `LagunaConfig` dict."""
    fields = Fields(config, DEFAULTS)
    fields.choices("gating", True, "per-head", default=True)
    for name, only in FIXED.items():
        fields.choices(name, only, default=only)
    for name in UNREAD_ROPE if fields.config.get("rope_parameters") is None else ():
        fields.choices(name, None, default=None)
    windows = fields.windows(lambda layer: False)
    kinds = fields.kinds("mlp_layer_types", (DENSE, SPARSE), lambda layer: SPARSE if layer else DENSE)
    if (dense := fields.layers("mlp_only_layers")) and dense != {i for i, kind in enumerate(kinds) if kind == DENSE}:
        raise ConfigError(f"{fields.where}: mlp_only_layers contradicts mlp_layer_types, or its default; remove one")
    ropes = fields.ropes(fields.size("head_dim"), ROPES, windows, UNREAD_ROPE, partial=True)
    norm, bias = NormConfig(fields.number("rms_norm_eps", negative=False)), fields.flag("attention_bias", False)
    heads, sparse = _heads(fields), _mixture(fields)
    own = {"bias": bias, "o_bias": bias, "qk_norm": QKNormConfig(norm), "head_gate": "softplus"}

    def attention(layer: int, common: AttentionConfig) -> dict[str, object]:
        return {**own, "num_heads": heads[layer], "window": windows[layer], "rope": ropes[layer]}

    def mlp(layer: int, gated: MLPConfig) -> LayerConfig:
        return gated if kinds[layer] == DENSE else sparse

    return decoder(fields, norm=norm, attention=attention, mlp=mlp)


def _heads(fields: Fields) -> list[int]:
    """The number of query heads of each layer; ConfigError, naming the field, if key/value heads do not divide it."""
    name, count = "num_attention_heads_per_layer", fields.size("num_hidden_layers")
    fields.ignore(name)
    heads, kv_heads = fields.config.get(name), fields.size("num_key_value_heads")
    if heads is None:
        return [fields.size("num_attention_heads")] * count
    most = MOST["num_attention_heads"]
    if is_list_of(heads, lambda n: is_int(n) and 0 < n <= most and n % kv_heads == 0) and len(heads) == count:
        return list(heads)
    raise ConfigError(
        f"{fields.where}: field {name!r} must be a list of num_hidden_layers = {count} multiples of "
        f"num_key_value_heads {kv_heads}, got {short(heads)}"
    )


def _mixture(fields: Fields) -> MoEConfig:
    activation = gate_activation(fields)
    router = RouterConfig(
        *fields.experts("num_experts"),
        scores="sigmoid",
        selection_bias=True,
        scale=fields.number("moe_routed_scaling_factor"),
    )
    shared = MLPConfig(fields.size("shared_expert_intermediate_size"), activation)
    return MoEConfig(router, fields.size("moe_intermediate_size"), activation, shared=shared, aux_loss=False)


PUBLISHED = {"experts.selection_bias": "mlp.experts.e_score_correction_bias"}
MODULES = {"experts.shared": "mlp.shared_experts.{part}_proj"}
LAYOUTS = [*published_layouts(PUBLISHED, MODULES), *expert_layouts({})[1:]]
"""The last ones are what transformers writes for a model that it has not loaded from a published checkpoint."""
FAMILIES = (Family("laguna", laguna, LAYOUTS, default_theta=ROPES, attribute_map=ONLY_NEW_ROPE),)
