"""The blocks that DFlash and DSpark are trained on: their anchors in a text, and the targets of their slots."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.layers import IGNORE_INDEX
from ligermodels.layers.tokens import Tokens

_MULTIPLIERS = -4658895280553007687, -7723592293110705685  # of splitmix64


class Blocks(NamedTuple):
    """N blocks of a packed row of T tokens. A block without a target stands for an anchor that is missing.

    anchors: long (N,), index in the row of the first slot of each block, ascending; 0 for a missing anchor.
    targets: long (N, K), the tokens at the K positions after each anchor, -100 from the first one without a label on.
    """

    anchors: Tensor
    targets: Tensor

    @property
    def counts(self) -> Tensor:
        """Long (K,), the number of targets of each slot."""
        return (self.targets != IGNORE_INDEX).sum(0)

    def after(self, x: Tensor, first: int = 0) -> Tensor:
        """x (T, ...) of the K positions from `first` positions after each anchor on, (N, K, ...). Positions beyond the
        end of the row give its last value."""
        slots = torch.arange(first, first + self.targets.shape[1], device=x.device)
        return x[(self.anchors[:, None] + slots).clamp(max=len(x) - 1)]


def sample_blocks(labels: Tensor, following: Tensor, packing: Tokens, num_anchors: int, seed: int) -> Blocks:
    """Sample anchors without replacement, among tokens that have a label and whose next token has one too.

    The choice in a sequence depends on its labels and the seed alone: it is the same in every pass, on every device,
    beside any other sequences, and with any padding.

    Args:
        labels: long (B, T), -100 where ignored.
        following: long (K, rows, length), for the tokens in the layout of `packing` the labels 1 to K tokens further
            on, -100 also beyond the end of the document.
        packing: the layout of the tokens.
        num_anchors: most anchors of a sequence.
        seed: seed of the choice.

    Returns:
        B * min(num_anchors, T) blocks of the flattened rows. Blocks without an anchor are the last, without targets.
    """
    targets, count = following.flatten(1), following[0].numel()
    place = torch.arange(count, device=labels.device).view_as(following[0])
    first = packing.restore(following[0], IGNORE_INDEX)
    candidate = (labels != IGNORE_INDEX) & (first != IGNORE_INDEX)
    tokens = packing.restore(packing.take(torch.ones_like(labels)))  # 0 on padding
    index, ignored = tokens.cumsum(1) - 1, (labels == IGNORE_INDEX) | (tokens == 0)
    content = _mixed(labels + _mixed(index + seed)).masked_fill(ignored, 0).sum(1, keepdim=True)
    keys = (_mixed(index + content) & (2**62 - 1)).masked_fill(~candidate, 2**62)
    chosen = keys.topk(min(num_anchors, labels.shape[1]), largest=False).indices
    anchors = packing.restore(place).gather(1, chosen).masked_fill(~candidate.gather(1, chosen), count)
    anchors = anchors.flatten().sort().values
    found = anchors < count
    anchors = anchors.masked_fill(~found, 0)
    targets = targets[:, anchors].T
    supervised = ((targets != IGNORE_INDEX) & found[:, None]).cumprod(1).bool()
    return Blocks(anchors, targets.masked_fill(~supervised, IGNORE_INDEX))


def _mixed(x: Tensor) -> Tensor:
    """A hash of int64 numbers, with the wrap-around of int64."""
    for multiplier in _MULTIPLIERS:
        x = (x ^ (x >> 31)) * multiplier
    return x ^ (x >> 29)
