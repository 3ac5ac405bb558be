"""Packed documents in a row: bounds and positions; and checks of token tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.runtime.checks import assert_async, rises


def check_token_ids(ids: Tensor, vocab_size: int, name: str = "input_ids") -> None:
    """InputError unless the token ids are usable.

    Args:
        ids: int64 or int32 (B, T), with T > 0 and values in [0, vocab_size).
        vocab_size: number of tokens in the vocabulary.
        name: name of the argument, for the error.
    """
    check_ids_kind(ids, name)
    assert_async((ids >= 0) & (ids < vocab_size), f"{name}: token ids must lie in [0, {vocab_size})", ids)


def check_ids_kind(ids: Tensor, name: str = "input_ids") -> None:
    """InputError unless token ids are int64 or int32 (B, T), with T > 0."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{name}: must be int64 or int32, got {ids.dtype}")
    if ids.ndim != 2 or ids.numel() == 0:
        raise InputError(f"{name}: must be (batch, tokens) with at least one token, got shape {tuple(ids.shape)}")


def check_plain(name: str, value: Any, *dtypes: torch.dtype) -> None:
    """InputError unless an argument is a dense tensor.

    Args:
        name: name of the argument, for the error.
        value: the argument.
        dtypes: the dtypes that it may have; by default any.
    """
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: must be a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise InputError(f"{name}: must be a dense tensor, got {value.layout}")
    if dtypes and value.dtype not in dtypes:
        raise InputError(f"{name}: must be {' or '.join(map(str, dtypes))}, got {value.dtype}")


def check_same_tokens(inputs: Tensor, **others: Tensor | None) -> None:
    """InputError unless each tensor of `others` has one element per token of the inputs (B, T, ...), on their
    device."""
    shape = tuple(inputs.shape[:2])
    for name, other in others.items():
        if other is None:
            continue
        if not isinstance(other, Tensor) or tuple(other.shape) != shape:
            actual = tuple(other.shape) if isinstance(other, Tensor) else type(other).__name__
            raise InputError(f"{name}: must have the inputs' shape {shape}, got {actual}")
        if other.device != inputs.device:
            raise InputError(f"{name}: must be on {inputs.device}, as the inputs are, got {other.device}")


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
