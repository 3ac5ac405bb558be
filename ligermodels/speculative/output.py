"""What a multi-head model returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import register_dataclass

from ligermodels.layers.packing import Unpadding
from ligermodels.models.output import ModelOutput

TOP_K = (1, 5)
"""Ranks at which accuracy is reported."""


@dataclass
class MultiHeadOutput(ModelOutput):
    """`loss`: scalar; `head_losses` (K,) unweighted; `ranks` (K, B, T) long, how many tokens a head finds likelier than
    the right one, -1 where there is no target; `accuracy` {1: (K,), 5: (K,)}, the share of targets among each head's 1
    or 5 likeliest tokens; `counts` (K,) targets each head had; `logits` (K, B, T, V), without labels; `base_loss` the
    base model's own loss, where that is part of it."""

    loss: Tensor | None = None
    head_losses: Tensor | None = None
    ranks: Tensor | None = None
    accuracy: dict[int, Tensor] | None = None
    counts: Tensor | None = None
    logits: Tensor | None = None
    base_loss: Tensor | None = None

    @classmethod
    def of_ranks(cls, ranks: Tensor, **fields: Any) -> MultiHeadOutput:
        """With `ranks`, and what follows from them."""
        counts = (ranks >= 0).sum((1, 2))
        correct = {k: ((ranks >= 0) & (ranks < k)).sum((1, 2)) for k in TOP_K}
        accuracy = {k: right / counts.clamp(min=1) for k, right in correct.items()}
        return cls(ranks=ranks, counts=counts, accuracy=accuracy, **fields)

    def padded(self, unpad: Unpadding) -> MultiHeadOutput:
        """Of a pass without padding: with it again, -1 in ranks and zeros in logits."""
        ranks = None if self.ranks is None else unpad.put_back(self.ranks, -1, dim=1)
        return replace(self, ranks=ranks, logits=None if self.logits is None else unpad.put_back(self.logits, dim=1))


register_dataclass(MultiHeadOutput)  # so that FSDP2 finds the tensors in it

MedusaOutput = MultiHeadOutput
