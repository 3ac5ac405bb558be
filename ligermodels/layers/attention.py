"""Grouped-query self-attention with rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from ligermodels import ops
from ligermodels.layers.rope import RopeConfig


class Cache(Protocol):
    """Keys and values of the tokens seen so far; see `generation.cache.KVCache`."""

    length: int

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...

    def advance(self, count: int) -> None: ...


@dataclass(frozen=True)
class AttentionConfig:
    """Heads and behaviour of one attention layer.

    `scale` None means head_dim ** -0.5; `window` counts the token itself; `softcap` caps the scores; `bias` and
    `output_bias` are those of q/k/v and of the output projection; `backend` names an attention backend.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    bias: bool = False
    output_bias: bool = False
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
    """What one forward pass tells each of its attention layers.

    `tables` holds cos and sin, (B or 1, T, dim / 2), for each rope in use; `mask` is bool (B, T, S), `cu_seqlens`
    int32 (n + 1,): see `ops.attention`. With a `cache`, keys and values are appended to it.
    """

    tables: Mapping[RopeConfig, tuple[Tensor, Tensor]] = field(default_factory=dict)
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cache: Cache | None = None


class Attention(nn.Module):
    """Self-attention; `qkv` holds for each key/value head its group of query heads, then its key, then its value."""

    def __init__(self, hidden_size: int, config: AttentionConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        width = config.num_kv_heads * (config.group_size + 2) * config.head_dim
        self.qkv = nn.Linear(hidden_size, width, bias=config.bias)
        self.o = nn.Linear(config.num_heads * config.head_dim, hidden_size, bias=config.output_bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x (B, T, H) -> (B, T, H)."""
        config = self.config
        cos, sin = context.tables[config.rope]
        q, k, v = ops.rope_qkv(self.qkv(x), cos, sin, config.num_kv_heads, config.group_size, config.head_dim)
        if context.cache is not None:
            k, v = context.cache.update(self.layer, k, v)
        out = ops.attention(
            q,
            k,
            v,
            scale=config.scale,
            window=config.window,
            softcap=config.softcap,
            mask=context.mask,
            cu_seqlens=context.cu_seqlens,
            backend=config.backend,
        )
        return self.o(out.flatten(2))
