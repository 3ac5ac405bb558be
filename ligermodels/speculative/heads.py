"""A Medusa head: residual blocks on the hidden state, then a projection to the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.layers import LMHead
from ligermodels.layers.linear import Linear
from ligermodels.layers.sharding import TensorSharding


class ResBlock(nn.Module):
    """x + SiLU(linear(x)). Weight and bias start at zero, so that a new block is the identity."""

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"linear": "replicated"}

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., H) -> (..., H)."""
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    """ResBlocks, then the head's own `lm_head`.

    Args:
        hidden_size: H.
        num_layers: number of ResBlocks.
        lm_head: the head's projection to the vocabulary. None: the head returns hidden states for the base's lm_head.
    """

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {}

    def __init__(self, hidden_size: int, num_layers: int, lm_head: LMHead | None) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(ResBlock(hidden_size) for _ in range(num_layers)))
        self.lm_head = lm_head

    def forward(self, hidden: Tensor, targets: Tensor | None = None, **loss_options: Any) -> Any:
        """The logits of the head; with targets, its loss.

        Args:
            hidden: hidden states (..., H).
            targets: long (...), -100 where ignored.
            loss_options: options of `LMHead.forward`.

        Returns:
            Logits (..., V); with targets a `HeadLoss`; hidden states (..., H) if the head has no lm_head.
        """
        hidden = self.layers(hidden)
        return hidden if self.lm_head is None else self.lm_head(hidden, targets, **loss_options)
