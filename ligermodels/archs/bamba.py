"""Bamba (IBM, Princeton and UIUC): Llama with Mamba2 in place of attention in most layers."""

from __future__ import annotations

import math

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.convert.json_values import is_number
from ligermodels.errors import ConfigError, short
from ligermodels.layers import AttentionConfig, LayerConfig, Mamba2Config

LINEAR = "linear_attention"
MAMBA = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
INFINITY = (math.inf, "Infinity", {"__float__": "Infinity"})
BAMBA = {
    **MAMBA,
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}
BAMBA_NAMES = {
    **{f"mlp.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    "norm.mlp_norm": "pre_ff_layernorm",
    "decoder.norm": "final_layernorm",
}


def mamba2_layer(fields: Fields, inner_size: str | None = None) -> Mamba2Config:
    """The Mamba2 layer that the fields `mamba_*` of a config describe; its chunk size changes no result.

    Args:
        fields: the config.
        inner_size: name of the field with the channels of all heads, if the family has one; without a value of it they
            are mamba_expand * hidden_size.

    Raises:
        ConfigError: a field is bad or not implemented; the message names it.
    """
    fields.ignore("mamba_chunk_size")
    fields.choices("hidden_act", "silu", "swish", default=None)  # also of the convolution
    stated_inner = None if inner_size is None else fields.optional_size(inner_size)
    inner = stated_inner or fields.size("mamba_expand") * fields.size("hidden_size")
    heads, groups = fields.size("mamba_n_heads"), fields.size("mamba_n_groups")
    stated = fields.config.get("mamba_d_head")
    head_dim = inner // heads if stated in (None, "auto") else fields.size("mamba_d_head")
    if heads * head_dim != inner:
        raise ConfigError(
            f"{fields.where}: mamba_n_heads {heads} heads of mamba_d_head {head_dim} channels do not make "
            f"{inner_size if stated_inner else 'mamba_expand * hidden_size'} = {inner}"
        )
    if heads % groups:
        raise ConfigError(f"{fields.where}: mamba_n_groups {groups} does not divide mamba_n_heads {heads}")
    bias = fields.flag("mamba_proj_bias", False)
    return Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        state_size=fields.size("mamba_d_state"),
        num_groups=groups,
        conv_width=fields.size("mamba_d_conv"),
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=bias,
        out_bias=bias,
        time_step_limit=time_step_limit(fields),
        norm_eps=fields.number("rms_norm_eps", negative=False),
    )


def time_step_limit(fields: Fields, name: str = "time_step_limit") -> tuple[float, float]:
    """The smallest and the largest step size, from the field `name`. JSON has infinity as Infinity, or as transformers
    writes it.

    ConfigError, naming the field, unless they are two numbers that rise from 0 on.
    """
    fields.ignore(name)
    value = fields.config.get(name)
    limit = [math.inf if end in INFINITY else end for end in value] if isinstance(value, list | tuple) else value
    if limit is None:
        return 0.0, math.inf
    if isinstance(limit, list) and len(limit) == 2 and all(map(is_number, limit)) and 0 <= limit[0] <= limit[1]:
        return float(limit[0]), float(limit[1])
    raise ConfigError(
        f"{fields.where}: field {name!r} must be two numbers, the first from 0 up to the second, got {short(value)}"
    )


def bamba(config: Config) -> DecoderConfig:
    """The composed config of a `BambaConfig` dict."""
    fields = Fields({**config, "partial_rotary_factor": 0.5}, BAMBA)
    Fields(config).choices("partial_rotary_factor", 0.5, default=0.5)  # transformers has no other
    fields.ignore("num_logits_to_keep")
    fields.choices("z_loss_coefficient", 0, default=0)
    full = fields.layers("attn_layer_indices")
    mamba, bias = mamba2_layer(fields), fields.flag("attention_bias", False)

    def mixer(layer: int, attention: AttentionConfig) -> LayerConfig:
        return attention if layer in full else mamba

    return decoder(
        fields,
        partial_rotary=True,
        attention=lambda layer, common: {"bias": bias, "o_bias": bias},
        mixer=mixer,
        mlp_bias=fields.flag("mlp_bias", False),
    )


FAMILIES = (Family("bamba", bamba, ({"names": BAMBA_NAMES},)),)
