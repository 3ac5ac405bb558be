"""Heads of layers that differ by type: layers of full attention beside those with a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligermodels.archs.fields import FULL, SLIDING, Fields
from ligermodels.convert.config_json import short
from ligermodels.errors import ConfigError

LAYERS = "layers of full attention, by global_head_dim, num_global_key_value_heads or per_layer_config"


def heads_by_type(fields: Fields, given: Mapping[str, Any], windows: list[int | None]) -> dict[str, tuple[int, int]]:
    """head_dim and key/value heads of the layers of each type, by the fields for full attention or by the
    `per_layer_config` that transformers writes in their place; `given` are the fields without defaults."""
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
    found = {SLIDING: own, FULL: Fields({**own.config, **full}, where=f"{fields.where}: {LAYERS}")}
    for each in found.values():
        if fields.size("num_attention_heads") % each.size("num_key_value_heads"):
            raise ConfigError(
                f"{each.where}: num_key_value_heads must divide num_attention_heads: {short(each.config)}"
            )
        if each.size("head_dim") % 2:
            raise ConfigError(f"{each.where}: head_dim must be even for rotary positions: {short(each.config)}")
    return {kind: (each.size("head_dim"), each.size("num_key_value_heads")) for kind, each in found.items()}


def _overrides(found: Any, layers: list[str]) -> Mapping[str, Any]:
    """What `per_layer_config` says of each of the `layers` of full attention; it must be the same of all. Its keys are
    the layers' numbers, which transformers writes with zeros in front."""
    by_layer = (
        {str(layer).lstrip("0") or "0": own for layer, own in found.items()} if isinstance(found, Mapping) else {}
    )
    own = by_layer.get(layers[0])
    wanted = {"head_dim", "num_key_value_heads"}
    if not isinstance(own, Mapping) or by_layer != dict.fromkeys(layers, own) or not {*own} <= wanted:
        raise ConfigError(
            "config.json: per_layer_config: must give each layer of full attention, and no other, the same head_dim "
            f"and num_key_value_heads, and nothing else; got {short(found)}"
        )
    return own
