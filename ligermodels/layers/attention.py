"""Grouped-query self-attention with rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor, nn

from ligermodels import ops
from ligermodels.layers.norm import NormConfig, RMSNorm
from ligermodels.layers.rope import RopeConfig


class Cache(Protocol):
    """Keys and values of the tokens seen so far; see `generation.cache.KVCache`."""

    length: int

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...

    def advance(self, count: int) -> None: ...


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

    `tables` holds cos and sin, (B or 1, T, dim / 2), for each rope in use; `masks`, where the causal rule does not do,
    a bool (B, T, S) for each window in use; `cu_seqlens` is int32 (n + 1,): see `ops.attention`. With a `cache`, keys
    and values are appended to it.
    """

    tables: Mapping[RopeConfig, tuple[Tensor, Tensor]] = field(default_factory=dict)
    masks: Mapping[int | None, Tensor] = field(default_factory=dict)
    cu_seqlens: Tensor | None = None
    cache: Cache | None = None
    router_logits: list[Tensor] = field(default_factory=list)


class Attention(nn.Module):
    """Self-attention; `qkv` holds for each key/value head its group of query heads, then its key, then its value."""

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
        """x (B, T, H) -> (B, T, H)."""
        config = self.config
        q, k, v = self._project(x, context)
        if context.cache is not None:
            k, v = context.cache.update(self.layer, k, v)
        out = ops.attention(
            q,
            k,
            v,
            scale=config.scale,
            window=config.window,
            softcap=config.softcap,
            mask=context.masks.get(config.window),
            cu_seqlens=context.cu_seqlens,
            backend=config.backend,
        )
        return self.o(out.flatten(2))

    def _project(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q (B, T, Hq, D) and k (B, T, Hkv, D), and v as k."""
        config, qkv = self.config, self.qkv(x)
        cos, sin = (None, None) if config.rope is None else context.tables[config.rope]
        shape = (config.num_kv_heads, config.group_size, config.head_dim)
        if config.qk_norm is None:
            return ops.rope_qkv(qkv, cos, sin, *shape)
        norm = config.qk_norm.norm
        if config.qk_norm.over == "head":
            weights = (self.q_norm.weight, self.k_norm.weight)
            return ops.rope_qkv(qkv, cos, sin, *shape, *weights, eps=norm.eps, offset=norm.offset, cast=norm.cast)
        q, k, v = ops.rope_qkv(qkv, None, None, *shape)
        q, k = self.q_norm(q.flatten(2)).view_as(q), self.k_norm(k.flatten(2)).view_as(k)
        return (q, k, v) if cos is None or sin is None else (*ops.rope(q, k, cos, sin), v)
