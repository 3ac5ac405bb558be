"""The configs of families that differ from others by their configuration alone."""

from typing import Any

from zoo_parts import BASE

NEWER: dict[str, dict[str, Any]] = {
    "muse_glimmer_text": {
        **BASE,
        "model_type": "muse_glimmer_text",
        "hidden_activation": "silu",
        "num_hidden_layers": 5,
        "sliding_window": 9,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "final_logit_softcapping": 3.0,
        "output_multiplier": 0.2,
        "post_norm_eps": 1e-3,
    },
    "muse_glimmer_text-layers": {
        **BASE,
        "model_type": "muse_glimmer_text",
        "sliding_window": 11,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "layer_rope_theta": [1e4, 0, 1e4],
        "qk_scale_factor": 1.7,
        "tie_word_embeddings": True,
    },
    "internlm3": {  # With the fields of published checkpoints.
        **BASE,
        "model_type": "internlm3",
        "head_dim": 10,
        "qkv_bias": True,
        "bias": True,
        "rope_theta": 5e4,
        "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
    },
    "iquestcoder": {**BASE, "model_type": "iquestcoder", "head_dim": 10, "num_key_value_heads": 3},
}
