"""Seed-OSS: Llama with a switch for biases of q, k and v, and another for the bias of the output projection."""

from __future__ import annotations

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.errors import ConfigWarning, warn_caller

DEFAULTS = {
    "vocab_size": 155136,
    "hidden_size": 4096,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 524288,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 1,
    "attention_bias": True,
}
DROPOUT = 0.1
"""Dropout of published checkpoints, and default of the config."""


def seed_oss(config: Config) -> DecoderConfig:
    """The composed config of a `SeedOssConfig` dict.

    Dropout is not implemented. For the value DROPOUT of all published checkpoints, this is only a ConfigWarning;
    training with another value is an error, as in other families.
    """
    fields = Fields(config, DEFAULTS)
    for name in ("attention_dropout", "residual_dropout"):
        if fields.number(name, DROPOUT) == DROPOUT:
            fields = fields.replaced(**{name: 0.0})
            warn_caller(
                f"{fields.where}: {name} = {DROPOUT} is not implemented: training is without dropout, as with "
                f"{name} = 0",
                ConfigWarning,
            )
    bias, o_bias = fields.flag("attention_bias", True), fields.flag("attention_out_bias", False)
    return decoder(
        fields,
        attention=lambda layer, common: {"bias": bias, "o_bias": o_bias},
        mlp_bias=fields.flag("mlp_bias", False),
    )


FAMILIES = (Family("seed_oss", seed_oss),)
