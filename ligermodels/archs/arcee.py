"""AFM: Llama with ungated feed-forward layers."""

from __future__ import annotations

from ligermodels.archs import llama
from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.layers.ungated_mlp import UngatedMLPConfig

DEFAULTS = {
    **llama.DEFAULTS,
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def arcee(config: Config) -> DecoderConfig:
    """The composed config of an `ArceeConfig` dict."""
    fields = Fields(config, DEFAULTS)
    fields.choices("hidden_act", "relu2", default="relu2")
    bias = fields.flag("attention_bias", False)
    mlp = UngatedMLPConfig(fields.size("intermediate_size"), fields.flag("mlp_bias", False))
    return decoder(
        fields, attention=lambda layer, common: {"bias": bias, "o_bias": bias}, feed_forward=lambda layer: mlp
    )


FAMILIES = (Family("arcee", arcee),)
