"""Fields that several of the tiny configs share, and the configs of mixtures, Llamas, Gemma 4 and latent attention."""

from typing import Any

# Head widths that are not hidden / heads, fewer key/value heads than heads, no round sizes, windows shorter than the
# sequences of the tests (41 tokens), and layers enough for every kind of layer to occur.
BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 60,
    "intermediate_size": 97,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "_xkept_by_export": {"extra": [1, "é"]},
}
DELTA = {
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-2,  # The output of a token whose query meets no key is all rounding, which 1e-5 would magnify.
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 7,
}
MAMBA = {
    "hidden_size": 54,
    "head_dim": 16,
    "rms_norm_eps": 1e-3,
    "mamba_expand": 2,
    "mamba_n_heads": 12,
    "mamba_n_groups": 3,
    "mamba_d_head": 9,
    "mamba_d_state": 10,
    "mamba_chunk_size": 16,
}
GEMMA = {**BASE, "tie_word_embeddings": True, "num_key_value_heads": 1}
SANDWICH = {**GEMMA, "query_pre_attn_scalar": 19, "sliding_window": 11}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 31}
GLM4_MOE = {**BASE, **EXPERTS, "model_type": "glm4_moe", "n_routed_experts": 8, "routed_scaling_factor": 1.7}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        **BASE,
        **EXPERTS,
        "model_type": "qwen2_moe",
        "num_experts": 6,
        "shared_expert_intermediate_size": 43,
    },
    "qwen2_moe-dense-and-windows": {
        **BASE,
        **EXPERTS,
        "model_type": "qwen2_moe",
        "num_experts": 5,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 29,
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 4,
    },
    "glm4_moe": {**GLM4_MOE, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
    "glm4_moe-qk-norm": {
        **GLM4_MOE,
        "num_hidden_layers": 3,
        "attention_bias": True,
        "use_qk_norm": True,
        "norm_topk_prob": False,
        "first_k_dense_replace": 2,
        "partial_rotary_factor": 0.4,
    },
    "minimax_m2": {
        **BASE,
        "model_type": "minimax_m2",
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "rotary_dim": 6,
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
    },
}
"""Mixtures with shared experts, sigmoid scores, selection biases and groups."""
GPT_OSS = {
    **BASE,
    "model_type": "gpt_oss",
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "swiglu_limit": 0.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
"""With a limit that many of the experts' channels exceed, and none comes near: there gradients jump."""
PHI_LONGROPE = {
    "model_type": "phi3",
    "head_dim": 10,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0 + 0.03 * i for i in range(5)],
        "long_factor": [1.5 + 0.4 * i for i in range(5)],
    },
}
LLAMA = {
    **BASE,
    "num_hidden_layers": 3,  # for tests that leave out the first and the last
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "attention_dropout": 0.0,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MINISTRAL3 = {
    "type": "yarn",
    "rope_theta": 1e4,
    "max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
TWO_LAYERS = {**LLAMA, "num_hidden_layers": 2}
LLAMAS: dict[str, dict[str, Any]] = {
    # Fields left out on purpose: head_dim, num_key_value_heads, rope.
    "llama-2": {**{k: v for k, v in LLAMA.items() if k not in ("head_dim", "num_key_value_heads")}, "hidden_size": 84},
    "llama-3": {**TWO_LAYERS, "rope_theta": 500_000.0, "rope_scaling": None, "torch_dtype": "float32"},
    "llama-3.1": {**LLAMA, "rope_theta": 500_000.0, "rope_scaling": LLAMA3_SCALING},
    "llama-3.2": {
        **TWO_LAYERS,
        "tie_word_embeddings": True,
        "eos_token_id": [2, 7],
        "rope_parameters": {**LLAMA3_SCALING, "factor": 32.0, "rope_theta": 500_000.0},
    },
    "biases-linear-one-kv-head": {
        **TWO_LAYERS,
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 1,
        "rope_theta": 1234.5,
        "rope_scaling": {"type": "linear", "factor": 2.5},
    },
}

GEMMA4_BASE = {
    **BASE,
    "model_type": "gemma4_text",
    "tie_word_embeddings": True,
    "num_key_value_heads": 1,
    "num_hidden_layers": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "global_head_dim": 24,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
}
GEMMA4: dict[str, dict[str, Any]] = {
    "gemma4_text": {**GEMMA4_BASE, "num_hidden_layers": 7, "layer_types": None, "num_key_value_heads": 2},
    "gemma4_text-keys-as-values": {
        **GEMMA4_BASE,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_key_value_heads": 3,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 5.0,
    },
    "gemma4_text-per-layer-inputs": {
        **GEMMA4_BASE,
        "num_hidden_layers": 5,
        "layer_types": ["full_attention", *["sliding_attention", "full_attention"] * 2],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 26,  # With a few, all may be near 0 after their gelu: a norm of noise follows.
        "vocab_size_per_layer_input": 131,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 5.0,
    },
    "gemma4_text-few-layers": {
        **GEMMA4_BASE,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 26,
        "vocab_size_per_layer_input": 140,
    },
    "gemma4_text-experts": {
        **GEMMA4_BASE,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 11,
    },
    "gemma4_unified_text": {
        **{name: value for name, value in GEMMA4_BASE.items() if name != "hidden_size_per_layer_input"},
        "model_type": "gemma4_unified_text",
        "num_hidden_layers": 6,
        "layer_types": None,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
    },
}

LATENT_BASE = {
    **{name: value for name, value in BASE.items() if name != "head_dim"},
    **EXPERTS,
    "num_key_value_heads": BASE["num_attention_heads"],
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "q_lora_rank": 11,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 8,
}
LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v3": {  # With the fields of published checkpoints.
        **LATENT_BASE,
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,  # two with experts
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "ep_size": 1,
        "seq_aux": True,
        "aux_loss_alpha": 0.001,
        "num_nextn_predict_layers": 1,
        "rope_theta": 1e4,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    },
    "deepseek_v3-without-experts": {  # Without a latent of queries, and with values wider than keys.
        **LATENT_BASE,
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "q_lora_rank": None,
        "v_head_dim": 18,
        "first_k_dense_replace": 2,
        "attention_bias": True,
        "rope_interleave": False,
    },
    "deepseek_v2": {  # With the fields of published checkpoints.
        **LATENT_BASE,
        "model_type": "deepseek_v2",
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.7,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "moe_layer_freq": 1,
        "rope_theta": 1e4,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.5,
        },
    },
    "deepseek_v2-greedy": {
        **LATENT_BASE,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "glm4_moe_lite": {
        **LATENT_BASE,
        "model_type": "glm4_moe_lite",
        "v_head_dim": 16,
        "routed_scaling_factor": 1.8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "rope_theta": 1e6,
        "rope_scaling": None,
    },
    "glm4_moe_lite-layer-types": {
        **{name: value for name, value in LATENT_BASE.items() if name != "first_k_dense_replace"},
        "model_type": "glm4_moe_lite",
        "mlp_layer_types": ["sparse", "dense"],
        "n_group": 2,
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "attention_bias": True,
    },
    "mistral4": {
        **LATENT_BASE,
        "model_type": "mistral4",
        "n_routed_experts": 7,
        "q_lora_rank": 12,  # With 11, GEMMs of mapped experts, which are not aligned then, give other bits.
        "rope_parameters": {**YARN, **MINISTRAL3},
    },
    "mistral4-groups": {
        **LATENT_BASE,
        "model_type": "mistral4",
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 0,
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "rope_parameters": {**YARN, **MINISTRAL3, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.5},
    },
}
"""With latent attention."""
