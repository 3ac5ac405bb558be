"""Several documents in one row: bounds, positions, and the checks on what a caller hands in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError


def require(condition: Tensor, message: str) -> None:
    """InputError on the CPU when any element of `condition` is false; on a GPU an asynchronous device assertion.

    Reading the answer back would stall the GPU's queue at every step, so there the error surfaces at the next sync.
    """
    if condition.device.type == "cpu" and not torch.compiler.is_compiling():
        if not bool(condition.all()):
            raise InputError(message)
    elif condition.device.type != "meta":
        torch._assert_async(condition.all(), message)


def check_token_ids(ids: Tensor, vocab_size: int, name: str = "input_ids") -> None:
    """InputError unless `ids` is an integer tensor (B, T) with T > 0 and values in [0, vocab_size)."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{name}: must be int64 or int32, got {ids.dtype}")
    if ids.ndim != 2 or ids.numel() == 0:
        raise InputError(f"{name}: must be (batch, tokens) with at least one token, got shape {tuple(ids.shape)}")
    inside = (ids >= 0) & (ids < vocab_size)
    message = f"{name}: token ids must lie in [0, {vocab_size})"
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(inside.all()):
        row, column = (~inside).nonzero()[0].tolist()
        raise InputError(f"{message}, but [{row}, {column}] is {int(ids[row, column])}")
    require(inside, message)


def check_beside(inputs: Tensor, **others: Tensor | None) -> None:
    """InputError unless each other that is there has one element a token of the inputs (B, T, ...), on their device."""
    shape = tuple(inputs.shape[:2])
    for name, other in others.items():
        if other is not None and tuple(other.shape) != shape:
            raise InputError(f"{name}: must have the inputs' shape {shape}, got {tuple(other.shape)}")
        if other is not None and other.device != inputs.device:
            raise InputError(f"{name}: must be on {inputs.device}, as the inputs are, got {other.device}")


def check_bounds(cu_seqlens: Tensor, shape: tuple[int, int]) -> None:
    """InputError unless `cu_seqlens` is int32 (n + 1,), rising from 0 to the length of a single row."""
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise InputError(
            f"cu_seqlens: must be int32 of shape (documents + 1,), got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    if shape[0] != 1:
        raise InputError(f"cu_seqlens: packed documents come as one row, but the batch has {shape[0]}")
    rises = (cu_seqlens[1:] >= cu_seqlens[:-1]).all()
    ends = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == shape[1])
    require(rises & ends, f"cu_seqlens: must rise from 0 to the row's length, {shape[1]}")


def document_of(cu_seqlens: Tensor, total: int) -> Tensor:
    """Index of the document that each of `total` tokens belongs to, (total,) long."""
    place = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(place, cu_seqlens[1:], right=True)


def packed_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """Position of each token within its document, (1, total) long."""
    place = torch.arange(total, device=cu_seqlens.device)
    return (place - cu_seqlens[document_of(cu_seqlens, total)])[None]


def bounds_of(position_ids: Tensor) -> Tensor | None:
    """Bounds, over the flattened B * T tokens, of documents whose positions (B, T) restart; None where none does.

    Costs one sync on a GPU: pass `cu_seqlens` instead where that matters.
    """
    follows = position_ids[:, 1:] == position_ids[:, :-1] + 1
    if bool(follows.all()):
        return None
    starts = F.pad(~follows, (1, 0), value=True).flatten().nonzero().flatten()
    return F.pad(starts, (0, 1), value=position_ids.numel()).to(torch.int32)
