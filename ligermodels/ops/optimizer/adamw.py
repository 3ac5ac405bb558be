"""One step of AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101), in one pass over memory."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from ligermodels.errors import InputError
from ligermodels.ops.optimizer.blockwise import (
    FIRST,
    SECOND,
    Average,
    Blockwise,
    check_blockwise,
    decode,
    decode_blocks,
    encode_blocks,
    launch_blocks,
    store,
    tile,
    tile_words,
)
from ligermodels.ops.optimizer.rounding import BLOCK, Shard, elements, random_words, rounded, rounding_key
from ligermodels.ops.runtime.checks import Signature
from ligermodels.ops.runtime.dispatch import tl, triton, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import reject_dtensors

_TENSORS = Signature(parameter="...", gradient="...", exp_avg="...", exp_avg_sq="...")
_WITH_BLOCKWISE = Signature(parameter="...", gradient="...")


@torch.no_grad()
def adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Average,
    exp_avg_sq: Average,
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
        exp_avg: running average of the gradient, of the parameter's shape and device, any floating dtype, contiguous;
            or `Blockwise`, with the code FIRST.
        exp_avg_sq: running average of the squared gradient, of the parameter's shape and device, any floating dtype,
            contiguous; or `Blockwise`, with the code SECOND. Both averages are tensors, or both `Blockwise`.
        step: number of this step, from 1 on.
        lr: learning rate.
        betas: decay of exp_avg and of exp_avg_sq per step.
        eps: added to the root of exp_avg_sq.
        weight_decay: weight decay per step, relative to the learning rate.
        rounding_seeds: seeds of stochastic rounding of bfloat16 tensors and of codes
            (https://arxiv.org/abs/2010.06192): a value is rounded up or down at random, so that it is right on average.
            Equal seeds, step and element give equal bits on one backend. None rounds to nearest, which loses changes
            below half a unit in the last place.
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
    tensors = checked(parameter, gradient, exp_avg, exp_avg_sq)
    if not use_kernels(*tensors[:2]) and parameter.device.type == "cpu" and _rounds_nothing(tensors):
        p, g, m, v = ([cast(Tensor, x)] for x in tensors)
        torch_adamw(
            p, g, m, v, [], [torch.tensor(step - 1.0, device="cpu")], fused=True, amsgrad=False, maximize=False,
            lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay,
        )  # fmt: skip
        return
    key = None if rounding_seeds is None else rounding_key(rounding_seeds, step)
    numbers = adamw_numbers(step, lr, betas, weight_decay)
    if use_kernels(*tensors[:2]):
        _launch(tensors, (*numbers, *betas, eps), key, shard)
    else:
        _step_reference(*tensors, *numbers, *betas, eps, key, shard)


@torch.no_grad()
def adamw_step_in_memory(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Average,
    exp_avg_sq: Average,
    *,
    numbers: Tensor,
    key: Tensor | None,
    betas: tuple[float, float],
    eps: float,
    shard: Shard | None = None,
) -> None:
    """`adamw_step` for a CUDA graph: the numbers that change from step to step are read from the device's memory.

    Args:
        parameter: any shape, any floating dtype, contiguous.
        gradient: its gradient, of its shape and device, any floating dtype; copied if it is not contiguous.
        exp_avg: running average of the gradient, as in `adamw_step`.
        exp_avg_sq: running average of the squared gradient, as in `adamw_step`.
        numbers: float64 (4,), the results of `adamw_numbers`, then a number that is not read.
        key: int64 (2,), the result of `rounding_key`, then a number that is not read; None rounds to nearest.
        betas: decay of exp_avg and of exp_avg_sq per step.
        eps: added to the root of exp_avg_sq.
        shard: which part of the whole parameter `parameter` is, as in `adamw_step`.

    Raises:
        InputError: as `adamw_step`.
    """
    tensors = checked(parameter, gradient, exp_avg, exp_avg_sq)
    if use_kernels(*tensors[:2]):
        _launch(tensors, (numbers, 0.0, 0.0, *betas, eps), key, shard)
    else:
        keep, size, root, _ = numbers
        _step_reference(*tensors, keep, size, root, *betas, eps, None if key is None else int(key[0]), shard)


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


def checked(
    parameter: Tensor, gradient: Tensor, exp_avg: Average, exp_avg_sq: Average
) -> tuple[Tensor, Tensor, Average, Average]:
    """The tensors of a step, the gradient contiguous; autograd learns that the others change. InputError if they do not
    fit."""
    if isinstance(exp_avg, Tensor) and isinstance(exp_avg_sq, Tensor):
        _TENSORS.check("adamw_step", parameter, gradient, exp_avg, exp_avg_sq)
        written = {"parameter": parameter, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    else:
        written = {"parameter": parameter}
        for name, x in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            if isinstance(x, Tensor):
                raise InputError("adamw_step: exp_avg and exp_avg_sq must both be tensors, or both Blockwise")
            check_blockwise("adamw_step", name, x, parameter)
            written |= {f"{name}.codes": x.codes, f"{name}.scales": x.scales}
        _WITH_BLOCKWISE.check("adamw_step", parameter, gradient)
        reject_dtensors("adamw_step", *written.values())
    for name, x in written.items():
        if not x.is_contiguous():
            raise InputError(f"adamw_step: {name} must be contiguous, has strides {x.stride()}: call .contiguous()")
    torch.autograd.graph.increment_version(list(written.values()))
    return parameter, gradient.contiguous(), exp_avg, exp_avg_sq


def _rounds_nothing(tensors: Sequence[Any]) -> bool:
    """Whether all tensors are float32 or all float64: then torch's fused step computes the same."""
    return {getattr(x, "dtype", None) for x in tensors} in ({torch.float32}, {torch.float64})


def _launch(
    tensors: Sequence[Any], numbers: Sequence[Tensor | float], key: Tensor | int | None, shard: Shard | None
) -> None:
    """`numbers` are keep, step_size, root, betas and eps; or with the first three in memory a tensor of them, 0, 0."""
    parameter = tensors[0]
    if not parameter.numel():
        return
    if isinstance(tensors[2], Blockwise):
        launch_blocks(_adamw8_step_kernel, "adamw_step", tensors, numbers, key, shard)
        return
    first, size, distance, blocks, aligned = elements(parameter, None if key is None else shard, "adamw_step")
    with torch.cuda.device_of(parameter):
        _adamw_step_kernel[(parameter.numel() // size * blocks,)](
            *tensors, size, blocks, first, distance, *numbers, 0 if key is None else key, STOCHASTIC=key is not None,
            ALIGNED=aligned, IN_MEMORY=isinstance(numbers[0], Tensor), BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


def _step_reference(
    parameter: Tensor, gradient: Tensor, exp_avg: Average, exp_avg_sq: Average, keep: Any, size: Any, root: Any,
    beta1: float, beta2: float, eps: float, key: int | None, shard: Shard | None = None,
) -> None:  # fmt: skip
    """The specification of the kernels, in plain torch; its random numbers come from another generator."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    g = gradient.to(dtype)
    m, v = (
        decode(x, code).to(dtype) if isinstance(x, Blockwise) else x.to(dtype)
        for x, code in ((exp_avg, FIRST), (exp_avg_sq, SECOND))
    )
    m = m.lerp(g, 1 - beta1)
    v = beta2 * v + (1 - beta2) * g * g
    p = parameter.to(dtype) * keep - size * m / (v.sqrt() / root + eps)
    generator = None if key is None else torch.Generator(p.device).manual_seed(key)
    store(parameter, p, generator, shard)
    store(exp_avg, m, generator, shard)
    store(exp_avg_sq, v, generator, shard, SECOND)


@triton.jit
def adamw_block(
    parameter, gradient, exp_avg, exp_avg_sq, i, inside, first, keep, step_size, root, beta1, beta2, eps, key,
    STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """The elements `i` (BLOCK,) that are `inside`; in random bits, four of them from `first` on share one draw."""
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
        words = random_words(key, first, BLOCK)
        if parameter.dtype.element_ty == tl.bfloat16:
            p = rounded(p, words >> 16)
        if exp_avg.dtype.element_ty == tl.bfloat16:
            m = rounded(m, (words & 0xFF00) + 0x80)
        if exp_avg_sq.dtype.element_ty == tl.bfloat16:
            v = rounded(v, ((words & 0xFF) << 8) + 0x80)
    tl.store(parameter + i, p.to(parameter.dtype.element_ty), mask=inside)
    tl.store(exp_avg + i, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + i, v.to(exp_avg_sq.dtype.element_ty), mask=inside)


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
    adamw_block(
        parameter, gradient, exp_avg, exp_avg_sq, row * size + k - before, (k >= before) & (k < size + before),
        start // 4 + block.to(tl.int64) * (BLOCK // 4), keep, step_size, root, beta1, beta2, eps, key, STOCHASTIC,
        BLOCK,
    )  # fmt: skip


@kernel
def _adamw8_step_kernel(
    parameter, gradient, m_codes, m_scales, v_codes, v_scales, columns, blocks, count, size, first, apart, keep,
    step_size, root, beta1, beta2, eps, key, STOCHASTIC: tl.constexpr, IN_MEMORY: tl.constexpr,
):  # fmt: skip
    """Eight of `count` blocks of 256 elements, `blocks` of them per row of `columns` elements. For random bits, rows of
    `size` blocks begin at block `first` of the whole tensor, the next rows `apart` blocks after one another."""
    if IN_MEMORY:
        step_size, root = tl.load(keep + 1).to(tl.float32), tl.load(keep + 2).to(tl.float32)
        keep = tl.load(keep).to(tl.float32)
        if STOCHASTIC:
            key = tl.load(key)
    b, i, inside = tile(columns, blocks, count)
    p = tl.load(parameter + i, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32)
    m, m_scale = tl.load(m_codes + i, mask=inside, other=0), tl.load(m_scales + b, mask=b < count, other=0.0)
    v, v_scale = tl.load(v_codes + i, mask=inside, other=0), tl.load(v_scales + b, mask=b < count, other=0.0)
    m = decode_blocks(m, m_scale, SIGNED=True, MANTISSA=3, TOP=61439.0)
    v = decode_blocks(v, v_scale, SIGNED=False, MANTISSA=3, TOP=4026531840.0)
    m = tl.where(inside, m + (1.0 - beta1) * (g - m), 0.0)
    v = tl.where(inside, beta2 * v + (1.0 - beta2) * g * g, 0.0)
    p = p * keep - step_size * m / (tl.sqrt(v) / root + eps)
    words = tile_words(key, b, size, first, apart, STOCHASTIC)
    if STOCHASTIC and parameter.dtype.element_ty == tl.bfloat16:
        p = rounded(p, words >> 16)
    tl.store(parameter + i, p.to(parameter.dtype.element_ty), mask=inside)
    codes, scales = encode_blocks(m, words >> 8 & 0xFF, True, MANTISSA=3, TOP=61439.0, STOCHASTIC=STOCHASTIC)
    tl.store(m_codes + i, codes.to(tl.uint8), mask=inside)
    tl.store(m_scales + b, scales, mask=b < count)
    codes, scales = encode_blocks(v, words & 0xFF, False, MANTISSA=3, TOP=4026531840.0, STOCHASTIC=STOCHASTIC)
    tl.store(v_codes + i, codes.to(tl.uint8), mask=inside)
    tl.store(v_scales + b, scales, mask=b < count)
