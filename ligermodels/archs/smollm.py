"""SmolLM 3: Llama with some layers that have no rotary positions (NoPE)."""

from __future__ import annotations

from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder

DEFAULTS = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 128004,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}


DEFAULT_THETA = 2e6


def smollm3(config: Config) -> DecoderConfig:
    """The composed config of a `SmolLM3Config` dict: with a window, it is the layers without positions that have it."""
    fields = Fields(config, DEFAULTS)
    every = fields.size("no_rope_layer_interval")
    rotated = fields.flags("no_rope_layers", lambda layer: (layer + 1) % every != 0)
    slides = fields.flag("use_sliding_window", False) and fields.optional_size("sliding_window") is not None
    windows = fields.windows(lambda layer: slides and not rotated[layer])
    bias = fields.flag("attention_bias", False)

    def attention(layer: int, common: Any) -> dict[str, Any]:
        own = {"bias": bias, "o_bias": bias, "window": windows[layer]}
        return own if rotated[layer] else {**own, "rope": None}

    return decoder(fields, default_theta=DEFAULT_THETA, attention=attention, mlp_bias=fields.flag("mlp_bias", False))


FAMILIES = (Family("smollm3", smollm3, default_theta=DEFAULT_THETA, architecture="SmolLM3ForCausalLM"),)
