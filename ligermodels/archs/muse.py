"""Muse Glimmer (Meta): gated attention with windows and rotary positions, and full attention without positions."""

from __future__ import annotations

from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.multimodal import TextModel, layouts, wrapper
from ligermodels.errors import ConfigError
from ligermodels.layers import NormConfig, QKNormConfig

MUSE_GLIMMER = {
    "vocab_size": 202048,
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_activation": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404,
    "post_norm_eps": 1e-8,
}
NAMES = {"attention.gate": "self_attn.gate_proj"}


def muse_glimmer_text(config: Config) -> DecoderConfig:
    """The composed config of a `MuseGlimmerTextConfig` dict."""
    fields = Fields(config, MUSE_GLIMMER)
    fields.choices("attention_bias", False, default=False)
    fields.ignore("hidden_act")  # hidden_activation counts
    layers, head_dim = fields.size("num_hidden_layers"), fields.size("head_dim")
    eps = fields.number("rms_norm_eps", negative=False)
    windows = fields.windows(lambda layer: (layers - 1 - layer) % 4 != 0)
    rope = fields.rope(head_dim, fields.size("max_position_embeddings"))
    thetas = fields.per_layer("layer_rope_theta", lambda layer: rope.theta if (layers - 1 - layer) % 4 else 0.0)
    if other := [theta for theta in thetas if theta not in (0, rope.theta)]:
        raise ConfigError(
            f"{fields.where}: layer_rope_theta: {other[0]} is neither 0 (no rotary positions) nor rope_theta "
            f"{rope.theta}, and transformers would use rope_theta; write one of them"
        )
    own: dict[str, Any] = {
        "output_gate": True,
        "qk_norm": QKNormConfig(NormConfig(eps, casting_mode="gemma"), has_weight=False),
        "softmax_scale": fields.number("qk_scale_factor", positive=True) * head_dim**-0.5,
    }
    return decoder(
        fields,
        activation="hidden_activation",
        norm=NormConfig(eps, offset=1.0, casting_mode="gemma"),
        final_norm=NormConfig(eps, casting_mode="gemma"),
        attention=lambda layer, common: {**own, "window": windows[layer], "rope": rope if thetas[layer] else None},
        block={
            "post_norm": True,
            "output_norm": NormConfig(fields.number("post_norm_eps", negative=False), offset=1.0, casting_mode="gemma"),
        },
        head={
            "logit_scale": fields.number("output_multiplier", positive=True),
            "softcap": fields.number("final_logit_softcapping", positive=True),
        },
        embed_norm_eps=eps,
    )


TEXT = Family("muse_glimmer_text", muse_glimmer_text, [{"names": NAMES}], architecture="MuseGlimmerForCausalLM")

FAMILIES = (
    TEXT,
    wrapper(
        "muse_glimmer",
        {"muse_glimmer_text": TextModel(TEXT)},
        layouts(("model.language_model", "lm_head.weight"), ignored=(r"^model\.vision_",), names=[NAMES]),
    ),
)
