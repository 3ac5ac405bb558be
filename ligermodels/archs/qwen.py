"""Qwen 2, 2.5 and 3, dense and as mixtures of experts."""

from __future__ import annotations

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import expert_layouts, sparse_layers
from ligermodels.archs.fields import renamed
from ligermodels.layers import NormConfig, QKNormConfig

QWEN2 = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN3 = {**QWEN2, "head_dim": 128}
QWEN3_MOE = {
    **QWEN2,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "router_aux_loss_coef": 0.001,
}
ATTRIBUTE_MAP = {"num_experts": "num_local_experts"}
"""Field -> name that transformers 5 may write instead, by its `attribute_map`."""


def windowed(fields: Fields) -> Fields:
    """`fields` without `sliding_window`, unless `use_sliding_window` is true."""
    return fields if fields.flag("use_sliding_window", False) else fields.replaced(sliding_window=None)


def _windows(fields: Fields) -> list[int | None]:
    fields = windowed(fields)
    first = fields.size("max_window_layers", zero=True)
    return fields.windows(lambda layer: layer >= first and fields.config["sliding_window"] is not None)


def _qk_norm(fields: Fields) -> QKNormConfig:
    return QKNormConfig(NormConfig(fields.number("rms_norm_eps", negative=False)))


def qwen2(config: Config) -> DecoderConfig:
    """The composed config of a `Qwen2Config` dict: q, k and v have biases, the output projection has none."""
    fields = Fields(config, QWEN2)
    windows = _windows(fields)
    return decoder(fields, attention=lambda layer, common: {"bias": True, "window": windows[layer]})


def qwen3(config: Config) -> DecoderConfig:
    """The composed config of a `Qwen3Config` dict."""
    fields = Fields(config, QWEN3)
    windows = _windows(fields)
    bias = fields.flag("attention_bias", False)
    own = {"bias": bias, "o_bias": bias, "qk_norm": _qk_norm(fields)}
    return decoder(fields, attention=lambda layer, common: {**own, "window": windows[layer]})


def qwen3_moe(config: Config) -> DecoderConfig:
    """The composed config of a `Qwen3MoeConfig` dict: some layers are mixtures, the others are dense."""
    fields = Fields(renamed(config, "num_experts", ATTRIBUTE_MAP["num_experts"]), QWEN3_MOE)
    bias = fields.flag("attention_bias", False)
    own = {"bias": bias, "o_bias": bias, "qk_norm": _qk_norm(fields)}
    fields.choices("use_qk_norm", True, default=True)
    own["window"] = windowed(fields).optional_size("sliding_window")
    coef = fields.router_aux_loss_coef()
    return decoder(fields, attention=lambda layer, common: own, mlp=sparse_layers(fields), router_aux_loss_coef=coef)


FAMILIES = (
    Family("qwen2", qwen2),
    Family("qwen3", qwen3),
    Family("qwen3_moe", qwen3_moe, expert_layouts(), attribute_map=ATTRIBUTE_MAP),
)
