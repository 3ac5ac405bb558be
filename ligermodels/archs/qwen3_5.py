"""Qwen3.5 and Qwen3-Next: three layers of Gated DeltaNet to one of gated attention; dense or with experts."""

from __future__ import annotations

from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import expert_layouts, mixture, sparse_layers
from ligermodels.archs.fields import FULL
from ligermodels.archs.multimodal import TextModel, layouts, plain_rope, wrapper
from ligermodels.errors import ConfigError
from ligermodels.layers import AttentionConfig, GatedDeltaNetConfig, LayerConfig, NormConfig, QKNormConfig
from ligermodels.models.mtp_format import MTPFormat

LINEAR = "linear_attention"
QWEN3_5 = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
QWEN3_5_MOE = {
    **QWEN3_5,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}
QWEN3_NEXT = {
    **QWEN3_5_MOE,
    "vocab_size": 151936,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_experts_per_tok": 10,
    "num_experts": 512,
}


OF_EXPERTS = (
    "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "shared_expert_intermediate_size",
    "num_experts_per_tok", "norm_topk_prob", "output_router_logits", "router_aux_loss_coef",
)  # fmt: skip
"""Fields of Qwen3-Next that count in layers with experts alone."""


def qwen3_5_text(config: Config) -> DecoderConfig:
    """The composed config of a `Qwen3_5TextConfig` dict."""
    return _hybrid(Fields(plain_rope(config), QWEN3_5))


def qwen3_5_moe_text(config: Config) -> DecoderConfig:
    """The composed config of a `Qwen3_5MoeTextConfig` dict: mixtures in all layers."""
    fields = Fields(plain_rope(config), QWEN3_5_MOE)
    for name in ("decoder_sparse_step", "norm_topk_prob"):
        fields.choices(name, QWEN3_5_MOE[name], default=None)
    fields.choices("mlp_only_layers", [], default=[])
    sparse = mixture(fields, fields.size("shared_expert_intermediate_size"))
    return _hybrid(fields, feed_forward=lambda layer: sparse, router_aux_loss_coef=fields.router_aux_loss_coef())


def qwen3_next(config: Config) -> DecoderConfig:
    """The composed config of a `Qwen3NextConfig` dict: some layers are mixtures, the others are dense."""
    fields = Fields(plain_rope(config), QWEN3_NEXT)
    if fields.size("num_experts", zero=True):
        mlp = sparse_layers(fields, fields.size("shared_expert_intermediate_size"))
        return _hybrid(fields, mlp=mlp, router_aux_loss_coef=fields.router_aux_loss_coef())
    fields.ignore(*OF_EXPERTS)
    return _hybrid(fields)


def gated_delta_net(fields: Fields, norm_eps: float) -> GatedDeltaNetConfig:
    """The Gated DeltaNet of the fields `linear_*`; `norm_eps` is the epsilon of its output's norm. ConfigError, naming
    the field, if one is missing or bad."""
    key_heads, value_heads = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    if value_heads % key_heads:
        raise ConfigError(
            f"{fields.where}: linear_num_key_heads {key_heads} does not divide linear_num_value_heads {value_heads}"
        )
    return GatedDeltaNetConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=fields.size("linear_key_head_dim"),
        value_head_dim=fields.size("linear_value_head_dim"),
        conv_width=fields.size("linear_conv_kernel_dim"),
        norm_eps=norm_eps,
    )


def _hybrid(fields: Fields, **more: Any) -> DecoderConfig:
    """The decoder of both families; `more` are further arguments of `compose.decoder`."""
    fields.choices("attn_output_gate", True, default=True)
    fields.choices("output_gate_type", "swish", default="swish")
    fields.choices("mamba_ssm_dtype", "float32", default="float32")
    fields.choices("hidden_act", "silu", default=None)
    interval = fields.size("full_attention_interval")
    kinds = fields.kinds("layer_types", (LINEAR, FULL), lambda layer: LINEAR if (layer + 1) % interval else FULL)
    norm = NormConfig(fields.number("rms_norm_eps", negative=False), offset=1.0, casting_mode="gemma")
    delta = gated_delta_net(fields, norm.eps)
    bias = fields.flag("attention_bias", False)
    attention = {"bias": bias, "o_bias": bias, "qk_norm": QKNormConfig(norm), "output_gate": True}

    def mixer(layer: int, full: AttentionConfig) -> LayerConfig:
        return full if kinds[layer] == FULL else delta

    return decoder(
        fields, partial_rotary=True, norm=norm, attention=lambda layer, common: attention, mixer=mixer, **more
    )


BESIDE = (r"^(model\.)?visual\.", r"^mtp\.")
"""Patterns of tensors of the vision tower and of MTP layers."""
NESTED, ALONE = ("model.language_model", "lm_head.weight"), ("model", "lm_head.weight")
"""Prefix and head of the text model, with a vision tower and without one."""
PACKED = {"delta.qkvz": "linear_attn.in_proj_qkvz", "delta.ba": "linear_attn.in_proj_ba"}
EXPERTS = [layout["names"] for layout in expert_layouts()]
QWEN3_NEXT_MTP = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Fields with the number of MTP layers; vLLM reads the second."""
TEXT = Family("qwen3_5_text", qwen3_5_text, layouts(ALONE, NESTED, ignored=BESIDE))
MOE_TEXT = Family("qwen3_5_moe_text", qwen3_5_moe_text, layouts(ALONE, NESTED, ignored=BESIDE, names=EXPERTS))

FAMILIES = (
    TEXT,
    MOE_TEXT,
    wrapper("qwen3_5", {"qwen3_5_text": TextModel(TEXT)}, layouts(NESTED, ignored=BESIDE)),
    wrapper("qwen3_5_moe", {"qwen3_5_moe_text": TextModel(MOE_TEXT)}, layouts(NESTED, ignored=BESIDE, names=EXPERTS)),
    Family(
        "qwen3_next",
        qwen3_next,
        layouts(ALONE, ignored=BESIDE, names=[{**PACKED, **names} for names in EXPERTS]),
        mtp=MTPFormat(QWEN3_NEXT_MTP, written_fields=QWEN3_NEXT_MTP),
    ),
)
