"""The text models of Qwen2.5-Omni and Qwen3-Omni: Qwen 2 and Qwen 3's mixtures with other defaults.

A checkpoint holds a thinker (a multimodal model that contains the text model) and models that turn its output into
speech, or a thinker alone."""

from __future__ import annotations

from ligermodels.archs.experts import expert_layouts
from ligermodels.archs.multimodal import TextModel, around, layouts, wrapper
from ligermodels.archs.qwen import FAMILIES as QWEN
from ligermodels.archs.qwen_vl import NO_WINDOWS

QWEN2_5_OMNI = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "sliding_window": 32768,
    "rope_theta": 1e6,
}
QWEN3_OMNI_MOE = {
    "vocab_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "norm_topk_prob": True,
    "sliding_window": None,
    "rope_theta": 1e6,
}
BESIDE = (r"^(thinker\.)?(model\.)?(visual|audio_tower)\.", r"^(talker|token2wav|code2wav)\.")
"""Patterns of tensors of the thinker's towers and of the models for speech."""
ALONE = (("model.language_model", "lm_head.weight"), ("model", "lm_head.weight"))
"""Prefix and head of the text model in a thinker alone: in state dicts of transformers 5, and in checkpoints."""
TOGETHER = (("thinker.model", "thinker.lm_head.weight"), ("thinker.model.language_model", "thinker.lm_head.weight"))
"""Prefix and head in a whole checkpoint with models for speech: in files, and in state dicts of transformers 5."""
QWEN2, _, QWEN3_MOE = QWEN
QWEN2_5_THINKER = wrapper(
    "qwen2_5_omni_thinker",
    {"qwen2_5_omni_text": TextModel(QWEN2, QWEN2_5_OMNI, unread=("head_dim",))},
    layouts(*ALONE, *TOGETHER, ignored=BESIDE),
)
EXPERTS = [layout["names"] for layout in expert_layouts()]
QWEN3_THINKER = wrapper(
    "qwen3_omni_moe_thinker",
    {"qwen3_omni_moe_text": TextModel(QWEN3_MOE, QWEN3_OMNI_MOE, fixed=NO_WINDOWS)},
    layouts(*ALONE, *TOGETHER, ignored=BESIDE, names=EXPERTS),
)

FAMILIES = (
    QWEN2_5_THINKER,
    around(QWEN2_5_THINKER, "qwen2_5_omni", layouts(*TOGETHER, ignored=BESIDE)),
    QWEN3_THINKER,
    around(QWEN3_THINKER, "qwen3_omni_moe", layouts(*TOGETHER, ignored=BESIDE, names=EXPERTS)),
)
