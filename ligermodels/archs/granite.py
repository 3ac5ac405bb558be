"""Granite 3: Llama with multipliers on embeddings, scores, residuals and logits."""

from __future__ import annotations

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.llama import DEFAULTS


def granite(config: Config) -> DecoderConfig:
    """The composed config of a `GraniteConfig` dict."""
    fields = Fields(config, DEFAULTS)
    bias = fields.flag("attention_bias", False)
    scale = fields.number("attention_multiplier", 1.0, positive=True)
    return decoder(
        fields,
        attention=lambda layer, common: {"bias": bias, "o_bias": bias, "softmax_scale": scale},
        mlp_bias=fields.flag("mlp_bias", False),
        block={"residual_scale": fields.number("residual_multiplier", 1.0)},
        head={"logit_scale": 1.0 / fields.number("logits_scaling", 1.0, positive=True)},
        input_scale=fields.number("embedding_multiplier", 1.0),
    )


FAMILIES = (Family("granite", granite),)
