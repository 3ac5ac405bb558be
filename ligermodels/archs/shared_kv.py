"""Layers that attend to the keys and values of an earlier one, by `num_kv_shared_layers`."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace

from ligermodels.archs.fields import Fields
from ligermodels.errors import ConfigError
from ligermodels.layers import AttentionConfig, BlockConfig, SharedKVAttentionConfig


def kv_sources(fields: Fields, windows: list[int | None]) -> dict[int, int]:
    """By the number of each layer that has no keys and values, the last one of its type that has them."""
    shared = fields.size("num_kv_shared_layers", 0, zero=True)
    first = len(windows) - shared
    found = {}
    for layer in range(max(first, 0), len(windows)):
        before = [i for i in range(first) if (windows[i] is None) == (windows[layer] is None)]
        if not before:
            raise ConfigError(
                f"{fields.where}: num_kv_shared_layers {shared} of {len(windows)} layers leaves none that is by "
                f"layer_types of the type of layer {layer} and has keys and values"
            )
        found[layer] = before[-1]
    return found


def with_shared_kv(block: BlockConfig, source: int | None) -> BlockConfig:
    """`block` with the keys and values of layer `source`, if it is given."""
    if source is None:
        return block
    own = {each.name: getattr(block.mixer, each.name) for each in fields_of(AttentionConfig)}
    return replace(block, mixer=SharedKVAttentionConfig(**{**own, "values": None}, kv_from=source))
