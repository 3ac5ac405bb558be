"""Grouped-query self-attention with rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, nn

from ligermodels import ops
from ligermodels.layers.norm import NormConfig, RMSNorm
from ligermodels.layers.rope import RopeConfig
from ligermodels.layers.targets import take_rows


class Cache(Protocol):
    """Keys and values of the tokens seen so far, as far as a layer sees them; see `generation.cache.KVCache`."""

    lengths: Tensor | None
    layers: list[Tensor]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...

    def write(self, layer: int, k: Tensor, v: Tensor) -> None: ...


@dataclass(frozen=True)
class QKNormConfig:
    """Norm of queries and keys before they are rotated: of each head, or of the whole projection (OLMo 2)."""

    norm: NormConfig
    over: Literal["head", "projection"] = "head"


@dataclass(frozen=True)
class AttentionConfig:
    """Heads and behaviour of one attention layer.

    `rope` None means no positions at all; `scale` None means head_dim ** -0.5; `window` counts the token itself;
    `softcap` caps the scores; `bias` and `output_bias` are those of q/k/v and of the output projection; `backend` names
    an attention backend.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    bias: bool = False
    output_bias: bool = False
    qk_norm: QKNormConfig | None = None
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    backend: str = "auto"

    @property
    def group_size(self) -> int:
        """Query heads a key/value head serves."""
        return self.num_heads // self.num_kv_heads


@dataclass
class Context:
    """What one forward pass tells each of its layers.

    `tables` holds cos and sin, (B or 1, T, dim / 2), for each rope in use; `cu_seqlens` is int32 (n + 1,): see
    `ops.attention`. With a `cache`, keys and values are appended to it; where its rows have lengths of their own, the
    new tokens may be a tree: `tree_mask`, see `ops.decode_attention`. `router_logits` gets those of each mixture of
    experts. `rows`, long (n,), indices of the flattened B * T: the tokens whose states alone the last block is to give,
    for of the others no more than keys and values are needed. They are only for a block whose layers say `takes_rows`.
    """

    tables: Mapping[RopeConfig, tuple[Tensor, Tensor]] = field(default_factory=dict)
    cu_seqlens: Tensor | None = None
    cache: Cache | None = None
    tree_mask: Tensor | None = None
    router_logits: list[Tensor] = field(default_factory=list)
    rows: Tensor | None = None


class Attention(nn.Module):
    """Self-attention; `qkv` holds for each key/value head its group of query heads, then its key, then its value."""

    takes_rows: ClassVar[bool] = True
    """It gives `Context.rows` alone where there are any."""

    def __init__(self, hidden_size: int, config: AttentionConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        width = config.num_kv_heads * (config.group_size + 2) * config.head_dim
        self.qkv = nn.Linear(hidden_size, width, bias=config.bias)
        self.o = nn.Linear(config.num_heads * config.head_dim, hidden_size, bias=config.output_bias)
        if config.qk_norm is not None:
            whole = config.qk_norm.over == "projection"
            self.q_norm = RMSNorm(config.head_dim * (config.num_heads if whole else 1), config.qk_norm.norm)
            self.k_norm = RMSNorm(config.head_dim * (config.num_kv_heads if whole else 1), config.qk_norm.norm)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x (B, T, H) -> (B, T, H), or (1, n, H) of the context's `rows`."""
        cache = context.cache
        if cache is not None and cache.lengths is not None:
            out = self._decode(x, context, cache, cache.lengths)
        else:
            out = self._attend(x, context)
        return self.o(take_rows(out.flatten(2), context.rows))

    def _attend(self, x: Tensor, context: Context) -> Tensor:
        """What tokens x (B, T, H) attend to in one another, and in a cache, (B, T, Hq, D)."""
        config = self.config
        q, k, v = self._project(self.qkv(x), context)
        if context.cache is not None:
            k, v = context.cache.update(self.layer, k, v)
        return ops.attention(
            q,
            k,
            v,
            scale=config.scale,
            window=config.window,
            softcap=config.softcap,
            cu_seqlens=context.cu_seqlens,
            backend=config.backend,
        )

    def _decode(self, x: Tensor, context: Context, cache: Cache, lengths: Tensor) -> Tensor:
        """What a few new tokens x (B, T, H) attend to in the cache, (B, T, Hq, D); they are appended to it first."""
        config = self.config
        k_cache, v_cache = cache.layers[self.layer]
        qkv = self.qkv(x).to(k_cache.dtype)
        if self._norms is None:
            q, k, v = self._project(qkv, context)
            cache.write(self.layer, k, v)
        else:
            weights, options = self._norms
            q = ops.rope_qkv_cached(
                qkv, *self._tables(context), *self._shape, k_cache, v_cache, lengths, *weights, **options
            )
        return ops.decode_attention(
            q,
            k_cache,
            v_cache,
            lengths,
            scale=config.scale,
            window=config.window,
            softcap=config.softcap,
            tree_mask=context.tree_mask,
        ).to(x.dtype)

    def _project(self, qkv: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q (B, T, Hq, D) and k (B, T, Hkv, D), and v as k."""
        cos, sin = self._tables(context)
        if self._norms is not None:
            weights, options = self._norms
            return ops.rope_qkv(qkv, cos, sin, *self._shape, *weights, **options)
        q, k, v = ops.rope_qkv(qkv, None, None, *self._shape)
        q, k = self.q_norm(q.flatten(2)).view_as(q), self.k_norm(k.flatten(2)).view_as(k)
        return (q, k, v) if cos is None or sin is None else (*ops.rope(q, k, cos, sin), v)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.config.num_kv_heads, self.config.group_size, self.config.head_dim

    @property
    def _norms(self) -> tuple[tuple[Tensor, ...], dict[str, Any]] | None:
        """The weights and options of norms that go with the rotation: of each head. None where they cannot."""
        if self.config.qk_norm is None:
            return (), {}
        norm = self.config.qk_norm.norm
        if self.config.qk_norm.over == "projection":
            return None
        return (self.q_norm.weight, self.k_norm.weight), {"eps": norm.eps, "offset": norm.offset, "cast": norm.cast}

    def _tables(self, context: Context) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.config.rope is None else context.tables[self.config.rope]
