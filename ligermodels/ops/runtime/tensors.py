"""Helpers for the tensors of ops: autocast, layouts for kernels, memory for gradients, and copies to the host."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, overload

import torch
from torch import Tensor

from ligermodels.ops.runtime.dispatch import set_batch_invariant

_VECTOR = 64  # elements; a multiple of what torch computes at a time
_ONE_THREAD = 2**14  # elements that torch leaves to one thread


@overload
def dtype_named(name: str) -> torch.dtype: ...
@overload
def dtype_named(name: str | None) -> torch.dtype | None: ...
def dtype_named(name: str | None) -> torch.dtype | None:
    """The dtype of torch with this name, such as "bfloat16"; None for None."""
    return None if name is None else getattr(torch, name)


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype). The test comes first because x.to takes the CPU as long as an addition even if it casts nothing."""
    return x if x.dtype == dtype else x.to(dtype)


def under_autocast(*operands: Tensor | None) -> list[Any]:
    """The operands of a matrix product, cast to the dtype of torch's autocast if it is on; float64 and None stay."""
    device = next((t.device.type for t in operands if isinstance(t, Tensor)), "meta")
    if device == "meta" or not torch.is_autocast_enabled(device):
        return list(operands)
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in operands]


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matrix product of x computes: the dtype of torch's autocast if it is on, else x's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if not x.is_meta and torch.is_autocast_enabled(device) else x.dtype


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which torch's autocast is off on x's device; the meta device has no autocast."""
    device = x.device.type
    is_on = not x.is_meta and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_on else nullcontext()


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each element of x; with `set_batch_invariant`, bits that depend on the element alone.

    On a CPU torch computes silu, gelu, sigmoid and softplus by vectors of elements, and the elements after the last
    whole vector, or beside the part of another thread, by other code. So there x goes in whole vectors, each part by
    one thread.

    Args:
        function: maps a tensor to a tensor of its shape and dtype, element by element.
        x: any shape.
    """
    if not (set_batch_invariant.value and x.is_cpu and x.numel()):
        return function(x)
    flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % _VECTOR))
    return torch.cat([function(part) for part in flat.split(_ONE_THREAD)])[: x.numel()].view(x.shape)


def empty_like(x: Tensor) -> Tensor:
    """An empty contiguous tensor of x's shape, dtype and device; `new_empty(x.shape)` takes the CPU twice as long."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def empty_gradient(x: Tensor | None, needed: int, like: Tensor) -> Tensor:
    """An empty tensor for the gradient of x; without elements, on the device of `like`, if it is not needed."""
    return like.new_empty(0) if x is None or not needed else empty_like(x)


def count_rows(x: Tensor) -> int:
    """The rows of x (..., N): the product of all sizes but the last. Symbolic sizes, as under `torch.export`, stay
    symbolic, while `torch.Size.numel` makes them constants."""
    return math.prod(x.shape[:-1])


def as_rows(x: Tensor) -> Tensor:
    """x (..., N) as (rows, N) with a contiguous last dimension: a view if the strides allow it, else a copy."""
    rows = x if x.dim() == 2 else x.reshape(count_rows(x), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def rows_and_stride(x: Tensor | None) -> tuple[Tensor | None, int]:
    """`as_rows`, and the stride from row to row, as kernels take them; None and 0 for None."""
    if x is None:
        return None, 0
    rows = as_rows(x)
    return rows, rows.stride(0)


def heads_and_strides(x: Tensor) -> tuple[Any, ...]:
    """x (B, T, heads, D) with a contiguous last dimension, and the strides of the others, as kernels take them."""
    x = x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
    return x, x.stride(0), x.stride(1), x.stride(2)


def contiguous(x: Tensor | None) -> Tensor | None:
    """x itself if it is contiguous or None, else a contiguous copy."""
    return None if x is None else x.contiguous()


class AsyncHostCopy:
    """Copies a tensor to the host without blocking; `get` waits for that copy alone.

    Kernels launched after it is made run while the copy is on its way. Of a tensor on the CPU it holds the value at
    the time.
    """

    _event: torch.cuda.Event | None = None

    def __init__(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._copy = tensor.clone()

    def get(self) -> Any:
        """The value, as `Tensor.tolist` gives it."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()
