"""What ops do with their tensors: checks, layouts for kernels, and memory for gradients."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError


def check_tensor(
    op: str, name: str, x: Tensor, shape: tuple[int | str, ...], device: torch.device, *dtypes: torch.dtype
) -> None:
    """Raises InputError, naming op and tensor, unless x has this shape, in which a letter is any size, is on this
    device, and is of one of these dtypes (without any: floating)."""
    if not isinstance(x, Tensor):
        raise InputError(f"{op}: {name} must be a tensor, got {type(x).__name__}")
    sizes = x.shape
    fits = sizes == shape or _has_shape(sizes, shape)
    if not fits or x.device != device or not (x.dtype in dtypes if dtypes else x.is_floating_point()):
        wanted_dtype = " or ".join(map(str, dtypes)) or "floating"
        raise InputError(
            f"{op}: {name} must be {wanted_dtype} of shape ({', '.join(map(str, shape))}) on {device}; "
            f"got {x.dtype} {tuple(x.shape)} on {x.device}"
        )


def _has_shape(sizes: torch.Size, shape: tuple[int | str, ...]) -> bool:
    if len(sizes) != len(shape):
        return False
    # A plain loop: a decoding step checks dozens of tensors.
    for size, wanted in zip(sizes, shape, strict=True):  # noqa: SIM110
        if size != wanted and not isinstance(wanted, str):
            return False
    return True


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), which takes the host as long as an addition even where there is nothing to cast."""
    return x if x.dtype == dtype else x.to(dtype)


def under_autocast(*operands: Tensor | None) -> list[Any]:
    """The operands of a matrix product as torch's autocast casts them, if it is on: to its dtype, but for float64."""
    device = next((t.device.type for t in operands if isinstance(t, Tensor)), "meta")
    if device == "meta" or not torch.is_autocast_enabled(device):
        return list(operands)
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in operands]


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matrix product of x computes: that of torch's autocast on x's device, if it is on."""
    device = x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which torch's autocast is off on x's device; the meta device has none."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def check_caches(op: str, k_cache: Tensor, v_cache: Tensor, shape: tuple[int | str, ...], like: Tensor) -> None:
    """Raises InputError unless both caches are of this shape, on the device and of the dtype of `like`, and their last
    dimension is contiguous."""
    check_tensor(op, "k_cache", k_cache, shape, like.device, like.dtype)
    check_tensor(op, "v_cache", v_cache, k_cache.shape, like.device, like.dtype)
    if (k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1) and k_cache.shape[-1] > 1:
        name = "v_cache" if k_cache.stride(-1) == 1 else "k_cache"
        raise InputError(f"{op}: the last dimension of {name} must be contiguous")


def check_rows(op: str, name: str, x: Tensor, **weights: Tensor | None) -> None:
    """Raises InputError unless x, called `name`, has floating rows, and weights or biases, named, that fit them."""
    if not isinstance(x, Tensor):
        raise InputError(f"{op}: {name} must be a tensor, got {type(x).__name__}")
    sizes = x.shape
    if not sizes or sizes[-1] == 0 or not x.is_floating_point():
        raise InputError(f"{op}: {name} must be floating, of shape (..., N) with N > 0; got {x.dtype} {tuple(sizes)}")
    for weight_name, weight in weights.items():
        if weight is not None:
            check_tensor(op, weight_name, weight, sizes[-1:], x.device)


def empty_like(x: Tensor) -> Tensor:
    """An empty contiguous tensor of x's shape, dtype and device; `new_empty(x.shape)` takes the host twice as long."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def empty_gradient(x: Tensor | None, needed: int, like: Tensor) -> Tensor:
    """An empty tensor for the gradient of x; of no elements, on the device of `like`, if it is not needed."""
    return like.new_empty(0) if x is None or not needed else empty_like(x)


def as_rows(x: Tensor) -> Tensor:
    """x (..., N) as (rows, N) whose last dimension is contiguous: a view where the strides allow it, else a copy."""
    if x.dim() == 2:
        rows = x
    else:
        rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def rows_and_stride(x: Tensor | None) -> tuple[Tensor | None, int]:
    """`as_rows`, and the stride from row to row, as kernels take them; None and 0 for None."""
    if x is None:
        return None, 0
    rows = as_rows(x)
    return rows, rows.stride(0)


def heads_and_strides(x: Tensor) -> tuple[Any, ...]:
    """x (B, T, heads, D), its last dimension contiguous, and the strides of the others, as kernels take them."""
    x = x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
    return x, x.stride(0), x.stride(1), x.stride(2)


def contiguous(x: Tensor | None) -> Tensor | None:
    """x itself if it is contiguous or None, else a contiguous copy."""
    return None if x is None else x.contiguous()
