"""MiniMax-M2: a mixture of experts in every layer, chosen by sigmoid scores and a bias."""

from __future__ import annotations

from ligermodels.archs import mixtral
from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import expert_layouts
from ligermodels.archs.fields import renamed
from ligermodels.errors import ConfigError
from ligermodels.layers import MoEConfig, NormConfig, QKNormConfig, RouterConfig

MINIMAX_M2 = {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 196608,
    "rms_norm_eps": 1e-6,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "router_aux_loss_coef": 0.001,
}
DEFAULT_THETA = 5e6
FIXED = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}
"""Field of published configs -> its only implemented value, as in transformers."""
BIAS = "e_score_correction_bias"
NAMES = {**mixtral.EXPERTS, "experts.selection_bias": f"block_sparse_moe.{BIAS}"}


def _rotated(fields: Fields) -> Fields:
    """`fields` with the factor that `rotary_dim`, the channels of each head that are rotated, stands for."""
    channels = fields.optional_size("rotary_dim")
    if channels is None or fields.config.get("partial_rotary_factor") is not None:
        return fields
    if channels > fields.size("head_dim"):
        raise ConfigError(f"{fields.where}: rotary_dim {channels} is above head_dim {fields.size('head_dim')}")
    return fields.replaced(partial_rotary_factor=channels / fields.size("head_dim"))


def minimax_m2(config: Config) -> DecoderConfig:
    """The composed config of a `MiniMaxM2Config` dict."""
    fields = _rotated(Fields(renamed(config, "num_local_experts", "num_experts"), MINIMAX_M2))
    fields.choices("router_jitter_noise", 0, 0.0, default=0.0)
    for name, only in FIXED.items():
        fields.choices(name, only, default=only)
    if not all(fields.flags("attn_type_list", lambda layer: True)):
        raise ConfigError(f"{fields.where}: attn_type_list: only layers of type 1, full attention, are implemented")
    fields.ignore("shared_moe_mode", "mlp_intermediate_size")  # for a shared expert; these models have none
    norm = NormConfig(fields.number("rms_norm_eps", negative=False))
    experts, chosen = fields.experts("num_local_experts")
    router = RouterConfig(experts, chosen, scores="sigmoid", selection_bias=True)
    return decoder(
        fields,
        attention=lambda layer, common: {"qk_norm": QKNormConfig(norm, "projection")},
        mlp=lambda layer, gated: MoEConfig(router, gated.size, gated.activation),
        default_theta=DEFAULT_THETA,
        partial_rotary=True,
        router_aux_loss_coef=fields.router_aux_loss_coef(),
    )


FAMILIES = (
    Family(
        "minimax_m2",
        minimax_m2,
        expert_layouts(NAMES, stacked={"experts.selection_bias": f"mlp.{BIAS}"}),
        DEFAULT_THETA,
        architecture="MiniMaxM2ForCausalLM",
    ),
)
