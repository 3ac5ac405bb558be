"""The text models of Mistral Small 3.x, Ministral 3 and Mistral Small 4, in checkpoints with a vision tower."""

from __future__ import annotations

from ligermodels.archs import mistral, mistral4
from ligermodels.archs.multimodal import BESIDE_VISION_TOWER, TextModel, wrapper

MISTRAL3 = {
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "vocab_size": 131072,
    "rope_theta": 1e9,
}
"""The `text_config` of a Mistral 3 config that has none."""

MISTRAL, _, MINISTRAL3 = mistral.FAMILIES
(MISTRAL4,) = mistral4.FAMILIES

FAMILIES = (
    wrapper(
        "mistral3",
        {"mistral": TextModel(MISTRAL), "ministral3": TextModel(MINISTRAL3), "mistral4": TextModel(MISTRAL4)},
        [{**layout, **names} for names in mistral4.LAYOUTS for layout in BESIDE_VISION_TOWER],
        tied=True,
        absent=MISTRAL3,
    ),
)
