"""Gradients of parameters: summed over chunks in float32 and rounded once, and kept from forward to backward pass."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ligermodels.ops.runtime.dispatch import num_sms, tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel

FIRST_ROWS = 1024  # rows that are rounded first, through a copy
SCALE_BLOCK = 8192  # elements that a program scales at a time
ALIGNED = 16  # the two parts of the sum meet at a multiple of this many rows, for the GEMMs


class GradientSum:
    """The sum over chunks of rows of g.T @ x, (V, H), for a weight, or of the rows of g, (V,), for a bias.

    With several chunks and a 16-bit parameter, the sum is float32 until `close`. Half of it is stored in the memory of
    the final gradient, so that it needs only the memory of the gradient once more, and rounding needs none. This saves
    2 bytes per element of the head's weight, 1 GB for 128k classes and H = 4096.
    """

    def __init__(self, gradient: Tensor, *, several: bool) -> None:
        """
        Args:
            gradient: memory of the result, contiguous, of the parameter's shape and dtype.
            several: whether there may be more than one chunk.
        """
        wide = torch.promote_types(gradient.dtype, torch.float32)
        self._gradient, self._empty = gradient, True
        self._parts = [(slice(None), gradient)]  # rows of the gradient, and their sum
        if several and wide != gradient.dtype:
            self._parts = _wide_parts(gradient, wide)

    def add(self, g: Tensor, x: Tensor | None = None) -> None:
        """Adds a chunk: g (M, V), and x (M, H) for a weight."""
        for part, total in self._parts:
            _add(total, g[:, part], x, first=self._empty)
        self._empty = False

    def close(self) -> Tensor:
        """Returns the gradient, zeros if nothing was added. `add` must not be called afterwards."""
        if self._empty:
            return self._gradient.zero_()
        for part, total in self._parts:
            if total is not self._gradient:
                _round(self._gradient, part, total)
        return self._gradient


def _wide_parts(gradient: Tensor, wide: torch.dtype) -> list[tuple[slice, Tensor]]:
    """The rows of a gradient in two parts, and memory of a wider dtype for the sum of each: for the first part, in the
    memory of the gradient. Only the second part, of all rows, for gradients that are small."""
    inside = len(gradient) // 2 // ALIGNED * ALIGNED if gradient.dim() == 2 else 0
    shared = gradient[: 2 * inside].view(-1).view(wide).view(inside, *gradient.shape[1:])
    rest = gradient.new_empty((len(gradient) - inside, *gradient.shape[1:]), dtype=wide)
    parts = [(slice(0, inside), shared), (slice(inside, len(gradient)), rest)]
    return parts if inside else parts[1:]


def _add(total: Tensor, g: Tensor, x: Tensor | None, *, first: bool) -> None:
    """total += g.T @ x, or without x the sum of the rows of g; `first`: total is uninitialised."""
    if x is None:
        rows_sum = g.sum(0, dtype=total.dtype)
        total.copy_(rows_sum if first else total + rows_sum)
        return
    beta = 0 if first else 1
    if total.dtype == g.dtype:
        torch.addmm(total, g.t(), x, beta=beta, out=total)
    elif total.is_cuda:
        torch.addmm(total, g.t(), x, beta=beta, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, g.t().to(total.dtype), x.to(total.dtype), beta=beta, out=total)


def _round(gradient: Tensor, rows: slice, total: Tensor) -> None:
    """gradient[rows] = total, where total may be in the memory of the first rows of the gradient.

    Row r of a sum in this memory is stored where rows 2r and 2r + 1 of the gradient belong. So pieces of doubling
    length can be rounded in order: each overwrites only rows of the sum that have been rounded."""
    if rows.stop == len(gradient):  # these are in memory of their own
        gradient[rows] = total
        return
    first = min(FIRST_ROWS, len(total))
    gradient[:first] = total[:first].to(gradient.dtype)
    ends = [first]
    while ends[-1] < len(total):
        ends.append(min(2 * ends[-1], len(total)))
    for start, end in pairwise(ends):
        gradient[start:end] = total[start:end]


def keep_gradients(ctx: Any, inputs: Sequence[Tensor | None], gradients: list[Tensor], needs: Sequence[bool]) -> None:
    """Saves the gradients that a forward pass has computed, and its inputs, for `kept_gradients`.

    Args:
        ctx: the context of the autograd.Function.
        inputs: the tensors from which a repeated backward pass recomputes the gradients.
        gradients: the gradients for a loss gradient of 1.
        needs: whether the forward pass computed each gradient; if it computed none, the backward pass does.
    """
    # A compiled graph keeps the gradients as saved tensors and may not write into them. Eagerly they are returned once,
    # without a second copy: autograd's own saved tensors would stay alive through the backward pass.
    ctx.functional = any(needs) and torch.compiler.is_compiling()
    if ctx.functional:
        ctx.save_for_backward(*gradients)
    else:
        ctx.save_for_backward(*inputs)
        ctx.gradients = gradients if any(needs) else None


def kept_gradients(ctx: Any, grad: Tensor) -> list[Tensor] | None:
    """The kept gradients times `grad`, a scalar; None if the backward pass has to compute them from the inputs."""
    if ctx.functional:
        return [g * grad for g in ctx.saved_tensors]
    if ctx.gradients is None:
        return None
    gradients: list[Tensor] = ctx.gradients
    ctx.gradients = None
    for g in gradients:
        scale_(g, grad)
    return gradients


@kernel
def _scale_kernel(x, factor, n, BLOCK: tl.constexpr):
    """x *= factor, without touching x if the factor is 1, as it usually is."""
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
            i = first + tl.arange(0, BLOCK)
            value = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32) * f
            tl.store(x + i, value.to(x.dtype.element_ty), mask=i < n)


def scale_(x: Tensor, factor: Tensor) -> None:
    """x *= factor in place, for a contiguous x, without a wait for the device."""
    if x.is_meta:
        return
    if use_kernels(x):
        programs = min(-(-x.numel() // SCALE_BLOCK), 8 * num_sms(x.device))  # few, which usually end at once
        with torch.cuda.device_of(x):
            _scale_kernel[(programs,)](x, factor, x.numel(), BLOCK=SCALE_BLOCK, num_warps=8)
    elif x.is_cuda or factor != 1:
        x.mul_(factor)
