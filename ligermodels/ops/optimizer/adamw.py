"""One step of AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101), in one pass over memory."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from ligermodels.errors import InputError
from ligermodels.ops.runtime.dispatch import tl, triton, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import reject_dtensors
from ligermodels.ops.runtime.tensors import check_tensor

BLOCK = 2048


class Shard(NamedTuple):
    """Which part of a whole tensor a shard is: shape of the whole, and index in it of the shard's first element."""

    shape: Sequence[int]
    starts: Sequence[int]


@torch.no_grad()
def adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    rounding_seeds: Sequence[int] | None = None,
    shard: Shard | None = None,
) -> None:
    """Updates a parameter and the averages of its gradient in place, as `torch.optim.AdamW` does.

    It computes in float32 (float64 for float64), and rounds each result once to its tensor's dtype.

    Args:
        parameter: any shape, any floating dtype, contiguous.
        gradient: its gradient, of its shape and device, any floating dtype; copied if it is not contiguous.
        exp_avg: running average of the gradient, of the parameter's shape and device, any floating dtype, contiguous.
        exp_avg_sq: running average of the squared gradient, of the parameter's shape and device, any floating dtype,
            contiguous.
        step: number of this step, from 1 on.
        lr: learning rate.
        betas: decay of exp_avg and of exp_avg_sq per step.
        eps: added to the root of exp_avg_sq.
        weight_decay: weight decay per step, relative to the learning rate.
        rounding_seeds: seeds of stochastic rounding of bfloat16 tensors (https://arxiv.org/abs/2010.06192): a value is
            rounded up or down at random, so that it is right on average. Equal seeds, step and element give equal bits
            on one backend. None rounds to nearest, which loses changes below half a unit in the last place.
        shard: which part of the whole parameter `parameter` is; None if it is the whole. Stochastic rounding then gives
            an element the bits that it has in the whole.

    Raises:
        InputError: shapes or devices do not fit, a tensor updated in place is not contiguous, or stochastic rounding
            in the kernel meets a shard that is divided in other dimensions than the first and one more.

    Examples:
        >>> weight, gradient = torch.randn(4, 8), torch.randn(4, 8)
        >>> averages = torch.zeros(4, 8), torch.zeros(4, 8)
        >>> adamw_step(weight, gradient, *averages, step=1, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    """
    tensors = _checked(parameter, gradient, exp_avg, exp_avg_sq)
    if not use_kernels(*tensors) and parameter.device.type == "cpu" and _rounds_nothing(tensors):
        p, g, m, v = ([x] for x in tensors)
        torch_adamw(
            p, g, m, v, [], [torch.tensor(step - 1.0)], fused=True, amsgrad=False, maximize=False,
            lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay,
        )  # fmt: skip
        return
    key = None if rounding_seeds is None else adamw_key(rounding_seeds, step)
    numbers = adamw_numbers(step, lr, betas, weight_decay)
    if use_kernels(*tensors):
        _launch(tensors, (*numbers, *betas, eps), key, shard)
    else:
        _step_reference(*tensors, *numbers, *betas, eps, key, shard)


@torch.no_grad()
def adamw_step_in_memory(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    numbers: Tensor,
    key: Tensor | None,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """`adamw_step` for a CUDA graph: the numbers that change from step to step are read from the device's memory.

    Args:
        parameter: any shape, any floating dtype, contiguous.
        gradient: its gradient, of its shape and device, any floating dtype; copied if it is not contiguous.
        exp_avg: running average of the gradient, of the parameter's shape and device, any floating dtype, contiguous.
        exp_avg_sq: running average of the squared gradient, as `exp_avg`.
        numbers: float64 (4,), the results of `adamw_numbers`, then a number that is not read.
        key: int64 (2,), the result of `adamw_key`, then a number that is not read; None rounds to nearest.
        betas: decay of exp_avg and of exp_avg_sq per step.
        eps: added to the root of exp_avg_sq.

    Raises:
        InputError: as for `adamw_step`.
    """
    tensors = _checked(parameter, gradient, exp_avg, exp_avg_sq)
    if use_kernels(*tensors):
        _launch(tensors, (numbers, 0.0, 0.0, *betas, eps), key, None)
    else:
        keep, size, root, _ = numbers
        _step_reference(*tensors, keep, size, root, *betas, eps, None if key is None else int(key[0]))


def adamw_numbers(step: int, lr: float, betas: tuple[float, float], weight_decay: float) -> tuple[float, float, float]:
    """The numbers of AdamW that change from step to step.

    Args:
        step: number of the step, from 1 on.
        lr: learning rate.
        betas: decay of exp_avg and of exp_avg_sq per step.
        weight_decay: weight decay per step, relative to the learning rate.

    Returns:
        The factor of the parameter; the learning rate and the root's divisor, corrected for averages that begin at 0.
    """
    return 1 - lr * weight_decay, lr / (1 - betas[0] ** step), (1 - betas[1] ** step) ** 0.5


def adamw_key(seeds: Sequence[int], step: int) -> int:
    """The key of the random bits of stochastic rounding: an odd number of 63 bits, so that Triton compiles one kernel
    for all keys."""
    digest = hashlib.blake2b(repr((*seeds, step)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 | 1 << 62 | 1


def _checked(
    parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    reject_dtensors("adamw_step", parameter, gradient, exp_avg, exp_avg_sq)
    for name, x in (("gradient", gradient), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check_tensor("adamw_step", name, x, parameter.shape, parameter.device)
    for name, x in (("parameter", parameter), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if not x.is_contiguous():
            raise InputError(f"adamw_step: {name} must be contiguous, has strides {x.stride()}: call .contiguous()")
    torch.autograd.graph.increment_version([parameter, exp_avg, exp_avg_sq])
    return parameter, gradient.contiguous(), exp_avg, exp_avg_sq


def _rounds_nothing(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are float32 or all float64: then torch's fused step computes the same."""
    return {x.dtype for x in tensors} in ({torch.float32}, {torch.float64})


def _launch(
    tensors: Sequence[Tensor], numbers: Sequence[Tensor | float], key: Tensor | int | None, shard: Shard | None
) -> None:
    """`numbers` are keep, step_size, root, betas and eps; or with the first three in memory a tensor of them, 0, 0."""
    parameter = tensors[0]
    n = parameter.numel()
    if not n:
        return
    first, size, distance = (0, n, 0) if key is None or shard is None else _rows(shard, parameter.shape)
    aligned = first % 4 == 0 and distance % 4 == 0
    blocks = -(-(size if aligned else size + 3) // BLOCK)
    with torch.cuda.device_of(parameter):
        _adamw_step_kernel[(n // size * blocks,)](
            *tensors, size, blocks, first, distance, *numbers, 0 if key is None else key, STOCHASTIC=key is not None,
            ALIGNED=aligned, IN_MEMORY=isinstance(numbers[0], Tensor), BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


def _rows(shard: Shard, sizes: Sequence[int]) -> tuple[int, int, int]:
    """A shard as rows of elements that are contiguous in the whole tensor: the index of its first element in the whole,
    the length of a row, and the distance between starts of rows in the whole (0 for a single row)."""
    shape, starts = shard
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    divided = [dim for dim in range(len(shape)) if sizes[dim] != shape[dim]]
    outer = next((dim for dim in range(len(shape)) if sizes[dim] != 1), 0)
    inner = max(divided, default=0)
    if [dim for dim in divided if outer < dim < inner]:
        raise InputError(
            f"adamw_step: shard: {tuple(sizes)} of {tuple(shape)} is divided in dimensions {divided}; shard only the "
            "first and one other dimension, or round to nearest"
        )
    size = math.prod(sizes[inner:])
    return first, size, 0 if size == math.prod(sizes) else math.prod(shape[inner:])


def _step_reference(
    parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, keep: Any, size: Any, root: Any,
    beta1: float, beta2: float, eps: float, key: int | None, shard: Shard | None = None,
) -> None:  # fmt: skip
    """The specification of the kernel, in plain torch; its random numbers come from another generator."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    g = gradient.to(dtype)
    m = exp_avg.to(dtype).lerp(g, 1 - beta1)
    v = beta2 * exp_avg_sq.to(dtype) + (1 - beta2) * g * g
    p = parameter.to(dtype) * keep - size * m / (v.sqrt() / root + eps)
    if key is not None:
        generator = torch.Generator(p.device).manual_seed(key)
        p, m, v = (
            _rounded_reference(x, generator, shard) if to.dtype == torch.bfloat16 else x
            for x, to in ((p, parameter), (m, exp_avg), (v, exp_avg_sq))
        )
    parameter.copy_(p)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


def _rounded_reference(x: Tensor, generator: torch.Generator, shard: Shard | None) -> Tensor:
    """x rounded stochastically to bfloat16, as float32: adds a random number of 16 bits, then clears the last 16."""
    shape, starts = (x.shape, [0] * x.ndim) if shard is None else shard
    draws = torch.randint(2**16, tuple(shape), generator=generator, device=x.device, dtype=torch.int32)
    for dim, (start, size) in enumerate(zip(starts, x.shape, strict=True)):
        draws = draws.narrow(dim, start, size)
    rounded = (x.float().view(torch.int32) + draws >> 16 << 16).view(torch.float32)
    return torch.where(x.isnan(), x.float(), rounded)


@triton.jit
def _rounded(x, draws):
    """The same as `_rounded_reference`. NaN is left alone: one with all bits set would overflow."""
    rounded = ((x.to(tl.uint32, bitcast=True) + draws) >> 16 << 16).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)


@kernel
def _adamw_step_kernel(
    parameter, gradient, exp_avg, exp_avg_sq, size, blocks, first, apart, keep, step_size, root, beta1, beta2, eps, key,
    STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, IN_MEMORY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of `size` elements, `blocks` programs per row. In the whole tensor the first row starts at element `first`,
    the next rows `apart` elements after one another. With IN_MEMORY `keep` points to keep, step_size and root, and
    `key` to the key."""
    if IN_MEMORY:
        step_size, root = tl.load(keep + 1).to(tl.float32), tl.load(keep + 2).to(tl.float32)
        keep = tl.load(keep).to(tl.float32)
        if STOCHASTIC:
            key = tl.load(key)
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    start = first + row * apart
    # Four neighbours in the whole tensor share one draw: a block begins at a multiple of four, maybe before the row.
    before = 0 if ALIGNED else start % 4
    k = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = row * size + k - before
    inside = (k >= before) & (k < size + before)
    p = tl.load(parameter + i, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + i, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + i, mask=inside, other=0.0).to(tl.float32)
    m = m + (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    p = p * keep - step_size * m / (tl.sqrt(v) / root + eps)
    if STOCHASTIC:
        # Philox gives four words of 32 bits at once, one for each of four elements: 16 bits for p, 8 for an average,
        # filled up with a half so that they are right to a five hundredth of a unit.
        j = start // 4 + block.to(tl.int64) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        a, b, c, d = tl.randint4x(key, j)
        words = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (BLOCK,))
        if parameter.dtype.element_ty == tl.bfloat16:
            p = _rounded(p, words >> 16)
        if exp_avg.dtype.element_ty == tl.bfloat16:
            m = _rounded(m, (words & 0xFF00) + 0x80)
        if exp_avg_sq.dtype.element_ty == tl.bfloat16:
            v = _rounded(v, ((words & 0xFF) << 8) + 0x80)
    tl.store(parameter + i, p.to(parameter.dtype.element_ty), mask=inside)
    tl.store(exp_avg + i, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + i, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
