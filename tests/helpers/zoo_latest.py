"""The configs of the latest families."""

from typing import Any

from zoo_parts import BASE, EXPERTS, LATENT_BASE, LLAMA3_SCALING, YARN

KIMI_LINEAR: dict[str, Any] = {
    **{name: value for name, value in LATENT_BASE.items() if name not in ("n_routed_experts", "n_group")},
    "model_type": "kimi_linear",
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-2,  # As for Gated DeltaNet: the output of a query that meets no key is all rounding.
}

LATEST: dict[str, dict[str, Any]] = {
    "llama4_text": {
        **BASE,
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "intermediate_size": 31,
        "intermediate_size_mlp": 97,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 5,
        "no_rope_layer_interval": 2,
        "attn_scale": 0.3,
        "floor_scale": 25,  # Beyond padded prompts: transformers takes the columns of padded rows for positions.
        "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500_000.0},
    },
    "llama4_text-two-experts-and-no-norms": {
        **BASE,
        "model_type": "llama4_text",
        "num_hidden_layers": 2,
        "intermediate_size": 31,
        "intermediate_size_mlp": 97,
        "moe_layers": [0],
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "no_rope_layers": [1, 1],  # Without positions biases of keys have no gradient but rounding.
        "layer_types": ["full_attention", "chunked_attention"],
        "attn_temperature_tuning": False,
        "use_qk_norm": False,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "mimo_v2_flash": {
        **BASE,
        **EXPERTS,
        "model_type": "mimo_v2_flash",
        "num_attention_heads": 8,
        "head_dim": 18,
        "v_head_dim": 11,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 9,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 5e5, "partial_rotary_factor": 0.45},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
        },
    },
    "mimo_v2_flash-published-fields": {
        **BASE,
        **EXPERTS,
        "model_type": "mimo_v2_flash",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "head_dim": 18,
        "v_head_dim": 18,
        "n_routed_experts": 5,
        "norm_topk_prob": False,
        "attention_bias": True,
        "attention_value_scale": 0.6,
        "sliding_window_size": 8,
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "swa_num_key_value_heads": 2,
        "swa_rope_theta": 10000,
        "layernorm_epsilon": 1e-5,
        "partial_rotary_factor": 0.334,
        "rope_theta": 5000000,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_shared_experts": None,
        "routed_scaling_factor": None,
        "add_swa_attention_sink_bias": True,
    },
    "kimi_linear": {  # With the fields of published checkpoints.
        **{
            name: value
            for name, value in KIMI_LINEAR.items()
            if name not in ("max_position_embeddings", "num_experts_per_tok")
        },
        "q_lora_rank": None,
        "model_max_length": 128,
        "head_dim": 10,
        "linear_attn_config": {
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
            "head_dim": 9,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 4,
        "topk_group": 2,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 2,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.7,
    },
    "kimi_linear-layer-types": {
        **{name: value for name, value in KIMI_LINEAR.items() if name != "first_k_dense_replace"},
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "linear_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
        "linear_head_dim": 12,
        "linear_num_heads": 3,
        "linear_conv_kernel_dim": 3,
        "n_group": 1,
        "num_local_experts": 6,
        "norm_topk_prob": False,
        "attention_bias": True,
    },
}
