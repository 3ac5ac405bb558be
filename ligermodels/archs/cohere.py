"""Cohere 2 (Command R7B, Command A): attention and feed-forward layer beside each other, after one LayerNorm.

Layers with a sliding window have rotary positions, layers of full attention have no positions."""

from __future__ import annotations

from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.deepseek import fixed
from ligermodels.layers import NormConfig

COHERE2 = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
FIXED = {
    "use_qk_norm": False,
    "use_parallel_block": True,
    "use_gated_activation": True,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
}
"""Field of published configs -> its only implemented value, as in transformers."""


def cohere2(config: Config) -> DecoderConfig:
    """The composed config of a `Cohere2Config` dict."""
    fields = Fields(config, COHERE2)
    fields.ignore("use_embedding_sharing", "use_parallel_embedding", "layer_switch")  # transformers does not read them
    for name, only in FIXED.items():
        fields.choices(name, only, default=only)
    fixed(fields, "head_dim", fields.size("hidden_size") // fields.size("num_attention_heads"), "num_attention_heads")
    bias = fields.flag("attention_bias", False)
    windows = fields.windows(lambda layer: (layer + 1) % fields.size("sliding_window_pattern") != 0)
    own: dict[str, Any] = {"bias": bias, "o_bias": bias, "stored_as_pairs": True}

    def attention(layer: int, common: Any) -> dict[str, Any]:
        return {**own, "window": windows[layer], **({"rope": None} if windows[layer] is None else {})}

    return decoder(
        fields,
        norm=NormConfig(fields.number("layer_norm_eps", negative=False), kind="layer"),
        attention=attention,
        block={"parallel": True},
        head={"logit_scale": fields.number("logit_scale")},
    )


FAMILIES = (Family("cohere2", cohere2),)
