"""Llama 2, 3, 3.1, 3.2 (text) and 3.3."""

from __future__ import annotations

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


def decoder_config(config: Config) -> DecoderConfig:
    """The composed config of a `LlamaConfig` dict."""
    fields = Fields(config, DEFAULTS)
    bias = fields.flag("attention_bias", False)
    return decoder(
        fields, attention=lambda layer, common: {"bias": bias, "o_bias": bias}, mlp_bias=fields.flag("mlp_bias", False)
    )


FAMILIES = (Family("llama", decoder_config),)
