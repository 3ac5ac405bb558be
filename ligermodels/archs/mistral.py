"""Mistral 7B, Nemo, Small and Large; Ministral 8B, with sliding windows in some layers; Ministral 3 and Devstral 2,
with queries that are scaled by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.convert.rope_settings import rope_parameters
from ligermodels.layers.query_scaling import QueryScaling

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


def mistral(config: Config) -> DecoderConfig:
    """The composed config of a `MistralConfig` or `MinistralConfig` dict: `layer_types` count under either name."""
    fields = Fields(config, DEFAULTS)
    windows = fields.windows(lambda layer: fields.optional_size("sliding_window") is not None)
    return decoder(fields, attention=lambda layer, common: {"window": windows[layer]})


MINISTRAL3 = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 11,
}
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def growing_queries(fields: Fields, rope: Mapping[str, Any]) -> tuple[Fields, QueryScaling | None]:
    """Split the scaling of queries by position from the rotary settings.

    Args:
        fields: the config.
        rope: rotary settings of a config that has none.

    Returns:
        `fields` without the settings of this scaling, and the scaling, or None.
    """
    settings = rope_parameters(fields.config, rope)
    own = Fields(settings, where=f"{fields.where}: rope_parameters")
    beta = own.number("llama_4_scaling_beta", 0.0)
    context = own.size("original_max_position_embeddings", fields.size("max_position_embeddings"))
    scaling = QueryScaling(beta, context) if beta else None
    plain = {k: v for k, v in settings.items() if k not in ("llama_4_scaling_beta", "max_position_embeddings")}
    return fields.replaced(rope_parameters=plain, rope_scaling=None), scaling


def ministral3(config: Config) -> DecoderConfig:
    """The composed config of a `Ministral3Config` dict. Its rotary settings include the scaling of queries."""
    fields, scaling = growing_queries(Fields(config, MINISTRAL3), MINISTRAL3_ROPE)
    own = {"window": fields.optional_size("sliding_window"), "query_scaling": scaling}
    return decoder(fields, attention=lambda layer, common: own)


MISTRAL = Family("mistral", mistral)
MINISTRAL3_FAMILY = Family("ministral3", ministral3, default_theta=MINISTRAL3_ROPE)

FAMILIES = (MISTRAL, Family("ministral", mistral), MINISTRAL3_FAMILY)
