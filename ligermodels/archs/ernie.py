"""ERNIE 4.5: Llama with the channels of a head rotated in pairs of neighbours; dense, or with mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import published_layouts
from ligermodels.archs.fields import name_of
from ligermodels.layers import MLPConfig, MoEConfig, RouterConfig

DEFAULTS = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
DEFAULT_THETA = 5e5


def ernie4_5(config: Config) -> DecoderConfig:
    """The composed config of an `Ernie4_5Config` dict."""
    fields = Fields(config, DEFAULTS)
    bias = fields.flag("use_bias", False)
    own = {"bias": bias, "o_bias": bias, "stored_as_pairs": True}
    return decoder(fields, default_theta=DEFAULT_THETA, attention=lambda layer, common: own, mlp_bias=bias)


ERNIE4_5_MOE = {
    **DEFAULTS,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": None,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
    "router_aux_loss_coef": 0.001,
}
EXPERTS, PER_TOKEN = ("moe_num_experts", "num_experts"), ("moe_k", "num_experts_per_tok")
"""Field -> its name in transformers' `attribute_map`."""


NAMES = {
    "experts.shared": "mlp.shared_experts.{part}_proj",
    "experts.selection_bias_row": "mlp.gate.moe_statics.e_score_correction_bias",
}
PUBLISHED = {**NAMES, "experts.selection_bias_row": "mlp.moe_statics.e_score_correction_bias"}


def ernie4_5_moe(config: Config) -> DecoderConfig:
    """The composed config of an `Ernie4_5_MoeConfig` dict; without its MTP layers."""
    fields = Fields(config, ERNIE4_5_MOE)
    fields.ignore(EXPERTS[1], PER_TOKEN[1])
    bias, layers = fields.flag("use_bias", False), fields.size("num_hidden_layers")
    router = RouterConfig(
        *fields.experts(name_of(config, *EXPERTS), name_of(config, *PER_TOKEN)),
        selection_bias=True,
        min_sum=fields.number("moe_norm_min", negative=False),
        float32_logits=True,
        float32_weight=True,
    )
    size, shared = fields.size("moe_intermediate_size"), fields.size("moe_num_shared_experts", zero=True)
    first, interval = fields.size("moe_layer_start_index", zero=True), fields.size("moe_layer_interval")
    last = fields.number("moe_layer_end_index")
    last = layers - 1 if last == -1 else last

    def mlp(layer: int, gated: MLPConfig) -> MLPConfig | MoEConfig:
        if (layer + 1) % interval or not first <= layer <= last:
            return gated
        beside = replace(gated, size=shared * size) if shared else None
        return MoEConfig(router, size, gated.activation, shared=beside)

    return decoder(
        fields,
        default_theta=DEFAULT_THETA,
        attention=lambda layer, common: {"bias": bias, "o_bias": bias, "stored_as_pairs": True},
        mlp_bias=bias,
        mlp=mlp,
        head={"bias": bias},
        router_aux_loss_coef=fields.router_aux_loss_coef(),
    )


FAMILIES = (
    Family("ernie4_5", ernie4_5, default_theta=DEFAULT_THETA),
    Family(
        "ernie4_5_moe",
        ernie4_5_moe,
        [{**layout, "ignored": (r"^model\.mtp",)} for layout in published_layouts(PUBLISHED, NAMES)],
        DEFAULT_THETA,
        attribute_map=dict((EXPERTS, PER_TOKEN)),
        architecture="Ernie4_5_MoeForCausalLM",
    ),
)
