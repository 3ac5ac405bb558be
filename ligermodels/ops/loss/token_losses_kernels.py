"""The Triton kernels of cross entropy: rows of logits to losses, other numbers of a row, and gradients.

No program waits for another one: a row's loss, and its gradient in place of the logits, are the work of one program.
"""

from typing import Any

from torch import Tensor

from ligermodels.ops.loss.logit_functions import below, dropped, effective, exp, next_above, tempered
from ligermodels.ops.loss.token_losses import LogitRows, LossOptions, RowGradients
from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import HAS_TRITON, tl, triton
from ligermodels.ops.runtime.launcher import kernel

TILES = 4
LOWEST = tl.constexpr(-3.4028234663852886e38) if HAS_TRITON else None  # the maximum of no logits, or of -inf


@triton.jit
def _observe(
    start, first, col, V, least, top, total, plain, before, spread, best, best_at, scale, softcap,
    class_weights, dropped_bits, MASKED: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr, MEAN: tl.constexpr, RANK: tl.constexpr, PREDICTED: tl.constexpr, ENTROPY: tl.constexpr,
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
    if dropped_bits is not None:
        x = tl.where(dropped(dropped_bits, col, inside if MASKED else None), float("-inf"), x)
    higher = tl.maximum(top, tl.max(x, axis=0))
    if ENTROPY:
        spread = exp(top - higher) * (spread + total * below(top, higher))
        spread += tl.sum(exp(x - higher[None, :]) * below(x, higher[None, :]), axis=0)
    total = total * exp(top - higher) + tl.sum(exp(x - higher[None, :]), axis=0)
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
        factor = factor - of_entropy * below(x, maximum)
    g = exp(x - maximum) * factor
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
    start, first, col, V, maximum, factor, c, scale, softcap, smoothing, dropped_bits, MASKED: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
):  # fmt: skip
    """Replaces a tile of logits by its gradient as if none were the target's."""
    place = start + first + col
    mask = (first + col < V) if MASKED else None
    given = tl.load(place, mask=mask)
    g = _gradient(
        given, False, maximum, factor, 0.0, 0.0, c, V, scale, softcap, smoothing, SCALED, CAPPED, SMOOTHED, False, False
    )
    if dropped_bits is not None:
        g = tl.where(dropped(dropped_bits, first + col, mask), 0.0, g)
    tl.store(place, g.to(start.dtype.element_ty), mask=mask)


@kernel
def _cross_entropy_row_kernel(
    logits, stride, target, loss_weights, class_weights, inverse_temperatures, dropped_bits, bits_stride,
    losses, maxima, totals, ranks, predicted, entropies, means, V, ignore_index, scale, softcap, logit_scale,
    smoothing, z_loss,
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
    if dropped_bits is not None:
        dropped_bits += row * bits_stride
    if inverse_temperatures is not None:
        scale, softcap, logit_scale = tempered(tl.load(inverse_temperatures + row), scale, softcap, logit_scale, CAPPED)
    if (y != ignore_index) & (y >= 0) & (y < V):
        given_y = tl.load(start + y)
        # Of logits equal to the target's, those before it rank before it: in tiles before its own whatever is not below
        # it, in others whatever is not below the next number. One comparison for each logit, or a row takes half as
        # long again.
        at_y = given_y.to(tl.float32)
        above_y = next_above(at_y)
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
                class_weights, dropped_bits, False, SCALED, CAPPED, SMOOTHED, means is not None, RANK,
                PREDICTED, ENTROPY,
            )  # fmt: skip
        if whole < V:
            top, total, plain, before, spread, best, best_at = _observe(
                start, whole, col, V, above_y, top, total, plain, before, spread, best, best_at, scale, softcap,
                class_weights, dropped_bits, True, SCALED, CAPPED, SMOOTHED, means is not None, RANK,
                PREDICTED, ENTROPY,
            )  # fmt: skip
        maximum = tl.max(top, axis=0)
        total_of_row = tl.sum(total * exp(top - maximum), axis=0)
        log_sum = tl.log(total_of_row)
        # x_y - max and log_sum stay apart: their sum would lose the digits of a small loss beside great logits.
        x_y, _ = effective(given_y, scale, softcap, SCALED, CAPPED)
        loss = (1.0 - smoothing) * (log_sum - (x_y - maximum))
        if SMOOTHED:
            loss += smoothing * (log_sum - (tl.sum(plain, axis=0) / V - maximum))
        loss += z_loss * (maximum + log_sum) * (maximum + log_sum)
        if dropped_bits is not None:
            loss = tl.where(dropped(dropped_bits, y, None), float("inf"), loss)
        if ENTROPY:
            spread = exp(top - maximum) * (spread + total * below(top, maximum))
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
                    start, whole, col, V, maximum, factor, c, scale, softcap, smoothing, dropped_bits,
                    True, SCALED, CAPPED, SMOOTHED,
                )  # fmt: skip
            for done in range(0, whole, SIZE):
                first = whole - SIZE - done
                _write_tile(
                    start, first, col, V, maximum, factor, c, scale, softcap, smoothing, dropped_bits,
                    False, SCALED, CAPPED, SMOOTHED,
                )  # fmt: skip
            g_y = _gradient(
                given_y, True, maximum, factor, 0.0, 0.0, c, V, scale, softcap, smoothing,
                SCALED, CAPPED, SMOOTHED, False, False,
            )  # fmt: skip
            if dropped_bits is not None:
                g_y = tl.where(dropped(dropped_bits, y, None), 0.0, g_y)
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
    class_weights, inverse_temperatures, dropped_bits, bits_stride, maxima, totals, entropies, first, columns, V,
    blocks, ignore_index, scale, softcap, logit_scale, smoothing, z_loss, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program writes one block of one row of the gradient, which may take the place of the logits: of `columns`
    of V logits, from the `first` on. maxima, totals and entropies are those of whole rows."""
    row = tl.program_id(0).to(tl.int64) // blocks
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    start, out, inside = logits + row * stride, gradient + row * gradient_stride, col < columns
    y = tl.load(target + row)
    if (y != ignore_index) & (y >= 0) & (y < V):
        if inverse_temperatures is not None:
            scale, softcap, logit_scale = tempered(
                tl.load(inverse_temperatures + row), scale, softcap, logit_scale, CAPPED
            )
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
        if dropped_bits is not None:
            g = tl.where(dropped(dropped_bits + row * bits_stride, first + col, inside), 0.0, g)
        tl.store(out + col, g.to(gradient.dtype.element_ty), mask=inside)
    else:
        tl.store(out + col, tl.zeros((BLOCK,), dtype=gradient.dtype.element_ty), mask=inside)


def _numbers(options: LossOptions) -> tuple[float, ...]:
    """scale, softcap, logit_scale, smoothing and z_loss as the kernels take them."""
    softcap = 1.0 if options.softcap is None else options.softcap
    return options.logit_scale / softcap, softcap, options.logit_scale, options.label_smoothing, options.z_loss


def _flags(options: LossOptions, rows: LogitRows) -> dict[str, bool]:
    """The parts of the formula that the kernels need."""
    return {
        "SCALED": options.logit_scale != 1 or rows.inverse_temperatures is not None,
        "CAPPED": options.softcap is not None,
        "SMOOTHED": options.label_smoothing != 0,
    }


def _sampler(rows: LogitRows) -> tuple[Any, ...]:
    """The sampler as the kernels take it: inverse temperatures, bits, and the stride of the bits' rows."""
    bits = rows.dropped_bits
    return rows.inverse_temperatures, bits, 0 if bits is None else bits.shape[-1]


def launch_rows(logits: Tensor, rows: LogitRows, options: LossOptions, class_weights: Tensor | None = None) -> None:
    """Fills the statistics of rows of logits, and replaces the logits by the gradient of weights * losses.

    Args:
        logits: (M, V), the last dimension contiguous.
        rows: fields (M,), contiguous; statistics that are None are not computed; without weights the logits stay.
        options: the options of the loss.
        class_weights: float32 (V,), of the means, which exclude label smoothing (their sums share lanes).
    """
    M, V = logits.shape
    most = 2048 if rows.weights is None else 4096  # in place, a row should have a multiprocessor to itself
    lanes = min(max(power_of_2_above(-(-V // (4 * TILES))), 256), most)  # 8 a thread: 16-byte loads of bfloat16
    _cross_entropy_row_kernel[(M,)](
        logits, logits.stride(0), rows.target, rows.weights, class_weights, *_sampler(rows), rows.losses, rows.maxima,
        rows.totals, rows.ranks, rows.predicted, rows.entropies, rows.means, V, options.ignore_index,
        *_numbers(options), **_flags(options, rows), RANK=rows.ranks is not None, PREDICTED=rows.predicted is not None,
        ENTROPY=rows.entropies is not None, TILES=min(power_of_2_above(-(-V // lanes)), TILES), BLOCK=lanes,
        num_warps=lanes // 256,
    )  # fmt: skip


def launch_gradient(
    logits: Tensor, gradient: Tensor, rows: LogitRows, gradients: RowGradients, options: LossOptions,
    class_weights: Tensor | None, first: int, num_classes: int,
) -> None:  # fmt: skip
    """Fills the gradient by logits (M, n) from the gradients by the statistics of their rows.

    Args:
        logits: (M, n), the last dimension contiguous.
        gradient: (M, n), the last dimension contiguous; it may be `logits`.
        rows: fields (M,), contiguous: targets, maxima and totals of whole rows, entropies if these have a gradient,
            and the sampler.
        gradients: the gradients by losses, entropies, lses and means, (M,), contiguous.
        options: the options of the loss.
        class_weights: float32 (num_classes,), of the means.
        first: the first class of `logits`.
        num_classes: the number of all classes.
    """
    M, n = logits.shape
    block = min(power_of_2_above(n), 4096)
    blocks = -(-n // block)
    _cross_entropy_gradient_kernel[(M * blocks,)](
        logits, logits.stride(0), gradient, gradient.stride(0), rows.target, gradients.losses, gradients.entropies,
        gradients.lses, gradients.means, class_weights, *_sampler(rows), rows.maxima, rows.totals, rows.entropies,
        first, n, num_classes, blocks, options.ignore_index, *_numbers(options), **_flags(options, rows),
        BLOCK=block, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip
