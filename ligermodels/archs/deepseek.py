"""DeepSeek-V2, V3 and R1: latent attention; mixtures of experts with shared experts except in the first few layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import check_groups, expert_layouts, grouped_router, shared_and_routed
from ligermodels.archs.fields import name_of
from ligermodels.archs.glm_moe import ATTRIBUTE_MAP, NAMES
from ligermodels.convert.rope_settings import rope_parameters
from ligermodels.errors import ConfigError
from ligermodels.layers import (
    LatentAttentionConfig,
    LayerConfig,
    MLPConfig,
    MoEConfig,
    RopeConfig,
    RouterConfig,
    yarn_mscale,
)
from ligermodels.layers.query_scaling import QueryScaling
from ligermodels.models.mtp_format import NUMBERED_LAYERS

DEEPSEEK_V3 = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
}
KEY_DIM = "qk_nope_head_dim + qk_rope_head_dim"


DEEPSEEK_V2 = {
    **DEEPSEEK_V3,
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": None,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
}
GREEDY, IN_GROUPS = "greedy", "group_limited_greedy"


def deepseek_v2(config: Config) -> DecoderConfig:
    """The composed config of a `DeepseekV2Config` dict."""
    fields = Fields(config, DEEPSEEK_V2)
    rotated, context = rotated_dim(fields), fields.size("max_position_embeddings")
    fixed(fields, "head_dim", rotated, "qk_rope_head_dim")
    fields.choices("moe_layer_freq", 1, default=1)
    fields.choices("scoring_func", "softmax", default="softmax")
    fields = fields.replaced(rope_interleave=fields.choices("rope_interleave", True, default=True))  # null is true here
    # transformers does not read it, other programs do.
    fields.choices("norm_topk_prob", False, default=False)
    fields.ignore("num_local_experts", "num_experts")
    groups, best = 1, 1
    if fields.choices("topk_method", GREEDY, IN_GROUPS, default=GREEDY) == IN_GROUPS:
        groups, best = fields.size("n_group"), fields.size("topk_group")
    fields.ignore("n_group", "topk_group")
    count, chosen = fields.experts(name_of(config, "n_routed_experts", "num_experts"))
    check_groups(fields, "n_routed_experts", count, chosen, groups, best, least=1)
    router = RouterConfig(
        count,
        chosen,
        num_groups=groups,
        top_k_groups=best,
        scores_per_group=1,
        normalize=False,
        scale=fields.number("routed_scaling_factor"),
        float32_logits=True,
        float32_weight=True,
    )
    dense = fields.size("first_k_dense_replace", zero=True)
    return latent_decoder(
        fields,
        rope=fields.rope(rotated, context),
        router=router,
        is_dense=lambda layer: layer < dense,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def deepseek_v3(config: Config) -> DecoderConfig:
    """The composed config of a `DeepseekV3Config` dict; without its MTP layers."""
    fields = Fields(config, DEEPSEEK_V3)
    rotated, context = rotated_dim(fields), fields.size("max_position_embeddings")
    fixed(fields, "head_dim", rotated, "qk_rope_head_dim")
    fields.choices("moe_layer_freq", 1, default=1)
    dense = fields.size("first_k_dense_replace", zero=True)
    return latent_decoder(
        fields,
        rope=fields.rope(rotated, context),
        router=grouped_router(fields, name_of(config, "n_routed_experts", ATTRIBUTE_MAP["n_routed_experts"])),
        is_dense=lambda layer: layer < dense,
    )


def latent_decoder(
    fields: Fields,
    *,
    rope: RopeConfig | None,
    router: RouterConfig,
    is_dense: Callable[[int], bool],
    query_scaling: QueryScaling | None = None,
    mlp_bias: bool = False,
    head_gate: Literal["sigmoid", "softplus"] | None = None,
    mixer: Callable[[int, LatentAttentionConfig], LayerConfig] = lambda layer, latent: latent,
    mlp: Callable[[int, MLPConfig | MoEConfig], LayerConfig] = lambda layer, common: common,
) -> DecoderConfig:
    """The decoder of DeepSeek-V3 and of families with the same layers.

    Args:
        fields: the config, with the family's defaults.
        rope: rotary embedding of the rotated channels of each head; None for attention without positions.
        router: router of all mixtures.
        is_dense: function (layer number) -> whether its feed-forward layer is dense instead of a mixture.
        query_scaling: scaling of queries by position, or None.
        mlp_bias: whether feed-forward projections have biases.
        head_gate: see `LatentAttentionConfig`.
        mixer: function (layer number, config of latent attention) -> config of the layer's token mixer.
        mlp: function (layer number, config of its dense layer or mixture) -> config of the layer's feed-forward layer.

    Raises:
        ConfigError: a field is missing, bad or not implemented; the message names it.
    """
    fields.ignore("output_router_logits", *ATTRIBUTE_MAP.values())  # no loss uses router logits
    heads, rotated = fields.size("num_attention_heads"), rotated_dim(fields)
    fixed(fields, "num_key_value_heads", heads, "num_attention_heads")
    latent = LatentAttentionConfig(
        heads,
        plain_dim=fields.size("qk_nope_head_dim"),
        rotated_dim=rotated,
        value_dim=fields.size("v_head_dim"),
        kv_rank=fields.size("kv_lora_rank"),
        q_rank=fields.optional_size("q_lora_rank"),
        rope=rope,
        bias=fields.flag("attention_bias", False),
        stored_as_pairs=fields.flag("rope_interleave", False),
        query_scaling=query_scaling,
        head_gate=head_gate,
    )
    fixed(fields, "qk_head_dim", latent.key_dim, KEY_DIM)
    if rope is not None:
        latent = replace(latent, softmax_scale=_softmax_scale(fields, latent.key_dim))
    mtp = name_of(fields.config, "num_nextn_predict_layers", ATTRIBUTE_MAP["num_nextn_predict_layers"])
    common_mlp = shared_and_routed(fields, router, is_dense)
    return decoder(
        fields.replaced(head_dim=rotated),
        attention=lambda layer, common: {"rope": rope},
        mixer=lambda layer, common: mixer(layer, latent),
        mlp_bias=mlp_bias,
        mlp=lambda layer, gated: mlp(layer, common_mlp(layer, gated)),
        num_mtp_layers=fields.size(mtp, 0, zero=True),
    )


def rotated_dim(fields: Fields) -> int:
    """qk_rope_head_dim; ConfigError unless it is even."""
    dim = fields.size("qk_rope_head_dim")
    if dim % 2:
        raise ConfigError(f"{fields.where}: qk_rope_head_dim {dim} must be even for rotary positions")
    return dim


def fixed(fields: Fields, name: str, value: int, source: str) -> None:
    """ConfigError if the config has the field `name` with another value than the only possible `value`.

    Args:
        fields: the config.
        name: the field.
        value: the value that follows from other fields.
        source: these fields, for the message.
    """
    if (stated := fields.size(name, value)) != value:
        raise ConfigError(f"{fields.where}: {name} = {stated} is not implemented; by {source} it must be {value}")


def _softmax_scale(fields: Fields, key_dim: int) -> float | None:
    """key_dim ** -0.5 times the square of YaRN's factor, if the rope has a `mscale_all_dim`; otherwise None.

    As in transformers, this holds for every rope type except the default.
    """
    settings = Fields(rope_parameters(fields.config), where=f"{fields.where}: rope_parameters")
    mscale = settings.number("mscale_all_dim", 0.0)
    if settings.config["rope_type"] == "default" or not mscale:
        return None
    return float(key_dim**-0.5 * yarn_mscale(settings.number("factor", positive=True), mscale) ** 2)


FAMILIES = (
    Family("deepseek_v2", deepseek_v2, expert_layouts(NAMES), attribute_map={"n_routed_experts": "num_experts"}),
    Family(
        "deepseek_v3",
        deepseek_v3,
        expert_layouts(NAMES),
        attribute_map=ATTRIBUTE_MAP,
        mtp=NUMBERED_LAYERS,
        added_fields={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
)
