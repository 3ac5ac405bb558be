"""From the fused projection of attention to queries, keys and values: split, normalised, rotated, in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers.config_checks import check_choice, check_numbers
from ligermodels.layers.kv_cache import LayerKV
from ligermodels.layers.norm import NormConfig
from ligermodels.layers.sharding import TensorSharding, is_tensor_parallel, local, mean_over_ranks
from ligermodels.ops.norm.rms_norm import rms_norm_reference
from ligermodels.ops.runtime.tensors import as_dtype

Tables = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class QKNormConfig:
    """RMSNorm of queries and keys before they are rotated: of each head, or of the whole projection (OLMo 2)."""

    norm: NormConfig
    over: Literal["head", "projection"] = "head"

    def __post_init__(self) -> None:
        check_choice(self, "over", ("head", "projection"))
        if self.norm.kind != "rms":
            raise ConfigError(f"norm: of queries and keys must be of kind 'rms', got {self.norm.kind!r}")


@dataclass(frozen=True)
class ValueConfig:
    """How values come from the projection, where it is not as they are: with `norm_eps` each head is divided by its
    root mean square, with this eps under the root (an RMSNorm without weight); with `from_keys` the projection has no
    values, and these are its keys before their norm and rotation. Gemma 4 has both."""

    norm_eps: float | None = None
    from_keys: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "norm_eps")


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
        self._group_width = head_dim * (self.group_size + (1 if values is not None and values.from_keys else 2))
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
        kv_heads = self._num_kv_heads(qkv)
        norms = local(self, self.q_norm, partial=True), local(self, self.k_norm, partial=True)
        if cache is not None and cache_seqlens is not None:
            return self._cached(qkv, tables, cache, cache_seqlens, *norms)
        if self.values is not None:
            qkv = self._with_values(qkv)
        return ops.rope_qkv(qkv, *tables, kv_heads, self.group_size, self.head_dim, *norms, **self.norm_options)

    @property
    def norm_options(self) -> dict[str, Any]:
        """The options of the norms of queries and keys, as arguments of ops; none without norms."""
        return {} if self.qk_norm is None else self.qk_norm.norm.options

    def _num_kv_heads(self, qkv: Tensor) -> int:
        """Key/value heads of the projection; InputError unless it has as many heads for each of them."""
        kv_heads, rest = divmod(qkv.shape[-1], self._group_width)
        if rest:
            raise InputError(
                f"qkv: width {qkv.shape[-1]} is no multiple of {self._group_width}, a key/value head with its "
                "query heads; shard the projection by key/value heads"
            )
        return kv_heads

    def _with_values(self, qkv: Tensor) -> Tensor:
        """(B, T, Hkv * (group + 1 or 2) * D) -> (..., Hkv * (group + 2) * D), of each group the values last."""
        if self.values is None:
            return qkv
        heads = qkv.unflatten(-1, (self._num_kv_heads(qkv), -1, self.head_dim))
        v = heads[..., -1:, :]
        v = v if self.values.norm_eps is None else ops.rms_norm(v, None, self.values.norm_eps)
        return torch.cat([heads[..., : self.group_size + 1, :], v], dim=-2).flatten(-3)

    def _cached(
        self,
        qkv: Tensor,
        tables: Tables,
        cache: LayerKV,
        cache_seqlens: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`forward` in a decoding pass: the queries, and all slots of the cache."""
        options: dict[str, Any] = dict(self.norm_options)
        kv_heads, values = self._num_kv_heads(qkv), self.values
        if values is not None and not values.from_keys:  # the norm of values is in the same kernel
            options["value_norm_eps"] = values.norm_eps
        else:
            qkv = self._with_values(qkv)
        qkv, shape = as_dtype(qkv, cache.keys.dtype), (kv_heads, self.group_size, self.head_dim)
        q = ops.rope_qkv_cached(qkv, *tables, *shape, *cache, cache_seqlens, q_norm, k_norm, **options)
        return q, cache.keys, cache.values


class ProjectionNormSplitQKV(SplitQKV):
    """The same with norms over all heads together, `QKNormConfig.over` "projection": before the rotation, and under
    tensor parallelism by the mean square over all ranks, each of which has its heads' part of the weights."""

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"q_norm": 0, "k_norm": 0}

    def forward(
        self, qkv: Tensor, tables: Tables, cache: LayerKV | None = None, cache_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `SplitQKV.forward`."""
        shape = self._num_kv_heads(qkv), self.group_size, self.head_dim
        q, k, v = ops.rope_qkv(self._with_values(qkv), None, None, *shape)
        q, k = self._normalised(q, k)
        if cache is None or cache_seqlens is None:
            cos, sin = tables
            return (q, k, v) if cos is None or sin is None else (*ops.rope(q, k, cos, sin), v)
        heads = [each.unflatten(2, (k.shape[2], -1)) for each in (q, k, v)]
        qkv = as_dtype(torch.cat(heads, dim=3).flatten(2), cache.keys.dtype)
        return ops.rope_qkv_cached(qkv, *tables, *shape, *cache, cache_seqlens), cache.keys, cache.values

    def _normalised(self, *heads: Tensor) -> list[Tensor]:
        """q and k, (B, T, heads, D), each normalised over all of its heads."""
        rows = [each.flatten(2) for each in heads]
        weights = [local(self, weight) for weight in (self.q_norm, self.k_norm)]
        for x, weight in zip(rows, weights, strict=True):
            if len(weight) != x.shape[-1]:
                raise InputError(
                    f"the norm over the whole projection has {len(weight)} channels, the projection {x.shape[-1]}: "
                    "shard both by heads (ligermodels.parallel.tensor)"
                )
        if not is_tensor_parallel(self):
            found = [ops.rms_norm(x, weight, **self.norm_options) for x, weight in zip(rows, weights, strict=True)]
        else:
            squares = mean_over_ranks(self, torch.stack([_mean_square(x) for x in rows]))
            parts = zip(rows, weights, squares, strict=True)
            found = [rms_norm_reference(x, weight, mean_square=each, **self.norm_options) for x, weight, each in parts]
        return [x.view_as(each) for x, each in zip(found, heads, strict=True)]


def _mean_square(x: Tensor) -> Tensor:
    """(..., n) -> (..., 1), float32; of float64 float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1, keepdim=True)
