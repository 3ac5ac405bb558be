"""ERNIE 4.5 (dense): Llama with the channels of a head rotated in pairs of neighbours."""

from __future__ import annotations

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder

DEFAULTS = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
DEFAULT_THETA = 5e5


def ernie4_5(config: Config) -> DecoderConfig:
    """The composed config of an `Ernie4_5Config` dict."""
    fields = Fields(config, DEFAULTS)
    bias = fields.flag("use_bias", False)
    own = {"bias": bias, "o_bias": bias, "stored_as_pairs": True}
    return decoder(fields, default_theta=DEFAULT_THETA, attention=lambda layer, common: own, mlp_bias=bias)


FAMILIES = (Family("ernie4_5", ernie4_5, default_theta=DEFAULT_THETA),)
