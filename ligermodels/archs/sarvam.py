"""Sarvam-105B with the layers of DeepSeek-V3, and Sarvam-30B with the layers of GLM-4.5."""

from __future__ import annotations

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields
from ligermodels.archs.deepseek import DEEPSEEK_V3, KEY_DIM, fixed, latent_decoder, rotated_dim
from ligermodels.archs.experts import expert_layouts, grouped_router, published_layouts
from ligermodels.archs.fields import name_of
from ligermodels.archs.glm_moe import ATTRIBUTE_MAP, GLM4_MOE, NAMES, glm_decoder
from ligermodels.models.mtp_format import NUMBERED_LAYERS

SARVAM_MLA = {
    **DEEPSEEK_V3,
    "vocab_size": 262144,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 64,
    "n_routed_experts": 128,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "num_nextn_predict_layers": 0,
    "initializer_range": 0.006,
}
SARVAM_MOE = {
    **GLM4_MOE,
    "vocab_size": 262144,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 19,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 1.0,
    "moe_intermediate_size": 1024,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
    "pad_token_id": 0,
    "num_nextn_predict_layers": 0,
    "initializer_range": 0.006,
}
MOE_THETA = 8e6
PUBLISHED_FIELDS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
"""Field of published configs -> its name in transformers."""
MOE_FIELDS = {**PUBLISHED_FIELDS, "use_qkv_bias": "attention_bias"}
FIXED = {"score_function": "sigmoid", "moe_router_enable_expert_bias": True}
"""Fields of published configs of which one value is implemented, as in transformers, which reads none of them."""


def sarvam_mla(config: Config) -> DecoderConfig:
    """The composed config of a `SarvamMLAConfig` dict; without its MTP layers."""
    experts, shared, _ = _names(config)
    fields = Fields(config, SARVAM_MLA)
    _check(fields)
    fields.ignore("use_qk_norm")  # queries and keys have no norms, the latent has one
    rotated = rotated_dim(fields)
    if fields.size("head_dim", rotated) != rotated:  # published configs have vLLM's width of a token in the cache
        fixed(fields, "head_dim", fields.size("kv_lora_rank") + rotated, "kv_lora_rank + qk_rope_head_dim")
    fixed(fields, "q_head_dim", fields.size("qk_nope_head_dim") + rotated, KEY_DIM)
    dense = fields.size("first_k_dense_replace", zero=True)
    return latent_decoder(
        fields.replaced(n_shared_experts=fields.size(shared)),
        rope=fields.rope(rotated, fields.size("max_position_embeddings")),
        router=grouped_router(fields, experts),
        is_dense=lambda layer: layer < dense,
    )


def sarvam_moe(config: Config) -> DecoderConfig:
    """The composed config of a `SarvamMoEConfig` dict; without its MTP layers."""
    experts, shared, mtp = _names(config)
    fields = Fields(config, SARVAM_MOE)
    _check(fields)
    fields.ignore(*MOE_FIELDS, "max_window_layers")  # there are no windows
    bias = name_of(config, "attention_bias", "use_qkv_bias")
    return glm_decoder(fields, experts=experts, mtp=mtp, shared=shared, bias=bias, default_theta=MOE_THETA)


def _names(config: Config) -> tuple[str, str, str]:
    """The names that `config` has for the numbers of routed experts, shared experts and MTP layers."""
    return (
        name_of(config, "n_routed_experts", "num_local_experts", "num_experts"),
        name_of(config, "n_shared_experts", "num_shared_experts"),
        name_of(config, "num_nextn_predict_layers", ATTRIBUTE_MAP["num_nextn_predict_layers"]),
    )


def _check(fields: Fields) -> None:
    """Check the fields that only published configs have; ConfigError, naming the field, for another value."""
    fields.ignore(*PUBLISHED_FIELDS)
    for name, only in FIXED.items():
        fields.choices(name, only, default=only)
    fields.choices("moe_layer_freq", 1, default=1)
    size = fields.size("moe_intermediate_size")
    fixed(fields, "moe_shared_expert_intermediate_size", size, "moe_intermediate_size")


PUBLISHED = {
    **NAMES,
    "attention.qkv": "attention.query_key_value",
    "attention.o": "attention.dense",
    "attention.q_norm": "attention.query_layernorm",
    "attention.k_norm": "attention.key_layernorm",
    "experts.selection_bias": "mlp.gate.expert_bias",
    "decoder.embed": "word_embeddings",
}
"""Names of published checkpoints of Sarvam-30B, which transformers writes too."""
FAMILIES = (
    Family(
        "sarvam_mla",
        sarvam_mla,
        expert_layouts(NAMES),
        attribute_map=PUBLISHED_FIELDS,
        mtp=NUMBERED_LAYERS,
        architecture="DeepseekV3ForCausalLM",
    ),
    Family(
        "sarvam_moe",
        sarvam_moe,
        published_layouts(PUBLISHED, NAMES),
        MOE_THETA,
        attribute_map=MOE_FIELDS,
        mtp=NUMBERED_LAYERS,
        architecture="Glm4MoeForCausalLM",
    ),
)
