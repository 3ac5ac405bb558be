"""One step of AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101), in one pass over memory."""

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torchs_adamw

from ligermodels.errors import InputError
from ligermodels.ops.runtime.dispatch import tl, triton, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import reject_dtensors
from ligermodels.ops.runtime.tensors import check_tensor

BLOCK = 2048


class Shard(NamedTuple):
    """Which part of a whole tensor a shard is: the whole's shape, and the index in it of the shard's first element."""

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
    """Changes the parameter and the averages of its gradient in place, as `torch.optim.AdamW` does at step `step` >= 1.

    parameter, gradient, exp_avg, exp_avg_sq: of one shape and device, any floating dtypes; float32 inside (float64 for
    float64), each rounded once to its dtype. Raises InputError if they do not fit, or are not contiguous (but for the
    gradient, of which a copy is made then).

    rounding_seeds: without them, rounding is to the nearest, and changes of less than half a unit in the last place
    are lost. With them what is in bfloat16 is rounded up or down at random, the likelier the nearer, so that it is
    right on average (https://arxiv.org/abs/2010.06192). Equal seeds, step and element give equal bits on one backend.

    shard: where the parameter is a shard, which part of the whole. An element then gets the bits that it has in the
    whole. The kernel takes shards in two dimensions at most, of which one is the first; InputError for others.
    """
    reject_dtensors("adamw_step", parameter, gradient, exp_avg, exp_avg_sq)
    for name, x in (("gradient", gradient), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check_tensor("adamw_step", name, x, parameter.shape, parameter.device)
    for name, x in (("parameter", parameter), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if not x.is_contiguous():
            raise InputError(f"adamw_step: {name} must be contiguous, has strides {x.stride()}")
    tensors = parameter, gradient.contiguous(), exp_avg, exp_avg_sq
    size, root = lr / (1 - betas[0] ** step), (1 - betas[1] ** step) ** 0.5
    numbers = 1 - lr * weight_decay, size, root, *betas, eps
    key = None if rounding_seeds is None else _key(*rounding_seeds, step)
    torch.autograd.graph.increment_version([parameter, exp_avg, exp_avg_sq])
    if not use_kernels(*tensors):
        dtypes = {x.dtype for x in tensors}
        if parameter.device.type == "cpu" and dtypes in ({torch.float32}, {torch.float64}):  # nothing is rounded
            p, g, m, v = ([x] for x in tensors)
            torchs_adamw(
                p, g, m, v, [], [torch.tensor(step - 1.0)], fused=True, amsgrad=False, maximize=False,
                lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay,
            )  # fmt: skip
        else:
            _step_reference(*tensors, *numbers, key, shard)
    elif n := parameter.numel():
        first, size, apart = (0, n, 0) if key is None or shard is None else _rows(shard, parameter.shape)
        aligned = first % 4 == 0 and apart % 4 == 0
        blocks = -(-(size if aligned else size + 3) // BLOCK)
        with torch.cuda.device_of(parameter):
            _adamw_step_kernel[(n // size * blocks,)](
                *tensors, size, blocks, first, apart, *numbers, key or 0,
                STOCHASTIC=key is not None, ALIGNED=aligned, BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip


def _key(*numbers: int) -> int:
    """A key for generators of random numbers. Odd and of 63 bits always: Triton compiles one kernel for all of them."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 | 1 << 62 | 1


def _rows(shard: Shard, sizes: Sequence[int]) -> tuple[int, int, int]:
    """A shard as rows of elements that follow one another in the whole: the number there of its first element, the
    length of a row, and the distance there between the starts of rows (0 of a single one)."""
    shape, starts = shard
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    divided = [dim for dim in range(len(shape)) if sizes[dim] != shape[dim]]
    outer = next((dim for dim in range(len(shape)) if sizes[dim] != 1), 0)
    inner = max(divided, default=0)
    if [dim for dim in divided if outer < dim < inner]:
        raise InputError(
            f"adamw_step: shard: {tuple(sizes)} of {tuple(shape)} is divided in dimensions {divided}; at most the "
            "first and one other may be, or round to nearest"
        )
    size = math.prod(sizes[inner:])
    return first, size, 0 if size == math.prod(sizes) else math.prod(shape[inner:])


def _step_reference(
    parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, keep: float, size: float, root: float,
    beta1: float, beta2: float, eps: float, key: int | None, shard: Shard | None = None,
) -> None:  # fmt: skip
    """The specification of the kernel, in plain torch; random numbers are from another generator."""
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
    """x as float32 whose last 16 bits are 0: a random number of 16 bits is added, and they are cut off."""
    shape, starts = (x.shape, [0] * x.ndim) if shard is None else shard
    draws = torch.randint(2**16, tuple(shape), generator=generator, device=x.device, dtype=torch.int32)
    for dim, (start, size) in enumerate(zip(starts, x.shape, strict=True)):
        draws = draws.narrow(dim, start, size)
    rounded = (x.float().view(torch.int32) + draws >> 16 << 16).view(torch.float32)
    return torch.where(x.isnan(), x.float(), rounded)


@triton.jit
def _rounded(x, draws):
    """As `_rounded_reference`. A NaN whose bits are all set would overflow."""
    rounded = ((x.to(tl.uint32, bitcast=True) + draws) >> 16 << 16).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)


@kernel
def _adamw_step_kernel(
    parameter, gradient, exp_avg, exp_avg_sq, size, blocks, first, apart, keep, step_size, root, beta1, beta2, eps, key,
    STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of `size` elements, `blocks` programs each. In the whole the first one starts at element `first`, and each
    `apart` after the one before."""
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    start = first + row * apart
    # Elements of the whole draw by fours: a block begins with the first of four, before the row if that does not.
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
