"""One step of AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101), in one pass over memory."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torchs_adamw

from ligermodels.errors import InputError
from ligermodels.ops.runtime.dispatch import tl, triton, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import reject_dtensors
from ligermodels.ops.runtime.tensors import check_tensor

BLOCK = 2048

Shard = tuple[Sequence[int], Callable[[Tensor], Tensor]]
"""The shape of a whole tensor, and the function from it to a shard."""


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

    shard: where the parameter is a shard, the whole's shape and the function from the whole to the shard. An element of
    the reference then gets the bits that it has in the whole. The kernel counts elements within the shard: with another
    sharding its bits are others.
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
        with torch.cuda.device_of(parameter):
            _adamw_step_kernel[(-(-n // BLOCK),)](
                *tensors, n, *numbers, key or 0, STOCHASTIC=key is not None, BLOCK=BLOCK, num_warps=8
            )


def _key(*numbers: int) -> int:
    """A key for generators of random numbers. Odd and of 63 bits always: Triton compiles one kernel for all of them."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 | 1 << 62 | 1


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
    shape, of_whole = (x.shape, None) if shard is None else shard
    draws = torch.randint(2**16, tuple(shape), generator=generator, device=x.device, dtype=torch.int32)
    draws = draws if of_whole is None else of_whole(draws)
    rounded = (x.float().view(torch.int32) + draws >> 16 << 16).view(torch.float32)
    return torch.where(x.isnan(), x.float(), rounded)


@triton.jit
def _rounded(x, draws):
    """As `_rounded_reference`. A NaN whose bits are all set would overflow."""
    rounded = ((x.to(tl.uint32, bitcast=True) + draws) >> 16 << 16).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)


@kernel
def _adamw_step_kernel(
    parameter, gradient, exp_avg, exp_avg_sq, n, keep, size, root, beta1, beta2, eps, key, STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    p = tl.load(parameter + i, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + i, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + i, mask=inside, other=0.0).to(tl.float32)
    m = m + (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    p = p * keep - size * m / (tl.sqrt(v) / root + eps)
    if STOCHASTIC:
        # Philox gives four words of 32 bits at once, one for each of four elements: 16 bits for p, 8 for an average,
        # filled up with a half so that they are right to a five hundredth of a unit.
        j = tl.program_id(0).to(tl.int64) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
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
