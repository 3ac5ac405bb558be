"""The configs of the latest families."""

from typing import Any

from zoo_parts import BASE, EXPERTS, YARN

LATEST: dict[str, dict[str, Any]] = {
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
}
