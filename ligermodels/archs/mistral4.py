"""Mistral Small 4: DeepSeek-V3 with a softmax in the router, and queries that are scaled by position."""

from __future__ import annotations

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields
from ligermodels.archs.deepseek import KEY_DIM, fixed, latent_decoder, rotated_dim
from ligermodels.archs.experts import expert_layouts, grouped_router
from ligermodels.archs.fields import renamed
from ligermodels.archs.glm_moe import NAMES
from ligermodels.archs.mistral import growing_queries
from ligermodels.errors import ConfigError

MISTRAL4 = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 11,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
PART = "partial_rotary_factor"


def mistral4(config: Config) -> DecoderConfig:
    """The composed config of a `Mistral4Config` dict. Its rope is of a part of each head, by default the part of
    qk_rope_head_dim."""
    fields = Fields(renamed(config, "n_routed_experts", "num_local_experts"), MISTRAL4)
    rotated, dense = rotated_dim(fields), fields.size("first_k_dense_replace", zero=True)
    key_dim = rotated + fields.size("qk_nope_head_dim")
    fixed(fields, "head_dim", key_dim, KEY_DIM)
    fields, scaling = growing_queries(fields, ROPE)
    settings = {PART: rotated / key_dim, **fields.config["rope_parameters"]}
    fields = fields.replaced(rope_parameters=settings)
    rope = fields.rope(key_dim, fields.size("max_position_embeddings"), partial=True)
    if rope.channels != rotated:
        raise ConfigError(
            f"{fields.where}: rope_parameters: {PART} gives {rope.channels} of {KEY_DIM} = {key_dim} channels to "
            f"rotate; qk_rope_head_dim is {rotated}"
        )
    return latent_decoder(
        fields,
        rope=rope,
        router=grouped_router(fields, scores="softmax"),
        is_dense=lambda layer: layer < dense,
        query_scaling=scaling,
    )


_EACH, _STACKED, _TRANSPOSED = expert_layouts(NAMES)
LAYOUTS = (_STACKED, _EACH, _TRANSPOSED)
"""One tensor for all experts first, as published."""
FAMILIES = (
    Family(
        "mistral4",
        mistral4,
        LAYOUTS,
        default_theta=ROPE,
        # With the older fields, transformers would not set the part of a head that is rotated.
        attribute_map={"n_routed_experts": "num_local_experts", "rope_theta": None, "rope_scaling": None},
    ),
)
