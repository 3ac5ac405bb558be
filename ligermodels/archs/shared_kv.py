"""Layers that attend to the keys and values of an earlier layer, by `num_kv_shared_layers`."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace

from ligermodels.archs.fields import Fields
from ligermodels.errors import ConfigError
from ligermodels.layers import AttentionConfig, BlockConfig, SharedKVAttentionConfig


def kv_sources(fields: Fields, windows: list[int | None]) -> dict[int, int]:
    """Layer without keys and values -> the last layer of the same type that has them."""
    shared = fields.size("num_kv_shared_layers", 0, zero=True)
    first = len(windows) - shared
    sources = {}
    for layer in range(max(first, 0), len(windows)):
        before = [i for i in range(first) if (windows[i] is None) == (windows[layer] is None)]
        if not before:
            raise ConfigError(
                f"{fields.where}: num_kv_shared_layers {shared} of {len(windows)} layers leaves no layer with keys and "
                f"values that has the layer type of layer {layer}"
            )
        sources[layer] = before[-1]
    return sources


def with_shared_kv(block: BlockConfig, source: int | None) -> BlockConfig:
    """`block`, attending to the keys and values of layer `source`; unchanged if `source` is None."""
    if source is None:
        return block
    own = {field.name: getattr(block.mixer, field.name) for field in fields_of(AttentionConfig)}
    return replace(block, mixer=SharedKVAttentionConfig(**{**own, "values": None}, kv_from=source))
