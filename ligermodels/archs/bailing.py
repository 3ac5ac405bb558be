"""Ling 3.0: Kimi Delta Attention with bounded decays, and latent attention with a gate of each head in every last layer
of a group; mixtures of experts with shared experts except in the first few layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ligermodels.archs.compose import STACKED_EXPERTS, Config, DecoderConfig, Family, Fields
from ligermodels.archs.deepseek import fixed, latent_decoder, rotated_dim
from ligermodels.archs.experts import TRANSPOSED_EXPERTS, feed_forwards, grouped_router
from ligermodels.archs.fields import DENSE, FULL, name_of
from ligermodels.archs.glm_moe import NAMES
from ligermodels.archs.kimi_linear import without_published_names
from ligermodels.archs.qwen3_5 import LINEAR
from ligermodels.convert.rope_settings import rope_parameters
from ligermodels.errors import ConfigError
from ligermodels.layers import KimiDeltaAttentionConfig, LatentAttentionConfig, MLPConfig, MoEConfig
from ligermodels.models.mtp_format import NUMBERED_LAYERS, MTPFormat

BAILING_HYBRID = {
    "vocab_size": 157184,
    "hidden_size": 2560,
    "intermediate_size": 6144,
    "num_hidden_layers": 42,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 768,
    "n_shared_experts": 1,
    "num_experts": 512,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "short_conv_kernel_size": 4,
    "layer_group_size": 6,
    "kda_lower_bound": -5.0,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 156892,
}
THETA = 6e6
HEAD_DIM = 128
FIXED = {
    "rope_interleave": True,
    "no_kda_lora": True,
    "use_kda_lora": False,
    "gated_attention_proj_granularity_type": "head_wise",
    "linear_attention": "kda",
    "linear_silu": True,
    "group_norm_size": 1,
    "score_function": "sigmoid",
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
}
"""Fields of published configs of which one value is implemented, as in transformers, which reads none of them."""

LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
"""Fields with the limits of the routed and of the shared experts of each layer, 0 or null for no limit: the activation
silu(gate) is at most the limit, and up within plus and minus the limit. transformers does not read them; the formula is
`SwigluStepAndMul` in inclusionAI's vLLM and SGLang code of this model."""


def bailing_hybrid(config: Config) -> DecoderConfig:
    """The composed config of a `BailingHybridConfig` dict; without its MTP layers. With a `q_lora_rank`, which
    transformers does not read, queries have a latent too."""
    config = without_published_names(config)
    fields = _with_whole_rope(Fields(config, BAILING_HYBRID))
    for name, only in FIXED.items():
        fields = fields.replaced(**{name: fields.choices(name, only, default=only)})  # null stands for this value too
    fields.choices("hidden_act", "silu", default=None)  # also of the convolutions
    fields.reject_tied()
    fields.ignore("use_qk_norm")  # queries and keys of the delta rule are normalised, and those of attention are not
    rotated = rotated_dim(fields)
    fixed(fields, "rotary_dim", rotated, "qk_rope_head_dim")
    size = fields.size("moe_intermediate_size")
    fixed(fields, "moe_shared_expert_intermediate_size", size, "moe_intermediate_size")
    # transformers writes the fields of both sides, and reads those on the left.
    heads = fields.size("linear_num_heads", fields.size("num_attention_heads"))
    width = fields.size("linear_head_dim", fields.size("head_dim", HEAD_DIM))
    conv_width = fields.size("linear_conv_kernel_dim", fields.size("short_conv_kernel_size"))
    routed, shared = (_limits(fields, name) for name in LIMITS)
    mixers, feed_forward = _mixers(fields), feed_forwards(fields, first_dense=2, types_decide=True)
    delta = KimiDeltaAttentionConfig(
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=width,
        value_head_dim=width,
        conv_width=conv_width,
        norm_eps=fields.number("rms_norm_eps", negative=False),
        decay_bound=_decay_bound(fields),
    )
    composed = latent_decoder(
        fields,
        rope=fields.rope(rotated, fields.size("max_position_embeddings"), THETA),
        router=grouped_router(fields, name_of(config, "num_experts", "num_local_experts")),
        is_dense=lambda layer: feed_forward[layer] == DENSE,
        head_gate="sigmoid",
        mixer=lambda layer, latent: latent if mixers[layer] == FULL else delta,
        mlp=lambda layer, common: _limited(common, routed[layer], shared[layer]),
    )
    if FULL not in mixers or not any((*routed, *shared)):
        return composed
    last = composed.blocks[max(layer for layer, kind in enumerate(mixers) if kind == FULL)]
    return replace(composed, mtp_block=replace(last, mlp=_limited(last.mlp, None, None)))  # no limits in MTP layers


def _with_whole_rope(fields: Fields) -> Fields:
    """`fields` without the `partial_rotary_factor` of published configs: `qk_rope_head_dim` channels are rotated. Other
    ropes than the default, for which transformers reads it, keep it."""
    settings = rope_parameters(fields.config, THETA)
    if settings.get("rope_type") != "default":
        return fields
    settings = {name: value for name, value in settings.items() if name != "partial_rotary_factor"}
    return fields.replaced(rope_parameters=settings, rope_scaling=None, partial_rotary_factor=None)


def _limits(fields: Fields, name: str) -> list[float | None]:
    """The limit of each layer's experts in the list `name`, None for no limit. The list may go on for MTP layers,
    without limits."""
    limits, count = fields.config.get(name), fields.size("num_hidden_layers")
    if isinstance(limits, list):
        limits = [0.0 if limit is None else limit for limit in limits]
        fields = fields.replaced(**{name: limits if any(limits[count:]) else limits[:count]})
    return [limit or None for limit in fields.per_layer(name, lambda layer: 0.0)]


def _limited(mlp: Any, routed: float | None, shared: float | None) -> Any:
    """A mixture with the limits of its `routed` and `shared` experts, None for no limit; or a dense layer as it is."""
    if not isinstance(mlp, MoEConfig) or not isinstance(mlp.shared, MLPConfig):
        return mlp
    shared_experts = replace(mlp.shared, activation="clamped_silu" if shared else "silu", limit=shared)
    return replace(mlp, activation="clamped_silu" if routed else "silu", limit=routed, shared=shared_experts)


def _decay_bound(fields: Fields) -> float | None:
    """The lower bound of the logarithms of decays, or None without a `kda_safe_gate`."""
    bound = fields.number("kda_lower_bound")
    if not fields.flag("kda_safe_gate", True):
        return None
    if bound >= 0:
        raise ConfigError(f"{fields.where}: kda_lower_bound {bound} must be below 0")
    return bound


def _mixers(fields: Fields) -> list[str]:
    """The kind of each layer's mixer, by `layer_types` or by `layer_group_size`."""
    group, count = fields.size("layer_group_size"), fields.size("num_hidden_layers")
    if fields.config.get("layer_types") is None and count % group:
        raise ConfigError(
            f"{fields.where}: num_hidden_layers {count} is no multiple of layer_group_size {group}, and programs "
            "differ in the kind of the last layers; write layer_types"
        )
    return fields.kinds("layer_types", (LINEAR, FULL), lambda layer: LINEAR if (layer + 1) % group else FULL)


MIXERS = {**KimiDeltaAttentionConfig.NAMES, **LatentAttentionConfig.NAMES}
PUBLISHED = {
    **NAMES,
    **{part: name.replace("self_attn.", "attention.") for part, name in MIXERS.items()},
    "latent.o": "attention.dense",
    "delta.conv_parts": "attention.{part}_conv1d",
    "experts.selection_bias": "mlp.gate.expert_bias",
    "decoder.embed": "word_embeddings",
}
SAVED = {**PUBLISHED, "delta.out": "attention.dense"}
"""As transformers saves it."""
DECAY = ("delta.a", "delta.A_log", "delta.dt_bias")
MODULES = {**NAMES, **{part: MIXERS[part].replace(".", ".forget_gate.") for part in DECAY}}
"""Names of transformers' modules."""
FAMILIES = (
    Family(
        "bailing_hybrid",
        bailing_hybrid,
        [
            {"names": names}
            for names in (PUBLISHED, SAVED, {**MODULES, **STACKED_EXPERTS}, {**MODULES, **TRANSPOSED_EXPERTS})
        ],
        THETA,
        mtp=MTPFormat(
            fields=NUMBERED_LAYERS.fields,
            prefix=NUMBERED_LAYERS.prefix,
            names={**NUMBERED_LAYERS.names, "norm": "final_layernorm"},
            block=NUMBERED_LAYERS.block,
        ),
        module_layout={"names": {**MODULES, **STACKED_EXPERTS}},
    ),
)
