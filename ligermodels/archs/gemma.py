"""Gemma 1, 2 and 3 (text), VaultGemma, and the text model of Gemma 3's checkpoints with vision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.fields import FULL, SLIDING
from ligermodels.archs.multimodal import BESIDE_VISION_TOWER, TextModel, wrapper
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


def _norm(fields: Fields) -> NormConfig:
    return NormConfig(fields.number("rms_norm_eps", negative=False), offset=1.0, casting_mode="gemma")


def gemma(config: Config) -> DecoderConfig:
    """The composed config of a `GemmaConfig` dict."""
    fields = Fields(config, GEMMA)
    if fields.config["hidden_act"] == "gelu":  # the first checkpoints say "gelu", and mean its tanh approximation
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


def gemma2(config: Config) -> DecoderConfig:
    """The composed config of a `Gemma2Config` dict."""
    fields = Fields(config, GEMMA2)
    fields.ignore("sliding_window_size")  # In some of the first checkpoints, beside sliding_window.
    return _sandwich(fields, fields.windows(lambda layer: layer % 2 == 0))


def vaultgemma(config: Config) -> DecoderConfig:
    """The composed config of a `VaultGemmaConfig` dict: Gemma 2 without the norms after the sublayers."""
    fields = Fields(config, GEMMA2)
    return _sandwich(fields, fields.windows(lambda layer: layer % 2 == 0), post_norm=False)


def gemma3_text(config: Config) -> DecoderConfig:
    """The composed config of a `Gemma3TextConfig` dict: layers with a window have other positions than the others."""
    fields = Fields(config, GEMMA3)
    fields.choices("attn_logit_softcapping", None, default=None)  # A field that transformers has, and does not heed.
    every = fields.size("sliding_window_pattern")
    windows = fields.windows(lambda layer: (layer + 1) % every != 0)
    ropes = fields.ropes(fields.size("head_dim"), GEMMA3_THETAS, windows)
    return _sandwich(fields, windows, [{"rope": rope} for rope in ropes], qk_norm=QKNormConfig(_norm(fields)))


def _sandwich(
    fields: Fields,
    windows: list[int | None],
    own: Sequence[Mapping[str, Any]] | None = None,
    *,
    post_norm: bool = True,
    **attention: Any,
) -> DecoderConfig:
    """Gemma 2 with these windows; `own` has further fields of each layer's AttentionConfig, `attention` of all."""
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
        attention=lambda layer, common: {**attention, "window": windows[layer], **(own[layer] if own else {})},
        block={"post_norm": post_norm},
        head={"softcap": fields.optional_number("final_logit_softcapping")},
        embed_scale=fields.size("hidden_size") ** 0.5,
    )


GEMMA3_TEXT = Family("gemma3_text", gemma3_text, default_theta=GEMMA3_THETAS)

FAMILIES = (
    Family("gemma", gemma),
    Family("gemma2", gemma2),
    Family(
        "vaultgemma",
        vaultgemma,
        [{"names": {"norm.mlp_norm": "pre_feedforward_layernorm"}}],
        architecture="VaultGemmaForCausalLM",
    ),
    GEMMA3_TEXT,
    wrapper("gemma3", {"gemma3_text": TextModel(GEMMA3_TEXT)}, BESIDE_VISION_TOWER, tied=True),
)
