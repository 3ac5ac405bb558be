"""Mistral 7B, Nemo, Small and Large; and Ministral 8B, whose window is a matter of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligermodels.archs.compose import decoder
from ligermodels.archs.decoder import DecoderConfig
from ligermodels.archs.family import Family
from ligermodels.archs.fields import Fields
from ligermodels.archs.multimodal import BESIDE_VISION_TOWER, TextModel, wrapper

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    # A config that says nothing has this window; one that says null has none.
    "sliding_window": 4096,
}


def mistral(config: Mapping[str, Any]) -> DecoderConfig:
    """The composed config of a `MistralConfig` or `MinistralConfig` dict: `layer_types` count under either name."""
    fields = Fields(config, DEFAULTS)
    windows = fields.windows(lambda layer: fields.optional_size("sliding_window") is not None)
    return decoder(fields, attention=lambda layer, common: {"window": windows[layer]})


MISTRAL = Family("mistral", mistral)
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
"""The `text_config` of a Mistral 3 that has none."""

FAMILIES = (
    MISTRAL,
    Family("ministral", mistral),
    wrapper(
        "mistral3",
        {"mistral": TextModel(MISTRAL, "MistralForCausalLM")},
        BESIDE_VISION_TOWER,
        tied=True,
        absent=MISTRAL3,
    ),
)
