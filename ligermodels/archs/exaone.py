"""EXAONE 4: norms only after the sublayers and over the heads of queries and keys; NoPE in full-attention layers."""

from __future__ import annotations

from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.layers import NormConfig, QKNormConfig

DEFAULTS = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


def exaone4(config: Config) -> DecoderConfig:
    """The composed config of an `Exaone4Config` dict: with a window, layers without it have no positions."""
    fields = Fields(config, DEFAULTS)
    hybrid = fields.optional_size("sliding_window") is not None
    windows = fields.windows(lambda layer: hybrid and (layer + 1) % fields.size("sliding_window_pattern") != 0)
    own = {"qk_norm": QKNormConfig(NormConfig(fields.number("rms_norm_eps", negative=False)))}

    def attention(layer: int, common: Any) -> dict[str, Any]:
        whole = hybrid and windows[layer] is None
        return {**own, "window": windows[layer], **({"rope": None} if whole else {})}

    return decoder(fields, attention=attention, block={"pre_norm": False, "post_norm": True})


FAMILIES = (Family("exaone4", exaone4),)
