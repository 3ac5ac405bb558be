"""A low-rank product as additional columns of a float8 product: [x | d] [w | b]^T = x w^T + d b^T.

x (N, K) and w (M, K) are float8. After each row they have memory for more columns, the tail. d (N, R) and b (M, R) are
rounded into the tails, in units of the scales of the rows of x and of w, so that one product multiplies all columns. d
is multiplied by a power of two and b is divided by it: then both have the same distance to the largest float8 number.
The result is written once; a separate product of d and b would read and write it again. With tails, a LoRA step of
Llama-3-8B takes 6 % less time.

d and b are rounded as x and w are: each number by at most 2^-4 of itself (2^-3 in E5M2). Smaller numbers change the sum
by at most 2e-5 of max|x| max|w| for each rank. So d b^T is as coarse as x w^T, also in a float32 model. If d b^T is too
large for the tails, or not finite, the tails are zeros, and a separate kernel adds d b^T. The device decides this,
without a host sync.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ligermodels.ops.float8.cast import scale_of_bits, update_amax
from ligermodels.ops.float8.low_rank import add_product, project
from ligermodels.ops.float8.mm import float8_mm
from ligermodels.ops.float8.scaling import MAX_EXPONENT, scale_exponent, store_row
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel

BLOCK = 128
"""Tails have multiples of this number of columns. With other multiples of 16, cuBLAS takes up to a quarter longer."""
ROWS = 32  # rows per program

_lock = threading.Lock()
_last_products: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
"""Device -> the stream of the last product that read tails, and an event recorded after it."""


def tail_of(rank: int) -> int:
    """Number of columns of a tail for a low-rank product of this rank."""
    return -(-rank // BLOCK) * BLOCK


@contextmanager
def _own_tails(device: torch.device) -> Iterator[None]:
    """Context manager for writing tails and multiplying with them, one call after another.

    Layers and calls share a frozen weight, so its tail must not change before the product has read it. A lock orders
    the calls of threads. On GPUs a call also waits for the last product, if that ran on another stream. Calls under
    CUDA graph capture do not wait: replays follow the order of the streams that they run on.
    """
    with _lock:
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            yield
            return
        stream = torch.cuda.current_stream(device)
        last_stream, event = _last_products.get(device) or (stream, torch.cuda.Event())
        if last_stream != stream:
            stream.wait_event(event)
        yield
        event.record(stream)
        _last_products[device] = stream, event


def low_rank_sum(
    x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, source: Tensor, source_scale: Tensor | None, a: Tensor,
    b: Tensor, d: Tensor, d_alpha: float, alpha: float, out_dtype: torch.dtype, bias: Tensor | None = None, *,
    fast_accumulation: bool,
) -> Tensor:  # fmt: skip
    """Compute d = d_alpha * (source * source_scale) a, and return x w^T + alpha * d b^T + bias.

    With tails of the same size, of R columns or more, after the rows of x and w, this is one product; otherwise two.

    Args:
        x: float8 (N, K + tail), contiguous; the tail is overwritten.
        x_scale: float32 (N,), scale of each row of x.
        w: float8 (M, K + tail), contiguous; the tail is overwritten.
        w_scale: float32 (), scale of w.
        source: (N, K), float8 or floating.
        source_scale: float32 (N,), scale of each row of `source`, if it is float8; else None.
        a: (K, R), any strides.
        b: (M, R), any strides.
        d: (N, R), contiguous; filled.
        d_alpha: factor of d.
        alpha: factor of d b^T.
        out_dtype: dtype of the result.
        bias: (M,) of `out_dtype`, or None.
        fast_accumulation: whether tensor cores accumulate in their registers, with fewer bits than float32.

    Returns:
        (N, M) of `out_dtype`.
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
    with _own_tails(x.device):
        tails.write(d, x_scale, x, 1.0)
        tails.write(b, w_scale, w, alpha)
        y = float8_mm(x, w, x_scale, w_scale, out_dtype, bias, fast_accumulation=fast_accumulation)
    add_product(y, d, b.t(), alpha, unless=tails.fit)
    return y


class _Tails:
    """State on the device, each int32 (): `amax_of_d` and `amax_of_b`, the bits of max|d / x_scale| and of max|b|, and
    `fit`, whether d and b fit the tails."""

    def __init__(
        self, x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, columns: int, alpha: float
    ) -> None:  # fmt: skip
        self.formats, self.w, self.w_scale, self.columns, self.alpha = (x.dtype, w.dtype), w, w_scale, columns, alpha
        self.amax_of_d, self.amax_of_b, self.fit = x_scale.new_zeros(3, 4, dtype=torch.int32)[:, 0]  # 16 bytes apart

    def write(self, source: Tensor, unit: Tensor, wide: Tensor, factor: float) -> None:
        """Write the tail of `wide`: factor * source / unit, times the power of two or its inverse; then zeros.

        Args:
            source: d (N, R) or b (M, R).
            unit: scale of the rows of x, float32 (N,), or of w, float32 ().
            wide: x or w with its tail.
            factor: factor of `source`.
        """
        columns, (M, R) = self.columns, source.shape
        if not use_kernels(source):
            self._write_reference(source, unit, wide[:, columns:], factor)
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
        values = factor * source.float() / (unit.unsqueeze(1) if unit.dim() else unit) * power
        tail[:, : source.shape[1]] = values.clamp(-largest, largest).to(tail.dtype)


@kernel
def _write_tail_kernel(
    source, row_stride, rank_stride, unit, unit_stride, words, pitch, first, amax_of_d, amax_of_b, fit, w_scale,
    factor, alpha, M, R, tail,
    OF_WEIGHT: tl.constexpr, X_EXPONENT: tl.constexpr, W_EXPONENT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ROWS rows of the tail. It begins at word `first` of each row of `words`, int32."""
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
