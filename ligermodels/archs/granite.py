"""Granite 3: Llama with multipliers on embeddings, scores, residuals and logits.

Granite SWA: the same with windows in most layers, attention sinks, and a rotary base for each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.llama import DEFAULTS
from ligermodels.errors import ConfigError

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


def _granite(fields: Fields, own: Callable[[int], Mapping[str, Any]]) -> DecoderConfig:
    """Granite's decoder; `own` (layer number) gives further fields of the layer's AttentionConfig."""
    bias = fields.flag("attention_bias", False)
    scale = fields.number("attention_multiplier", 1.0, positive=True)
    return decoder(
        fields,
        attention=lambda layer, common: {"bias": bias, "o_bias": bias, "softmax_scale": scale, **own(layer)},
        mlp_bias=fields.flag("mlp_bias", False),
        block={"residual_scale": fields.number("residual_multiplier", 1.0)},
        head={"logit_scale": 1.0 / fields.number("logits_scaling", 1.0, positive=True)},
        input_scale=fields.number("embedding_multiplier", 1.0),
    )


FAMILIES = (Family("granite", granite), Family("granite_swa", granite_swa, architecture="GraniteSWAForCausalLM"))
