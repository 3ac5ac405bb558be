"""Queries that grow with their position, for contexts beyond the original one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class QueryScaling:
    """Rotated queries are multiplied by 1 + beta * ln(1 + floor(position / original_context)), as in Llama 4 and
    Ministral 3. The factor goes by the query's position in its document alone, so keys in a cache stay as they are."""

    beta: float
    original_context: int

    def scale(self, q: Tensor, positions: Tensor) -> Tensor:
        """q (B, T, heads, D) and its positions (B or 1, T) -> q, scaled: the factor in float32, then in q's dtype."""
        contexts = torch.floor(positions.float() / self.original_context)
        return q * (1 + self.beta * torch.log(1 + contexts)).to(q.dtype)[..., None, None]
