"""A product of low rank as further columns of a float8 product: [x | d] [w | b]^T = x w^T + d b^T.

x (N, K) and w (M, K) are float8 with memory for more columns after each row, the tail. d (N, R) and b (M, R) are
rounded into it, in units of the scales of x's rows and of w, so that one product multiplies all columns. A power of two
that multiplies d and divides b leaves both the same distance to the greatest float8 number. The result is written once,
where a product of d and b on its own reads and writes it again: a LoRA step of Llama-3-8B takes 6 % less time so.

d and b are rounded as x and w are: each number by at most 2^-4 of itself (2^-3 in E5M2); numbers too small for that
change the sum by at most 2e-5 of max|x| max|w| for each rank. So what is added is as coarse as the product with w, also
in a float32 model. Where d b^T is too large for the tails, or not finite, they are zeros, and a kernel of its own adds
it; that is decided on the device, without a host sync.
"""

import threading

import torch
from torch import Tensor

from ligermodels.ops.float8.cast import scale_of_bits, update_amax
from ligermodels.ops.float8.low_rank import add_product, project
from ligermodels.ops.float8.mm import float8_mm
from ligermodels.ops.float8.scaling import MAX_EXPONENT, scale_exponent, store_row
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.tensors import without_autocast

BLOCK = 128
"""Columns: with rows of other multiples of 16, products of cuBLAS take up to a quarter longer."""
ROWS = 32  # of a program
_one_at_a_time = threading.Lock()  # A frozen weight is shared: its tail may not change before the product is launched.


def tail_of(rank: int) -> int:
    """Columns of a tail that holds a product of this rank."""
    return -(-rank // BLOCK) * BLOCK


def low_rank_sum(
    x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, source: Tensor, source_scale: Tensor | None, a: Tensor,
    b: Tensor, d: Tensor, d_alpha: float, alpha: float, out_dtype: torch.dtype, bias: Tensor | None = None, *,
    fast_accumulation: bool,
) -> Tensor:  # fmt: skip
    """d = d_alpha * (source * source_scale) a, (N, R), is stored, and returned is x w^T + alpha * d b^T + bias, (N, M)
    of out_dtype: with the tails of x and w, if both have the same of R columns or more, else in two passes.

    x: (N, K + tail) and w: (M, K + tail), float8, contiguous, to be multiplied by x_scale, float32 (N,), of each row,
    and w_scale, float32 (). Tails are overwritten. source: (N, K), float8 or floating, and its scale: as for `project`.
    a: (K, R) and b: (M, R), of any strides. d: contiguous. bias: (M,) of out_dtype.
    """
    columns, rank = source.shape[1], d.shape[1]
    if not x.shape[1] == w.shape[1] >= columns + rank:
        project(source, source_scale, a, d, d_alpha)
        x, w = x[:, :columns].contiguous(), w[:, :columns].contiguous()
        y = float8_mm(x, w, x_scale, w_scale, out_dtype, bias, fast_accumulation=fast_accumulation)
        add_product(y, d, b.t(), alpha)
        return y
    tails = _Tails(x, x_scale, w, w_scale, columns, alpha)
    project(source, source_scale, a, d, d_alpha, amax=tails.amax_of_d, unit=x_scale)
    update_amax(b if b.stride(1) == 1 else b.t(), tails.amax_of_b)
    with _one_at_a_time:
        tails.write(d, x_scale, x, 1.0)
        tails.write(b, w_scale, w, alpha)
        y = float8_mm(x, w, x_scale, w_scale, out_dtype, bias, fast_accumulation=fast_accumulation)
    add_product(y, d, b.t(), alpha, unless=tails.fit)
    return y


class _Tails:
    """State on the device: the bits of the maxima of d and b, and whether both fit the tails.

    amax_of_d, amax_of_b: int32 (), of max|d / x_scale| and of max|b|.
    """

    def __init__(
        self, x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, columns: int, alpha: float
    ) -> None:  # fmt: skip
        self.formats, self.w, self.w_scale, self.columns, self.alpha = (x.dtype, w.dtype), w, w_scale, columns, alpha
        self.amax_of_d, self.amax_of_b, self.fit = x_scale.new_zeros(3, 4, dtype=torch.int32)[:, 0]  # 16 bytes apart

    def write(self, source: Tensor, unit: Tensor, wide: Tensor, factor: float) -> None:
        """The tail of x or w: factor * source / unit, times the power of two or its inverse, and zeros beyond that."""
        columns, (M, R) = self.columns, source.shape
        if not use_kernels(source):
            # `data` leaves the version counter alone: tails are scratch memory, and autograd may have saved the rows.
            self._write_reference(source, unit, wide.data[:, columns:], factor)
        elif M:
            x_format, w_format = self.formats
            _write_tail_kernel[(-(-M // ROWS),)](
                source, *source.stride(), unit, unit.dim(), wide.view(torch.int32), wide.shape[1] // 4, columns // 4,
                self.amax_of_d, self.amax_of_b, self.fit, self.w_scale, factor, abs(self.alpha),
                M, R, wide.shape[1] - columns, OF_WEIGHT=wide is self.w, X_EXPONENT=MAX_EXPONENT[x_format],
                W_EXPONENT=MAX_EXPONENT[w_format], ROWS=ROWS, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip

    def _write_reference(self, source: Tensor, unit: Tensor, tail: Tensor, factor: float) -> None:
        x_format, w_format = self.formats
        greatest = self.amax_of_b.view(torch.float32) * abs(self.alpha) / self.w_scale
        of_d, of_b = scale_of_bits(self.amax_of_d, x_format), scale_of_bits(greatest.view(torch.int32), w_format)
        self.fit.copy_(of_d * of_b <= 1)
        tail.zero_()
        if not self.fit:
            return
        exponent = (torch.frexp(of_b).exponent - torch.frexp(of_d).exponent) // 2
        power = torch.ldexp(torch.ones_like(greatest), -exponent if unit is self.w_scale else exponent)
        largest = torch.finfo(tail.dtype).max
        with without_autocast(source):
            values = factor * source.float() / (unit.unsqueeze(1) if unit.dim() else unit) * power
        tail[:, : source.shape[1]] = values.clamp(-largest, largest).to(tail.dtype)


@kernel
def _write_tail_kernel(
    source, row_stride, rank_stride, unit, unit_stride, words, pitch, first, amax_of_d, amax_of_b, fit, w_scale,
    factor, alpha, M, R, tail,
    OF_WEIGHT: tl.constexpr, X_EXPONENT: tl.constexpr, W_EXPONENT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the tail, which begins at word `first` of each row of `words`, int32."""
    bits = tl.load(amax_of_d)
    of_weight = (tl.load(amax_of_b).to(tl.float32, bitcast=True) * alpha / tl.load(w_scale)).to(tl.int32, bitcast=True)
    x_exponent, w_exponent = scale_exponent(bits, X_EXPONENT), scale_exponent(of_weight, W_EXPONENT)
    finite = tl.maximum(bits, of_weight & 0x7FFFFFFF) < 0x7F800000
    both_fit = finite & (x_exponent + w_exponent <= 2 * 127)
    if tl.program_id(0) == 0:
        tl.store(fit, both_fit.to(tl.int32))
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
