"""The tensors that an op takes, declared once: each by its name and a string of its sizes."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.runtime.library import PLAIN, reject_dtensors, replicated
from ligermodels.ops.runtime.tensors import Shape, check_tensor


class _Spec(NamedTuple):
    name: str
    shape: Shape
    dtypes: tuple[torch.dtype, ...]
    like: int | None  # index of the tensor with the same dtype
    optional: bool


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
        self._positive = {word[:-1] for text in tensors.values() for word in text.split() if word.endswith("+")}
        self._specs = [_parsed(name, text.replace("+", ""), list(tensors)) for name, text in tensors.items()]

    def check(self, op: str, *tensors: Any, **sizes: Any) -> Any:
        """Check the tensors of a call, and return them.

        Args:
            op: name of the op, for messages.
            tensors: the tensors, in the order of the signature.
            sizes: sizes that are known: letter -> number.

        Raises:
            InputError: a shape, dtype or device does not fit, or a tensor is a DTensor and the op takes none.
        """
        plain, device = True, None
        for (name, shape, dtypes, like, optional), x in zip(self._specs, tensors, strict=True):
            if x is None and optional:
                continue
            if like is not None:
                dtypes = (tensors[like].dtype,)
            known = len(sizes)
            if not isinstance(x, Tensor) or not _fits(x, shape, device, dtypes, sizes):
                raise _error(op, name, x, shape, device, dtypes, dict(list(sizes.items())[:known]))
            device, plain = x.device, plain and type(x) in PLAIN
        for letter in self._positive:
            if sizes[letter] == 0:
                shapes = ", ".join(str(tuple(x.shape)) for x in tensors if x is not None)
                raise InputError(f"{op}: needs {letter} > 0; got tensors of shape {shapes}")
        if plain or self._dtensors == "kept":
            return tensors
        if self._dtensors == "refused":
            reject_dtensors(op, *tensors)
            return tensors
        others = {spec.name: x for spec, x in zip(self._specs[1:], tensors[1:], strict=True)}
        return tensors[0], *replicated(op, tensors[0], **others)


def _parsed(name: str, text: str, names: list[str]) -> _Spec:
    sizes: list[Any] = []
    dtypes, like = [], None
    for word in text.replace("?", "").split():
        if word.startswith("="):
            like = names.index(word[1:])
        elif hasattr(torch, word):
            dtypes.append(getattr(torch, word))
        else:
            sizes.append(... if word == "..." else int(word) if word.isdigit() else word)
    return _Spec(name, tuple(sizes), tuple(dtypes), like, "?" in text)


def _fits(
    x: Tensor, shape: Shape, device: torch.device | None, dtypes: tuple[torch.dtype, ...], sizes: dict[str, Any]
) -> bool:
    """Whether x is as declared. Adds the letters of its shape to `sizes`."""
    if (device is not None and x.device != device) or not (x.dtype in dtypes if dtypes else x.is_floating_point()):
        return False
    found: Any = x.shape
    if shape and shape[0] is ...:
        split = max(len(found) - len(shape) + 1, 0)
        leading, found, shape = found[:split], found[split:], shape[1:]
        if sizes.setdefault("...", leading) != leading:
            return False
    if len(found) != len(shape):
        return False
    for size, letter in zip(found, shape, strict=True):
        if size != (sizes.setdefault(letter, size) if type(letter) is str else letter):
            return False
    return True


def _error(
    op: str, name: str, x: Any, shape: Shape, device: torch.device | None, dtypes: tuple[torch.dtype, ...],
    sizes: dict[str, Any],
) -> InputError:  # fmt: skip
    """The error of `check_tensor`, with numbers for known letters."""
    parts = [[*sizes.get("...", [...])] if size is ... else [sizes.get(size, size)] for size in shape]
    wanted = tuple(size for part in parts for size in part)
    check_tensor(op, name, x, wanted, device, *dtypes)
    return InputError(f"{op}: {name} must be of shape {wanted}, equal letters for equal sizes; got {tuple(x.shape)}")
