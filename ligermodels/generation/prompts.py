"""The prompts of a batch: checked, and padded on the left."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ligermodels.errors import InputError, short
from ligermodels.layers.packing import check_plain

TokenIds: TypeAlias = Tensor | Sequence[int] | Sequence[Sequence[int]]


class Prompts(NamedTuple):
    """Prompts of a batch, padded on the left: `ids` long (B, T), `mask` bool (B, T), True on real tokens."""

    ids: Tensor
    mask: Tensor

    def repeated(self, count: int) -> "Prompts":
        """Each `count` times, in adjacent rows."""
        return self if count == 1 else Prompts(*(each.repeat_interleave(count, dim=0) for each in self))

    def to(self, device: torch.device) -> "Prompts":
        """On a model's device; InputError for one without values."""
        if device.type == "meta":
            raise InputError("the model is on the meta device, without weights: load it on another to generate")
        return Prompts(self.ids.to(device), self.mask.to(device))


def prepare_prompts(
    input_ids: TokenIds, attention_mask: Tensor | None, pad_token_id: int | None, vocab_size: int
) -> Prompts:
    """Check the prompts of a `generate` call and pad them on the left (arguments and errors as there)."""
    if isinstance(input_ids, Tensor):
        prompts = _from_tensor(input_ids, attention_mask)
    elif attention_mask is None:
        prompts = _from_lists(input_ids, pad_token_id)
    else:
        raise InputError("attention_mask goes with a tensor of input_ids; lists of ids need none")
    wrong = (((prompts.ids < 0) | (prompts.ids >= vocab_size)) & prompts.mask).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        # counted among the row's real tokens: that is where the caller finds it, however it was padded
        place = int(prompts.mask[row, :column].sum())
        raise InputError(
            f"input_ids: token id {int(prompts.ids[row, column])} (prompt {row}, token {place}) is outside the "
            f"vocabulary of {vocab_size}"
        )
    return prompts


def _from_tensor(ids: Tensor, attention_mask: Tensor | None) -> Prompts:
    if ids.layout is not torch.strided or ids.is_meta:
        raise InputError(f"input_ids must be a plain tensor with values, got one on {ids.device}, {ids.layout}")
    if ids.dtype == torch.uint64 and bool((ids.view(torch.int64) < 0).any()):
        raise InputError("input_ids: a token id is beyond int64")
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise InputError(f"input_ids must be integers, got {ids.dtype}")
    if ids.ndim not in (1, 2):
        raise InputError(f"input_ids must have shape (B, T) or (T,), got {tuple(ids.shape)}")
    if ids.numel() == 0:
        raise InputError(f"input_ids are empty (shape {tuple(ids.shape)}): a prompt needs at least one token")
    if attention_mask is not None:
        check_plain("attention_mask", attention_mask)
        if attention_mask.is_meta or attention_mask.is_complex() or attention_mask.is_quantized:
            kind = f"{attention_mask.dtype} on {attention_mask.device}"
            raise InputError(f"attention_mask: must be bool or numbers with values, got {kind}")
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask.to(ids.device)
    if mask.shape != ids.shape:
        raise InputError(f"attention_mask has shape {tuple(mask.shape)}, input_ids have {tuple(ids.shape)}")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError("attention_mask may hold only 1 (a token) and 0 (padding)")
    ids, mask = ids.long().reshape(-1, ids.shape[-1]), mask.bool().reshape(-1, ids.shape[-1])
    empty = (~mask.any(dim=1)).nonzero()
    if len(empty):
        raise InputError(f"prompt {int(empty[0])} is empty: its attention_mask has no 1")
    # real tokens to the right end, in their order; left-padded rows stay as they are
    order = mask.int().argsort(dim=1, stable=True)
    return Prompts(ids.gather(1, order), mask.gather(1, order))


def _from_lists(input_ids: Sequence[int] | Sequence[Sequence[int]], pad_token_id: int | None) -> Prompts:
    if not isinstance(input_ids, Sequence | None) or isinstance(input_ids, str | bytes):
        raise InputError(
            f"input_ids must be a tensor, a list of ids or a list of such lists, got {type(input_ids).__name__}"
        )
    rows: Sequence[Any] = input_ids
    if rows and all(_is_id(row) for row in rows):
        rows = [rows]
    if not rows:
        raise InputError("input_ids are empty: give at least one prompt")
    lengths = []
    for number, row in enumerate(rows):
        if isinstance(row, bytes) or not isinstance(row, Sequence) or not all(map(_is_id, row)):
            raise InputError(f"input_ids must be a tensor, a list of ids or a list of such lists: see prompt {number}")
        if not row:
            raise InputError(f"prompt {number} is empty: a prompt needs at least one token")
        if wrong := [each for each in row if abs(each) >= 2**63]:
            raise InputError(f"input_ids: token id {short(wrong[0])} (prompt {number}) is beyond int64")
        lengths.append(len(row))
    longest = max(lengths)
    if pad_token_id is None and min(lengths) < longest:
        raise InputError("prompts of different lengths need padding: give pad_token_id (or eos_token_id)")
    ids = torch.tensor([[pad_token_id or 0] * (longest - len(row)) + list(row) for row in rows])
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return Prompts(ids, mask)


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
