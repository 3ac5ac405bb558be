"""The Triton kernel of the divergences: rows of logits of both sides to losses, statistics, and gradients in place.

A program goes through its row three times: for the log-sum-exps of both sides, for the sums of the divergence, which
need them, and for the gradient, which needs these. A row comes from memory once; later it is in the cache.
"""

from torch import Tensor

from ligermodels.ops.loss.divergences import DistillationOptions, DivergenceRows
from ligermodels.ops.loss.logit_functions import effective, exp
from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import HAS_TRITON, tl, triton
from ligermodels.ops.runtime.launcher import kernel

TILES = 4
LOWEST = tl.constexpr(-3.4028234663852886e38) if HAS_TRITON else None


@triton.jit
def _tile(start, at, V, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """Given logits of a tile, effective ones, both -inf outside of the row, and the slope of the softcap."""
    given = tl.load(start + at, mask=at < V, other=float("-inf")).to(tl.float32)
    x, slope = effective(given, scale, softcap, SCALED, CAPPED)
    return given, tl.where(at < V, x, float("-inf")), slope


@triton.jit
def _add(given, x, top, total, best, best_at, first):
    """Adds a tile to the state of BLOCK lanes: maxima, sums of exp(x - maximum), the greatest given logits and their
    first tiles."""
    greatest = tl.max(given, axis=0)
    best_at = tl.where(greatest > best, first, best_at)
    higher = tl.maximum(top, tl.max(x, axis=0))
    total = total * exp(top - higher) + tl.sum(exp(x - higher[None, :]), axis=0)
    return higher, total, tl.maximum(best, greatest), best_at


@triton.jit
def _first_greatest(start, best, best_at, col, V):
    """The first class of the greatest given logit."""
    greatest = tl.max(best, axis=0)
    places = tl.min(tl.where(best == greatest, best_at, V), axis=0) + col  # of the first tile that has it
    given = tl.load(start + places, mask=places < V, other=float("-inf")).to(tl.float32)
    return tl.min(tl.min(tl.where((given == greatest) & (places < V), places, V), axis=0), axis=0)


@triton.jit
def _log_mixture(p, q, beta):
    """log(beta p + (1 - beta) q), finite where both are 0 in float32."""
    return tl.log(tl.maximum(beta * p + (1.0 - beta) * q, 1.2e-38))


@triton.jit
def _terms(log_q, log_p, beta, DIVERGENCE: tl.constexpr):
    """Terms of a tile of classes, to be summed over the row: of a KL divergence or the jsd; of c, see `_slopes`; and of
    the l1."""
    p, q = exp(log_p), exp(log_q)
    loss = tl.zeros_like(p)
    c = loss
    distance = loss
    if DIVERGENCE == "reverse_kl":
        c = q * tl.maximum(log_q - log_p, LOWEST)
        loss = c
    elif DIVERGENCE == "jsd":
        log_m = _log_mixture(p, q, beta)
        c = q * tl.maximum(log_q - log_m, LOWEST)
        loss = beta * p * tl.maximum(log_p - log_m, LOWEST) + (1.0 - beta) * c
    elif DIVERGENCE == "forward_kl" or DIVERGENCE == "lk":
        loss = p * tl.maximum(log_p - log_q, LOWEST)
    if DIVERGENCE == "lk" or DIVERGENCE == "l1" or DIVERGENCE == "tv":
        distance = tl.abs(q - p)
        c = q * _sign(q, p)
    return loss, c, distance


@triton.jit
def _sign(q, p):
    """The sign of q - p."""
    return tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))


@triton.jit
def _share_of_student(log_q, log_p):
    """The part of the gradient of min(p, q) that is q's."""
    return tl.where(log_q < log_p, 1.0, tl.where(log_q > log_p, 0.0, 0.5))


@triton.jit
def _of_row(kl, c, distance, near, masses, student_masses, DIVERGENCE: tl.constexpr):
    """The divergence of a row, and c and a of `_slopes`.

    kl, c, distance: the sums of `_terms` over the row.
    near, masses, student_masses: of nla, by lanes: the maxima of log min(p, q), the sums of min(p, q) over the
        exponential of the maximum, and the student's part of these sums."""
    loss, a = kl, 0.0
    if DIVERGENCE == "nla":
        highest = tl.max(near, axis=0)
        mass = tl.sum(masses * exp(near - highest), axis=0)
        c = tl.sum(student_masses * exp(near - highest), axis=0) / mass
        a = highest + tl.log(mass)
        loss = -a
    elif DIVERGENCE == "l1":
        loss = distance
    elif DIVERGENCE == "tv":
        loss = 0.5 * distance
    elif DIVERGENCE == "lk":
        a = exp(-3.0 * (1.0 - 0.5 * distance))
        loss = a * kl + 0.5 * (1.0 - a) * distance
    return loss, c, a


@triton.jit
def _slopes(log_q, log_p, c, a, beta, DIVERGENCE: tl.constexpr):
    """The gradient of the divergence by a tile of the student's x / temperature (head of `divergences`).

    c: the sum of q times what the gradient multiplies by q, over the row.
    a: of lk the weight of the KL divergence, of nla log sum min(p, q)."""
    p, q = exp(log_p), exp(log_q)
    if DIVERGENCE == "forward_kl":
        g = q - p
    elif DIVERGENCE == "reverse_kl":
        g = q * (log_q - log_p - c)
    elif DIVERGENCE == "jsd":
        g = (1.0 - beta) * q * (log_q - _log_mixture(p, q, beta) - c)
    elif DIVERGENCE == "nla":
        g = q * c - exp(tl.minimum(log_q, log_p) - a) * _share_of_student(log_q, log_p)
    else:
        g = q * (_sign(q, p) - c)
        if DIVERGENCE == "tv":
            g = 0.5 * g
        elif DIVERGENCE == "lk":
            g = a * (q - p) + 0.5 * (1.0 - a) * g
    return g


@kernel
def _divergence_kernel(
    student, stride, teacher, teacher_stride, share, valid, loss_weights, losses, accepted, agreed, teacher_lses,
    overlaps, targets, label_losses, ranks, V, scale, softcap, teacher_scale, teacher_softcap, slope_of_logits, beta,
    label_weight, divergence_weight, DIVERGENCE: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    TEACHER_SCALED: tl.constexpr, TEACHER_CAPPED: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program computes one row; see `launch_divergence`."""
    SIZE: tl.constexpr = TILES * BLOCK
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, TILES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    teacher_row = row // share
    start, other = student + row * stride, teacher + teacher_row * teacher_stride
    loss, of_whole, overlap, label_loss = 0.0, 0.0, 0.0, 0.0
    same = tl.program_id(0) < 0
    rank = tl.full((), 0, dtype=tl.int64) + V
    if tl.load(valid + row):
        lanes = tl.zeros((BLOCK,), dtype=tl.float32)
        lowest = tl.full((BLOCK,), LOWEST, dtype=tl.float32)
        top, total, best, best_at = lowest, lanes, lowest, lanes.to(tl.int32)
        top_p, total_p, best_p, best_at_p = top, total, best, best_at
        for first in range(0, V, SIZE):
            given, x, _ = _tile(start, first + col, V, scale, softcap, SCALED, CAPPED)
            top, total, best, best_at = _add(given, x, top, total, best, best_at, first)
            given, x, _ = _tile(other, first + col, V, teacher_scale, teacher_softcap, TEACHER_SCALED, TEACHER_CAPPED)
            top_p, total_p, best_p, best_at_p = _add(given, x, top_p, total_p, best_p, best_at_p, first)
        # Maxima and logarithms of sums stay apart: their sum would lose the digits of log-probabilities near 0.
        maximum, maximum_p = tl.max(top, axis=0), tl.max(top_p, axis=0)
        log_sum = tl.log(tl.sum(total * exp(top - maximum), axis=0))
        log_sum_p = tl.log(tl.sum(total_p * exp(top_p - maximum_p), axis=0))
        if agreed is not None:
            same = _first_greatest(start, best, best_at, col, V) == _first_greatest(other, best_p, best_at_p, col, V)
        log_mass = 0.0
        if teacher_lses is not None:
            log_mass = tl.minimum(maximum_p - tl.load(teacher_lses + teacher_row) + log_sum_p, 0.0)
        y = tl.full((), -1, dtype=tl.int64)
        x_y = 0.0
        if targets is not None:
            y = tl.load(targets + row)
            x_y, _slope_of_y = effective(tl.load(start + y, mask=y >= 0, other=0.0), scale, softcap, SCALED, CAPPED)

        kls, cs, distances, shares, whole_shares, before = lanes, lanes, lanes, lanes, lanes, lanes.to(tl.int32)
        near, masses, student_masses = lowest, lanes, lanes
        for first in range(0, V, SIZE):
            at = first + col
            _, x, _ = _tile(start, at, V, scale, softcap, SCALED, CAPPED)
            _, x_p, _ = _tile(other, at, V, teacher_scale, teacher_softcap, TEACHER_SCALED, TEACHER_CAPPED)
            log_q, log_p = x - maximum - log_sum, x_p - maximum_p - log_sum_p
            if DIVERGENCE == "nla":
                smaller = tl.minimum(log_q, log_p)
                higher = tl.maximum(near, tl.max(smaller, axis=0))
                r = exp(smaller - higher[None, :])
                masses = masses * exp(near - higher) + tl.sum(r, axis=0)
                student_masses = student_masses * exp(near - higher)
                student_masses += tl.sum(r * _share_of_student(log_q, log_p), axis=0)
                near = higher
            else:
                kl, c, distance = _terms(log_q, log_p, beta, DIVERGENCE)
                kls += tl.sum(tl.where(at < V, kl, 0.0), axis=0)
                cs += tl.sum(tl.where(at < V, c, 0.0), axis=0)
                distances += tl.sum(tl.where(at < V, distance, 0.0), axis=0)
            if accepted is not None:
                whole_shares += tl.sum(exp(tl.minimum(log_q, log_p + log_mass)), axis=0)
            if overlaps is not None:
                shares += tl.sum(exp(tl.minimum(log_q, log_p)), axis=0)
            if targets is not None:
                before += tl.sum((x > x_y).to(tl.int32), axis=0)
        kl, c, distance = tl.sum(kls, axis=0), tl.sum(cs, axis=0), tl.sum(distances, axis=0)
        loss, c, a = _of_row(kl, c, distance, near, masses, student_masses, DIVERGENCE)
        of_whole, overlap = tl.sum(whole_shares, axis=0), tl.sum(shares, axis=0)
        if y >= 0:
            label_loss = maximum - x_y + log_sum
            rank = tl.sum(before, axis=0).to(tl.int64)
        if loss_weights is not None:
            weight = tl.load(loss_weights + row) * slope_of_logits
            tl.debug_barrier()  # all threads have read the row
            for done in range(0, V, SIZE):  # from the end, which is still in the cache
                at = (V - 1) // SIZE * SIZE - done + col
                _, x, slope = _tile(start, at, V, scale, softcap, SCALED, CAPPED)
                _, x_p, _ = _tile(other, at, V, teacher_scale, teacher_softcap, TEACHER_SCALED, TEACHER_CAPPED)
                log_q = x - maximum - log_sum
                g = _slopes(log_q, x_p - maximum_p - log_sum_p, c, a, beta, DIVERGENCE)
                if targets is not None:
                    of_label = exp(log_q) - tl.where(at == y, 1.0, 0.0)
                    g = divergence_weight * g + tl.where(y >= 0, label_weight, 0.0) * of_label
                if CAPPED:
                    g *= slope
                tl.store(start + at, (g * weight).to(student.dtype.element_ty), mask=at < V)
    elif loss_weights is not None:
        for first in range(0, V, SIZE):
            zeros = tl.zeros((TILES, BLOCK), dtype=student.dtype.element_ty)
            tl.store(start + first + col, zeros, mask=first + col < V)
    tl.store(losses + row, loss)
    if accepted is not None:
        tl.store(accepted + row, tl.minimum(of_whole, 1.0))
    if overlaps is not None:
        tl.store(overlaps + row, tl.minimum(overlap, 1.0))
    if agreed is not None:
        tl.store(agreed + row, same)
    if targets is not None:
        tl.store(label_losses + row, label_loss)
        tl.store(ranks + row, rank)


def launch_divergence(student: Tensor, teacher: Tensor, rows: DivergenceRows, options: DistillationOptions) -> None:
    """`divergence_in_place` by the kernel. The logits of the teacher stay, and so do the logits of the student without
    `rows.loss_weights`.

    Args:
        student: (M, V), the last dimension contiguous.
        teacher: (M, V), or (M / S, V): row i for the S rows from i * S on; the last dimension contiguous.
        rows: numbers of each row, in float32, and memory for the results.
        options: the options of the divergence.
    """
    (M, V), teacher_rows = student.shape, max(len(teacher), 1)
    lanes = min(max(power_of_2_above(-(-V // (4 * TILES))), 256), 2048)
    inverse = 1 / options.temperature

    def numbers(scale: float, softcap: float | None) -> tuple[float, float]:
        return (scale * inverse, 1.0) if softcap is None else (scale / softcap, softcap * inverse)

    scales = numbers(options.logit_scale, options.softcap)
    teacher_scales = numbers(options.teacher_logit_scale, options.teacher_softcap)
    labels = rows.labels
    targets, label_losses, ranks = (None,) * 3 if labels is None else (labels.targets, labels.losses, labels.ranks)
    weights = (0.0, 1.0) if labels is None else (labels.weight, labels.divergence_weight)
    _divergence_kernel[(M,)](
        student, student.stride(0), teacher, teacher.stride(0), M // teacher_rows, rows.valid, rows.loss_weights,
        rows.losses, rows.accepted, rows.agreed, rows.teacher_lses, rows.overlaps, targets, label_losses, ranks, V,
        *scales, *teacher_scales,
        options.logit_scale * inverse, options.beta, *weights, DIVERGENCE=options.divergence, SCALED=scales[0] != 1,
        CAPPED=options.softcap is not None, TEACHER_SCALED=teacher_scales[0] != 1,
        TEACHER_CAPPED=options.teacher_softcap is not None,
        TILES=min(power_of_2_above(-(-V // lanes)), TILES), BLOCK=lanes, num_warps=lanes // 256,
    )  # fmt: skip
