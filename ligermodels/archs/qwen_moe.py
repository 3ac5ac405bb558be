"""Qwen1.5-MoE and Qwen2-57B-A14B: mixtures of experts with a gated shared one."""

from __future__ import annotations

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import expert_layouts, sparse_layers
from ligermodels.archs.qwen import QWEN2, windowed

QWEN2_MOE = {
    **QWEN2,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "router_aux_loss_coef": 0.001,
}


def qwen2_moe(config: Config) -> DecoderConfig:
    """The composed config of a `Qwen2MoeConfig` dict."""
    fields = Fields(config, QWEN2_MOE)
    last, slides = fields.size("max_window_layers", zero=True), fields.flag("use_sliding_window", False)
    windows = windowed(fields).windows(lambda layer: slides and layer % 2 == 0 and layer < last)
    bias = fields.flag("qkv_bias", True)
    return decoder(
        fields,
        attention=lambda layer, common: {"bias": bias, "window": windows[layer]},
        mlp=sparse_layers(fields, fields.size("shared_expert_intermediate_size")),
        router_aux_loss_coef=fields.router_aux_loss_coef(),
    )


FAMILIES = (Family("qwen2_moe", qwen2_moe, expert_layouts()),)
