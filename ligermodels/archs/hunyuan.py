"""Hy3 (Tencent): mixtures of experts, chosen by sigmoid scores and a bias, with a shared expert."""

from __future__ import annotations

from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import published_layouts, shared_and_routed
from ligermodels.archs.fields import DENSE, SPARSE, name_of
from ligermodels.layers import NormConfig, QKNormConfig, RouterConfig
from ligermodels.models.mtp_format import NUMBERED_LAYERS

HY_V3 = {
    "vocab_size": 120832,
    "hidden_size": 4096,
    "intermediate_size": 13312,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1536,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "router_scaling_factor": 2.826,
    "initializer_range": 0.006,
}
HY_V3_THETA = 11_158_840.0
HY_V3_FIXED = ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias")
"""Fields of published configs; only true is implemented, as in transformers."""
HY_V3_PUBLISHED = {
    "experts.router": "mlp.router.gate.weight",
    "experts.selection_bias": "mlp.expert_bias",
    "experts.shared": "mlp.shared_mlp.{part}_proj",
}
HY_V3_NAMES = {
    "experts.selection_bias": "mlp.e_score_correction_bias",
    "experts.shared": "mlp.shared_experts.{part}_proj",
}


def hy_v3(config: Config) -> DecoderConfig:
    """The composed config of a `HYV3Config` dict; without its MTP layer."""
    fields = Fields(config, HY_V3)
    # transformers adds the outputs of experts in float32 and rounds once, as a sum in any dtype does.
    fields.ignore("output_router_logits", "num_local_experts", "enable_moe_fp32_combine")
    for name in HY_V3_FIXED:
        fields.choices(name, True, default=True)
    bias = fields.flag("attention_bias", False)
    norm = QKNormConfig(NormConfig(fields.number("rms_norm_eps", negative=False)))
    own: dict[str, Any] = {"bias": bias, "o_bias": bias, "qk_norm": norm}
    first = fields.size("first_k_dense_replace", 1, zero=True)
    kinds = fields.kinds("mlp_layer_types", (DENSE, SPARSE), lambda layer: DENSE if layer < first else SPARSE)
    router = RouterConfig(
        *fields.experts(name_of(config, "num_experts", "num_local_experts")),
        scores="sigmoid",
        selection_bias=True,
        eps=1e-20,
        scale=fields.number("router_scaling_factor"),
        float32_logits=True,
    )
    return decoder(
        fields,
        attention=lambda layer, common: own,
        mlp_bias=fields.flag("mlp_bias", False),
        mlp=shared_and_routed(fields, router, lambda layer: kinds[layer] == DENSE, "num_shared_experts"),
        default_theta=HY_V3_THETA,
        num_mtp_layers=fields.size("num_nextn_predict_layers", 1, zero=True),
    )


FAMILIES = (
    Family(
        "hy_v3",
        hy_v3,
        published_layouts(HY_V3_PUBLISHED, HY_V3_NAMES),
        HY_V3_THETA,
        attribute_map={"num_experts": "num_local_experts"},
        mtp=NUMBERED_LAYERS,
        architecture="HYV3ForCausalLM",
    ),
)
