"""GLM-4.5, 4.6 and 4.7: mixtures of experts with a shared expert in all layers except the first few."""

from __future__ import annotations

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import expert_layouts, grouped_router, shared_and_routed
from ligermodels.archs.fields import name_of
from ligermodels.layers import NormConfig, QKNormConfig
from ligermodels.models.mtp_format import NUMBERED_LAYERS

GLM4_MOE = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
ATTRIBUTE_MAP = {"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"}
"""Field -> name that transformers 5 may write instead, by its `attribute_map`."""
NAMES = {"experts.shared": "mlp.shared_experts.{part}_proj"}


def glm4_moe(config: Config) -> DecoderConfig:
    """The composed config of a `Glm4MoeConfig` dict; without its MTP layers."""
    experts, mtp = (name_of(config, name, other) for name, other in ATTRIBUTE_MAP.items())
    return glm_decoder(Fields(config, GLM4_MOE), experts=experts, mtp=mtp)


def glm_decoder(
    fields: Fields,
    *,
    experts: str,
    mtp: str,
    shared: str = "n_shared_experts",
    bias: str = "attention_bias",
    default_theta: float = 10_000.0,
) -> DecoderConfig:
    """The decoder of GLM-4.5 and of families with the same layers.

    Args:
        fields: the config, with the family's defaults.
        experts: name of the field with the number of routed experts.
        mtp: name of the field with the number of MTP layers.
        shared: name of the field with the number of shared experts.
        bias: name of the field that gives q, k and v biases.
        default_theta: rotary base of a config that names none.

    Raises:
        ConfigError: a field is missing, bad or not implemented; the message names it.
    """
    fields.ignore("output_router_logits", *ATTRIBUTE_MAP.values())  # no loss uses router logits
    if fields.config.get("head_dim") is None:  # rounded down, as in transformers
        fields = fields.replaced(head_dim=fields.size("hidden_size") // fields.size("num_attention_heads"))
    norm = QKNormConfig(NormConfig(fields.number("rms_norm_eps", negative=False)))
    own = {"bias": fields.flag(bias, False), "qk_norm": norm if fields.flag("use_qk_norm", False) else None}
    router, dense = grouped_router(fields, experts), fields.size("first_k_dense_replace", zero=True)
    return decoder(
        fields,
        attention=lambda layer, common: own,
        mlp=shared_and_routed(fields, router, lambda layer: layer < dense, shared),
        default_theta=default_theta,
        partial_rotary=True,
        num_mtp_layers=fields.size(mtp, zero=True),
    )


FAMILIES = (Family("glm4_moe", glm4_moe, expert_layouts(NAMES), attribute_map=ATTRIBUTE_MAP, mtp=NUMBERED_LAYERS),)
