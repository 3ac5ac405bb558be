"""Numbers and sizes of heads that differ between full-attention layers and sliding-window layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligermodels.archs.fields import FULL, SLIDING, Fields
from ligermodels.convert.json_values import as_object, is_object
from ligermodels.errors import ConfigError, short

LAYERS = "layers of full attention, by global_head_dim, num_global_key_value_heads or per_layer_config"


def heads_by_type(fields: Fields, given: Mapping[str, Any], windows: list[int | None]) -> dict[str, tuple[int, int]]:
    """Layer type -> head_dim and key/value heads of its layers.

    Args:
        fields: the config.
        given: its fields without defaults. Full-attention layers have fields of their own; transformers may write
            `per_layer_config` instead.
        windows: each layer's sliding window, or None.
    """
    own = Fields({name: fields.size(name) for name in ("head_dim", "num_key_value_heads")})
    full: Mapping[str, Any] = {"head_dim": fields.size("global_head_dim")}
    kv_heads = fields.optional_size("num_global_key_value_heads")
    if fields.flag("attention_k_eq_v", False) and kv_heads is not None:
        full = {**full, "num_key_value_heads": kv_heads}
    if "per_layer_config" in given:
        full = _overrides(given["per_layer_config"], [str(i) for i, window in enumerate(windows) if window is None])
        fields.ignore("per_layer_config")
        for name, other in (("head_dim", "global_head_dim"), ("num_key_value_heads", "num_global_key_value_heads")):
            if given.get(other) not in (None, full.get(name)) and (name == "head_dim" or name in full):
                raise ConfigError(f"{fields.where}: {other} = {short(given[other])} contradicts per_layer_config")
    by_type = {SLIDING: own, FULL: Fields({**own.config, **full}, where=f"{fields.where}: {LAYERS}")}
    for layers in by_type.values():
        if fields.size("num_attention_heads") % layers.size("num_key_value_heads"):
            raise ConfigError(
                f"{layers.where}: num_key_value_heads must divide num_attention_heads: {short(layers.config)}"
            )
        if layers.size("head_dim") % 2:
            raise ConfigError(f"{layers.where}: head_dim must be even for rotary positions: {short(layers.config)}")
    return {name: (layers.size("head_dim"), layers.size("num_key_value_heads")) for name, layers in by_type.items()}


def _overrides(per_layer_config: Any, layers: list[str]) -> Mapping[str, Any]:
    """The fields that `per_layer_config` has for the full-attention `layers`; they must be equal for all of them.

    Its keys are layer numbers, to which transformers adds leading zeros.
    """
    by_layer = {str(layer).lstrip("0") or "0": own for layer, own in as_object(per_layer_config).items()}
    own = by_layer.get(layers[0])
    known = {"head_dim", "num_key_value_heads"}
    if not is_object(own) or by_layer != dict.fromkeys(layers, own) or not {*own} <= known:
        raise ConfigError(
            "config.json: per_layer_config: must have the same head_dim and num_key_value_heads for each layer "
            f"of full attention, and no other layers or fields; got {short(per_layer_config)}"
        )
    return own
