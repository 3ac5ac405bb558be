"""OLMo 2 and 3: norms only after the sublayers, and over whole queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ligermodels.archs import llama
from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.fields import FULL, SLIDING
from ligermodels.layers import NormConfig, QKNormConfig

DEFAULTS = {**llama.DEFAULTS, "vocab_size": 50304, "rms_norm_eps": 1e-5, "pad_token_id": 1}


OLMO3 = {**DEFAULTS, "sliding_window": 4096}
OLMO3_THETAS = {SLIDING: 5e5, FULL: 5e5}


def olmo2(config: Config) -> DecoderConfig:
    """The composed config of an `Olmo2Config` dict."""
    return _olmo(Fields(config, DEFAULTS), lambda layer: {})


def olmo3(config: Config) -> DecoderConfig:
    """The composed config of an `Olmo3Config` dict.

    Sliding-window layers have the plain rope; `rope_scaling` applies to full-attention layers only. Without a base in
    `rope_parameters`, it is the base of OLMO3_THETAS: releases of transformers read a top-level `rope_theta` in
    different ways.
    """
    fields = Fields(config, OLMO3)
    windows = fields.windows(lambda layer: (layer + 1) % 4 != 0)
    head_dim = fields.size("head_dim", fields.size("hidden_size") // fields.size("num_attention_heads"))
    ropes = fields.ropes(head_dim, OLMO3_THETAS, windows, unread=["rope_theta", "rope_local_base_freq"])
    return _olmo(fields, lambda layer: {"window": windows[layer], "rope": ropes[layer]})


def _olmo(fields: Fields, own: Callable[[int], Mapping[str, Any]]) -> DecoderConfig:
    """The decoder of OLMo 2; `own` (layer number) gives further fields of the layer's AttentionConfig."""
    bias = fields.flag("attention_bias", False)
    norm = NormConfig(fields.number("rms_norm_eps", negative=False), casting_mode="gemma")
    common = {"bias": bias, "o_bias": bias, "qk_norm": QKNormConfig(norm, over="projection")}
    return decoder(
        fields,
        norm=norm,
        attention=lambda layer, _: {**common, **own(layer)},
        block={"pre_norm": False, "post_norm": True},
    )


FAMILIES = (Family("olmo2", olmo2), Family("olmo3", olmo3, default_theta=OLMO3_THETAS))
