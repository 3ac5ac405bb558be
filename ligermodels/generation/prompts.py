"""The prompts of a batch: checked, and padded on the left."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ligermodels.arguments import is_sequence, is_whole
from ligermodels.errors import InputError, short
from ligermodels.layers.memory import memory_for
from ligermodels.ops.runtime.checks import check_plain

TokenIds: TypeAlias = Tensor | Sequence[int] | Sequence[Sequence[int]]

KINDS = "input_ids must be a tensor, a list of ids or a list of such lists"


class Prompts(NamedTuple):
    """Prompts of a batch, padded on the left: `ids` long (B, T), `mask` bool (B, T), True on tokens."""

    ids: Tensor
    mask: Tensor

    def for_samples(self, count: int, do_sample: bool) -> "Prompts":
        """Each prompt `count` times, in adjacent rows. Raises InputError for several of them without `do_sample`, or
        for more than fit into memory."""
        if count == 1:
            return self
        if not do_sample:
            raise InputError(f"num_return_sequences above 1 needs do_sample=True: got {count}")
        with memory_for(f"num_return_sequences = {count}", self.ids.device):
            return Prompts(*(tensor.repeat_interleave(count, dim=0) for tensor in self))

    def to(self, device: torch.device) -> "Prompts":
        """Prompts on the device of a model. Raises InputError for the meta device."""
        if device.type == "meta":
            raise InputError("the model is on the meta device, without weights: load it on another to generate")
        return Prompts(self.ids.to(device), self.mask.to(device))


def prepare_prompts(
    input_ids: TokenIds,
    attention_mask: Tensor | None,
    pad_token_id: int | None,
    eos_token_ids: Sequence[int],
    vocab_size: int,
) -> Prompts:
    """Check the prompts of a `generate` call and pad them on the left.

    Without a mask, tokens of a tensor that equal `pad_token_id` are padding, as in transformers, unless this token also
    ends sequences. Then a warning says that a mask is missing, if the ids look padded.

    Args:
        input_ids: integers (B, T) or (T,), one list of ids, or a list of such lists.
        attention_mask: (B, T) or (T,), 1 on tokens and 0 on padding, on any side; only with a tensor of ids.
        pad_token_id: fills shorter lists; None if all lists have one length.
        eos_token_ids: tokens that end a sequence.
        vocab_size: token ids are in [0, vocab_size).

    Returns:
        `Prompts` on the device of `input_ids`, or on the CPU for lists.

    Raises:
        InputError: an empty prompt, an id outside the vocabulary, a mask that does not fit the ids, or lists of
            different lengths without a `pad_token_id`.
    """
    if isinstance(input_ids, Tensor):
        ids = _check_ids(input_ids)
        if attention_mask is None:
            attention_mask = _inferred_mask(ids, pad_token_id, eos_token_ids)
        prompts = _padded_on_the_left(ids, _check_mask(attention_mask, ids))
    elif attention_mask is None:
        prompts = _from_lists(input_ids, pad_token_id)
    else:
        raise InputError("attention_mask goes with a tensor of input_ids; lists of ids need none")
    _check_vocabulary(prompts, vocab_size)
    return prompts


def _check_ids(ids: Tensor) -> Tensor:
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
    return ids


def _inferred_mask(ids: Tensor, pad_token_id: int | None, eos_token_ids: Sequence[int]) -> Tensor:
    """A mask for ids (B, T) or (T,) that come without one."""
    is_pad = torch.zeros_like(ids, dtype=torch.bool) if pad_token_id is None else ids == pad_token_id
    if pad_token_id not in eos_token_ids:
        if bool(is_pad.all(dim=-1).any()):
            raise InputError(
                f"input_ids: a prompt has no token but pad_token_id ({pad_token_id}); if it is text, give a mask"
            )
        return ~is_pad
    if _looks_padded(is_pad.reshape(-1, ids.shape[-1])):
        warnings.warn(
            f"input_ids: look padded with pad_token_id ({pad_token_id}), which is read as text, because it ends "
            "sequences too: give attention_mask, or a pad_token_id of its own",
            UserWarning,
            stacklevel=2,
        )
    return torch.ones_like(is_pad)


def _looks_padded(is_pad: Tensor) -> bool:
    """Whether rows (B, T) have padding on a side, by the places of `pad_token_id`. One may begin each row, as BOS."""
    first, last = is_pad[:, 0], is_pad[:, -1]
    if is_pad.shape[1] == 1:
        return False
    return bool((first & is_pad[:, 1]).any() | (first.any() & ~first.all()) | (last.any() & (len(last) > 1)))


def _check_mask(attention_mask: Tensor, ids: Tensor) -> Tensor:
    check_plain("attention_mask", attention_mask)
    if attention_mask.is_meta or attention_mask.is_complex() or attention_mask.is_quantized:
        description = f"{attention_mask.dtype} on {attention_mask.device}"
        raise InputError(f"attention_mask: must be bool or numbers with values, got {description}")
    mask = attention_mask.to(ids.device)
    if mask.shape != ids.shape:
        raise InputError(f"attention_mask has shape {tuple(mask.shape)}, input_ids have {tuple(ids.shape)}")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError("attention_mask may hold only 1 (a token) and 0 (padding)")
    return mask


def _padded_on_the_left(ids: Tensor, mask: Tensor) -> Prompts:
    ids, mask = ids.long().reshape(-1, ids.shape[-1]), mask.bool().reshape(-1, ids.shape[-1])
    empty = (~mask.any(dim=1)).nonzero()
    if len(empty):
        raise InputError(f"prompt {int(empty[0])} is empty: its attention_mask has no 1")
    # A stable sort keeps the tokens in their order; left-padded rows stay as they are.
    order = mask.int().argsort(dim=1, stable=True)
    return Prompts(ids.gather(1, order), mask.gather(1, order))


def _from_lists(input_ids: Sequence[int] | Sequence[Sequence[int]], pad_token_id: int | None) -> Prompts:
    if input_ids is not None and not is_sequence(input_ids):
        raise InputError(f"{KINDS}, got {type(input_ids).__name__}")
    if not input_ids:
        raise InputError("input_ids are empty: give at least one prompt")
    rows: Sequence[Any] = [input_ids] if all(map(is_whole, input_ids)) else input_ids
    lengths = [_check_row(row, number) for number, row in enumerate(rows)]
    longest = max(lengths)
    if pad_token_id is None and min(lengths) < longest:
        raise InputError("prompts of different lengths need padding: give pad_token_id (or eos_token_id)")
    with torch.device("cpu"):
        ids = torch.tensor([[pad_token_id or 0] * (longest - len(row)) + list(row) for row in rows])
        mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return Prompts(ids, mask)


def _check_row(row: Any, number: int) -> int:
    """The length of a list of token ids."""
    if not is_sequence(row) or not all(map(is_whole, row)):
        raise InputError(f"{KINDS}: see prompt {number}")
    if not row:
        raise InputError(f"prompt {number} is empty: a prompt needs at least one token")
    if too_large := [token for token in row if abs(token) >= 2**63]:
        raise InputError(f"input_ids: token id {short(too_large[0])} (prompt {number}) is beyond int64")
    return len(row)


def _check_vocabulary(prompts: Prompts, vocab_size: int) -> None:
    outside = (((prompts.ids < 0) | (prompts.ids >= vocab_size)) & prompts.mask).nonzero()
    if len(outside):
        row, column = outside[0].tolist()
        # The position in the caller's list: padding is not counted.
        position = int(prompts.mask[row, :column].sum())
        raise InputError(
            f"input_ids: token id {int(prompts.ids[row, column])} (prompt {row}, token {position}) is outside the "
            f"vocabulary of {vocab_size}"
        )
