"""Nemotron-H (NVIDIA; Nemotron Nano 2, Nemotron 3): each block is Mamba2, attention without positions, a feed-forward
layer with squared ReLU, or a mixture of such experts, which may be narrower than the hidden states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ligermodels.archs.bamba import LINEAR, time_step_limit
from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import grouped_router
from ligermodels.archs.fields import FULL, name_of, renamed
from ligermodels.convert.json_values import is_list_of
from ligermodels.errors import ConfigError, short
from ligermodels.layers import AttentionConfig, BlockConfig, LayerConfig, Mamba2Config, MoEConfig, NormConfig
from ligermodels.layers.ungated_mlp import UngatedMLPConfig
from ligermodels.models.mtp_format import PAIRS_OF_LAYERS

MLP, MOE = "mlp", "moe"
LISTS_OF_KINDS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
"""Fields with the kind of each layer; the last one is a string."""
LISTS_OF_MTP_KINDS = ("mtp_layers_block_type", "mtp_hybrid_override_pattern")
"""Fields with the kinds of the layers that are one MTP layer together; the last one is a string."""
CHARACTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
OTHER_NAMES = {**CHARACTERS, **{kind: kind for kind in CHARACTERS.values()}, "mamba": LINEAR, "attention": FULL}
DEFAULTS = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "intermediate_size": 21504,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "time_step_min": 0.001,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "layer_norm_epsilon": 1e-5,
    "pad_token_id": 0,
}
UNUSED = (
    "chunk_size", "expand", "use_mamba_kernels", "mamba_ssm_cache_dtype", "time_step_max", "time_step_floor",
    "rescale_prenorm_residual", "moe_shared_expert_overlap", "output_router_logits", "norm_eps",
    "mamba_chunk_size", "mamba_expand", "mamba_dt_max", "mamba_dt_init_floor",
)  # fmt: skip
"""Fields that change no result: of kernels, of initial values, logits that no loss uses, an epsilon of no norm."""
OTHER_FIELDS = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "time_step_min": "mamba_dt_min",
}
"""Field -> its other name, which transformers reads too."""
FIXED = {
    "attention_bias": False,
    "residual_in_fp32": False,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "n_shared_experts": 1,
}
"""Field -> its only implemented value; transformers computes with it whatever the config says."""


def nemotron_h(config: Config) -> DecoderConfig:
    """The composed config of a `NemotronHConfig` dict."""
    kinds, mtp_kinds = _kinds(config), _mtp_kinds(config)
    names = {name: name_of(config, name, other) for name, other in OTHER_FIELDS.items()}
    config = renamed(config, "n_routed_experts", "num_local_experts")
    fields = Fields({**config, "num_hidden_layers": len(kinds)}, DEFAULTS)
    fields.ignore(*LISTS_OF_KINDS, *LISTS_OF_MTP_KINDS, *UNUSED, *OTHER_FIELDS.values())
    for name, only in FIXED.items():
        fields.choices(name, only, default=only)
    fields.reject_tied()
    head_dim, eps = fields.size("head_dim"), fields.number("layer_norm_epsilon", negative=False)
    fields.choices("attention_head_dim", head_dim, default=head_dim)
    mamba = _mamba(fields, eps, names)
    has_experts = MOE in kinds or (MOE in mtp_kinds and PAIRS_OF_LAYERS.count(config) > 0)
    feed_forward = {MLP: _mlp(fields, "intermediate_size"), MOE: _mixture(fields) if has_experts else None}

    def mixer(layer: int, attention: AttentionConfig) -> LayerConfig | None:
        return {LINEAR: mamba, FULL: attention}.get(kinds[layer])

    composed = decoder(
        fields,
        norm=NormConfig(eps, casting_mode="gemma"),
        attention=lambda layer, common: {"rope": None},
        feed_forward=lambda layer: feed_forward.get(kinds[layer]),
        mixer=mixer,
    )
    return replace(composed, mtp_block=_mtp_block(composed, mtp_kinds, feed_forward))


def _mtp_block(
    composed: DecoderConfig, kinds: list[str], feed_forward: Mapping[str, LayerConfig | None]
) -> BlockConfig | None:
    """The block of an MTP layer, of attention and a feed-forward layer; None for other `kinds`, and for models without
    such layers."""
    attention = [block for block in composed.blocks if isinstance(block.mixer, AttentionConfig)]
    mlp = feed_forward.get(kinds[1]) if len(kinds) == 2 and kinds[0] == FULL else None
    return replace(attention[-1], mlp=mlp) if attention and mlp is not None else None


def _kinds(config: Config) -> list[str]:
    """The kind of each layer, from the fields LISTS_OF_KINDS.

    ConfigError, naming the field, for unknown kinds, or if these fields or `num_hidden_layers` contradict.
    """
    found = _listed_kinds(config, LISTS_OF_KINDS, [LINEAR, MOE, FULL, MLP])
    if (count := config.get("num_hidden_layers")) not in (None, len(found)):
        raise ConfigError(
            f"config.json: num_hidden_layers = {short(count)} contradicts the {len(found)} layers of "
            f"{next((name for name in LISTS_OF_KINDS if config.get(name)), 'the default layers_block_type')}; remove it"
        )
    return found


def _mtp_kinds(config: Config) -> list[str]:
    """The kinds of the layers of an MTP layer, from the fields LISTS_OF_MTP_KINDS. As in transformers, its default in
    the first of them gives way to the other."""
    if config.get(LISTS_OF_MTP_KINDS[1]) is not None:
        first = _listed_kinds(config, LISTS_OF_MTP_KINDS[:1], [FULL, MOE])
        config = config if first != [FULL, MOE] else {**config, LISTS_OF_MTP_KINDS[0]: None}
    return _listed_kinds(config, LISTS_OF_MTP_KINDS, [FULL, MOE])


def _listed_kinds(config: Config, names: tuple[str, ...], default: list[str]) -> list[str]:
    """The kinds of layers in the fields `names`, of which a pattern is a string of one character per layer;
    `default` without them.

    ConfigError, naming the field, for unknown kinds, or if the fields contradict each other.
    """
    stated = {name: config[name] for name in names if config.get(name) is not None}
    found: list[str] = []
    for name, value in (stated or {names[0]: default}).items():
        kinds = list(value) if isinstance(value, str) and name.endswith("_pattern") else value
        if not kinds or not is_list_of(kinds, lambda kind: isinstance(kind, str) and kind in OTHER_NAMES):
            known = " ".join(CHARACTERS) if kinds is not value else ", ".join(CHARACTERS.values())
            raise ConfigError(f"config.json: field {name!r} must have one of {known} per layer, got {short(value)}")
        kinds = [OTHER_NAMES[kind] for kind in kinds]
        if found and kinds != found:
            raise ConfigError(f"config.json: {' and '.join(stated)} contradict each other; remove one")
        found = kinds
    return found


def _mamba(fields: Fields, eps: float, names: Mapping[str, str]) -> Mamba2Config:
    """The Mamba2 layer. Step sizes have a lower bound, `time_step_min`, as in transformers' prefill.

    Args:
        fields: the config.
        eps: epsilon of the norm.
        names: field of OTHER_FIELDS -> the name that the config has for it.
    """
    bias = fields.flag("use_bias", False)
    if fields.flag("mamba_proj_bias", False) and not bias:
        raise ConfigError(f"{fields.where}: mamba_proj_bias = True is not implemented; use_bias gives these biases")
    for name in ("time_step_limit", "mamba_dt_limit"):  # transformers reads both, and uses neither
        if time_step_limit(fields, name) != (0.0, math.inf):
            raise ConfigError(f"{fields.where}: {name} is not implemented; the lower bound is time_step_min")
    heads, groups = fields.size("mamba_num_heads"), fields.size(names["n_groups"])
    if heads % groups:
        raise ConfigError(f"{fields.where}: {names['n_groups']} {groups} does not divide mamba_num_heads {heads}")
    return Mamba2Config(
        num_heads=heads,
        head_dim=fields.size("mamba_head_dim"),
        state_size=fields.size("ssm_state_size"),
        num_groups=groups,
        conv_width=fields.size(names["conv_kernel"]),
        conv_bias=fields.flag(names["use_conv_bias"], True),
        bias=bias,
        out_bias=bias,
        time_step_limit=(fields.number(names["time_step_min"], negative=False), math.inf),
        norm_eps=eps,
    )


def _mlp(fields: Fields, size: str) -> UngatedMLPConfig:
    return UngatedMLPConfig(fields.size(size), fields.flag("mlp_bias", False))


def _mixture(fields: Fields) -> MoEConfig:
    """Experts without a gate; with `moe_latent_size` between two projections."""
    latent = fields.optional_size("moe_latent_size")
    return MoEConfig(
        grouped_router(fields),
        fields.size("moe_intermediate_size"),
        activation="relu2",
        latent_size=latent,
        latent_bias=latent is not None and fields.flag("mlp_bias", False),
        shared=_mlp(fields, "moe_shared_expert_intermediate_size"),
        aux_loss=False,
    )


PARTS = {**AttentionConfig.NAMES, **Mamba2Config.NAMES, **UngatedMLPConfig.NAMES, **MoEConfig.NAMES}
NAMES = {
    **{part: f"mixer.{name.partition('.')[2]}" for part, name in PARTS.items()},
    "experts.shared": "mixer.shared_experts.{part}_proj",
    "norm.mixer_norm": "norm",
    "norm.mlp_norm": "norm",
    "decoder.embed": "embeddings",
    "decoder.norm": "norm_f",
}
STACKED = {**NAMES, "experts.gate_up": "mixer.experts.up_proj", "experts.down": "mixer.experts.down_proj"}
LAYOUTS = [
    {"prefix": prefix, "names": names}
    for prefix, names in (("backbone", NAMES), ("model", STACKED), ("model", NAMES), ("backbone", STACKED))
]
"""As published, then as the modules of transformers."""
FAMILIES = (Family("nemotron_h", nemotron_h, LAYOUTS, mtp=PAIRS_OF_LAYERS, architecture="NemotronHForCausalLM"),)
