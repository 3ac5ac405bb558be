"""From the fused projection of attention to queries, keys and values: split, normalised, rotated, in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.layers.kv_cache import LayerKV
from ligermodels.layers.norm import NormConfig
from ligermodels.layers.sharding import TensorSharding, local
from ligermodels.ops.runtime.tensors import as_dtype

Tables = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class QKNormConfig:
    """RMSNorm of queries and keys before they are rotated: of each head, or of the whole projection (OLMo 2)."""

    norm: NormConfig
    over: Literal["head", "projection"] = "head"


@dataclass(frozen=True)
class ValueConfig:
    """How values come from the projection, where it is not as they are: with `norm_eps` each head is divided by its
    root mean square, with this eps under the root (an RMSNorm without weight); with `from_keys` the projection has no
    values, and these are its keys before their norm and rotation. Gemma 4 has both."""

    norm_eps: float | None = None
    from_keys: bool = False


class SplitQKV(nn.Module):
    """Splits the fused projection, normalises queries and keys, and rotates them.

    It owns the weights of both norms, `q_norm` and `k_norm`, if there are any: norm and rotation are one kernel. The
    number of key/value heads is that of the projection it is given, which may be a tensor-parallel shard.
    """

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"q_norm": "replicated", "k_norm": "replicated"}

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qk_norm: QKNormConfig | None,
        values: ValueConfig | None = None,
    ) -> None:
        super().__init__()
        self.group_size, self.head_dim, self.qk_norm = num_heads // num_kv_heads, head_dim, qk_norm
        self.values = values
        self.q_norm: nn.Parameter | None = None
        self.k_norm: nn.Parameter | None = None
        if qk_norm is not None:
            whole = qk_norm.over == "projection"
            self.q_norm = nn.Parameter(torch.empty(head_dim * (num_heads if whole else 1)))
            self.k_norm = nn.Parameter(torch.empty(head_dim * (num_kv_heads if whole else 1)))
            self.init_weights()

    def init_weights(self, std: float = 0.0) -> None:
        """Scales one."""
        if self.qk_norm is not None and self.q_norm is not None and self.k_norm is not None:
            for weight in (self.q_norm, self.k_norm):
                nn.init.constant_(weight, 1.0 - self.qk_norm.norm.offset)

    def extra_repr(self) -> str:
        norm = "" if self.qk_norm is None else f", qk_norm over each {self.qk_norm.over}"
        return f"group_size={self.group_size}, head_dim={self.head_dim}{norm}"

    def forward(
        self, qkv: Tensor, tables: Tables, cache: LayerKV | None = None, cache_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qkv (B, T, Hkv * (group + 2) * D) -> q (B, T, Hq, D), k and v (B, T, Hkv, D), q and k rotated. The width is
        Hkv * (group + 1) * D where values are `from_keys`.

        With `cache_seqlens`, long (B,), k and v are written to the slots of `cache` from there on instead, and what is
        returned are all slots of it.
        """
        rows = self.group_size + (1 if self.values is not None and self.values.from_keys else 2)
        width = rows * self.head_dim
        if qkv.shape[-1] % width:
            raise InputError(
                f"qkv: width {qkv.shape[-1]} is no multiple of {width}, a key/value head with its query heads; shard "
                "the projection by key/value heads"
            )
        shape = qkv.shape[-1] // width, self.group_size, self.head_dim
        if self.values is not None:
            qkv = self._with_values(qkv.unflatten(-1, (shape[0], rows, self.head_dim)), self.values)
        norms: tuple[Tensor, ...] = ()
        options: dict[str, Any] = {}
        if self.qk_norm is not None and self.q_norm is not None and self.k_norm is not None:
            norm = self.qk_norm.norm
            norms = local(self, self.q_norm, partial=True), local(self, self.k_norm, partial=True)
            options = {"eps": norm.eps, "offset": norm.offset, "casting_mode": norm.casting_mode}
        if norms and self.qk_norm is not None and self.qk_norm.over == "projection":
            q, k, v = ops.rope_qkv(qkv, None, None, *shape)
            q, k = self._normalise(q, norms[0], options), self._normalise(k, norms[1], options)
            if cache is None or cache_seqlens is None:
                cos, sin = tables
                return (q, k, v) if cos is None or sin is None else (*ops.rope(q, k, cos, sin), v)
            qkv = torch.cat([each.unflatten(2, (shape[0], -1)) for each in (q, k, v)], dim=3).flatten(2)
            norms, options = (), {}
        if cache is None or cache_seqlens is None:
            return ops.rope_qkv(qkv, *tables, *shape, *norms, **options)
        qkv = as_dtype(qkv, cache.keys.dtype)
        q = ops.rope_qkv_cached(qkv, *tables, *shape, *cache, cache_seqlens, *norms, **options)
        return q, cache.keys, cache.values

    def _with_values(self, heads: Tensor, values: ValueConfig) -> Tensor:
        """heads (B, T, Hkv, group + 1 or 2, D) -> (B, T, Hkv * (group + 2) * D), its last ones the values."""
        v = heads[..., -1:, :]
        v = v if values.norm_eps is None else ops.rms_norm(v, None, values.norm_eps)
        return torch.cat([heads[..., : self.group_size + 1, :], v], dim=-2).flatten(-3)

    def _normalise(self, x: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
        """x (B, T, heads, D) normalised over all heads together."""
        if weight.shape[0] != x.shape[2] * x.shape[3]:
            raise InputError(
                f"the norm over the whole projection has {weight.shape[0]} channels, the projection "
                f"{x.shape[2] * x.shape[3]}: such a norm cannot be sharded by heads"
            )
        return ops.rms_norm(x.flatten(2), weight, **options).view_as(x)
