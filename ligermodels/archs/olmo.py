"""OLMo 2 and 3: norms only after the sublayers, and over whole queries and keys.

OLMo Hybrid: the same in some layers; most layers are Gated DeltaNet, with norms before the sublayers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ligermodels.archs import llama
from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.deepseek import fixed
from ligermodels.archs.fields import FULL, SLIDING
from ligermodels.archs.qwen3_5 import LINEAR
from ligermodels.convert.json_values import is_object
from ligermodels.convert.rope_settings import has_null_theta
from ligermodels.errors import ConfigError
from ligermodels.layers import AttentionConfig, GatedDeltaNetConfig, LayerConfig, NormConfig, QKNormConfig

DEFAULTS = {**llama.DEFAULTS, "vocab_size": 50304, "rms_norm_eps": 1e-5, "pad_token_id": 1}


OLMO3 = {**DEFAULTS, "sliding_window": 4096}
OLMO_HYBRID = {
    "vocab_size": 100352,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 100277,
    "linear_conv_kernel_dim": 4,
}
INITIAL = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
"""Fields of initial values."""
DELTA_NORM_EPS = 1e-5
"""Epsilon of the output's norm of Gated DeltaNet, whatever the config says, as in transformers."""
POST_NORM = {"pre_norm": False, "post_norm": True}
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


def olmo_hybrid(config: Config) -> DecoderConfig:
    """The composed config of an `OlmoHybridConfig` dict. Null as `rope_theta` of `rope_parameters` means that attention
    has no positions, as in published checkpoints."""
    fields = Fields(config, OLMO_HYBRID)
    fields.ignore(*INITIAL)
    fields.choices("hidden_act", "silu", default=None)
    heads, last = fields.size("num_attention_heads"), fields.size("num_hidden_layers") - 1
    if fields.config.get("head_dim") is not None:
        fixed(fields, "head_dim", fields.size("hidden_size") // heads, "num_attention_heads")
    kinds = fields.kinds("layer_types", (LINEAR, FULL), lambda layer: FULL if layer % 4 == 3 else LINEAR)
    if fields.config.get("layer_types") is None and FULL not in kinds:
        kinds[last] = FULL
    if len(set(kinds)) == 1:
        raise ConfigError(f"{fields.where}: layer_types must have both {LINEAR!r} and {FULL!r}")
    key_heads = fields.size("linear_num_key_heads", heads)
    value_heads = fields.size("linear_num_value_heads", heads)
    if value_heads % key_heads:
        raise ConfigError(
            f"{fields.where}: linear_num_key_heads {key_heads} does not divide linear_num_value_heads {value_heads}"
        )
    key_dim = fields.size("linear_key_head_dim", int(0.75 * fields.size("hidden_size") / key_heads))
    delta = GatedDeltaNetConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=key_dim,
        value_head_dim=fields.size("linear_value_head_dim", 2 * key_dim),
        conv_width=fields.size("linear_conv_kernel_dim"),
        norm_eps=DELTA_NORM_EPS,
        beta_scale=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
    )
    settings = config.get("rope_parameters")
    if is_object(settings) and has_null_theta({"rope_parameters": settings}):
        for name in ("rope_theta", "rope_scaling"):  # transformers reads one of them and not the other
            fields.choices(name, None, default=None)
    own = {"rope": None} if has_null_theta(config) else {}

    def mixer(layer: int, attention: AttentionConfig) -> LayerConfig:
        return attention if kinds[layer] == FULL else delta

    return _olmo(fields, lambda layer: own, mixer=mixer, block=lambda layer: POST_NORM if kinds[layer] == FULL else {})


def _olmo(fields: Fields, own: Callable[[int], Mapping[str, Any]], **more: Any) -> DecoderConfig:
    """The decoder of OLMo 2; `own` (layer number) gives further fields of the layer's AttentionConfig, and `more` are
    further arguments of `compose.decoder`."""
    bias = fields.flag("attention_bias", False)
    norm = NormConfig(fields.number("rms_norm_eps", negative=False), casting_mode="gemma")
    common = {"bias": bias, "o_bias": bias, "qk_norm": QKNormConfig(norm, over="projection")}
    return decoder(
        fields, norm=norm, attention=lambda layer, _: {**common, **own(layer)}, **{"block": POST_NORM, **more}
    )


MODULES = {
    **{f"delta.{part}": f"linear_attn.{part}_proj" for part in "qkvba"},
    "delta.z": "linear_attn.g_proj",
    "delta.norm": "linear_attn.o_norm",
    "delta.out": "linear_attn.o_proj",
}
PUBLISHED = {
    **MODULES,
    "delta.conv_parts": "linear_attn.{part}_conv1d",
    "norm.mixer_norm": "attention_layer_norm",
    "norm.mlp_norm": "feedforward_layer_norm",
}
SAVED = {
    **{part: name for part, name in PUBLISHED.items() if part != "delta.conv_parts"},
    "delta.conv_chunks": PUBLISHED["delta.conv_parts"],
    "norm.mixer_post_norm": PUBLISHED["norm.mlp_norm"],
}
"""As transformers 5 saves it: with names of layers of Gated DeltaNet in layers of attention too, and the convolution in
three equal parts."""
FAMILIES = (
    Family("olmo2", olmo2),
    Family("olmo3", olmo3, default_theta=OLMO3_THETAS),
    Family(
        "olmo_hybrid",
        olmo_hybrid,
        [{"names": names} for names in (PUBLISHED, SAVED, MODULES)],
        module_layout={"names": MODULES},
    ),
)
