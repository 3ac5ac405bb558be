"""How DFlash and DSpark heads are trained: on which blocks of a text, with which weights of slots and losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.arguments import Divergence, check_count, check_number
from ligermodels.errors import InputError, short
from ligermodels.layers import IGNORE_INDEX
from ligermodels.layers.targets import shift_labels
from ligermodels.layers.tokens import Tokens, token_layout
from ligermodels.ops.loss.divergences import DIVERGENCES
from ligermodels.ops.runtime.checks import check_plain, check_same_tokens

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

    def at_anchors(self, ranks: Tensor, count: int) -> Tensor:
        """Ranks (N, K) of the blocks, -1 without a target, as (K, T) of T = `count` tokens, -1 except at anchors."""
        index = self.anchors.expand(ranks.shape[1], -1)
        # A missing anchor is 0, which may be the anchor of another block too.
        return ranks.new_full((ranks.shape[1], count), -1).scatter_reduce(1, index, ranks.T, "amax")


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


def shifted(labels: Tensor, count: int, bounds: tuple[Tensor | None, ...]) -> tuple[Tensor, Tokens]:
    """The arguments `following` and `packing` of `sample_blocks`, of labels without their batch.

    Args:
        labels: long (B, T), -100 where ignored.
        count: K.
        bounds: position_ids, cu_seqlens and attention_mask, each a tensor or None: see `MultiHeadModel.num_targets`.

    Raises:
        InputError: a tensor of a wrong dtype or shape.
    """
    check_plain("labels", labels, torch.int64)
    if labels.ndim != 2:
        raise InputError(f"labels: must be (batch, tokens), got shape {tuple(labels.shape)}")
    shape, (position_ids, cu_seqlens, mask) = (labels.shape[0], labels.shape[1]), bounds
    check_same_tokens(labels, attention_mask=mask)
    layout = token_layout(shape, attention_mask=mask, position_ids=position_ids, cu_seqlens=cu_seqlens)
    rows, ahead = layout.packing.take(labels, IGNORE_INDEX), range(1, 1 + count)
    return torch.stack([shift_labels(rows, each, layout.cu_seqlens) for each in ahead]), layout.packing


def _mixed(x: Tensor) -> Tensor:
    """A hash of int64 numbers, with the wrap-around of int64."""
    for multiplier in _MULTIPLIERS:
        x = (x ^ (x >> 31)) * multiplier
    return x ^ (x >> 29)


@dataclass(frozen=True)
class BlockTraining:
    """How a head is trained on blocks. Slot k of the K that propose tokens has the weight exp(-k / gamma).

    Args:
        num_anchors: most blocks for each sequence of a batch.
        gamma: decay of the slots' weights; None for equal weights.
        ce_weight: weight of the cross entropy to the text.
        divergence: from the model's distribution: a name of `ops.linear_distillation`.
        divergence_weight: weight of the divergence.
        confidence_weight: weight of the confidence head's loss.
        dpace_alpha: constant of D-PACE in [0, 1]: its weights replace the weights of `gamma`, see `SlotLoss`. None: no
            D-PACE.
        seed: seed of the anchors.

    Raises:
        InputError: a value is out of range; or D-PACE is given with a divergence.
    """

    num_anchors: int = 512
    gamma: float | None = 4.0
    ce_weight: float = 1.0
    divergence: Divergence = "l1"
    divergence_weight: float = 0.0
    confidence_weight: float = 1.0
    dpace_alpha: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("num_anchors", self.num_anchors)
        check_count("seed", self.seed, least=0)
        for name in ("ce_weight", "divergence_weight", "confidence_weight"):
            check_number(name, getattr(self, name))
        if self.gamma is not None:
            check_number("gamma", self.gamma, positive=True)
        check_divergence(self.divergence)
        if self.dpace_alpha is not None:
            if not check_number("dpace_alpha", self.dpace_alpha) <= 1:
                raise InputError(f"dpace_alpha: must be at most 1, got {self.dpace_alpha}")
            if self.divergence_weight or not self.ce_weight:
                raise InputError("dpace_alpha: D-PACE weighs the cross entropy; give ce_weight, no divergence_weight")

    def slot_weights(self, count: int) -> list[float]:
        """The weights of `count` slots, before D-PACE."""
        weights: list[float] = self.slot_weights_on(torch.device("cpu"), torch.float64, count).tolist()
        return weights

    def slot_weights_on(self, device: torch.device, dtype: torch.dtype, count: int) -> Tensor:
        """`slot_weights` (count,) on a device in a dtype, computed there: a CUDA graph takes no copy from the host."""
        if self.gamma is None or self.dpace_alpha is not None:
            return torch.ones(count, dtype=dtype, device=device)
        return torch.exp(-torch.arange(count, dtype=torch.float64, device=device) / self.gamma).to(dtype)


def check_divergence(divergence: object) -> None:
    """InputError unless `divergence` is a name of `ops.linear_distillation`."""
    if divergence not in DIVERGENCES:
        raise InputError(f"divergence: must be one of {', '.join(DIVERGENCES)}, got {short(divergence)}")


def default_layer_ids(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """The ids of the layers that DFlash heads read by default: `round(1 + i (N - 4) / (n - 1))`, or N // 2 for n = 1.

    Layers that a small model does not have, or has once, are left out.

    Args:
        num_layers: n, layers of the head.
        num_target_layers: N, layers of the model.
    """
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    ids = (round(1 + i * span / (num_layers - 1)) for i in range(num_layers))
    return tuple(sorted({min(max(layer, 0), num_target_layers - 1) for layer in ids}))
