"""LFM2 (Liquid AI): gated short convolutions and some layers of attention; dense or with experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import expert_layouts
from ligermodels.archs.fields import FULL, renamed
from ligermodels.errors import ConfigError
from ligermodels.layers import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    MoEConfig,
    NormConfig,
    QKNormConfig,
    RouterConfig,
    ShortConvConfig,
)
from ligermodels.models.untie import ALSO_TIED, TIED

CONV = "conv"
COMMON = {
    "vocab_size": 65536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
}
LFM2 = {
    **COMMON,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": None,
}
LFM2_MOE = {
    **COMMON,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts_per_tok": 4,
    "num_experts": 32,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
DEFAULT_THETA = 1e6
OTHER_WIDTHS = ("block_dim", "conv_dim", "conv_dim_out")
"""Fields of published configs that transformers takes to equal hidden_size."""
UNUSED = (
    "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init", "block_norm_eps",
    "output_router_logits",
)  # fmt: skip
"""Fields that transformers does not read: initial values, an epsilon of no norm, and logits that no loss uses."""


def lfm2(config: Config) -> DecoderConfig:
    """The composed config of an `Lfm2Config` dict."""
    fields = Fields(renamed(_tied(config), "intermediate_size", "block_ff_dim"), LFM2)
    fields.choices("block_use_swiglu", True, default=True)
    attending = fields.layers("full_attn_idxs")
    if fields.config["full_attn_idxs"] is None:
        attending = frozenset(range(fields.size("num_hidden_layers")))
    kinds = fields.kinds("layer_types", (CONV, FULL), lambda layer: FULL if layer in attending else CONV)
    size = _adjusted_size(fields)
    return _hybrid(fields, kinds, mlp=lambda layer, gated: replace(gated, size=size))


def lfm2_moe(config: Config) -> DecoderConfig:
    """The composed config of an `Lfm2MoeConfig` dict."""
    fields = Fields(_tied(config), LFM2_MOE)
    if fields.config.get("layer_types") is None:
        raise ConfigError(f"{fields.where}: field 'layer_types' is missing; list 'conv' or 'full_attention' per layer")
    kinds = fields.kinds("layer_types", (CONV, FULL), lambda layer: FULL)
    dense, size = fields.size("num_dense_layers", zero=True), fields.size("moe_intermediate_size")
    router = RouterConfig(
        *fields.experts("num_experts"),
        scores="sigmoid",
        selection_bias=fields.flag("use_expert_bias", True),
        normalize=fields.flag("norm_topk_prob", True),
        eps=1e-6,
        scale=fields.number("routed_scaling_factor"),
    )
    experts = MoEConfig(router, size, aux_loss=False)

    def mlp(layer: int, gated: MLPConfig) -> LayerConfig:
        return gated if layer < dense else experts

    return _hybrid(fields, kinds, mlp=mlp)


def _tied(config: Config) -> Config:
    return renamed(config, TIED, ALSO_TIED)


def _adjusted_size(fields: Fields) -> int:
    """Intermediate channels: with `block_auto_adjust_ff_dim` 2/3 of `intermediate_size`, and unless the multiplier is
    null, this times the multiplier, rounded up to `block_multiple_of`."""
    size = fields.size("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        fields.ignore("block_multiple_of", "block_ffn_dim_multiplier")
        return size
    size = int(2 * size / 3)
    if (multiplier := fields.optional_number("block_ffn_dim_multiplier")) is not None:
        multiple = fields.size("block_multiple_of")
        size = -(-int(multiplier * size) // multiple) * multiple
    if size == 0:
        raise ConfigError(f"{fields.where}: intermediate_size and block_ffn_dim_multiplier give 0 channels")
    return size


def _hybrid(fields: Fields, kinds: list[str], **more: Any) -> DecoderConfig:
    """The decoder of both families; `more` are further arguments of `compose.decoder`."""
    hidden = fields.size("hidden_size")
    for name in OTHER_WIDTHS:
        fields.repeats(name, "hidden_size")
    fields.repeats("num_heads", "num_attention_heads")
    fields.choices("use_pos_enc", True, default=True)
    fields.choices("hidden_act", "silu", default=None)
    fields.ignore(*UNUSED)
    norm = NormConfig(fields.number("norm_eps", negative=False))
    conv = ShortConvConfig(hidden, fields.size("conv_L_cache"), fields.flag("conv_bias", False))
    attention = {"qk_norm": QKNormConfig(norm)}

    def mixer(layer: int, full: AttentionConfig) -> LayerConfig:
        return full if kinds[layer] == FULL else conv

    return decoder(
        fields, norm=norm, attention=lambda layer, common: attention, mixer=mixer, default_theta=DEFAULT_THETA, **more
    )


NAMES = {
    "norm.mixer_norm": "operator_norm",
    "norm.mlp_norm": "ffn_norm",
    "decoder.norm": "embedding_norm",
    "attention.o": "self_attn.out_proj",
    "attention.q_norm": "self_attn.q_layernorm",
    "attention.k_norm": "self_attn.k_layernorm",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
}
MOE_NAMES = {
    **NAMES,
    "experts.router": "feed_forward.gate.weight",
    "experts.selection_bias": "feed_forward.expert_bias",
    "experts.gate": "feed_forward.experts.{expert}.w1.weight",
    "experts.up": "feed_forward.experts.{expert}.w3.weight",
    "experts.down": "feed_forward.experts.{expert}.w2.weight",
}
MOE_LAYOUTS = [
    {"names": {part: name.replace("mlp.", "feed_forward.") for part, name in layout["names"].items()}}
    for layout in expert_layouts(MOE_NAMES)
]

family = partial(Family, default_theta=DEFAULT_THETA)
FAMILIES = (family("lfm2", lfm2, [{"names": NAMES}]), family("lfm2_moe", lfm2_moe, MOE_LAYOUTS))
