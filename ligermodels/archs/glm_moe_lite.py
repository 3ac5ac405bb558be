"""GLM-4.7-Flash: the layers of DeepSeek-V3."""

from __future__ import annotations

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields
from ligermodels.archs.deepseek import latent_decoder, rotated_dim
from ligermodels.archs.experts import expert_layouts, feed_forwards_by_types, grouped_router
from ligermodels.archs.fields import DENSE, name_of, renamed
from ligermodels.archs.glm_moe import ATTRIBUTE_MAP, NAMES
from ligermodels.models.mtp_format import NUMBERED_LAYERS

GLM4_MOE_LITE = {
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "hidden_act": "silu",
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
}


def glm4_moe_lite(config: Config) -> DecoderConfig:
    """The composed config of a `Glm4MoeLiteConfig` dict; its layers of multi-token prediction are no part of it."""
    fields = Fields(renamed(config, "qk_rope_head_dim", "head_dim"), GLM4_MOE_LITE)
    kinds = feed_forwards_by_types(fields)
    return latent_decoder(
        fields,
        rope=fields.rope(rotated_dim(fields), fields.size("max_position_embeddings")),
        router=grouped_router(fields, name_of(config, "n_routed_experts", ATTRIBUTE_MAP["n_routed_experts"])),
        is_dense=lambda layer: kinds[layer] == DENSE,
    )


FAMILIES = (
    Family("glm4_moe_lite", glm4_moe_lite, expert_layouts(NAMES), attribute_map=ATTRIBUTE_MAP, mtp=NUMBERED_LAYERS),
)
