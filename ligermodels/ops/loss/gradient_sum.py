"""The gradient of a parameter, summed over chunks in float32 and rounded once."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

ALONE = 1024  # rows that are rounded first, by way of a copy
ALIGNED = 16  # the two parts of the sum meet at a multiple of this many rows, for the GEMMs


class GradientSum:
    """The sum over chunks of rows of g.T @ x, (V, H), for a weight, or of g's rows, (V,), for a bias.

    With several chunks and a 16-bit parameter, the sum is float32 until `close`. Half of it is stored in the memory of
    the final gradient, so that it needs only as much memory again, and rounding needs none.
    `parameter` gives shape, dtype and device; `several`: whether there may be more than one chunk.
    """

    def __init__(self, parameter: Tensor, *, several: bool) -> None:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self._gradient = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        self._empty, self._parts, self._sums = True, [slice(0, len(parameter))], [self._gradient]
        if several and wide != parameter.dtype:
            inside = len(parameter) // 2 // ALIGNED * ALIGNED if parameter.dim() == 2 else 0
            self._parts = [slice(0, inside), slice(inside, len(parameter))]
            shared = self._gradient[: 2 * inside].view(-1).view(wide).view(inside, *parameter.shape[1:])
            rest = torch.empty((len(parameter) - inside, *parameter.shape[1:]), dtype=wide, device=parameter.device)
            self._sums = [shared, rest]

    def add(self, g: Tensor, x: Tensor | None = None) -> None:
        """Adds a chunk: g (M, V), and x (M, H) for a weight."""
        for part, total in zip(self._parts, self._sums, strict=True):
            if not len(total):
                continue
            each = g[:, part]
            if x is None:
                each = each.sum(0, dtype=total.dtype)
                total.copy_(each if self._empty else total + each)
                continue
            options: dict[str, Any] = {"beta": 0 if self._empty else 1, "out": total}
            if total.dtype == g.dtype:
                torch.addmm(total, each.t(), x, **options)
            elif total.is_cuda:
                torch.addmm(total, each.t(), x, out_dtype=total.dtype, **options)
            else:
                torch.addmm(total, each.t().to(total.dtype), x.to(total.dtype), **options)
        self._empty = False

    def close(self) -> Tensor:
        """Returns the sum in the parameter's dtype, zeros if nothing was added. `add` must not be called afterwards."""
        gradient, sums, self._sums = self._gradient, self._sums, []
        if self._empty:
            return gradient.zero_()
        if sums[0] is gradient:
            return gradient
        shared, rest = sums
        # Row r of the sum is stored where rows 2r and 2r + 1 of the result belong. So pieces of doubling length can be
        # rounded in order: each overwrites only rows of the sum that have been rounded.
        first = min(ALONE, len(shared))
        gradient[:first] = shared[:first].to(gradient.dtype)
        ends = [first]
        while ends[-1] < len(shared):
            ends.append(min(2 * ends[-1], len(shared)))
        for start, end in pairwise(ends):
            gradient[start:end] = shared[start:end]
        gradient[len(shared) :] = rest
        return gradient
