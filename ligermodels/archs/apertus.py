"""Apertus: ungated feed-forward layers with the activation xIELU, and norms over the heads of queries and keys."""

from __future__ import annotations

from typing import Any

from ligermodels.archs import llama
from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.layers import NormConfig, QKNormConfig
from ligermodels.layers.ungated_mlp import UngatedMLPConfig

APERTUS = {
    **llama.DEFAULTS,
    "vocab_size": 131072,
    "intermediate_size": 14336,
    "hidden_act": "xielu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 3,
}
ROPE = {
    "rope_type": "llama3",
    "default_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
NAMES = {"norm.mixer_norm": "attention_layernorm", "norm.mlp_norm": "feedforward_layernorm"}


def apertus(config: Config) -> DecoderConfig:
    """The composed config of an `ApertusConfig` dict."""
    fields = Fields(config, APERTUS)
    fields.choices("hidden_act", "xielu", default="xielu")
    fields.choices("qk_norm", True, default=True)
    fields.choices("post_norm", False, default=False)
    fields.choices("mlp_bias", False, default=False)
    if not config.get("rope_scaling") and config.get("rope_parameters") is None:
        # Releases of transformers differ: the base is this one, or that of the default settings.
        fields.refuse_unread(["rope_theta"], lambda fields: fields.config.get("rope_theta") or ROPE["default_theta"])
    bias = fields.flag("attention_bias", False)
    norm = QKNormConfig(NormConfig(fields.number("rms_norm_eps", negative=False)))
    own: dict[str, Any] = {"bias": bias, "o_bias": bias, "qk_norm": norm}
    mlp = UngatedMLPConfig(fields.size("intermediate_size"), activation="xielu")
    return decoder(fields, attention=lambda layer, common: own, feed_forward=lambda layer: mlp, default_theta=ROPE)


FAMILIES = (Family("apertus", apertus, [{"names": NAMES}], ROPE),)
