"""A product of low rank as further columns of a float8 product: [x | d] [w | b]^T = x w^T + d b^T.

x (N, K) and w (M, K) are float8 with memory for more columns after each row, the tail. d (N, R) and b (M, R) are
rounded into it, in units of the scales of x's rows and of w, so that one product multiplies all columns. A power of two
that multiplies d and divides b leaves both the same distance to the greatest float8 number. The result is written once,
where a product of d and b on its own reads and writes it again: LoRA of rank 16 on Llama-3-8B takes 7 % less time so.

d and b are rounded as x and w are, each number by at most 2^-4 of itself (2^-3 in E5M2). What is too small for that
changes a product by at most 2^-18 of max|x| max|w|, which bfloat16 hardly holds beside x w^T. Where d b^T is too large
for the tails, or not finite, they are zeros, and it is added by a kernel of its own; the device decides.
"""

import torch
from torch import Tensor

from ligermodels.ops.float8.cast import scale_of_bits, take_up_amax
from ligermodels.ops.float8.low_rank import add_product
from ligermodels.ops.float8.mm import float8_mm
from ligermodels.ops.float8.scaling import MAX_EXPONENT, scale_exponent, store_row
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.tensors import without_autocast

BLOCK = 128
"""Columns: with rows of other multiples of 16, products of cuBLAS take up to a quarter longer."""
ROWS = 32  # of a program


def tail_of(rank: int) -> int:
    """Columns of a tail that holds a product of this rank."""
    return -(-rank // BLOCK) * BLOCK


class LowRankSum:
    """x w^T + alpha * d b^T: with the tails of x and w if both have the same of R columns or more, else in two passes.

    x: (N, K + tail) and w: (M, K + tail), float8, contiguous; K is `columns`, R is `rank`. Tails are overwritten.
    x_scale: float32 (N,), of each row. w_scale: float32 ().
    most: int32 (), the bits of max|d / x_scale|, which what computes d takes up; or None, where that is not needed.
    """

    def __init__(self, x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, columns: int, rank: int) -> None:
        self.x, self.x_scale, self.w, self.w_scale, self.columns = x, x_scale, w, w_scale, columns
        self.most: Tensor | None = None
        if x.shape[1] == w.shape[1] >= columns + rank:
            self.most, self._most_of_weight, self._fits = x_scale.new_zeros(3, 4, dtype=torch.int32)[:, 0]  # aligned

    def product(
        self, d: Tensor, b: Tensor, alpha: float, out_dtype: torch.dtype, bias: Tensor | None = None, *,
        fast_accumulation: bool,
    ) -> Tensor:  # fmt: skip
        """(x * x_scale) (w * w_scale)^T + alpha * d b^T + bias -> (N, M) of out_dtype.

        d: (N, R), contiguous. b: (M, R), of d's dtype and any strides. bias: (M,) of out_dtype.
        """
        x, w, fits = self.x, self.w, None
        if self.most is None:
            x, w = x[:, : self.columns].contiguous(), w[:, : self.columns].contiguous()
        else:
            take_up_amax(b if b.stride(1) == 1 else b.t(), self._most_of_weight)
            self._write(d, self.x_scale, x, 1.0, alpha)
            self._write(b, self.w_scale, w, alpha, alpha)
            fits = self._fits
        y = float8_mm(x, w, self.x_scale, self.w_scale, out_dtype, bias, fast_accumulation=fast_accumulation)
        add_product(y, d, b.t(), alpha, unless=fits)
        return y

    def _write(self, source: Tensor, unit: Tensor, wide: Tensor, factor: float, alpha: float) -> None:
        """The tail of x or w: factor * source / unit, times the power of two or its inverse, and zeros beyond that."""
        columns, (M, R) = self.columns, source.shape
        if not use_kernels(source):
            self._write_reference(source, unit, wide.data[:, columns:], factor, alpha)
        elif M:
            _write_tail_kernel[(-(-M // ROWS),)](
                source, *source.stride(), unit, unit.dim(), wide.view(torch.int32), wide.shape[1] // 4, columns // 4,
                self.most, self._most_of_weight, self._fits, self.w_scale, factor, abs(alpha),
                M, R, wide.shape[1] - columns, OF_WEIGHT=wide is self.w, X_EXPONENT=MAX_EXPONENT[self.x.dtype],
                W_EXPONENT=MAX_EXPONENT[self.w.dtype], ROWS=ROWS, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip

    def _write_reference(self, source: Tensor, unit: Tensor, tail: Tensor, factor: float, alpha: float) -> None:
        assert self.most is not None
        greatest = self._most_of_weight.view(torch.float32) * abs(alpha) / self.w_scale
        of_d, of_b = scale_of_bits(self.most, self.x.dtype), scale_of_bits(greatest.view(torch.int32), self.w.dtype)
        self._fits.copy_(of_d * of_b <= 1)
        tail.zero_()
        if not self._fits:
            return
        exponent = (torch.frexp(of_b).exponent - torch.frexp(of_d).exponent) // 2
        power = torch.ldexp(torch.ones_like(greatest), -exponent if unit is self.w_scale else exponent)
        largest = torch.finfo(tail.dtype).max
        with without_autocast(source):
            values = factor * source.float() / (unit.unsqueeze(1) if unit.dim() else unit) * power
        tail[:, : source.shape[1]] = values.clamp(-largest, largest).to(tail.dtype)


@kernel
def _write_tail_kernel(
    source, row_stride, rank_stride, unit, unit_stride, words, pitch, first, most, most_of_weight, fits, w_scale,
    factor, alpha, M, R, tail,
    OF_WEIGHT: tl.constexpr, X_EXPONENT: tl.constexpr, W_EXPONENT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the tail, which begins at word `first` of each row of `words`, int32."""
    bits = tl.load(most)
    of_weight = (tl.load(most_of_weight).to(tl.float32, bitcast=True) * alpha / tl.load(w_scale)).to(
        tl.int32, bitcast=True
    )
    x_exponent, w_exponent = scale_exponent(bits, X_EXPONENT), scale_exponent(of_weight, W_EXPONENT)
    finite = tl.maximum(bits, of_weight & 0x7FFFFFFF) < 0x7F800000
    both_fit = finite & (x_exponent + w_exponent <= 2 * 127)
    if tl.program_id(0) == 0:
        tl.store(fits, both_fit.to(tl.int32))
    exponent = (w_exponent - x_exponent) >> 1
    if OF_WEIGHT:
        exponent = -exponent
    power = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    each = tl.load(unit + row * unit_stride, mask=row < M, other=1.0)[:, None]
    for start in range(0, tail, BLOCK):
        rank = start + tl.arange(0, BLOCK)
        inside = (row < M)[:, None] & (rank < R)[None, :]
        v = tl.load(source + row[:, None] * row_stride + rank[None, :] * rank_stride, mask=inside, other=0.0)
        v = tl.where(both_fit & inside, factor * v.to(tl.float32) / each, 0.0)
        if OF_WEIGHT:
            store_row(words + first, v, power, row, start, M, tail // 4, pitch, W_EXPONENT, ROWS, BLOCK)
        else:
            store_row(words + first, v, power, row, start, M, tail // 4, pitch, X_EXPONENT, ROWS, BLOCK)
