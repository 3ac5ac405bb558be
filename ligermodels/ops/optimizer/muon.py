"""One step of Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) in three parts: the momentum, its
orthogonalisation by Newton-Schulz, and the update of the parameter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.optimizer.blockwise import (
    MOMENTUM,
    Average,
    check_blockwise,
    decode,
    decode_blocks,
    encode_blocks,
    launch_blocks,
    store,
    tile,
    tile_words,
)
from ligermodels.ops.optimizer.rounding import BLOCK, Shard, elements, random_words, rounded
from ligermodels.ops.runtime.checks import Signature
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel

_GRADIENT, _MOMENTUM = Signature(gradient="..."), Signature(gradient="...", momentum="...")
_UPDATE = Signature(parameter="...", update="...")
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of the quintic polynomial of Newton-Schulz, as in `torch.optim.Muon`."""
EPS = 1e-7


def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """Orthogonalise matrices approximately: U S V^T -> U f(S) V^T with f(S) from about 0.7 to 1.2.

    It computes in bfloat16, as `torch.optim.Muon`; float64 in float64.

    Args:
        x: (..., rows, columns), any floating dtype.
        steps: number of iterations. Default: 5.

    Returns:
        A tensor of the shape of x, bfloat16 or float64.
    """
    a, b, c = COEFFICIENTS
    y = x.to(torch.float64 if x.dtype == torch.float64 else torch.bfloat16)
    y = y.flatten(0, -3) if y.ndim > 2 else y
    add_product = torch.addmm if y.ndim == 2 else torch.baddbmm
    is_tall = y.shape[-2] > y.shape[-1]
    y = y.mT if is_tall else y
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = y @ y.mT
        y = add_product(y, add_product(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y.mT if is_tall else y).reshape(x.shape)


@torch.no_grad()
def momentum_step(
    gradient: Tensor,
    momentum: Average,
    *,
    beta: float,
    nesterov: bool = True,
    key: Tensor | int | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """Updates the running average of a gradient in place, and returns Muon's direction.

    Args:
        gradient: any shape, any floating dtype; copied if it is not contiguous.
        momentum: running average, of the gradient's shape and device, any floating dtype, or `Blockwise` with the
            code MOMENTUM; contiguous.
        beta: decay of the average per step.
        nesterov: return gradient + beta (average - gradient). Default: True; False returns the average.
        key: `Blockwise`: key of stochastic rounding, an int or a tensor int64 (2,) of it and a number that is not read;
            None rounds to nearest.
        shard: which part of the whole tensor `gradient` is; None if it is the whole.

    Returns:
        The direction, of the shape of `gradient`: of the dtype of `momentum`, or of `gradient` if that is `Blockwise`.

    Raises:
        InputError: shapes or devices do not fit.
    """
    if isinstance(momentum, Tensor):
        _MOMENTUM.check("momentum_step", gradient, momentum)
        gradient = gradient.to(momentum.dtype)
        momentum.lerp_(gradient, 1 - beta)
        return gradient.lerp(momentum, beta) if nesterov else momentum.clone()
    _GRADIENT.check("momentum_step", gradient)
    check_blockwise("momentum_step", "momentum", momentum, gradient)
    torch.autograd.graph.increment_version(list(momentum))
    gradient = gradient.contiguous()
    if use_kernels(gradient):
        direction = torch.empty_like(gradient)
        if gradient.numel():
            tensors = (gradient, direction, momentum)
            launch_blocks(_momentum8_kernel, "momentum_step", tensors, (beta, float(nesterov)), key, shard)
        return direction
    g = gradient.float()
    m = decode(momentum, MOMENTUM).lerp(g, 1 - beta)
    generator = None if key is None else torch.Generator(g.device).manual_seed(_int(key))
    store(momentum, m, generator, shard, MOMENTUM)
    return (g.lerp(m, beta) if nesterov else m).to(gradient.dtype)


@torch.no_grad()
def apply_update(
    parameter: Tensor,
    update: Tensor,
    *,
    numbers: Tensor | Sequence[float],
    key: Tensor | int | None = None,
    shard: Shard | None = None,
) -> None:
    """parameter = keep * parameter - size * update, in place and rounded once.

    It computes in float32 (float64 for float64).

    Args:
        parameter: any shape, any floating dtype, contiguous.
        update: of its shape and device, any floating dtype; copied if it is not contiguous.
        numbers: keep and size, or a tensor float64 of them and of numbers that are not read.
        key: bfloat16: key of stochastic rounding, an int, or if `numbers` is a tensor a tensor int64 (2,) of it and a
            number that is not read; None rounds to nearest.
        shard: which part of the whole parameter `parameter` is; None if it is the whole.

    Raises:
        InputError: shapes or devices do not fit, `parameter` is not contiguous, or stochastic rounding in the kernel
            meets a shard that is divided in other dimensions than the first and one more.
    """
    _UPDATE.check("apply_update", parameter, update)
    if not parameter.is_contiguous():
        raise InputError(f"apply_update: parameter must be contiguous, has strides {parameter.stride()}")
    torch.autograd.graph.increment_version(parameter)
    update = update.contiguous()
    if use_kernels(parameter, update):
        if parameter.numel():
            _launch_update(parameter, update, numbers, key, shard)
        return
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    generator = None if key is None else torch.Generator(parameter.device).manual_seed(_int(key))
    store(parameter, parameter.to(dtype) * numbers[0] - numbers[1] * update.to(dtype), generator, shard)


def _launch_update(
    parameter: Tensor, update: Tensor, numbers: Tensor | Sequence[float], key: Tensor | int | None, shard: Shard | None
) -> None:
    first, size, distance, blocks, aligned = elements(parameter, None if key is None else shard, "apply_update")
    in_memory = isinstance(numbers, Tensor)
    keep, step_size = (numbers, 0.0) if isinstance(numbers, Tensor) else numbers[:2]
    with torch.cuda.device_of(parameter):
        _apply_update_kernel[(parameter.numel() // size * blocks,)](
            parameter, update, size, blocks, first, distance, keep, step_size, 0 if key is None else key,
            STOCHASTIC=key is not None, ALIGNED=aligned, IN_MEMORY=in_memory, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


def _int(key: Tensor | int) -> int:
    return key if isinstance(key, int) else int(key[0])


@kernel
def _momentum8_kernel(
    gradient, direction, codes, scales, columns, blocks, count, size, first, apart, beta, nesterov, key,
    STOCHASTIC: tl.constexpr, IN_MEMORY: tl.constexpr,
):  # fmt: skip
    """Eight blocks of 256 elements; see `_adamw8_step_kernel`. With IN_MEMORY `key` points to the key."""
    if IN_MEMORY and STOCHASTIC:
        key = tl.load(key)
    b, i, inside = tile(columns, blocks, count)
    g = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32)
    m, scale = tl.load(codes + i, mask=inside, other=0), tl.load(scales + b, mask=b < count, other=0.0)
    m = decode_blocks(m, scale, SIGNED=True, MANTISSA=5, TOP=14.75)
    m = tl.where(inside, m + (1.0 - beta) * (g - m), 0.0)
    ahead = tl.where(nesterov > 0.5, g + beta * (m - g), m)
    tl.store(direction + i, ahead.to(direction.dtype.element_ty), mask=inside)
    words = tile_words(key, b, size, first, apart, STOCHASTIC)
    m_codes, m_scales = encode_blocks(m, words >> 8 & 0xFF, True, MANTISSA=5, TOP=14.75, STOCHASTIC=STOCHASTIC)
    tl.store(codes + i, m_codes.to(tl.uint8), mask=inside)
    tl.store(scales + b, m_scales, mask=b < count)


@kernel
def _apply_update_kernel(
    parameter, update, size, blocks, first, apart, keep, step_size, key, STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr, IN_MEMORY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of `size` elements, `blocks` programs per row; see `_adamw_step_kernel`. With IN_MEMORY `keep` points to
    keep and step_size, and `key` to the key."""
    if IN_MEMORY:
        step_size = tl.load(keep + 1).to(tl.float32)
        keep = tl.load(keep).to(tl.float32)
        if STOCHASTIC:
            key = tl.load(key)
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    start = first + row * apart
    before = 0 if ALIGNED else start % 4
    k = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = row * size + k - before
    inside = (k >= before) & (k < size + before)
    p = tl.load(parameter + i, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(update + i, mask=inside, other=0.0).to(tl.float32)
    p = p * keep - step_size * u
    if STOCHASTIC and parameter.dtype.element_ty == tl.bfloat16:
        p = rounded(p, random_words(key, start // 4 + block.to(tl.int64) * (BLOCK // 4), BLOCK) >> 16)
    tl.store(parameter + i, p.to(parameter.dtype.element_ty), mask=inside)
