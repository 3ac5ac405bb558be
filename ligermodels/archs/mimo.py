"""MiMo-V2-Flash (Xiaomi): windows with attention sinks in most layers, values narrower than keys, and experts."""

from __future__ import annotations

from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder, gate_activation
from ligermodels.archs.deepseek import fixed
from ligermodels.archs.experts import grouped_router, published_layouts
from ligermodels.archs.fields import DENSE, FULL, ONLY_NEW_ROPE, SLIDING, SPARSE, UNREAD_ROPE, renamed
from ligermodels.convert.json_values import first_value, is_object
from ligermodels.convert.rope_settings import rope_parameters
from ligermodels.errors import ConfigError
from ligermodels.layers import AttentionConfig, LayerConfig, MLPConfig, MoEConfig, ValueConfig

DEFAULTS = {
    "vocab_size": 152576,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 129,
    "attention_value_scale": 0.707,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_routed_experts": 256,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
}
"""The ropes of a config that names none."""
FIXED = {
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "n_shared_experts": None,
    "hybrid_block_size": None,
}
"""Field of published configs -> its only implemented value, as in transformers."""
OLDER_ROPE = {**ROPES[FULL], **dict.fromkeys(UNREAD_ROPE[1:3], None)}
"""Field of rope -> its only implemented value in a config without `rope_parameters`."""


def mimo_v2_flash(config: Config) -> DecoderConfig:
    """The composed config of a `MiMoV2FlashConfig` dict; without its MTP layers."""
    config = renamed(config, "n_routed_experts", "num_local_experts")
    fields = Fields(config, DEFAULTS)
    if (before := fields.optional_size("sliding_window_size")) is not None:  # the token itself comes on top
        fields = fields.replaced(sliding_window=before + 1)
    if config.get("routed_scaling_factor") is None:
        fields = fields.replaced(routed_scaling_factor=1.0)
    fields.ignore("output_router_logits", "attention_chunk_size")  # no loss uses router logits; no chunks are computed
    for name, only in FIXED.items():
        fields.choices(name, only, default=only)
    for name in UNREAD_ROPE if config.get("rope_parameters") is None else ():
        fields.choices(name, None, OLDER_ROPE[name], default=None)
    windows = fields.windows(lambda layer: layer > 0 and (layer + 1) % 6 != 0)
    kinds = fields.kinds("mlp_layer_types", (DENSE, SPARSE), lambda layer: SPARSE if layer else DENSE)
    _check_older_fields(fields, [window is not None for window in windows], [kind == SPARSE for kind in kinds])
    ropes = _with_rotated_part(fields).ropes(fields.size("head_dim"), ROPES, windows, UNREAD_ROPE, partial=True)
    kv_heads, bias = _kv_heads(fields, windows), fields.flag("attention_bias", False)
    values = ValueConfig(dim=_value_dim(fields), scale=fields.number("attention_value_scale", 1.0, negative=False))
    activation = gate_activation(fields)
    sparse = MoEConfig(grouped_router(fields), fields.size("moe_intermediate_size"), activation, aux_loss=False)

    def attention(layer: int, common: AttentionConfig) -> dict[str, Any]:
        window = windows[layer]
        own = {"num_kv_heads": kv_heads[layer], "window": window, "sinks": window is not None, "rope": ropes[layer]}
        return {**own, "bias": bias, "values": values}

    def mlp(layer: int, gated: MLPConfig) -> LayerConfig:
        return gated if kinds[layer] == DENSE else sparse

    return decoder(fields, attention=attention, mlp=mlp)


def _with_rotated_part(fields: Fields) -> Fields:
    """`fields` in which default ropes that state no `partial_rotary_factor` have the one of ROPES, as in transformers.
    Ropes of other types rotate whole heads there. A factor beside `rope_parameters` stays: it may be an error."""
    part, settings = "partial_rotary_factor", fields.config.get("rope_parameters")
    if not is_object(settings) or fields.config.get(part) is not None:
        return fields
    by_type = {
        name: {part: ROPES[FULL][part], **own}
        for name, own in settings.items()
        if is_object(own) and first_value(own.get("rope_type"), own.get("type"), "default") == "default"
    }
    return fields.replaced(rope_parameters={**settings, **by_type})


def _value_dim(fields: Fields) -> int:
    """v_head_dim; ConfigError if it is above head_dim."""
    dim, most = fields.size("v_head_dim"), fields.size("head_dim")
    if dim > most:
        raise ConfigError(f"{fields.where}: v_head_dim {dim} above head_dim {most} is not implemented")
    return dim


def _kv_heads(fields: Fields, windows: list[int | None]) -> list[int]:
    """Key/value heads of each layer, twice as many in those with a window; ConfigError unless they divide the heads."""
    heads, kv_heads = fields.size("num_attention_heads"), fields.size("num_key_value_heads")
    if any(windows) and heads % (2 * kv_heads):
        raise ConfigError(
            f"{fields.where}: layers with a sliding window have twice num_key_value_heads {kv_heads}, which does not "
            f"divide num_attention_heads {heads}"
        )
    return [kv_heads if window is None else 2 * kv_heads for window in windows]


def _check_older_fields(fields: Fields, slides: list[bool], sparse: list[bool]) -> None:
    """ConfigError if a field of published configs contradicts what transformers reads.

    Args:
        fields: the config.
        slides: whether each layer has a sliding window.
        sparse: whether each layer has experts.
    """
    for name, found in (("hybrid_layer_pattern", slides), ("moe_layer_freq", sparse)):
        if fields.flags(name, found.__getitem__) != found:
            other = "layer_types" if found is slides else "mlp_layer_types"
            raise ConfigError(f"{fields.where}: {name} contradicts {other}, or its default")
    fixed(fields, "swa_num_attention_heads", fields.size("num_attention_heads"), "num_attention_heads")
    fixed(fields, "swa_num_key_value_heads", 2 * fields.size("num_key_value_heads"), "num_key_value_heads")
    fixed(fields, "swa_head_dim", fields.size("head_dim"), "head_dim")
    fixed(fields, "swa_v_head_dim", fields.size("v_head_dim"), "v_head_dim")
    for name, value in (
        ("layernorm_epsilon", fields.number("rms_norm_eps")),
        ("swa_rope_theta", rope_parameters(fields.config, ROPES, SLIDING)["rope_theta"]),
    ):
        if (stated := fields.number(name, value)) != value:
            raise ConfigError(f"{fields.where}: {name} = {stated} contradicts the {value} that transformers reads")


LAYOUTS = [
    {**layout, "ignored": (r"^model\.mtp\.",)}
    for layout in published_layouts({"attention.sinks": "self_attn.attention_sink_bias"}, {})
]
FAMILIES = (
    Family(
        "mimo_v2_flash",
        mimo_v2_flash,
        LAYOUTS,
        default_theta=ROPES,
        attribute_map=ONLY_NEW_ROPE,
        architecture="MiMoV2FlashForCausalLM",
    ),
)
