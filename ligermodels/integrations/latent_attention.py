"""Latent attention on the projections and norms of a transformers layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ligermodels.integrations.modules import OnModules, part, part_named, projected
from ligermodels.layers import LatentAttentionConfig
from ligermodels.layers.latent_attention import LatentAttention
from ligermodels.layers.rope import pairs_to_halves


class HFLatentAttention(OnModules, LatentAttention):
    """`LatentAttention` on a transformers attention module, whose projections have the rotated channels last."""

    config: LatentAttentionConfig
    q_a, q_a_norm = part_named("latent.q_a"), part_named("latent.q_a_norm")
    kv_a_norm, o = part_named("latent.kv_a_norm"), part_named("latent.o")

    @property
    def head_gate(self) -> Any:  # type: ignore[override]
        """The linear layer of the heads' gates, or None."""
        return None if self.config.head_gate is None else part(self.source, "latent.head_gate")

    def q(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x (B, T, H) -> queries (B, T, heads * key_dim), of each head the rotated channels first."""
        return self._rotated_first(projected(self.source, "latent.q", x), self.config.key_dim)

    def q_b(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """The same of latents of queries, x (B, T, q_rank)."""
        return self._rotated_first(projected(self.source, "latent.q_b", x), self.config.key_dim)

    def kv_a(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x (B, T, H) -> rotated channels of keys, then the latent, (B, T, latent_dim)."""
        return self._rotated_first(projected(self.source, "latent.kv_a", x), self.config.latent_dim)

    def kv_b(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Latents x (..., kv_rank) -> channels without rotation of keys, and values, (..., heads * channels)."""
        return projected(self.source, "latent.kv_b", x)

    def _rotated_first(self, x: Tensor, dim: int) -> Tensor:
        """x (B, T, heads * dim), of each head the rotated channels last, with these channels first and as halves."""
        rotated = self.config.rotated_dim
        plain, last = x.unflatten(-1, (-1, dim)).split([dim - rotated, rotated], dim=-1)
        heads = torch.cat([last, plain], dim=-1)
        return (pairs_to_halves(heads, rotated) if self.config.stored_as_pairs else heads).flatten(-2)
