"""Falcon-H1 (TII): attention and Mamba2 side by side in every layer, with multipliers of most projections."""

from __future__ import annotations

from dataclasses import replace

from ligermodels.archs.bamba import MAMBA, mamba2_layer
from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.layers import AttentionConfig, MLPConfig, ParallelMixersConfig

DEFAULTS = {
    **MAMBA,
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
    "pad_token_id": 0,
}
UNUSED = ("mlp_expansion_factor", "num_logits_to_keep", "time_step_min", "time_step_max", "time_step_floor")
"""Fields that transformers does not read, or only for initial values."""


def falcon_h1(config: Config) -> DecoderConfig:
    """The composed config of a `FalconH1Config` dict."""
    fields = Fields(config, DEFAULTS)
    fields.ignore(*UNUSED)
    fields.choices("mamba_use_mlp", True, default=True)
    fields.choices("attn_layer_indices", None, default=None)
    bias = fields.flag("attention_bias", False)
    z, x, b, c, dt = _multipliers(fields, "ssm_multipliers", 5)
    mamba = replace(
        mamba2_layer(fields, "mamba_d_ssm"),
        out_bias=fields.flag("projectors_bias", False),
        norm_before_gate=fields.flag("mamba_norm_before_gate", True),
        has_norm=fields.flag("mamba_rms_norm", False),
        part_scales=(z, x, b, c, dt),
    )
    inputs = tuple(fields.number(f"{name}_in_multiplier", 1.0) for name in ("ssm", "attention"))
    outputs = tuple(fields.number(f"{name}_out_multiplier", 1.0) for name in ("ssm", "attention"))
    of_gate, of_down = _multipliers(fields, "mlp_multipliers", 2)
    key_scale = fields.number("key_multiplier", 1.0)

    def attention(layer: int, common: AttentionConfig) -> dict[str, object]:
        return {"bias": bias, "o_bias": bias, "softmax_scale": key_scale * common.head_dim**-0.5}

    def mlp(layer: int, gated: MLPConfig) -> MLPConfig:
        return replace(gated, gate_multiplier=of_gate, down_multiplier=of_down)

    return decoder(
        fields,
        attention=attention,
        mixer=lambda layer, full: ParallelMixersConfig((mamba, full), inputs, outputs),
        mlp=mlp,
        mlp_bias=fields.flag("mlp_bias", False),
        head={"logit_scale": fields.number("lm_head_multiplier", 1.0, positive=True)},
        token_scale=fields.number("embedding_multiplier", 1.0),
    )


def _multipliers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    """The `count` numbers in field `name`, or ones if it is missing or null."""
    fields.ignore(name)
    return (1.0,) * count if fields.config.get(name) is None else fields.numbers(name, count)


NAMES = {
    **{f"mlp.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    "norm.mlp_norm": "pre_ff_layernorm",
    "decoder.norm": "final_layernorm",
}
FAMILIES = (Family("falcon_h1", falcon_h1, ({"names": NAMES},), architecture="FalconH1ForCausalLM"),)
