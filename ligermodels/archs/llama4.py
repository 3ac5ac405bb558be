"""Llama 4 (Meta): attention within chunks in layers with rotary positions, scaled queries in layers without positions,
and mixtures of experts in which the router's weights multiply the experts' inputs.

Chunks are not computed: rows longer than `attention_chunk_size` are refused (`AttentionConfig.chunk`)."""

from __future__ import annotations

from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder, gate_activation
from ligermodels.archs.fields import FULL
from ligermodels.archs.multimodal import TextModel, layouts, wrapper
from ligermodels.errors import ConfigError
from ligermodels.layers import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    MoEConfig,
    NormConfig,
    QKNormConfig,
    RouterConfig,
)
from ligermodels.layers.query_scaling import QueryScaling

DEFAULTS = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
THETA = 500_000.0
CHUNKED = "chunked_attention"
NAMES = {
    **{f"mlp.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    "experts.router": "feed_forward.router.weight",
    "experts.gate_up_transposed": "feed_forward.experts.gate_up_proj",
    "experts.down_transposed": "feed_forward.experts.down_proj",
    "experts.shared": "feed_forward.shared_expert.{part}_proj",
}


def llama4_text(config: Config) -> DecoderConfig:
    """The composed config of a `Llama4TextConfig` dict."""
    if config.get("no_rope_layers") == []:  # as none
        config = {name: value for name, value in config.items() if name != "no_rope_layers"}
    fields = Fields(config, DEFAULTS)
    # transformers' model uses none of these.
    fields.ignore("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    every = fields.size("no_rope_layer_interval")
    rotates = fields.flags("no_rope_layers", lambda layer: (layer + 1) % every != 0)  # 1 means with rope
    kinds = fields.kinds("layer_types", (CHUNKED, FULL), lambda layer: CHUNKED if rotates[layer] else FULL)
    chunk = fields.optional_size("attention_chunk_size")
    if CHUNKED in kinds and chunk is None:
        raise ConfigError(f"{fields.where}: layer_types has {CHUNKED!r}, but attention_chunk_size is null")
    rope = fields.rope(fields.size("head_dim"), fields.size("max_position_embeddings"), THETA)
    bias = fields.flag("attention_bias", False)
    own: dict[str, Any] = {"bias": bias, "o_bias": bias}
    unrotated: dict[str, Any] = {**own, "rope": None, "query_scaling": _temperature(fields)}
    rotated: dict[str, Any] = {**own, "rope": rope, "stored_as_pairs": True}
    if fields.flag("use_qk_norm", True):
        # The norm has no weight, so it is the same before the rotation, in one kernel with it, if that keeps lengths.
        norm = NormConfig(fields.number("rms_norm_eps", negative=False))
        rotated["qk_norm"] = QKNormConfig(norm, has_weight=False, after_rope=rope.attention_factor != 1)

    def attention(layer: int, common: AttentionConfig) -> dict[str, Any]:
        return {**(rotated if rotates[layer] else unrotated), "chunk": chunk if kinds[layer] == CHUNKED else None}

    return decoder(fields, attention=attention, feed_forward=_feed_forward(fields))


def _temperature(fields: Fields) -> QueryScaling | None:
    """The scaling of queries in layers without positions."""
    scaling = QueryScaling(fields.number("attn_scale"), fields.size("floor_scale"), offset=1)
    return scaling if fields.flag("attn_temperature_tuning", True) else None


def _feed_forward(fields: Fields) -> Any:
    """The argument `feed_forward` of `compose.decoder`."""
    activation, step = gate_activation(fields), fields.size("interleave_moe_layer_step")
    size, layers = fields.size("intermediate_size"), fields.size("num_hidden_layers")
    sparse = fields.layers("moe_layers")
    if fields.config.get("moe_layers") is None:
        sparse = frozenset(range(step - 1, layers, step))
    router = RouterConfig(*fields.experts("num_local_experts"), scores="sigmoid", normalize=False)
    shared = MLPConfig(size, activation)
    mixture = MoEConfig(router, size, activation, shared=shared, weight_inputs=True, aux_loss=False)
    dense = MLPConfig(fields.size("intermediate_size_mlp"), activation)

    def feed_forward(layer: int) -> LayerConfig:
        return mixture if layer in sparse else dense

    return feed_forward


TEXT = Family("llama4_text", llama4_text, [{"names": NAMES}], default_theta=THETA)
TOWERS = (r"^vision_model\.", r"^multi_modal_projector\.")

FAMILIES = (
    TEXT,
    wrapper(
        "llama4",
        {"llama4_text": TextModel(TEXT)},
        layouts(("language_model.model", "language_model.lm_head.weight"), ignored=TOWERS, names=[NAMES]),
    ),
)
