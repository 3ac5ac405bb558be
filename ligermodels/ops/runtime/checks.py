"""Checks of arguments: of the tensors of an op, declared once by a `Signature`; of token ids and options; and of values
in tensors, which are read where a check runs on the host."""

import math
from collections.abc import Collection
from numbers import Real
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from ligermodels.arguments import check_count, check_number
from ligermodels.errors import InputError, short
from ligermodels.ops.runtime.dispatch import checked_on_host
from ligermodels.ops.runtime.library import is_fake, is_plain, reject_dtensors, replicated

_DTYPES = frozenset(x for x in vars(torch).values() if isinstance(x, torch.dtype))
_FLOATING = frozenset(dtype for dtype in _DTYPES if dtype.is_floating_point)
MOST_ACCEPTED = 256  # shapes that a signature remembers as accepted
Shape = tuple[Any, ...]
"""Sizes. A letter stands for any size, a leading `...` for any number of dimensions."""


def check_tensor(
    op: str,
    name: str,
    x: Any,
    shape: Shape,
    device: torch.device | None = None,
    *dtypes: torch.dtype,
    optional: bool = False,
) -> None:
    """Raises InputError unless x is a tensor of this shape, device and dtype.

    Args:
        op, name: the op and its argument x, for the message.
        x: the argument.
        shape: its sizes, see `Shape`.
        device: its device; None for any.
        dtypes: its dtype is one of these; if there are none, any floating dtype.
        optional: whether x may be None.
    """
    if x is None and optional:
        return
    check_tensors(op, **{name: x})
    fits = x.shape == shape or _has_shape(x.shape, shape)
    if not fits or x.device != (device or x.device) or not (x.dtype in dtypes if dtypes else x.is_floating_point()):
        dtype = " or ".join(map(str, dtypes)) or "floating"
        sizes = ", ".join("..." if size is ... else str(size) for size in shape)
        raise InputError(
            f"{op}: {name} must be {dtype} of shape ({sizes})" + (f" on {device}" if device else "") + "; "
            f"got {x.dtype} {tuple(x.shape)} on {x.device}"
        )


def check_tensors(op: str, **tensors: Any) -> None:
    """Raises InputError, naming `op` and the argument, unless each is a tensor: for ops that read sizes of `tensors`
    before they check them."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise InputError(f"{op}: {name} must be a tensor, got {type(x).__name__}")


def _has_shape(sizes: torch.Size, shape: Shape) -> bool:
    if shape and shape[0] is ...:
        sizes, shape = sizes[max(len(sizes) - len(shape) + 1, 0) :], shape[1:]
    return len(sizes) == len(shape) and all(
        isinstance(expected, str) or size == expected for size, expected in zip(sizes, shape, strict=True)
    )


def check_strides(op: str, **caches: Tensor) -> None:
    """Raises InputError, naming `op`, unless the last dimension of each of the `caches`, by their names, is
    contiguous."""
    for name, cache in caches.items():
        if cache.stride(-1) != 1 and cache.shape[-1] > 1:
            raise InputError(f"{op}: the last dimension of {name} must be contiguous, has stride {cache.stride(-1)}")


class _Spec(NamedTuple):
    """One tensor of an op, as declared."""

    name: str
    shape: Shape
    dtypes: Collection[torch.dtype]
    dtype_name: str  # equal for tensors of equal dtypes
    leading: bool  # whether the first of the `sizes` stands for any number of dimensions
    sizes: tuple[str, ...]  # equal letters for equal sizes, or numbers; "..." for the leading dimensions
    positive: frozenset[str]  # the letters of sizes that may not be 0
    optional: bool

    def fits(self, x: Any, known: dict[str, Any]) -> bool:
        """Whether x is as declared. Adds the values of names that occur for the first time to `known`."""
        if not isinstance(x, Tensor):
            return x is None and self.optional
        dtype, device = x.dtype, x.device
        sizes: tuple[Any, ...] = x.shape
        if self.leading:
            first = len(sizes) + 1 - len(self.sizes)
            sizes = sizes[:first], *sizes[first:]
        if len(sizes) != len(self.sizes) or dtype not in self.dtypes:
            return False
        if known.setdefault(self.dtype_name, dtype) != dtype or known.setdefault("device", device) != device:
            return False
        for letter, size in zip(self.sizes, sizes, strict=True):
            if known.setdefault(letter, size) != size or (letter in self.positive and size == 0):
                return False
        return True


class Signature:
    """The tensors of an op in their order, such as `Signature(x="... N+", residual="... N =x ?", weight="N ?")`.

    Each string has the sizes of a tensor. Equal letters are equal sizes, in all tensors; "N+" is at least 1; a leading
    `...` stands for any number of dimensions, the same in all tensors. After the sizes may follow the allowed dtypes
    ("int32 int64"; without them any floating dtype), or "=x" for the dtype of x, and "?" if the tensor may be None. All
    tensors are on one device.

    Args:
        dtensors: "refused" (default); "replicated" for ops that declare `rows`: if the first tensor is a DTensor, plain
            others become replicated DTensors on its mesh; or "kept" as they are.
        tensors: name -> string of sizes.
    """

    def __init__(self, *, dtensors: Literal["refused", "replicated", "kept"] = "refused", **tensors: str) -> None:
        self._dtensors = dtensors
        self._specs = [_parsed(name, text) for name, text in tensors.items()]
        self._numbers = {size: int(size) for spec in self._specs for size in spec.sizes if size.isdigit()}
        self._accepted: set[Any] = set()

    def check(self, op: str, *tensors: Any, **sizes: Any) -> Any:
        """Check the tensors of a call, and return them.

        Args:
            op: name of the op, for messages.
            tensors: the tensors, in the order of the signature.
            sizes: sizes that are known: letter -> number.

        Raises:
            InputError: a shape, dtype or device does not fit, or a tensor is a DTensor and the op takes none.
        """
        numbers = all(type(size) is int for size in sizes.values())
        if torch.compiler.is_compiling() or not numbers or not is_plain(*tensors):
            return self._checked(op, tensors, sizes)
        # Each op begins with it, and layers repeat their sizes: a check takes three times as long as this look-up.
        form = *[None if x is None else (x.dtype, x.device, x.shape) for x in tensors], *sizes.items()
        if form not in self._accepted:
            self._checked(op, tensors, sizes)
            if len(self._accepted) >= MOST_ACCEPTED:
                self._accepted.clear()
            self._accepted.add(form)
        return tensors

    def _checked(self, op: str, tensors: tuple[Any, ...], sizes: dict[str, Any]) -> tuple[Any, ...]:
        known = {**self._numbers, **sizes}
        for spec, x in zip(self._specs, tensors, strict=True):
            if not spec.fits(x, known):
                raise self._error(op, spec, tensors, {**self._numbers, **sizes})
        return tensors if is_plain(*tensors) or self._dtensors == "kept" else self._with_dtensors(op, tensors)

    def _error(self, op: str, spec: _Spec, tensors: tuple[Any, ...], known: dict[str, Any]) -> InputError:
        """The error of `check_tensor` for the tensor of `spec`, with numbers for the letters of the tensors before."""
        position = self._specs.index(spec)
        for earlier, tensor in zip(self._specs[:position], tensors, strict=False):
            earlier.fits(tensor, known)
        parts = [[*known.get("...", [...])] if size is ... else [known.get(size, size)] for size in spec.shape]
        wanted = tuple(size for part in parts for size in part)
        declared = spec.dtypes if isinstance(spec.dtypes, tuple) else ()
        dtypes = (known[spec.dtype_name],) if spec.dtype_name in known else declared
        x = tensors[position]
        check_tensor(op, spec.name, x, wanted, known.get("device"), *dtypes)
        for letter, size in zip(reversed(spec.sizes), reversed(x.shape), strict=False):
            if size == 0 and letter in spec.positive:
                shapes = ", ".join(str(tuple(x.shape)) for x in tensors if x is not None)
                return InputError(f"{op}: needs {letter} > 0; got tensors of shape {shapes}")
        return InputError(
            f"{op}: {spec.name} must be of shape {wanted}, equal letters for equal sizes; got {tuple(x.shape)}"
        )

    def _with_dtensors(self, op: str, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._dtensors == "refused":
            reject_dtensors(op, *tensors)
            return tensors
        others = {spec.name: x for spec, x in zip(self._specs[1:], tensors[1:], strict=True)}
        return tensors[0], *replicated(op, tensors[0], **others)


def _parsed(name: str, text: str) -> _Spec:
    """The tensor `name` from its sizes, dtypes, "=other" for the dtype of another tensor, and "?"."""
    shape: list[Any] = []
    dtypes, tied = [], name
    positive = frozenset(word[:-1] for word in text.split() if word.endswith("+"))
    for word in text.replace("?", "").replace("+", "").split():
        if word.startswith("="):
            tied = word[1:]
        elif hasattr(torch, word):
            dtypes.append(getattr(torch, word))
        else:
            shape.append(... if word == "..." else word)
    leading, dtype_name = shape[:1] == [...], f"dtype of {tied}"
    allowed: Collection[torch.dtype] = tuple(dtypes) or (_FLOATING if tied == name else _DTYPES)
    sizes = ("..." if size is ... else size for size in shape)
    return _Spec(name, tuple(shape), allowed, dtype_name, leading, tuple(sizes), positive, "?" in text)


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
    if not torch.compiler.is_compiling() and not is_fake(condition) and checked_on_host(condition):
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


def check_chosen(op: str, experts: Tensor, num_experts: int) -> None:
    """InputError unless the chosen experts (N, k) are in [0, num_experts). It is checked where `check_rising` is.

    Args:
        op: the op's name, for the message.
        experts: integers (N, k).
        num_experts: number of experts.
    """
    if torch.compiler.is_compiling() or is_fake(experts) or not checked_on_host(experts):
        return
    assert_async((experts >= 0) & (experts < num_experts), f"{op}: experts must lie in [0, {num_experts})", experts)


def check_scores(op: str, softmax_scale: Any = None, window: Any = None, softcap: Any = None) -> None:
    """Checks the options of attention scores, in eager mode; None stands for the default of each.

    Args:
        op: the op's name, for error messages.
        softmax_scale: a finite number.
        window: a whole number of at least 1.
        softcap: a positive number.

    Raises:
        InputError: an option has another type or value.
    """
    if torch.compiler.is_compiling():  # with dynamic=True a number is a symbol, which has no value yet
        return
    if softmax_scale is not None and (
        not isinstance(softmax_scale, Real) or isinstance(softmax_scale, bool) or not math.isfinite(softmax_scale)
    ):
        raise InputError(f"{op}: softmax_scale must be a finite number or None, got {short(softmax_scale)}")
    if window is not None:
        check_count(f"{op}: window", window)
    if softcap is not None:
        check_number(f"{op}: softcap", softcap, positive=True)


def check_eps(op: str, eps: float, name: str = "eps") -> None:
    """InputError, in eager mode, unless the epsilon of a norm, the argument `name`, is a finite number of at least 0. A
    negative one gives NaN for some rows only."""
    if not torch.compiler.is_compiling():
        check_number(f"{op}: {name}", eps)


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
