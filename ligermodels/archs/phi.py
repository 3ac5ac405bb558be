"""Phi 3, 3.5 and 4: Llama with q, k and v in one tensor, and gate and up in another."""

from __future__ import annotations

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.convert.rope_settings import rope_parameters
from ligermodels.errors import ConfigError

DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 32000,
}

PACKED = {"attention.qkv": "self_attn.qkv_proj", "mlp.gate_up": "mlp.gate_up_proj"}


def phi3(config: Config) -> DecoderConfig:
    """The composed config of a `Phi3Config` dict."""
    fields = Fields(config, DEFAULTS)
    if rope_parameters(config)["rope_type"] == "yarn":
        raise ConfigError(
            f"{fields.where}: rope_type = 'yarn' does not mean the same to all readers of phi3: transformers reads it "
            "as 'longrope'; write 'longrope', with short_factor and long_factor"
        )
    window = fields.optional_size("sliding_window")
    return decoder(fields, attention=lambda layer, common: {"window": window}, partial_rotary=True)


FAMILIES = (Family("phi3", phi3, [{"names": PACKED}]),)
