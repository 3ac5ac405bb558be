"""Lara 4 Mini: Gated DeltaNet, windows, and full attention without positions; a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ligermodels.archs.compose import STACKED_EXPERTS, Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import mixture
from ligermodels.archs.fields import FULL, SLIDING
from ligermodels.archs.qwen3_5 import LINEAR, gated_delta_net
from ligermodels.layers import AttentionConfig, LayerConfig, NormConfig, QKNormConfig

LARA_MINI = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 4,
    "num_experts": 128,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}
PATTERN = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)
"""Kinds of the layers of a config without `layer_types`, repeated."""


def lara_mini(config: Config) -> DecoderConfig:
    """The composed config of a `LaraMiniConfig` dict: only layers with a window have positions."""
    fields = Fields(config, LARA_MINI)
    fields.ignore("intermediate_size")  # there are no dense layers
    fields.choices("hidden_act", "silu", default=None)
    kinds = fields.kinds("layer_types", (LINEAR, SLIDING, FULL), lambda layer: PATTERN[layer % len(PATTERN)])
    norm = NormConfig(fields.number("rms_norm_eps", negative=False), casting_mode="gemma")
    delta = gated_delta_net(fields, norm.eps)
    bias = fields.flag("attention_bias", False)
    common = {"bias": bias, "o_bias": bias, "qk_norm": QKNormConfig(norm)}
    experts = mixture(fields, fields.size("shared_expert_intermediate_size"))
    experts = replace(experts, router=replace(experts.router, float32_logits=True), shared_gate=False)

    def attention(layer: int, _: AttentionConfig) -> dict[str, Any]:
        if kinds[layer] == SLIDING:
            return {**common, "window": fields.size("sliding_window")}
        return {**common, "rope": None}

    def mixer(layer: int, attention: AttentionConfig) -> LayerConfig:
        return delta if kinds[layer] == LINEAR else attention

    return decoder(
        fields,
        norm=norm,
        attention=attention,
        mixer=mixer,
        feed_forward=lambda layer: experts,
        router_aux_loss_coef=fields.router_aux_loss_coef(),
    )


PUBLISHED = {**STACKED_EXPERTS, "delta.in": "linear_attn.in_proj", "delta.norm": "linear_attn.out_norm"}
FAMILIES = (
    Family(
        "lara_mini",
        lara_mini,
        [{"names": names} for names in (PUBLISHED, STACKED_EXPERTS)],
        module_layout={"names": STACKED_EXPERTS},
    ),
)
