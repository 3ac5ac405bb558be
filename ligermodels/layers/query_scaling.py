"""Scaling of queries by position, for contexts beyond the original context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers.config_checks import check_sizes


@dataclass(frozen=True)
class QueryScaling:
    """Rotated queries are multiplied by 1 + beta * ln(1 + floor(position / original_context)), as in Llama 4 and
    Ministral 3. The factor depends only on the query's position in its document, so cached keys stay valid."""

    beta: float
    original_context: int

    def __post_init__(self) -> None:
        check_sizes(self, "original_context")

    def scale(self, q: Tensor, positions: Tensor | None) -> Tensor:
        """q (B, T, heads, D), scaled by its positions (B or 1, T); InputError without positions. The factor is computed
        in float32, then cast."""
        if positions is None:
            raise InputError("positions: of the ForwardContext are missing, and query_scaling goes by them")
        contexts = torch.floor(positions.float() / self.original_context)
        return q * (1 + self.beta * torch.log(1 + contexts)).to(q.dtype)[..., None, None]
