"""Checks of arguments: of token ids, of options, and of values in tensors, which are read where a check runs on the
host."""

import math
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from ligermodels.arguments import check_count, check_number
from ligermodels.errors import InputError, short
from ligermodels.ops.runtime.dispatch import checked_on_host
from ligermodels.ops.runtime.library import is_fake


def assert_async(condition: Tensor, message: str, values: Tensor | None = None, name: str = "") -> None:
    """InputError on the CPU when any element of `condition` is false; on a GPU an asynchronous device assertion.

    Reading the result back would synchronise with the GPU at every step; the assertion surfaces at the next sync.
    `ops.set_host_checks` asks for the InputError on a GPU too.

    Args:
        condition: bool, any shape.
        message: message of the error.
        values: the values that were checked, of the shape of `condition`: the InputError names the first bad value and
            its indices. Default: None.
        name: name of the values, before the indices.
    """
    if not torch.compiler.is_compiling() and checked_on_host(condition):
        if not bool(condition.all()):
            if values is not None:
                first = (~condition).nonzero()[0].tolist()
                message = f"{message}, but {name}{first} is {values[tuple(first)]}"
            raise InputError(message)
    elif condition.device.type != "meta":
        torch._assert_async(condition.all(), message)


def rises(cu_seqlens: Tensor, total: int | None) -> Tensor:
    """Whether bounds (n + 1,) rise from 0, to `total` if it is given: a bool scalar on their device."""
    begins = (cu_seqlens[1:] >= cu_seqlens[:-1]).all() & (cu_seqlens[0] == 0)
    return begins if total is None else begins & (cu_seqlens[-1] == total)


def check_rising(op: str, cu_seqlens: Tensor | None, total: int | None = None) -> None:
    """InputError unless bounds of packed documents rise from 0, to the length of the row if it is given.

    The check runs where values are read on the host (`checked_on_host`): on the CPU, and on CUDA with
    `ops.set_host_checks`; elsewhere it costs nothing.

    Args:
        op: the op's name, for the message.
        cu_seqlens: int32 (n + 1,), or None.
        total: number of tokens of the row; None if bounds may end before it.
    """
    if cu_seqlens is None or torch.compiler.is_compiling() or is_fake(cu_seqlens) or not checked_on_host(cu_seqlens):
        return
    if not len(cu_seqlens) or not bool(rises(cu_seqlens, total)):
        end = "" if total is None else f" to the row's length, {total}"
        raise InputError(f"{op}: cu_seqlens must rise from 0{end}; got {short(cu_seqlens.tolist())}")


def check_scores(op: str, softmax_scale: Any = None, window: Any = None, softcap: Any = None) -> None:
    """Checks the options of attention scores; None stands for the default of each.

    Args:
        op: the op's name, for error messages.
        softmax_scale: a finite number.
        window: a whole number of at least 1.
        softcap: a positive number.

    Raises:
        InputError: an option has another type or value.
    """
    if softmax_scale is not None and (
        not isinstance(softmax_scale, Real) or isinstance(softmax_scale, bool) or not math.isfinite(softmax_scale)
    ):
        raise InputError(f"{op}: softmax_scale must be a finite number or None, got {short(softmax_scale)}")
    if window is not None:
        check_count(f"{op}: window", window)
    if softcap is not None:
        check_number(f"{op}: softcap", softcap, positive=True)


def check_token_ids(ids: Tensor, vocab_size: int, name: str = "input_ids") -> None:
    """InputError unless the token ids are usable.

    Args:
        ids: int64 or int32 (B, T), with T > 0 and values in [0, vocab_size).
        vocab_size: number of tokens in the vocabulary.
        name: name of the argument, for the error.
    """
    check_id_range(checked_ids(ids, name), vocab_size, name=name)


def check_id_range(ids: Tensor, vocab_size: int, mask: Tensor | None = None, *, name: str = "input_ids") -> None:
    """InputError unless each token id is in the vocabulary.

    Args:
        ids: (B, T).
        vocab_size: number of tokens in the vocabulary.
        mask: (B, T), 0 on padding, which may hold any id; None without padding.
        name: name of the argument, for the error.
    """
    if mask is not None:
        ids = ids.masked_fill(mask == 0, 0)
    assert_async((ids >= 0) & (ids < vocab_size), f"{name}: token ids must lie in [0, {vocab_size})", ids)


def checked_ids(ids: Any, name: str = "input_ids") -> Tensor:
    """The token ids; InputError unless they are a tensor of int64 or int32 (B, T), with T > 0."""
    check_plain(name, ids)
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{name}: must be int64 or int32, got {ids.dtype}")
    if ids.ndim != 2 or ids.numel() == 0:
        raise InputError(f"{name}: must be (batch, tokens) with at least one token, got shape {tuple(ids.shape)}")
    return cast(Tensor, ids)


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
    shape = inputs.shape[:2]
    for name, other in others.items():
        if other is None or (isinstance(other, Tensor) and other.shape == shape and other.device == inputs.device):
            continue
        actual = tuple(other.shape) if isinstance(other, Tensor) else type(other).__name__
        if actual != tuple(shape):
            raise InputError(f"{name}: must have the inputs' shape {tuple(shape)}, got {actual}")
        raise InputError(f"{name}: must be on {inputs.device}, as the inputs are, got {other.device}")


def check_not_complex(attention_mask: Tensor) -> None:
    """InputError for an attention mask of complex numbers."""
    if attention_mask.is_complex():
        raise InputError(f"attention_mask: must be whole numbers or bool, got {attention_mask.dtype}")
