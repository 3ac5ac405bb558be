"""GLM-4 (0414): norms before and after the sublayers; a part of each head rotated, in pairs of neighbours."""

from __future__ import annotations

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder

DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "pad_token_id": 151329,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
NAMES = {
    "norm.mixer_post_norm": "post_self_attn_layernorm",
    "norm.mlp_norm": "post_attention_layernorm",
    "norm.mlp_post_norm": "post_mlp_layernorm",
    "mlp.gate_up": "mlp.gate_up_proj",
}


def glm4(config: Config) -> DecoderConfig:
    """The composed config of a `Glm4Config` dict: q, k and v can have biases, the output projection has none."""
    fields = Fields(config, DEFAULTS)
    own = {"bias": fields.flag("attention_bias", True), "stored_as_pairs": True}
    return decoder(fields, attention=lambda layer, common: own, partial_rotary=True, block={"post_norm": True})


FAMILIES = (Family("glm4", glm4, [{"names": NAMES}]),)
