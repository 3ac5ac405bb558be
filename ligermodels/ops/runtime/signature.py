"""The tensors that an op takes, declared once: each by its name and a string of its sizes."""

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.runtime.library import PLAIN_OR_NONE, reject_dtensors, replicated
from ligermodels.ops.runtime.tensors import Shape, check_tensor

_DTYPES = frozenset(x for x in vars(torch).values() if isinstance(x, torch.dtype))
_FLOATING = frozenset(dtype for dtype in _DTYPES if dtype.is_floating_point)


class _Spec(NamedTuple):
    """One tensor of an op, as declared."""

    name: str
    shape: Shape
    dtypes: Collection[torch.dtype]
    dtype_name: str  # equal for tensors of equal dtypes
    leading: bool  # whether any number of dimensions comes before the `sizes`
    sizes: tuple[str, ...]  # equal letters for equal sizes, or numbers
    positive: frozenset[str]  # the letters of sizes that may not be 0
    optional: bool

    def fits(self, x: Any, known: dict[str, Any]) -> bool:
        """Whether x is as declared. Adds the values of names that occur for the first time to `known`."""
        # Each op begins with it. To gather all values, and then compare them, takes twice the time.
        if not isinstance(x, Tensor):
            return x is None and self.optional
        dtype, device, sizes = x.dtype, x.device, x.shape
        first = len(sizes) - len(self.sizes)
        if first < 0 or (first and not self.leading) or dtype not in self.dtypes:
            return False
        if known.setdefault(self.dtype_name, dtype) != dtype or known.setdefault("device", device) != device:
            return False
        if self.leading:
            leading, sizes = sizes[:first], sizes[first:]
            if known.setdefault("...", leading) != leading:
                return False
        for letter, size in zip(self.sizes, sizes, strict=True):  # a plain loop is the fastest
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

    def check(self, op: str, *tensors: Any, **sizes: Any) -> Any:
        """Check the tensors of a call, and return them.

        Args:
            op: name of the op, for messages.
            tensors: the tensors, in the order of the signature.
            sizes: sizes that are known: letter -> number.

        Raises:
            InputError: a shape, dtype or device does not fit, or a tensor is a DTensor and the op takes none.
        """
        known, plain = {**self._numbers, **sizes}, True
        for spec, x in zip(self._specs, tensors, strict=True):
            if not spec.fits(x, known):
                raise self._error(op, spec, tensors, {**self._numbers, **sizes})
            plain = plain and type(x) in PLAIN_OR_NONE
        return tensors if plain or self._dtensors == "kept" else self._with_dtensors(op, tensors)

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
    return _Spec(name, tuple(shape), allowed, dtype_name, leading, tuple(shape[leading:]), positive, "?" in text)
