"""The Triton kernels of cross entropy: rows of logits to losses, other numbers of a row, and gradients.

No program waits for another one: a row's loss, and its gradient in place of the logits, are the work of one program.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ligermodels.ops.loss.token_losses import LossOptions
from ligermodels.ops.runtime.dispatch import HAS_TRITON, num_sms, power_of_2_above, tl, triton, use_kernels
from ligermodels.ops.runtime.launcher import kernel

if TYPE_CHECKING:
    from ligermodels.ops.loss.row_statistics import RowGradients, RowStatistics

TILES = 4
SCALE_BLOCK = 8192  # elements that a program scales at a time
NEAR = tl.constexpr(0.8) if HAS_TRITON else None
LOG2_E = tl.constexpr(1.4426950408889634) if HAS_TRITON else None
LOWEST = tl.constexpr(-3.4028234663852886e38) if HAS_TRITON else None  # the maximum of no logits, or of -inf
VANISHED = tl.constexpr(-128.0) if HAS_TRITON else None  # exp of it is 0 in float32


@triton.jit
def _tanh_near(x):
    """tanh(x) for |x| < NEAR: an odd polynomial (a minimax fit of relative error 7e-9), without cancellation."""
    z = x * x
    p = 0.0015847518 * z - 0.0074095489
    p = p * z + 0.021302985
    p = p * z - 0.05385233
    p = p * z + 0.13332221
    p = p * z - 0.33333297
    return x + x * z * p


@triton.jit
def effective(x, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """Effective logits of given ones in float32, accurate to a few units in the last place, and, if CAPPED, their slope
    1 - tanh^2, accurate to 1e-5 of itself even where tanh is near 1. scale: logit_scale, over softcap if CAPPED."""
    x = x.to(tl.float32)
    if SCALED or CAPPED:
        x = x * scale
    slope = x
    if CAPPED:
        e = tl.exp(-2.0 * tl.abs(x))
        share = 1.0 / (1.0 + e)
        far = 1.0 - 2.0 * e * share
        slope = 4.0 * e * share * share
        x = softcap * tl.where(tl.abs(x) < NEAR, _tanh_near(x), tl.where(x < 0, -far, far))
    return x, slope


@triton.jit
def _exp(x):
    """exp(x), flushed to 0 below 1e-38; tl.exp takes three instructions more to keep such results."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def _below(x, maximum):
    """x - maximum, but finite where x is -inf, to be multiplied by its exp, which is 0 there."""
    return tl.maximum(x - maximum, VANISHED)


@triton.jit
def _next_above(x):
    """The least float32 above x; of inf, and of NaN, NaN."""
    bits = x.to(tl.int32, bitcast=True)
    above = tl.where(x == 0, 1, tl.where(bits < 0, bits - 1, bits + 1)).to(tl.float32, bitcast=True)
    return tl.where(x == x, above, x)  # the highest NaN, to which GPUs convert, would wrap around to -0.0


@triton.jit
def _observe(
    start, first, col, V, least, top, total, plain, before, spread, best, best_at, scale, softcap,
    class_weights, MASKED: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
    MEAN: tl.constexpr, RANK: tl.constexpr, PREDICTED: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Adds a tile (TILES, BLOCK) of a row's logits, from `first` on, to the state of BLOCK lanes: their maxima, sums of
    exp(x - maximum), plain sums (if MEAN, weighted by class), counts of given logits from `least` on, sums of
    exp(x - maximum) * (x - maximum), and the greatest given logits and their first tiles."""
    col += first
    inside = col < V
    given = tl.load(start + col, mask=inside, other=float("-inf")) if MASKED else tl.load(start + col)
    x, _ = effective(given, scale, softcap, SCALED, CAPPED)
    if CAPPED and MASKED:
        x = tl.where(inside, x, float("-inf"))
    higher = tl.maximum(top, tl.max(x, axis=0))
    if ENTROPY:
        spread = _exp(top - higher) * (spread + total * _below(top, higher))
        spread += tl.sum(_exp(x - higher[None, :]) * _below(x, higher[None, :]), axis=0)
    total = total * _exp(top - higher) + tl.sum(_exp(x - higher[None, :]), axis=0)
    if SMOOTHED:
        plain += tl.sum(tl.where(inside, x, 0.0), axis=0)
    if MEAN:
        weight = tl.load(class_weights + col, mask=inside, other=0.0)
        plain += tl.sum(tl.where(inside, x * weight, 0.0), axis=0)
    if RANK:
        before += tl.sum((given.to(tl.float32) >= least).to(tl.int32), axis=0)
    if PREDICTED:
        greatest = tl.max(given.to(tl.float32), axis=0)
        best_at = tl.where(greatest > best, first, best_at)
        best = tl.maximum(best, greatest)
    return higher, total, plain, before, spread, best, best_at


@triton.jit
def _gradient(
    given, is_target, maximum, factor, of_entropy, of_mean, c, V, scale, softcap, smoothing,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, MEAN: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """The gradient by given logits of the row's numbers, each times its weight. c: loss_weight * logit_scale. of_mean:
    the share of the weighted mean, for each logit by its class.
    exp(x - maximum) gets factor - of_entropy * (x - maximum); without other weights than the loss's, factor is c times
    1 + 2 z_loss lse, over the sum of exp(x - maximum)."""
    x, slope = effective(given, scale, softcap, SCALED, CAPPED)
    if ENTROPY:
        factor = factor - of_entropy * _below(x, maximum)
    g = _exp(x - maximum) * factor
    if SMOOTHED:
        g -= c * smoothing / V
    if MEAN:
        g += of_mean
    g -= tl.where(is_target, c * (1.0 - smoothing), 0.0)
    if CAPPED:
        g *= slope
    return g


@triton.jit
def _write_tile(
    start, first, col, V, maximum, factor, c, scale, softcap, smoothing, MASKED: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
):  # fmt: skip
    """Replaces a tile of logits by its gradient as if none were the target's."""
    place = start + first + col
    mask = (first + col < V) if MASKED else None
    given = tl.load(place, mask=mask)
    g = _gradient(
        given, False, maximum, factor, 0.0, 0.0, c, V, scale, softcap, smoothing, SCALED, CAPPED, SMOOTHED, False, False
    )
    tl.store(place, g.to(start.dtype.element_ty), mask=mask)


@kernel
def _cross_entropy_row_kernel(
    logits, stride, target, loss_weights, class_weights, losses, maxima, totals, ranks, predicted, entropies, means,
    V, ignore_index, scale, softcap, logit_scale, smoothing, z_loss,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, RANK: tl.constexpr, PREDICTED: tl.constexpr,
    ENTROPY: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program reads one row and writes its loss, max and sum of exp(x - max), and the requested statistics.

    BLOCK lanes go through the row, TILES logits each at a time, and are reduced once at the end: little more than one
    exp for each logit, and no barrier in the loop. Given loss_weights, the program then goes back through the row and
    replaces it by the gradient of loss_weight * loss, from the end, which is still in the cache."""
    SIZE: tl.constexpr = TILES * BLOCK
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, TILES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    start = logits + row * stride
    whole = V // SIZE * SIZE
    y = tl.load(target + row)
    loss, maximum, total_of_row, entropy = 0.0, 0.0, 1.0, 0.0
    weighted = 0.0  # the sum of class_weights * x
    rank = tl.full((), -1, dtype=tl.int64)
    prediction = tl.full((), -1, dtype=tl.int64)
    if (y != ignore_index) & (y >= 0) & (y < V):
        given_y = tl.load(start + y)
        # Of logits equal to the target's, those before it rank before it: in tiles before its own whatever is not below
        # it, in others whatever is not below the next number. One comparison for each logit, or a row takes half as
        # long again.
        at_y = given_y.to(tl.float32)
        above_y = _next_above(at_y)
        top = tl.full((BLOCK,), LOWEST, dtype=tl.float32)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        plain = tl.zeros((BLOCK,), dtype=tl.float32)
        before = tl.zeros((BLOCK,), dtype=tl.int32)
        spread = tl.zeros((BLOCK,), dtype=tl.float32)
        best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        best_at = tl.zeros((BLOCK,), dtype=tl.int32)
        for first in range(0, whole, SIZE):
            least = tl.where(first + SIZE <= y, at_y, above_y)
            top, total, plain, before, spread, best, best_at = _observe(
                start, first, col, V, least, top, total, plain, before, spread, best, best_at, scale, softcap,
                class_weights, False, SCALED, CAPPED, SMOOTHED, means is not None, RANK, PREDICTED, ENTROPY,
            )  # fmt: skip
        if whole < V:
            top, total, plain, before, spread, best, best_at = _observe(
                start, whole, col, V, above_y, top, total, plain, before, spread, best, best_at, scale, softcap,
                class_weights, True, SCALED, CAPPED, SMOOTHED, means is not None, RANK, PREDICTED, ENTROPY,
            )  # fmt: skip
        maximum = tl.max(top, axis=0)
        total_of_row = tl.sum(total * _exp(top - maximum), axis=0)
        log_sum = tl.log(total_of_row)
        # x_y - max and log_sum stay apart: their sum would lose the digits of a small loss beside great logits.
        x_y, _ = effective(given_y, scale, softcap, SCALED, CAPPED)
        loss = (1.0 - smoothing) * (log_sum - (x_y - maximum))
        if SMOOTHED:
            loss += smoothing * (log_sum - (tl.sum(plain, axis=0) / V - maximum))
        loss += z_loss * (maximum + log_sum) * (maximum + log_sum)
        if ENTROPY:
            spread = _exp(top - maximum) * (spread + total * _below(top, maximum))
            entropy = log_sum - tl.sum(spread, axis=0) / total_of_row
        if means is not None:
            weighted = tl.sum(plain, axis=0)
        if RANK:
            for first in range(y.to(tl.int32) // SIZE * SIZE, y.to(tl.int32), BLOCK):  # equal ones in the target's tile
                place = first + tl.arange(0, BLOCK)
                before += (tl.load(start + place, mask=place < y, other=float("nan")) == given_y).to(tl.int32)
            rank = tl.sum(before, axis=0).to(tl.int64)
        if PREDICTED:
            greatest = tl.max(best, axis=0)
            places = tl.min(tl.where(best == greatest, best_at, V), axis=0) + col  # of the first tile that has it
            found = (places < V) & (tl.load(start + places, mask=places < V, other=0.0) == greatest)
            prediction = tl.minimum(tl.min(tl.min(tl.where(found, places, V), axis=0), axis=0), V - 1).to(tl.int64)
        if loss_weights is not None:
            c = tl.load(loss_weights + row) * logit_scale
            factor = c * (1.0 + 2.0 * z_loss * (maximum + log_sum)) / total_of_row
            tl.debug_barrier()  # all threads have read the row
            if whole < V:
                _write_tile(
                    start, whole, col, V, maximum, factor, c, scale, softcap, smoothing, True, SCALED, CAPPED, SMOOTHED
                )
            for done in range(0, whole, SIZE):
                first = whole - SIZE - done
                _write_tile(
                    start, first, col, V, maximum, factor, c, scale, softcap, smoothing, False, SCALED, CAPPED, SMOOTHED
                )
            g_y = _gradient(
                given_y, True, maximum, factor, 0.0, 0.0, c, V, scale, softcap, smoothing,
                SCALED, CAPPED, SMOOTHED, False, False,
            )  # fmt: skip
            tl.debug_barrier()  # all threads have written theirs
            tl.store(start + y, g_y.to(logits.dtype.element_ty))
    elif loss_weights is not None:
        for first in range(0, V, SIZE):
            zeros = tl.zeros((TILES, BLOCK), dtype=logits.dtype.element_ty)
            tl.store(start + first + col, zeros, mask=first + col < V)
    tl.store(losses + row, loss)
    if maxima is not None:
        tl.store(maxima + row, maximum)
        tl.store(totals + row, total_of_row)
    if RANK:
        tl.store(ranks + row, rank)
    if PREDICTED:
        tl.store(predicted + row, prediction)
    if entropies is not None:
        tl.store(entropies + row, entropy)
    if means is not None:
        tl.store(means + row, weighted / V)


@kernel
def _cross_entropy_gradient_kernel(
    logits, stride, gradient, gradient_stride, target, loss_weights, entropy_weights, lse_weights, mean_weights,
    class_weights, maxima, totals, entropies, first, columns, V, blocks, ignore_index, scale, softcap, logit_scale,
    smoothing, z_loss, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program writes one block of one row of the gradient, which may take the place of the logits: of `columns`
    of V logits, from the `first` on. maxima, totals and entropies are those of whole rows."""
    row = tl.program_id(0).to(tl.int64) // blocks
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    start, out, inside = logits + row * stride, gradient + row * gradient_stride, col < columns
    y = tl.load(target + row)
    if (y != ignore_index) & (y >= 0) & (y < V):
        maximum, total = tl.load(maxima + row), tl.load(totals + row)
        log_sum = tl.log(total)
        c = tl.load(loss_weights + row) * logit_scale
        given = tl.load(start + col, mask=inside, other=0.0)
        factor = c * (1.0 + 2.0 * z_loss * (maximum + log_sum)) / total
        of_entropy, of_mean = 0.0, 0.0
        if entropy_weights is not None:  # its slope by x_j is p_j * (log_sum - entropy - (x_j - maximum))
            of_entropy = tl.load(entropy_weights + row) * logit_scale / total
            factor += of_entropy * (log_sum - tl.load(entropies + row))
        if lse_weights is not None:
            factor += tl.load(lse_weights + row) * logit_scale / total
        if mean_weights is not None:
            weight = tl.load(class_weights + first + col, mask=inside, other=0.0)
            of_mean = tl.load(mean_weights + row) * logit_scale / V * weight
        g = _gradient(
            given, first + col == y, maximum, factor, of_entropy, of_mean, c, V, scale, softcap, smoothing,
            SCALED, CAPPED, SMOOTHED, mean_weights is not None, entropy_weights is not None,
        )  # fmt: skip
        tl.store(out + col, g.to(gradient.dtype.element_ty), mask=inside)
    else:
        tl.store(out + col, tl.zeros((BLOCK,), dtype=gradient.dtype.element_ty), mask=inside)


def _numbers(options: LossOptions) -> tuple[float, ...]:
    """scale, softcap, logit_scale, smoothing and z_loss as the kernels take them."""
    softcap = 1.0 if options.softcap is None else options.softcap
    return options.logit_scale / softcap, softcap, options.logit_scale, options.label_smoothing, options.z_loss


def _flags(options: LossOptions) -> dict[str, bool]:
    """The parts of the formula that the kernels need."""
    return {
        "SCALED": options.logit_scale != 1,
        "CAPPED": options.softcap is not None,
        "SMOOTHED": options.label_smoothing != 0,
    }


def launch_rows(
    logits: Tensor, target: Tensor, statistics: "RowStatistics", options: LossOptions, *,
    loss_weights: Tensor | None = None, class_weights: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills the statistics of rows of logits, and replaces the logits by the gradient of loss_weights * losses.

    Args:
        logits: (M, V), the last dimension contiguous.
        target: int64 (M,), contiguous.
        statistics: fields (M,), contiguous; those that are None are not computed.
        options: the options of the loss.
        loss_weights: float32 (M,); None: the logits stay.
        class_weights: float32 (V,), of the means, which exclude label smoothing (their sums share lanes).
    """
    M, V = logits.shape
    losses, ranks, predicted, entropies, _, means, maxima, totals = statistics
    most = 2048 if loss_weights is None else 4096  # in place, a row should have a multiprocessor to itself
    lanes = min(max(power_of_2_above(-(-V // (4 * TILES))), 256), most)  # 8 a thread: 16-byte loads of bfloat16
    _cross_entropy_row_kernel[(M,)](
        logits, logits.stride(0), target, loss_weights, class_weights, losses, maxima, totals, ranks, predicted,
        entropies, means, V, options.ignore_index, *_numbers(options), **_flags(options),
        RANK=ranks is not None, PREDICTED=predicted is not None, ENTROPY=entropies is not None,
        TILES=min(power_of_2_above(-(-V // lanes)), TILES), BLOCK=lanes, num_warps=lanes // 256,
    )  # fmt: skip


def launch_gradient(
    logits: Tensor, gradient: Tensor, target: Tensor, maxima: Tensor, totals: Tensor, gradients: "RowGradients",
    options: LossOptions, *, entropies: Tensor | None = None, class_weights: Tensor | None = None, first: int = 0,
    num_classes: int,
) -> None:  # fmt: skip
    """Fills the gradient by logits (M, n) from the gradients by the statistics of their rows.

    Args:
        logits: (M, n), the last dimension contiguous.
        gradient: (M, n), the last dimension contiguous; it may be `logits`.
        target: int64 (M,), contiguous.
        maxima: of whole rows, (M,), see `RowStatistics`.
        totals: of whole rows, (M,).
        gradients: the gradients by losses, entropies, lses and means, (M,), contiguous.
        options: the options of the loss.
        entropies: of whole rows, (M,), if these have a gradient.
        class_weights: float32 (num_classes,), of the means.
        first: the first class of `logits`.
        num_classes: the number of all classes.
    """
    M, n = logits.shape
    block = min(power_of_2_above(n), 4096)
    blocks = -(-n // block)
    _cross_entropy_gradient_kernel[(M * blocks,)](
        logits, logits.stride(0), gradient, gradient.stride(0), target, gradients.losses, gradients.entropies,
        gradients.lses, gradients.means, class_weights, maxima, totals, entropies, first, n, num_classes, blocks,
        options.ignore_index, *_numbers(options), **_flags(options),
        BLOCK=block, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip


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
