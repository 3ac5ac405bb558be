"""Packed documents in a row: bounds and positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.runtime.checks import assert_async, check_plain, rises


def check_bounds(cu_seqlens: Tensor, shape: tuple[int, int]) -> None:
    """InputError unless `cu_seqlens` is int32 (n + 1,), rising from 0 to the length of a single row."""
    check_plain("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise InputError(
            f"cu_seqlens: must be int32 of shape (documents + 1,), got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    if shape[0] != 1:
        raise InputError(f"cu_seqlens: packed documents come as one row, but the batch has {shape[0]}")
    assert_async(rises(cu_seqlens, shape[1]), f"cu_seqlens: must rise from 0 to the row's length, {shape[1]}")


def document_of(cu_seqlens: Tensor, total: int) -> Tensor:
    """Number of the document of each of `total` tokens, long (total,)."""
    index = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(index, cu_seqlens[1:], right=True)


def packed_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """Position of each token within its document, (1, total) long."""
    index = torch.arange(total, device=cu_seqlens.device)
    return (index - cu_seqlens[document_of(cu_seqlens, total)])[None]


def bounds_of(position_ids: Tensor) -> Tensor | None:
    """Bounds of documents, over the flattened B * T tokens, found by positions (B, T) that do not rise by 1; None for
    one document in each row.

    Waits for the GPU once; pass `cu_seqlens` instead to avoid this. Under torch.compile there are always B * T + 1
    bounds: empty documents follow the last one.
    """
    restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    is_start = F.pad(restarts, (1, 0), value=True).flatten()
    if torch.compiler.is_compiling():
        count = is_start.numel()
        starts = torch.nonzero_static(is_start, size=count, fill_value=count).flatten()
        return F.pad(starts, (0, 1), value=count).to(torch.int32)
    starts = is_start.nonzero().flatten()
    if len(starts) == len(position_ids):
        return None
    return F.pad(starts, (0, 1), value=position_ids.numel()).to(torch.int32)


def document_bounds(shape: Sequence[int], position_ids: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    """Bounds of packed documents.

    Args:
        shape: (B, T) of the inputs.
        position_ids: long (B, T) or None. Positions that do not rise by 1 mark documents, if there are no `cu_seqlens`.
        cu_seqlens: int32 (n + 1,), bounds of documents in a single row, or None.

    Returns:
        int32 (n + 1,), bounds over the flattened B * T tokens; None for one document in each row.

    Raises:
        InputError: an argument does not fit the shape.
    """
    if position_ids is not None:
        check_plain("position_ids", position_ids, torch.int64, torch.int32)
        if tuple(position_ids.shape) != tuple(shape):
            raise InputError(
                f"position_ids: must have the inputs' shape {tuple(shape)}, got {tuple(position_ids.shape)}"
            )
    if cu_seqlens is not None:
        check_bounds(cu_seqlens, (shape[0], shape[1]))
        return cu_seqlens
    return None if position_ids is None else bounds_of(position_ids)
