"""Mellum 2: Qwen 3's mixture of experts with windows, and another rope where there is one."""

from __future__ import annotations

from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import expert_layouts
from ligermodels.archs.fields import DENSE, FULL, SLIDING, SPARSE, renamed
from ligermodels.layers import MLPConfig, MoEConfig, NormConfig, QKNormConfig, RouterConfig

DEFAULTS = {
    "vocab_size": 98304,
    "hidden_size": 2304,
    "intermediate_size": 7168,
    "num_hidden_layers": 28,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 1024,
    "moe_intermediate_size": 896,
    "num_experts_per_tok": 8,
    "num_experts": 64,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}
THETAS = {SLIDING: 1e4, FULL: 5e5}
OLD_ROPE = ("rope_theta", "rope_scaling", "rope_local_base_freq")
"""Fields of transformers 4, which has no Mellum; exports leave them out."""


def mellum(config: Config) -> DecoderConfig:
    """The composed config of a `MellumConfig` dict. Layers that predict further tokens are not loaded."""
    fields = Fields(renamed(config, "num_experts", "num_local_experts"), DEFAULTS)
    bias = fields.flag("attention_bias", False)
    windows = fields.windows(lambda layer: False)
    ropes = fields.ropes(fields.size("head_dim"), THETAS, windows, unread=OLD_ROPE)
    norm = QKNormConfig(NormConfig(fields.number("rms_norm_eps", negative=False)))
    kinds = fields.kinds("mlp_layer_types", (DENSE, SPARSE), lambda layer: SPARSE)
    router = RouterConfig(*fields.experts("num_experts"), normalize=fields.flag("norm_topk_prob", True))
    size = fields.size("moe_intermediate_size")

    def attention(layer: int, common: Any) -> dict[str, Any]:
        own = {"window": windows[layer], "rope": ropes[layer]}
        return {"bias": bias, "o_bias": bias, "qk_norm": norm, **own}

    def mlp(layer: int, gated: MLPConfig) -> MLPConfig | MoEConfig:
        return gated if kinds[layer] == DENSE else MoEConfig(router, size, gated.activation)

    return decoder(fields, attention=attention, mlp=mlp, router_aux_loss_coef=fields.router_aux_loss_coef())


FAMILIES = (
    Family(
        "mellum",
        mellum,
        [{**layout, "ignored": (r"^mtp\.",)} for layout in expert_layouts()],
        THETAS,
        attribute_map={"num_experts": "num_local_experts", **dict.fromkeys(OLD_ROPE)},
    ),
)
