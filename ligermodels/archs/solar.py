"""Solar Open: mixtures of experts with a shared expert in all layers."""

from __future__ import annotations

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder, gate_activation
from ligermodels.archs.experts import expert_layouts, grouped_router, shared_and_routed
from ligermodels.archs.fields import name_of
from ligermodels.archs.glm_moe import NAMES
from ligermodels.layers import MLPConfig

SOLAR_OPEN = {
    "vocab_size": 196608,
    "hidden_size": 4096,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1280,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
DEFAULT_THETA = 1e6
ATTRIBUTE_MAP = {"n_routed_experts": "num_local_experts"}


def solar_open(config: Config) -> DecoderConfig:
    """The composed config of a `SolarOpenConfig` dict."""
    fields = Fields(config, SOLAR_OPEN)
    fields.ignore("output_router_logits", "intermediate_size", *ATTRIBUTE_MAP.values())  # there are no dense layers
    bias = fields.flag("attention_bias", False)
    router = grouped_router(fields, name_of(config, "n_routed_experts", ATTRIBUTE_MAP["n_routed_experts"]))
    mixture = shared_and_routed(fields, router)
    gated = MLPConfig(fields.size("moe_intermediate_size"), gate_activation(fields))
    return decoder(
        fields,
        attention=lambda layer, common: {"bias": bias},
        feed_forward=lambda layer: mixture(layer, gated),
        default_theta=DEFAULT_THETA,
    )


FAMILIES = (Family("solar_open", solar_open, expert_layouts(NAMES), DEFAULT_THETA, attribute_map=ATTRIBUTE_MAP),)
