"""Gemma 1, 2 and 3 (text), and the text model of Gemma 3's checkpoints with vision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligermodels.archs.compose import decoder
from ligermodels.archs.decoder import DecoderConfig
from ligermodels.archs.family import Family
from ligermodels.archs.fields import FULL, SLIDING, Fields
from ligermodels.convert.config_json import short
from ligermodels.errors import ConfigError
from ligermodels.layers import NormConfig, QKNormConfig

COMMON = {
    "pad_token_id": 0,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
GEMMA = {
    **COMMON,
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_act": "gelu_pytorch_tanh",
}
GEMMA2 = {
    **COMMON,
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
GEMMA3 = {
    **GEMMA2,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}


GEMMA3_THETAS = {SLIDING: 1e4, FULL: 1e6}
SHARED = (
    "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "is_causal", "per_layer_config",
    "quantization_config", "quantization", "compression_config", "transformers_weights",
)  # fmt: skip
"""Fields of a config with vision that are those of its text model too."""
BESIDE_TEXT = (
    "text_config", "vision_config", "tie_word_embeddings", "initializer_range", "mm_tokens_per_image",
    "image_token_index", "image_token_id", "boi_token_index", "eoi_token_index",
)  # fmt: skip
"""Its other fields."""


def _norm(fields: Fields) -> NormConfig:
    return NormConfig(fields.number("rms_norm_eps", negative=False), offset=1.0, casting_mode="gemma")


def gemma(config: Mapping[str, Any]) -> DecoderConfig:
    """The composed config of a `GemmaConfig` dict."""
    fields = Fields(config, GEMMA)
    if fields.config["hidden_act"] == "gelu":  # What the first checkpoints say, and do not mean.
        fields = fields.replaced(hidden_act="gelu_pytorch_tanh")
    fields.ignore("hidden_activation")
    fields.choices("use_bidirectional_attention", False, default=False)
    bias = fields.flag("attention_bias", False)
    return decoder(
        fields,
        norm=_norm(fields),
        attention=lambda layer, common: {"bias": bias, "o_bias": bias},
        embed_scale=fields.size("hidden_size") ** 0.5,
    )


def gemma2(config: Mapping[str, Any]) -> DecoderConfig:
    """The composed config of a `Gemma2Config` dict."""
    fields = Fields(config, GEMMA2)
    fields.ignore("sliding_window_size")  # In some of the first checkpoints, beside sliding_window.
    return _sandwich(fields, fields.windows(lambda layer: layer % 2 == 0), {})


def gemma3_text(config: Mapping[str, Any]) -> DecoderConfig:
    """The composed config of a `Gemma3TextConfig` dict: layers with a window have other positions than the others."""
    fields = Fields(config, GEMMA3)
    fields.choices("attn_logit_softcapping", None, default=None)  # A field that transformers has, and does not heed.
    every = fields.size("sliding_window_pattern")
    windows = fields.windows(lambda layer: (layer + 1) % every != 0)
    ropes = {
        slides: fields.rope(fields.size("head_dim"), fields.size("max_position_embeddings"), GEMMA3_THETAS, layer_type)
        for slides, layer_type in ((True, SLIDING), (False, FULL))
    }
    own = {layer: {"rope": ropes[window is not None]} for layer, window in enumerate(windows)}
    return _sandwich(fields, windows, own, qk_norm=QKNormConfig(_norm(fields)))


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `Gemma3TextConfig` dict within a `Gemma3Config` dict."""
    shared = {name: config[name] for name in SHARED if name in config}
    text = config.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json: field 'text_config' must be an object, got {short(text)}")
    tied = "tie_word_embeddings"
    if tied not in config and not text.get(tied, True):
        # Releases of transformers differ in which of the two they ask.
        raise ConfigError(f"config.json: text_config.{tied} = {short(text[tied])}: set {tied} beside text_config too")
    own = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], tied: config.get(tied, True)}
    return {**shared, **text, **own}


def gemma3(config: Mapping[str, Any]) -> DecoderConfig:
    """The composed config of the text model in a `Gemma3Config` dict."""
    whole = Fields(config)
    whole.ignore(*SHARED, *BESIDE_TEXT)
    whole.check_unread()
    return gemma3_text(text_of(config))


def _sandwich(
    fields: Fields, windows: list[int | None], own: Mapping[int, Mapping[str, Any]], **attention: Any
) -> DecoderConfig:
    fields.choices("use_bidirectional_attention", False, default=False)
    fields.ignore("hidden_act")  # hidden_activation counts.
    bias = fields.flag("attention_bias", False)
    attention |= {"bias": bias, "o_bias": bias}
    attention["softmax_scale"] = fields.number("query_pre_attn_scalar", positive=True) ** -0.5
    attention["softcap"] = fields.optional_number("attn_logit_softcapping")
    return decoder(
        fields,
        activation="hidden_activation",
        norm=_norm(fields),
        attention=lambda layer, common: {**attention, "window": windows[layer], **own.get(layer, {})},
        block={"post_norm": True},
        head={"softcap": fields.optional_number("final_logit_softcapping")},
        embed_scale=fields.size("hidden_size") ** 0.5,
    )


VISION = (r"^(model\.)?vision_tower\.", r"^(model\.)?multi_modal_projector\.")
WRAPPED = (("model.language_model", "lm_head.weight"), ("language_model.model", "language_model.lm_head.weight"))
"""Prefix and head of the text model beside a vision tower, as newer and older checkpoints have them."""

FAMILIES = (
    Family("gemma", gemma),
    Family("gemma2", gemma2),
    Family("gemma3_text", gemma3_text, default_theta=GEMMA3_THETAS),
    Family(
        "gemma3",
        gemma3,
        [{"prefix": prefix, "head": head, "ignored": VISION} for prefix, head in WRAPPED],
        GEMMA3_THETAS,
        text=text_of,
    ),
)
