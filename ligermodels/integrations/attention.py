"""Attention on the projections and norms of a transformers layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.integrations.modules import OnModules, native_of, part, part_named, projected
from ligermodels.layers import AttentionConfig, ForwardContext
from ligermodels.layers.attention import Attention, Tables
from ligermodels.layers.kv_cache import LayerKV
from ligermodels.layers.rope import pairs_to_halves
from ligermodels.layers.shared_kv_attention import SharedKVAttention


class HFAttention(OnModules, Attention):
    """`Attention` on a transformers attention module, with separate projections and norms of q, k and v.

    Their results stay apart: the order of the native fused projection would take a copy.
    """

    config: AttentionConfig
    o = part_named("attention.o")

    @property
    def gate(self) -> Any:  # type: ignore[override]
        """The linear layer of the heads' gates, or None."""
        return part(self.source, "attention.head_gate") if self.config.head_gate is not None else None

    @property
    def sinks(self) -> Any:  # type: ignore[override]
        """Parameter (num_heads,), or None."""
        return part(self.source, "attention.sinks") if self.config.sinks else None

    def project(
        self, x: Tensor, context: ForwardContext, state: LayerKV | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        config = self.config
        tables: Tables = (None, None) if config.rope is None else context.rope_tables[config.rope]
        q, k, v = self._projections(x)
        q, gate = self._gated(x, q) if config.output_gate else (q, None)
        q, k, v = self._normalised(q, k, v)
        if config.qk_norm is not None and config.qk_norm.after_rope:
            q, k, tables = *self._norms(*_rotated(q, k, tables)), (None, None)
        if config.stored_as_pairs and config.rope is not None:
            q, k = (pairs_to_halves(heads, config.rope.channels) for heads in (q, k))
        if state is not None and context.cache_seqlens is not None:
            return self._cached(q, k, v, tables, state, context.cache_seqlens), state.keys, state.values, gate
        return *_rotated(q, k, tables), v, gate

    def _gated(self, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """The queries and the output gate, each (B, T, channels): of two tensors, or of q, which has both by head."""
        if "attention.gate" in native_of(self.source).names:
            return q, projected(self.source, "attention.gate", x)
        q, gate = (half.flatten(2) for half in q.unflatten(2, (-1, 2 * self.config.head_dim)).chunk(2, dim=-1))
        return q, gate

    def _projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, H) -> q, k and v (B, T, channels)."""
        config, source = self.config, self.source
        if "attention.qkv" in native_of(source).names:
            keys, values = config.num_kv_heads * config.head_dim, config.num_kv_heads * config.value_dim
            sizes = [config.num_heads * config.head_dim, keys, values]
            q, k, v = projected(source, "attention.qkv", x).split(sizes, dim=-1)
            return q, k, v
        q, k = (projected(source, f"attention.{name}", x) for name in ("q", "k"))
        return q, k, k if config.values is not None and config.values.from_keys else projected(source, "attention.v", x)

    def _normalised(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v (B, T, channels) -> (B, T, heads, D), with the norms of the config. A tensor-parallel shard has
        fewer heads."""
        config, norm = self.config, self.config.qk_norm

        if norm is not None and norm.over == "projection":
            q, k = self._norms(q, k)
        q, k = (channels.unflatten(2, (-1, config.head_dim)) for channels in (q, k))
        v = v.unflatten(2, (-1, config.value_dim))
        if norm is not None and norm.over == "head" and not norm.after_rope:
            q, k = self._norms(q, k)
        return q, k, v if config.values is None else config.values.from_projection(v, config.head_dim)

    def _norms(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The norms of queries and keys."""
        norm = self.config.qk_norm
        if norm is not None and not norm.has_weight:
            return ops.rms_norm(q, None, norm.norm.eps), ops.rms_norm(k, None, norm.norm.eps)
        return part(self.source, "attention.q_norm")(q), part(self.source, "attention.k_norm")(k)

    def _cached(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, state: LayerKV, cache_seqlens: Tensor) -> Tensor:
        """The rotated queries of a decoding pass; the new keys and values are written to the state."""
        kv_heads = k.shape[2]
        group = q.shape[2] // kv_heads
        joined = torch.cat([heads.unflatten(2, (kv_heads, -1)) for heads in (q, k, v)], dim=3).flatten(2)
        joined = joined.to(state.keys.dtype)
        return ops.rope_qkv_cached(joined, *tables, kv_heads, group, self.config.head_dim, *state, cache_seqlens)


class HFSharedKVAttention(OnModules, SharedKVAttention):
    """`SharedKVAttention` on a transformers attention module."""

    o = part_named("attention.o")

    def q(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x (B, T, H) -> queries (B, T, channels)."""
        return projected(self.source, "attention.q", x)

    @property
    def q_norm(self) -> nn.Module | None:  # type: ignore[override]
        """The norm of queries, or None."""
        return None if self.config.qk_norm is None else part(self.source, "attention.q_norm")


def _rotated(q: Tensor, k: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """q and k (B, T, heads, D) with rotary positions, where the layer has any."""
    cos, sin = tables
    return (q, k) if cos is None or sin is None else ops.rope(q, k, cos, sin)
