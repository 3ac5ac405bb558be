"""Granite 3: Llama with multipliers on embeddings, scores, residuals and logits.

Granite SWA: the same with windows in most layers, attention sinks, and a rotary base for each layer.

Granite 4 (`granitemoehybrid`): the same with Mamba2 in place of attention in most layers, and experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ligermodels.archs.bamba import LINEAR, MAMBA, mamba2_layer
from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder, gate_activation
from ligermodels.archs.fields import FULL, renamed
from ligermodels.archs.llama import DEFAULTS
from ligermodels.errors import ConfigError
from ligermodels.layers import AttentionConfig, LayerConfig, MLPConfig, MoEConfig, RouterConfig

GRANITE_SWA = {
    **DEFAULTS,
    "vocab_size": 100352,
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "tie_word_embeddings": True,
}


GRANITE_HYBRID = {
    **DEFAULTS,
    **MAMBA,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "router_aux_loss_coef": 0.001,
}
SHARED = {"mlp.gate_up": "shared_mlp.input_linear", "mlp.down": "shared_mlp.output_linear"}
HYBRID_NAMES = {**SHARED, "experts.shared_gate_up": SHARED["mlp.gate_up"], "experts.shared": SHARED["mlp.down"]}
PUBLISHED_EXPERTS = {
    "experts.router": "block_sparse_moe.router.layer.weight",
    "experts.gate_up": "block_sparse_moe.input_linear.weight",
    "experts.down": "block_sparse_moe.output_linear.weight",
}
EXPERTS = {
    "experts.router": "block_sparse_moe.router.weight",
    "experts.gate_up": "block_sparse_moe.experts.gate_up_proj",
    "experts.down": "block_sparse_moe.experts.down_proj",
}
OLDER_LAYER_TYPES = {"mamba": LINEAR, "attention": FULL}


def granite(config: Config) -> DecoderConfig:
    """The composed config of a `GraniteConfig` dict."""
    return _granite(Fields(config, DEFAULTS), lambda layer: {})


def granite_swa(config: Config) -> DecoderConfig:
    """The composed config of a `GraniteSWAConfig` dict."""
    fields = Fields(config, GRANITE_SWA)
    windows = fields.windows(lambda layer: layer % 4 != 0)
    head_dim = fields.size("head_dim", fields.size("hidden_size") // fields.size("num_attention_heads"))
    rope = fields.rope(head_dim, fields.size("max_position_embeddings"))
    thetas = fields.per_layer("layer_rope_theta", lambda layer: rope.theta)
    if small := [theta for theta in thetas if 0 < theta <= 1]:
        raise ConfigError(f"{fields.where}: layer_rope_theta must be 0 (no positions) or above 1, got {small[0]}")
    ropes = [replace(rope, theta=theta) if theta else None for theta in thetas]
    return _granite(fields, lambda layer: {"sinks": True, "window": windows[layer], "rope": ropes[layer]})


def granitemoehybrid(config: Config) -> DecoderConfig:
    """The composed config of a `GraniteMoeHybridConfig` dict: attention has positions only if the config says so."""
    config = renamed(config, "layer_types", "layers_block_type")
    if isinstance(types := config.get("layer_types"), list):
        config = {**config, "layer_types": [OLDER_LAYER_TYPES.get(str(kind), kind) for kind in types]}
    fields = Fields(config, GRANITE_HYBRID)
    fields.ignore("init_method")
    fields.choices("normalization_function", "rmsnorm", default="rmsnorm")
    kinds = fields.kinds("layer_types", (LINEAR, FULL), lambda layer: LINEAR)
    mamba, activation = mamba2_layer(fields), gate_activation(fields)
    shared = MLPConfig(fields.size("shared_intermediate_size"), activation)
    feed_forward: LayerConfig = shared
    aux_loss = fields.router_aux_loss_coef()
    if fields.size("num_local_experts", zero=True):
        router = RouterConfig(*fields.experts("num_local_experts"))
        feed_forward = MoEConfig(router, fields.size("intermediate_size"), activation, shared=shared)
    rotates = fields.choices("position_embedding_type", "rope", "nope", default="nope") == "rope"

    def mixer(layer: int, attention: AttentionConfig) -> LayerConfig:
        return attention if kinds[layer] == FULL else mamba

    return _granite(
        fields,
        lambda layer: {} if rotates else {"rope": None},
        feed_forward=lambda layer: feed_forward,
        mixer=mixer,
        router_aux_loss_coef=aux_loss,
    )


def _granite(fields: Fields, own: Callable[[int], Mapping[str, Any]], **more: Any) -> DecoderConfig:
    """Granite's decoder; `own` (layer number) gives further fields of the layer's AttentionConfig, and `more` are
    further arguments of `compose.decoder`."""
    bias = fields.flag("attention_bias", False)
    scale = fields.number("attention_multiplier", 1.0, positive=True)
    return decoder(
        fields,
        attention=lambda layer, common: {"bias": bias, "o_bias": bias, "softmax_scale": scale, **own(layer)},
        mlp_bias=fields.flag("mlp_bias", False),
        block={"residual_scale": fields.number("residual_multiplier", 1.0)},
        head={"logit_scale": 1.0 / fields.number("logits_scaling", 1.0, positive=True)},
        input_scale=fields.number("embedding_multiplier", 1.0),
        **more,
    )


FAMILIES = (
    Family("granite", granite),
    Family("granite_swa", granite_swa, architecture="GraniteSWAForCausalLM"),
    Family(
        "granitemoehybrid",
        granitemoehybrid,
        [{"names": {**HYBRID_NAMES, **experts}} for experts in (PUBLISHED_EXPERTS, EXPERTS)],
        architecture="GraniteMoeHybridForCausalLM",
    ),
)
