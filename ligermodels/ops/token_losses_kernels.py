"""The Triton kernels of cross entropy: rows of logits to losses, ranks and gradients."""

import torch

from ligermodels.ops.dispatch import HAS_TRITON, power_of_2_above, processors, tl, triton, use_kernels
from ligermodels.ops.launcher import after_previous_kernel, kernel
from ligermodels.ops.token_losses import LossOptions

TILES = 4
SCALE_BLOCK = 8192  # elements that a program scales at a time
BOUND = 60.0  # for |x| up to this, sums of exp(x) over a vocabulary are well within float32
NEAR = tl.constexpr(0.8) if HAS_TRITON else None
LOG2_E = tl.constexpr(1.4426950408889634) if HAS_TRITON else None
LOWEST = tl.constexpr(-3.4028234663852886e38) if HAS_TRITON else None  # the maximum of none, or of -inf


@triton.jit
def _tanh_near(x):
    """tanh(x) for |x| < NEAR: an odd polynomial (a minimax fit of relative error 7e-9), which nothing cancels in."""
    z = x * x
    p = 0.0015847518 * z - 0.0074095489
    p = p * z + 0.021302985
    p = p * z - 0.05385233
    p = p * z + 0.13332221
    p = p * z - 0.33333297
    return x + x * z * p


@triton.jit
def _tanh_far(x):
    """tanh(x), off by units in the last place of 1; and 1 - tanh^2, by 1e-5 of itself even where tanh is near 1."""
    e = tl.exp(-2.0 * tl.abs(x))
    share = 1.0 / (1.0 + e)
    far = 1.0 - 2.0 * e * share
    return tl.where(x < 0, -far, far), 4.0 * e * share * share


@triton.jit
def effective(x, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """Effective logits of given ones, in float32, off by no more than a few units in the last place; and, CAPPED,
    1 - tanh^2. scale is logit_scale, over softcap if there is one."""
    x = x.to(tl.float32)
    if SCALED or CAPPED:
        x = x * scale
    slope = x
    if CAPPED:
        far, slope = _tanh_far(x)
        x = softcap * tl.where(tl.abs(x) < NEAR, _tanh_near(x), far)
    return x, slope


@triton.jit
def effective_bounded(given, inside, scale, softcap, ALL_NEAR: tl.constexpr):
    """log2(e) times the effective logits of a BOUNDED tile, -inf where it is not inside; and 1 - tanh^2.

    They are off by units in the last place of themselves or, if not all are near 0, of the softcap. Arithmetic is what
    this takes its time for. Where all are, as they mostly are, it is a polynomial (a minimax fit of tanh, of relative
    error 6e-8, with fewer operations than `_tanh_near`), its coefficients scaled in place of the logits."""
    cap = softcap * LOG2_E
    x = given.to(tl.float32)
    if ALL_NEAR:
        z, s, first = x * x, scale * scale, cap * scale
        p = -0.0043552995 * first * s * s * s * s * s
        p = p * z + 0.0190933 * first * s * s * s * s
        p = p * z - 0.053114315 * first * s * s * s
        p = p * z + 0.13321048 * first * s * s
        p = p * z - 0.33332675 * first * s
        x = x * (p * z + 0.99999994 * first)
        slope = 1.0 - x * x * (1.0 / (cap * cap))
    else:
        x, slope = _tanh_far(x * scale)
        x = tl.where(inside, cap * x, float("-inf"))
    return x, slope


@triton.jit
def all_near(given, scale):
    """Whether all of a tile of logits is where the polynomial alone gives tanh; and so all inside."""
    return tl.max(tl.abs(given.to(tl.float32))) * scale < NEAR


@triton.jit
def effective_tile(
    given, inside, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr, BOUNDED: tl.constexpr
):  # fmt: skip
    """Effective logits of a tile that is -inf where it is not inside, and stays so. BOUNDED, times log2(e)."""
    if BOUNDED:
        if all_near(given, scale):
            x, _ = effective_bounded(given, inside, scale, softcap, ALL_NEAR=True)
        else:
            x, _ = effective_bounded(given, inside, scale, softcap, ALL_NEAR=False)
    else:
        x, _ = effective(given, scale, softcap, SCALED, CAPPED)
        if CAPPED:
            x = tl.where(inside, x, float("-inf"))
    return x


@triton.jit
def exp(x):
    """exp(x); tl.exp itself costs three instructions more, which keep results below 1e-38."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def _observe(
    start, first, col, V, y, at_y, top, total, plain, before, x_y, scale, softcap, MASKED: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, BOUNDED: tl.constexpr, SMOOTHED: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Takes a tile (TILES, BLOCK) of a row's logits, from `first` on, into what its BLOCK lanes have seen so far: their
    maxima (BOUNDED, 0), sums of exp(x - maximum), plain sums, counts of logits that stand before the target's, and,
    BOUNDED, the target's own x."""
    col += first
    inside = col < V
    given = tl.load(start + col, mask=inside, other=float("-inf")) if MASKED else tl.load(start + col)
    x = effective_tile(given, inside, scale, softcap, SCALED, CAPPED, BOUNDED)
    if BOUNDED:
        higher = top
        total += tl.sum(tl.exp2(x), axis=0)
        if (y >= first) & (y < first + given.numel):
            x_y += tl.sum(tl.where(col == y, x, 0.0), axis=0) / LOG2_E
    else:
        higher = tl.maximum(top, tl.max(x, axis=0))
        total = total * exp(top - higher) + tl.sum(exp(x - higher[None, :]), axis=0)
    if SMOOTHED:
        plain += tl.sum(tl.where(inside, x, 0.0), axis=0) / (LOG2_E if BOUNDED else 1.0)
    if RANK:
        before += tl.sum((inside & ((given > at_y) | ((given == at_y) & (col < y)))).to(tl.int32), axis=0)
    return higher, total, plain, before, x_y


@triton.jit
def gradient_of(
    given, is_target, maximum, factor, c, V, scale, softcap, smoothing,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
):  # fmt: skip
    """Gradient of coefficient * loss by given logits. c: coefficient * logit_scale. factor: c times 1 + 2 z_loss lse,
    over the sum of exp(x - maximum)."""
    x, slope = effective(given, scale, softcap, SCALED, CAPPED)
    g = exp(x - maximum) * factor
    if SMOOTHED:
        g -= c * smoothing / V
    g -= tl.where(is_target, c * (1.0 - smoothing), 0.0)
    if CAPPED:
        g *= slope
    return g


@triton.jit
def gradient_bounded(
    given, is_target, factor, c, V, scale, softcap, smoothing, SMOOTHED: tl.constexpr, ALL_NEAR: tl.constexpr
):  # fmt: skip
    """The same by BOUNDED logits, and the effective ones. Where the target goes the way that the sum of its piece went,
    what both are off by cancels."""
    x, slope = effective_bounded(given, True, scale, softcap, ALL_NEAR)
    g = tl.exp2(x) * factor
    if SMOOTHED:
        g -= c * smoothing / V
    g -= tl.where(is_target, c * (1.0 - smoothing), 0.0)
    return g * slope, x / LOG2_E


@kernel
def _cross_entropy_row_kernel(
    logits, stride, target, losses, maxima, log_sums, ranks,
    V, ignore_index, scale, softcap, smoothing, z_loss,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, BOUNDED: tl.constexpr, SMOOTHED: tl.constexpr, RANK: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program reads one row: its loss, max and log of the sum of exp(x - max), and its rank.

    BLOCK lanes go through the row, TILES logits each at a time, and meet once at the end: little more than one exp for
    each logit, and no barrier in the loop."""
    after_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, TILES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    start = logits + row * stride
    whole = V // (TILES * BLOCK) * (TILES * BLOCK)
    y = tl.load(target + row)
    if (y != ignore_index) & (y >= 0) & (y < V):
        at_y = tl.load(start + y)
        top = tl.full((BLOCK,), 0.0 if BOUNDED else LOWEST, dtype=tl.float32)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        plain = tl.zeros((BLOCK,), dtype=tl.float32)
        before = tl.zeros((BLOCK,), dtype=tl.int32)
        x_y = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, whole, TILES * BLOCK):
            top, total, plain, before, x_y = _observe(
                start, first, col, V, y, at_y, top, total, plain, before, x_y, scale, softcap,
                False, SCALED, CAPPED, BOUNDED, SMOOTHED, RANK,
            )  # fmt: skip
        if whole < V:
            top, total, plain, before, x_y = _observe(
                start, whole, col, V, y, at_y, top, total, plain, before, x_y, scale, softcap,
                True, SCALED, CAPPED, BOUNDED, SMOOTHED, RANK,
            )  # fmt: skip
        maximum = tl.max(top, axis=0)
        log_sum = tl.log(tl.sum(total * exp(top - maximum), axis=0))
        # x_y - max and log_sum stay apart: their sum would lose what logits of great size leave of the loss.
        at_y, _ = effective(at_y, scale, softcap, SCALED, CAPPED)
        loss = (1.0 - smoothing) * (log_sum - ((tl.sum(x_y, axis=0) if BOUNDED else at_y) - maximum))
        if SMOOTHED:
            loss += smoothing * (log_sum - (tl.sum(plain, axis=0) / V - maximum))
        loss += z_loss * (maximum + log_sum) * (maximum + log_sum)
        tl.store(losses + row, loss)
        tl.store(maxima + row, maximum)
        tl.store(log_sums + row, log_sum)
        if RANK:
            tl.store(ranks + row, tl.sum(before, axis=0).to(tl.int64))
    else:
        tl.store(losses + row, 0.0)
        tl.store(maxima + row, 0.0)
        tl.store(log_sums + row, 0.0)
        if RANK:
            tl.store(ranks + row, -1)


@kernel
def _cross_entropy_gradient_kernel(
    logits, stride, gradient, target, maxima, log_sums, coefficients,
    V, blocks, ignore_index, scale, softcap, logit_scale, smoothing, z_loss,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, BOUNDED: tl.constexpr, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program writes one block of one row of the gradient, from the saved max and log-sum."""
    after_previous_kernel()
    row = tl.program_id(0).to(tl.int64) // blocks
    first = tl.program_id(0) % blocks * BLOCK
    col = first + tl.arange(0, BLOCK)
    start, out = logits + row * stride, gradient + row * V
    y = tl.load(target + row)
    if (y != ignore_index) & (y >= 0) & (y < V):
        maximum, log_sum = tl.load(maxima + row), tl.load(log_sums + row)
        c = tl.load(coefficients + row) * logit_scale
        given = tl.load(start + col, mask=col < V, other=0.0)
        factor = c * (1.0 + 2.0 * z_loss * (maximum + log_sum)) * tl.exp(-log_sum)
        if BOUNDED:
            if all_near(given, scale):
                g, _ = gradient_bounded(given, col == y, factor, c, V, scale, softcap, smoothing, SMOOTHED, True)
            else:
                g, _ = gradient_bounded(given, col == y, factor, c, V, scale, softcap, smoothing, SMOOTHED, False)
        elif (y >= first) & (y < first + BLOCK):
            g = gradient_of(given, col == y, maximum, factor, c, V, scale, softcap, smoothing, SCALED, CAPPED, SMOOTHED)
        else:  # as mostly, and to look for the target would take longer than to read and write
            g = gradient_of(given, False, maximum, factor, c, V, scale, softcap, smoothing, SCALED, CAPPED, SMOOTHED)
        tl.store(out + col, g.to(gradient.dtype.element_ty), mask=col < V)
    else:
        tl.store(out + col, tl.zeros((BLOCK,), dtype=tl.float32).to(gradient.dtype.element_ty), mask=col < V)


def numbers(options: LossOptions) -> tuple[float, ...]:
    """scale, softcap, logit_scale, smoothing and z_loss as the kernels take them."""
    softcap = 1.0 if options.softcap is None else options.softcap
    return options.logit_scale / softcap, softcap, options.logit_scale, options.label_smoothing, options.z_loss


def flags(options: LossOptions, logits: torch.Tensor) -> dict[str, bool]:
    """Which parts of the formula the kernels need. BOUNDED: a softcap under which exp(x) needs no maximum to stay
    within float32, of logits of 16 bits, by a scale whose powers are neither great nor tiny."""
    scale, softcap, *_ = numbers(options)
    capped = options.softcap is not None
    return {
        "SCALED": options.logit_scale != 1,
        "CAPPED": capped,
        "BOUNDED": capped and 1 <= softcap <= BOUND and 2**-8 <= scale <= 1 and logits.dtype.itemsize == 2,
        "SMOOTHED": options.label_smoothing != 0,
    }


def _row_blocks(V: int) -> tuple[int, int, int]:
    """Lanes, logits a lane takes at a time, and warps, for rows of V logits: 16-byte loads of bfloat16."""
    lanes = min(max(power_of_2_above(-(-V // (4 * TILES))), 256), 2048)
    return lanes, min(power_of_2_above(-(-V // lanes)), TILES), lanes // 256


def launch_rows(
    logits: torch.Tensor,
    target: torch.Tensor,
    losses: torch.Tensor,
    maxima: torch.Tensor,
    log_sums: torch.Tensor,
    ranks: torch.Tensor,
    options: LossOptions,
) -> None:
    """Runs the kernel over the rows of logits (M, V) whose last dimension is contiguous; fills the rest, (M,)."""
    M, V = logits.shape
    block, tiles, warps = _row_blocks(V)
    scale, softcap, _, smoothing, z_loss = numbers(options)
    _cross_entropy_row_kernel[(M,)](
        logits, logits.stride(0), target, losses, maxima, log_sums, ranks,
        V, options.ignore_index, scale, softcap, smoothing, z_loss, **flags(options, logits), RANK=options.return_rank,
        TILES=tiles, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def launch_gradient(
    logits: torch.Tensor,
    gradient: torch.Tensor,
    target: torch.Tensor,
    maxima: torch.Tensor,
    log_sums: torch.Tensor,
    coefficients: torch.Tensor,
    options: LossOptions,
) -> None:
    """Fills gradient (M, V), contiguous, with that of coefficient * loss, from what `launch_rows` found of logits."""
    M, V = logits.shape
    block = min(power_of_2_above(V), 4096)
    blocks = -(-V // block)
    _cross_entropy_gradient_kernel[(M * blocks,)](
        logits, logits.stride(0), gradient, target, maxima, log_sums, coefficients,
        V, blocks, options.ignore_index, *numbers(options), **flags(options, logits),
        BLOCK=block, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip


@kernel
def _scale_kernel(x, factor, n, BLOCK: tl.constexpr):
    """x *= factor; where the factor turns out to be 1, as it mostly is, without touching x."""
    after_previous_kernel()
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
            i = first + tl.arange(0, BLOCK)
            value = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32) * f
            tl.store(x + i, value.to(x.dtype.element_ty), mask=i < n)


def scale_(x: torch.Tensor, factor: torch.Tensor) -> None:
    """x *= factor in place, x contiguous, without a wait for the device."""
    if use_kernels(x):
        programs = min(-(-x.numel() // SCALE_BLOCK), 8 * processors(x.device))  # few: mostly they only start, and end
        with torch.cuda.device_of(x):
            _scale_kernel[(programs,)](x, factor, x.numel(), BLOCK=SCALE_BLOCK, num_warps=8)
    elif x.is_cuda or factor != 1:
        x.mul_(factor)
