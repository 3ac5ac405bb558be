"""The configs of families that differ from others by their configuration alone."""

from typing import Any

from zoo_parts import BASE

NEWER: dict[str, dict[str, Any]] = {
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
