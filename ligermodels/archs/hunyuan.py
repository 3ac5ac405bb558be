"""HunYuan 1 (Tencent), dense and with experts: queries and keys are rotated, then normalised.

Hy3: mixtures of experts, chosen by sigmoid scores and a bias, with a shared expert."""

from __future__ import annotations

from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import expert_layouts, published_layouts, shared_and_routed
from ligermodels.archs.fields import DENSE, SPARSE, name_of
from ligermodels.convert.rope_settings import rope_parameters
from ligermodels.errors import ConfigError
from ligermodels.layers import MoEConfig, NormConfig, QKNormConfig, RouterConfig
from ligermodels.models.mtp_format import NUMBERED_LAYERS

HY_V3 = {
    "vocab_size": 120832,
    "hidden_size": 4096,
    "intermediate_size": 13312,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1536,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "router_scaling_factor": 2.826,
    "initializer_range": 0.006,
}
HY_V3_THETA = 11_158_840.0
HY_V3_FIXED = ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias")
"""Fields of published configs; only true is implemented, as in transformers."""
HY_V3_PUBLISHED = {
    "experts.router": "mlp.router.gate.weight",
    "experts.selection_bias": "mlp.expert_bias",
    "experts.shared": "mlp.shared_mlp.{part}_proj",
}
HY_V3_NAMES = {
    "experts.selection_bias": "mlp.e_score_correction_bias",
    "experts.shared": "mlp.shared_experts.{part}_proj",
}


def hy_v3(config: Config) -> DecoderConfig:
    """The composed config of a `HYV3Config` dict; without its MTP layer."""
    fields = Fields(config, HY_V3)
    # transformers adds the outputs of experts in float32 and rounds once, as a sum in any dtype does.
    fields.ignore("output_router_logits", "num_local_experts", "enable_moe_fp32_combine")
    for name in HY_V3_FIXED:
        fields.choices(name, True, default=True)
    bias = fields.flag("attention_bias", False)
    norm = QKNormConfig(NormConfig(fields.number("rms_norm_eps", negative=False)))
    own: dict[str, Any] = {"bias": bias, "o_bias": bias, "qk_norm": norm}
    first = fields.size("first_k_dense_replace", 1, zero=True)
    kinds = fields.kinds("mlp_layer_types", (DENSE, SPARSE), lambda layer: DENSE if layer < first else SPARSE)
    router = RouterConfig(
        *fields.experts(name_of(config, "num_experts", "num_local_experts")),
        scores="sigmoid",
        selection_bias=True,
        eps=1e-20,
        scale=fields.number("router_scaling_factor"),
        float32_logits=True,
        float32_weight=True,
    )
    return decoder(
        fields,
        attention=lambda layer, common: own,
        mlp_bias=fields.flag("mlp_bias", False),
        mlp=shared_and_routed(fields, router, lambda layer: kinds[layer] == DENSE, "num_shared_experts"),
        default_theta=HY_V3_THETA,
        num_mtp_layers=fields.size("num_nextn_predict_layers", 1, zero=True),
    )


HUNYUAN = {
    "vocab_size": 290943,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}
HUNYUAN_MOE = {**HUNYUAN, "num_experts": 1, "moe_topk": 1}
HUNYUAN_NAMES = {"attention.q_norm": "self_attn.query_layernorm", "attention.k_norm": "self_attn.key_layernorm"}
HUNYUAN_MOE_NAMES = {
    **HUNYUAN_NAMES,
    "experts.router": "mlp.gate.wg.weight",
    "experts.shared": "mlp.shared_mlp.{part}_proj",
}
HUNYUAN_FIXED: dict[str, tuple[Any, ...]] = {
    "use_qk_norm": (True,),
    "use_cla": (False,),
    "use_mla": (False,),
    "mlp_bias": (False,),
    "norm_topk_prob": (True,),
    "group_limited_greedy": (False,),
    "routed_scaling_factor": (1.0, False),
    "moe_layer_num_skipped": (0,),
    "use_rotary_pos_emb": (True,),
    "position_embedding_xdrope": (False,),
}
"""Field of published configs -> its only implemented values, as in transformers."""
HUNYUAN_UNUSED = (
    "kv_lora_rank",
    "q_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "cla_share_factor",
)
"""Fields of published configs that count with `use_mla` or `use_cla` only."""
OTHER_NAMES = {"moe_topk": "num_experts_per_tok", "num_experts": "num_local_experts"}


def hunyuan_v1_dense(config: Config) -> DecoderConfig:
    """The composed config of a `HunYuanDenseV1Config` dict."""
    fields, attention = _hunyuan(Fields(config, HUNYUAN))
    return decoder(fields, attention=lambda layer, common: attention)


def hunyuan_v1_moe(config: Config) -> DecoderConfig:
    """The composed config of a `HunYuanMoEV1Config` dict."""
    fields, attention = _hunyuan(Fields(config, HUNYUAN_MOE))
    fields.ignore("output_router_logits", *OTHER_NAMES.values())  # no loss uses router logits
    per_token, experts = (name_of(config, name, other) for name, other in OTHER_NAMES.items())
    fields.choices("use_mixed_mlp_moe", True, default=True)
    for name, only in (("num_shared_expert", 1), ("moe_intermediate_size", fields.size("intermediate_size"))):
        if fields.same(name, only) != only:
            raise ConfigError(f"{fields.where}: {name} must be {only}; transformers does not read it")
    chosen = fields.replaced(**{per_token: fields.same(per_token, 1)})
    router = RouterConfig(*chosen.experts(experts, per_token), float32_logits=True, float32_weight=True)
    return decoder(
        fields,
        attention=lambda layer, common: attention,
        mlp=lambda layer, gated: MoEConfig(router, gated.size, gated.activation, shared=gated, aux_loss=False),
    )


def _hunyuan(fields: Fields) -> tuple[Fields, dict[str, Any]]:
    """`fields` without the rotary setting "alpha", and the fields of all AttentionConfigs."""
    fields.ignore("eod_token_id", "sep_token_id")
    fields.ignore(*HUNYUAN_UNUSED)
    for name, implemented in HUNYUAN_FIXED.items():
        fields.choices(name, *implemented, default=implemented[0])
    head_dim = fields.size("head_dim", fields.size("hidden_size") // fields.size("num_attention_heads"))
    if (stated := fields.size("attention_head_dim", head_dim)) != head_dim:
        raise ConfigError(f"{fields.where}: attention_head_dim {stated} contradicts head_dim {head_dim}")
    bias = fields.flag("attention_bias", False)
    norm = QKNormConfig(NormConfig(fields.number("rms_norm_eps", negative=False)), after_rope=True)
    settings = rope_parameters(fields.config)
    own = Fields(settings, where=f"{fields.where}: rope_parameters")
    if own.config.get("rope_type") == "dynamic" and own.config.get("alpha"):
        # The rope of a context that is alpha times as long, for contexts of any length.
        if head_dim <= 2:
            raise ConfigError(f"{fields.where}: head_dim must be above 2 for a rope with alpha, got {head_dim}")
        stretch = own.number("alpha", positive=True) ** (head_dim / (head_dim - 2))
        settings = {"rope_type": "default", "rope_theta": own.number("rope_theta", positive=True) * stretch}
    else:
        settings = {name: value for name, value in settings.items() if name != "alpha"}
    return fields.replaced(rope_parameters=settings, rope_scaling=None), {"bias": bias, "o_bias": bias, "qk_norm": norm}


FAMILIES = (
    Family("hunyuan_v1_dense", hunyuan_v1_dense, [{"names": HUNYUAN_NAMES}], architecture="HunYuanDenseV1ForCausalLM"),
    Family(
        "hunyuan_v1_moe",
        hunyuan_v1_moe,
        expert_layouts(HUNYUAN_MOE_NAMES, stacked={"experts.router": HUNYUAN_MOE_NAMES["experts.router"]}),
        attribute_map=OTHER_NAMES,
        architecture="HunYuanMoEV1ForCausalLM",
    ),
    Family(
        "hy_v3",
        hy_v3,
        published_layouts(HY_V3_PUBLISHED, HY_V3_NAMES),
        HY_V3_THETA,
        attribute_map={"num_experts": "num_local_experts"},
        mtp=NUMBERED_LAYERS,
        architecture="HYV3ForCausalLM",
    ),
)
