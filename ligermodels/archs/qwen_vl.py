"""The text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen 2 and 3 with other defaults."""

from __future__ import annotations

from ligermodels.archs import qwen
from ligermodels.archs.experts import expert_layouts
from ligermodels.archs.multimodal import TextModel, layouts, wrapper

QWEN2_VL = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1e6,
}
QWEN3_VL = {"max_position_embeddings": 128000, "rope_theta": 5e5}
QWEN3_VL_MOE = {
    **QWEN3_VL,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "num_experts": 60,
}
NO_WINDOWS = {"use_sliding_window": False}
"""Qwen3-VL and Qwen3-Omni compute no windows in transformers."""
VISION = (r"^(model\.)?visual\.",)
NEW = ("model.language_model", "lm_head.weight")
"""Prefix and head of the text model in transformers 5 and in checkpoints of Qwen3-VL."""
OLD = ("model", "lm_head.weight")
"""Prefix and head of the text model in checkpoints of Qwen2-VL and Qwen2.5-VL."""
QWEN2, QWEN3, QWEN3_MOE = qwen.FAMILIES
QWEN2_TEXT = TextModel(QWEN2, QWEN2_VL, unread=("head_dim",))
QWEN3_TEXT = TextModel(QWEN3, QWEN3_VL, fixed=NO_WINDOWS)
QWEN3_MOE_TEXT = TextModel(QWEN3_MOE, QWEN3_VL_MOE, fixed={**NO_WINDOWS, "norm_topk_prob": True})
EXPERTS = [layout["names"] for layout in expert_layouts()]

FAMILIES = (
    wrapper("qwen2_vl", {"qwen2_vl_text": QWEN2_TEXT}, layouts(NEW, OLD, ignored=VISION), either=True, flat=True),
    wrapper("qwen2_5_vl", {"qwen2_5_vl_text": QWEN2_TEXT}, layouts(NEW, OLD, ignored=VISION), either=True, flat=True),
    wrapper("qwen3_vl", {"qwen3_vl_text": QWEN3_TEXT}, layouts(NEW, ignored=VISION)),
    wrapper("qwen3_vl_moe", {"qwen3_vl_moe_text": QWEN3_MOE_TEXT}, layouts(NEW, ignored=VISION, names=EXPERTS)),
)
