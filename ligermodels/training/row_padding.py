"""Padding of packed rows, so that batches have few shapes for CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.layers import IGNORE_INDEX, Router
from ligermodels.layers.modules import modules_of


class RowPadding:
    """Pads packed rows of `module`'s batches to lengths that many batches share, and their boundaries.

    Args:
        module: the model that is trained.
    """

    grows = False

    def __init__(self, module: nn.Module) -> None:
        # A mixture's load-balancing loss would count padding.
        self._pads_tokens = not modules_of(module, Router)

    def __call__(self, parts: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        return [_padded(part, self._pads_tokens) for part in parts]


def _padded(part: Mapping[str, Tensor], pads_tokens: bool) -> dict[str, Tensor]:
    """A packed micro-batch with one of few shapes.

    Args:
        part: the micro-batch.
        pads_tokens: whether a document without targets may follow, up to a multiple of at most a sixteenth of the row.

    Returns:
        The micro-batch; empty documents follow the last one.
    """
    if "cu_seqlens" not in part:
        return dict(part)
    ids, labels, bounds = (part.get(name) for name in _PACKED)
    total = cast(Tensor, labels).shape[1]
    missing = -total % (1 << max(total.bit_length() - 5, 0)) if pads_tokens and part.keys() == set(_PACKED) else 0
    padded = dict(part)
    if missing:
        padded["input_ids"] = F.pad(cast(Tensor, ids), (0, missing))
        padded["labels"] = F.pad(cast(Tensor, labels), (0, missing), value=IGNORE_INDEX)
    bounds = F.pad(cast(Tensor, bounds), (0, 1), value=total + missing)
    length = max(16, 1 << (len(bounds) - 1).bit_length())
    padded["cu_seqlens"] = F.pad(bounds, (0, length - len(bounds)), value=total + missing)
    return padded


_PACKED = ("input_ids", "labels", "cu_seqlens")
