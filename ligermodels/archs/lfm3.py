"""LFM3 (Liquid AI): gated short convolutions, attention with a window, and full attention, with a gate of each head."""

from __future__ import annotations

from ligermodels.archs import lfm2
from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.fields import FULL, ONLY_NEW_ROPE, SLIDING, UNREAD_ROPE, renamed
from ligermodels.archs.lfm2 import CONV
from ligermodels.layers import AttentionConfig, LayerConfig, NormConfig, QKNormConfig, ShortConvConfig

DEFAULTS = {
    "vocab_size": 128_000,
    "hidden_size": 2048,
    "intermediate_size": 7680,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "pad_token_id": 124_893,
    "tie_word_embeddings": True,
    "conv_L_cache": 7,
    "sliding_window": 256,
}
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "default_theta": 1e6},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
}
"""The ropes of a config that names none. The base of settings without one is 1e6, as in transformers."""


def lfm3(config: Config) -> DecoderConfig:
    """The composed config of an `Lfm3Config` dict."""
    fields = Fields(renamed(config, "norm_eps", "rms_norm_eps"), DEFAULTS)
    fields.choices("hidden_act", "silu", default=None)
    kinds = fields.kinds("layer_types", (CONV, SLIDING, FULL), _kind)
    window = fields.size("sliding_window") if SLIDING in kinds else None
    fields.ignore("sliding_window")
    for name in UNREAD_ROPE if fields.config.get("rope_parameters") is None else ():
        fields.choices(name, None, default=None)
    windows = [window if kind == SLIDING else None for kind in kinds]
    ropes = fields.ropes(fields.size("head_dim"), ROPES, windows, UNREAD_ROPE)
    norm, bias = NormConfig(fields.number("norm_eps", negative=False)), fields.flag("attention_bias", False)
    conv = ShortConvConfig(fields.size("hidden_size"), fields.size("conv_L_cache"), fields.flag("conv_bias", False))
    own = {"bias": bias, "o_bias": bias, "qk_norm": QKNormConfig(norm)}
    own |= {"head_gate": "sigmoid" if fields.flag("use_attention_gate", True) else None}

    def mixer(layer: int, attention: AttentionConfig) -> LayerConfig:
        return conv if kinds[layer] == CONV else attention

    return decoder(
        fields,
        norm=norm,
        attention=lambda layer, common: {**own, "window": windows[layer], "rope": ropes[layer]},
        mixer=mixer,
        block={"post_norm": fields.flag("use_sandwich_norm", True)},
    )


def _kind(layer: int) -> str:
    """The kind of a layer where `layer_types` is missing."""
    if layer % 4 == 2:
        return FULL
    return SLIDING if layer % 4 == 0 and layer > 0 else CONV


MODULES = {
    **{part: name for part, name in lfm2.NAMES.items() if not part.startswith("attention.")},
    "norm.mixer_post_norm": "post_operator_norm",
    "norm.mlp_post_norm": "post_ffn_norm",
}
PUBLISHED = {**MODULES, "attention.head_gate": "self_attn.gate_proj"}
FAMILIES = (
    Family(
        "lfm3",
        lfm3,
        [{"names": names} for names in (PUBLISHED, MODULES)],
        default_theta=ROPES,
        attribute_map=ONLY_NEW_ROPE,
        module_layout={"names": MODULES},
    ),
)
