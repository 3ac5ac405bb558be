"""Scaling of queries by position, for contexts beyond the original context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers.config_checks import check_sizes


@dataclass(frozen=True)
class QueryScaling:
    """Rotated queries are multiplied by 1 + beta * ln(1 + floor((position + offset) / original_context)), as in
    Ministral 3, and with an offset of 1 in Llama 4. The factor depends only on the query's position in its document,
    so cached keys stay valid."""

    beta: float
    original_context: int
    offset: int = 0

    def __post_init__(self) -> None:
        check_sizes(self, "original_context")
        check_sizes(self, "offset", least=0)

    def scale(self, q: Tensor, positions: Tensor | None) -> Tensor:
        """q (B, T, heads, D), scaled by its positions (B or 1, T); InputError without positions. The factor is computed
        in float32, then cast."""
        if positions is None:
            raise InputError("positions: of the ForwardContext are missing, and query_scaling goes by them")
        contexts = torch.floor((positions + self.offset).float() / self.original_context)
        return q * (1 + self.beta * torch.log(1 + contexts)).to(q.dtype)[..., None, None]
