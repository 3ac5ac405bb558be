"""Mixtral 8x7B and 8x22B: a mixture of experts in every layer."""

from __future__ import annotations

from ligermodels.archs import mistral
from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import expert_layouts
from ligermodels.archs.fields import renamed
from ligermodels.layers import MoEConfig, RouterConfig

DEFAULTS = {
    **mistral.DEFAULTS,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "router_aux_loss_coef": 0.001,
}
DEFAULT_THETA = 1e6
EXPERTS = {
    "experts.router": "block_sparse_moe.gate.weight",
    "experts.gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "experts.up": "block_sparse_moe.experts.{expert}.w3.weight",
    "experts.down": "block_sparse_moe.experts.{expert}.w2.weight",
}


def mixtral(config: Config) -> DecoderConfig:
    """The composed config of a `MixtralConfig` dict."""
    fields = Fields(renamed(config, "num_local_experts", "num_experts"), DEFAULTS)
    fields.choices("router_jitter_noise", 0, 0.0, default=0.0)
    window = fields.optional_size("sliding_window")
    experts, chosen = fields.experts("num_local_experts")
    return decoder(
        fields,
        attention=lambda layer, common: {"window": window},
        mlp=lambda layer, gated: MoEConfig(RouterConfig(experts, chosen), gated.size, gated.activation),
        default_theta=DEFAULT_THETA,
        router_aux_loss_coef=fields.router_aux_loss_coef(),
    )


FAMILIES = (Family("mixtral", mixtral, expert_layouts(EXPERTS), DEFAULT_THETA),)
