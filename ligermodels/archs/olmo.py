"""OLMo 2: norms only after the sublayers, and over whole queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligermodels.archs import llama
from ligermodels.archs.compose import decoder
from ligermodels.archs.decoder import DecoderConfig
from ligermodels.archs.family import Family
from ligermodels.archs.fields import Fields
from ligermodels.layers import NormConfig, QKNormConfig

DEFAULTS = {**llama.DEFAULTS, "vocab_size": 50304, "rms_norm_eps": 1e-5, "pad_token_id": 1}


def olmo2(config: Mapping[str, Any]) -> DecoderConfig:
    """The composed config of an `Olmo2Config` dict."""
    fields = Fields(config, DEFAULTS)
    bias = fields.flag("attention_bias", False)
    norm = NormConfig(fields.number("rms_norm_eps", negative=False), casting_mode="gemma")
    own = {"bias": bias, "o_bias": bias, "qk_norm": QKNormConfig(norm, over="projection")}
    return decoder(fields, norm=norm, attention=lambda layer, common: own, block={"pre_norm": False, "post_norm": True})


FAMILIES = (Family("olmo2", olmo2),)
