"""A Medusa head: blocks on the hidden state, then a projection to the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.layers.head import LMHead


class ResBlock(nn.Module):
    """x + SiLU(linear(x)). Weight and bias start at zero, so that a new block is the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., H) -> (..., H)."""
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    """ResBlocks, then a projection to the vocabulary: the head's own, or the base model's when `lm_head` is None."""

    def __init__(self, hidden_size: int, num_layers: int, lm_head: LMHead | None) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(ResBlock(hidden_size) for _ in range(num_layers)))
        self.lm_head = lm_head

    @property
    def linears(self) -> list[nn.Linear]:
        """Those of the ResBlocks."""
        return [cast(ResBlock, block).linear for block in self.layers]

    def forward(self, hidden: Tensor, shared: LMHead) -> Tensor:
        """hidden (..., H) -> logits (..., V); `shared` is the base model's lm_head."""
        head = shared if self.lm_head is None else self.lm_head
        return cast(Tensor, head(self.layers(hidden)))


def propose(heads: Sequence[MedusaHead], hidden: Tensor, shared: LMHead) -> Tensor:
    """hidden (B, H) -> logits (B, K, V) of K heads, each as `MedusaHead.forward` gives them.

    For a few rows, where a kernel takes as long as it takes to start: what lies between the linear layers of the blocks
    is done for all heads at once, and a shared lm_head is read once.
    """
    x = hidden[:, None].expand(-1, len(heads), -1)  # (B, K, H)
    for linears in zip(*(head.linears for head in heads), strict=True):
        moved = [linear(rows) for linear, rows in zip(linears, x.unbind(1), strict=True)]
        x = x + F.silu(torch.stack(moved, dim=1))
    own = [head.lm_head for head in heads if head.lm_head is not None]
    if not own:
        return cast(Tensor, shared(x))
    return torch.stack([lm_head(rows) for lm_head, rows in zip(own, x.unbind(1), strict=True)], dim=1)
