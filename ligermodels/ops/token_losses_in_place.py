"""Cross entropy whose gradient takes the logits' place: each logit read from memory once and written once.

A row's gradient needs all of the row first, so each logit is read twice; the second time it has to come from the cache.
Whole rows of large vocabularies, one a multiprocessor, are more than the cache holds. Here a program takes a piece of a
row, either to sum it up or to write its gradient, and writing follows some pieces behind.
"""

import torch

from ligermodels.errors import BackendError
from ligermodels.ops.dispatch import power_of_2_above, processors, tl, triton
from ligermodels.ops.launcher import after_previous_kernel, kernel
from ligermodels.ops.token_losses import LossOptions
from ligermodels.ops.token_losses_kernels import (
    LOG2_E,
    LOWEST,
    NEAR,
    effective,
    effective_bounded,
    effective_tile,
    exp,
    flags,
    gradient_bounded,
    gradient_of,
    numbers,
)

PIECE = 4096  # logits a program takes at most
# Pieces a multiprocessor between summing up and writing: more than are read at once, less than the cache holds.
BEHIND = 14


@triton.jit
def _pack(high, low):
    """Two numbers of 32 bits, of which the low one is not negative, as one that is written and read whole."""
    return (high.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def _high(word):
    """The high one, a float32."""
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _wait_for(words, there, found):
    """The words, of which some have been found, once none of them is 0 any more."""
    while tl.min((found != 0).to(tl.int32), axis=0) == 0:
        found = tl.load(words, mask=there, other=1, volatile=True)
    return found


@triton.jit
def _load(start, room, POLICY: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """A piece in tiles, of which `room` logits are there: all asked for before the first is computed with."""
    SIZE: tl.constexpr = BLOCK // TILES
    col = tl.arange(0, SIZE)
    tiles = ()
    for i in tl.static_range(TILES):
        there = col < room - i * SIZE
        tile = tl.load(start + i * SIZE + col, mask=there, other=0.0, eviction_policy=POLICY)
        tiles += (tile,)  # type: ignore[assignment]  # the loop is unrolled
    return tiles


@triton.jit
def _sum_and_most(total, most, other_total, other_most):
    """Of pairs, the sum of the first and the greatest of the second, for one reduction in place of two."""
    return total + other_total, tl.maximum(most, other_most)


@triton.jit
def _sum_up_bounded(
    start, room, scale, softcap, SMOOTHED: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of a BOUNDED piece whether some are far from 0 (1 or 0), the sum of exp(x) and, if that is wanted, that of x."""
    SIZE: tl.constexpr = BLOCK // TILES
    tiles, col = _load(start, room, "evict_last", TILES, BLOCK), tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), dtype=tl.float32)
    plain, most = total, total
    for i in tl.static_range(TILES):  # as if all were near 0, so that threads meet once
        x, _ = effective_bounded(tiles[i], True, scale, softcap, ALL_NEAR=True)
        total += tl.where(col < room - i * SIZE, tl.exp2(x), 0.0)
        plain += x
        most = tl.maximum(most, tl.abs(tiles[i].to(tl.float32)))
    total, most = tl.reduce((total, most), 0, _sum_and_most)
    far = (most * scale >= NEAR).to(tl.float32)
    if far != 0.0:
        total, plain = 0.0, tl.zeros((SIZE,), dtype=tl.float32)
        for i in tl.static_range(TILES):
            inside = col < room - i * SIZE
            x, _ = effective_bounded(tiles[i], inside, scale, softcap, ALL_NEAR=False)
            total += tl.sum(tl.exp2(x), axis=0)
            plain += tl.where(inside, x, 0.0)
    return far, total, tl.sum(plain, axis=0) / LOG2_E if SMOOTHED else far  # which nobody takes for it


@triton.jit
def _write_bounded(
    start, tiles, room, factor, c, V, scale, softcap, smoothing,
    SMOOTHED: tl.constexpr, ALL_NEAR: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of a BOUNDED piece, as if the target were not there."""
    SIZE: tl.constexpr = BLOCK // TILES
    col = tl.arange(0, SIZE)
    for i in tl.static_range(TILES):
        g, _ = gradient_bounded(tiles[i], False, factor, c, V, scale, softcap, smoothing, SMOOTHED, ALL_NEAR)
        g = g.to(start.dtype.element_ty)
        tl.store(start + i * SIZE + col, g, mask=col < room - i * SIZE, eviction_policy="evict_first")


@kernel
def _cross_entropy_in_place_kernel(
    logits, stride, target, losses, ranks, coefficients, sums, more,
    M, V, behind, ignore_index, scale, softcap, logit_scale, smoothing, z_loss,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, BOUNDED: tl.constexpr, SMOOTHED: tl.constexpr, RANK: tl.constexpr,
    PIECES: tl.constexpr, PADDED: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs take turns: one sums up a piece, the next writes the gradient of the piece that is `behind` others. This
    waits for the row's other pieces, all of which are those of programs before it: GPUs start programs in the order of
    their numbers, and those that sum up wait for nobody.

    Of each piece (M, PIECES): `sums` gets its maximum and sum of exp(x - maximum) (BOUNDED, whether some of it is far
    from 0, and the sum of exp(x)), `more` its plain sum and one more than the count of its logits that stand before the
    target's: each pair as one word, which is not 0."""
    after_previous_kernel()
    writes = tl.program_id(0) % 2 == 1
    place = tl.program_id(0) // 2 - (behind if writes else 0)
    if (place < 0) | (place >= M * PIECES):
        return
    row, first = (place // PIECES).to(tl.int64), place % PIECES * BLOCK
    part, there = row * PIECES + tl.arange(0, PADDED), tl.arange(0, PADDED) < PIECES
    found = tl.load(sums + part, mask=there & writes, other=0, volatile=True)
    y = tl.load(target + row)
    valid = (y != ignore_index) & (y >= 0) & (y < V)
    at_target = logits + row * stride + y
    start = logits + row * stride + first
    col = tl.arange(0, BLOCK)
    room = V - first
    inside = col < room
    if valid & writes:
        tiles = _load(start, room, "evict_first", TILES, BLOCK)
        found = _wait_for(sums + part, there, tl.where(there, found, 1))
        total = tl.where(there, found.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
        far, maximum = 0.0, 0.0
        if BOUNDED:
            own = there & (tl.arange(0, PADDED) == place % PIECES)
            total, far = tl.reduce((total, tl.where(own, _high(found), 0.0)), 0, _sum_and_most)
        else:
            tops = tl.where(there, _high(found), LOWEST)
            maximum = tl.max(tops, axis=0)
            total = tl.sum(total * exp(tops - maximum), axis=0)
        c = tl.load(coefficients + row) * logit_scale
        factor = c / total
        if z_loss != 0.0:
            factor *= 1.0 + 2.0 * z_loss * (maximum + tl.log(total))
        near = (y >= first) & (y < first + BLOCK)
        given_y = 0.0
        if near:
            given_y = tl.load(at_target).to(tl.float32)
            tl.debug_barrier()  # all threads have read it
        if BOUNDED:
            if far == 0.0:
                _write_bounded(
                    start, tiles, room, factor, c, V, scale, softcap, smoothing, SMOOTHED, True, TILES, BLOCK
                )
            else:
                _write_bounded(
                    start, tiles, room, factor, c, V, scale, softcap, smoothing, SMOOTHED, False, TILES, BLOCK
                )
        else:
            g = gradient_of(tiles[0], False, maximum, factor, c, V, scale, softcap, smoothing, SCALED, CAPPED, SMOOTHED)
            tl.store(start + col, g.to(logits.dtype.element_ty), mask=inside, eviction_policy="evict_first")
        if near:
            tl.debug_barrier()  # all threads have written theirs
            if BOUNDED:
                if far == 0.0:
                    g_y, x_y = gradient_bounded(given_y, True, factor, c, V, scale, softcap, smoothing, SMOOTHED, True)
                else:
                    g_y, x_y = gradient_bounded(given_y, True, factor, c, V, scale, softcap, smoothing, SMOOTHED, False)
            else:
                g_y = gradient_of(
                    given_y, True, maximum, factor, c, V, scale, softcap, smoothing, SCALED, CAPPED, SMOOTHED
                )
                x_y, _ = effective(given_y, scale, softcap, SCALED, CAPPED)
            tl.store(at_target, g_y.to(logits.dtype.element_ty))
            # x_y - max and log_sum stay apart: their sum would lose what logits of great size leave of the loss.
            log_sum = tl.log(total)
            loss = (1.0 - smoothing) * (log_sum - (x_y - maximum))
            if SMOOTHED or RANK:
                found = _wait_for(more + part, there, tl.zeros((PADDED,), dtype=tl.int64))
            if SMOOTHED:
                loss += smoothing * (log_sum - (tl.sum(tl.where(there, _high(found), 0.0), axis=0) / V - maximum))
            loss += z_loss * (maximum + log_sum) * (maximum + log_sum)
            tl.store(losses + row, loss)
            if RANK:
                tl.store(ranks + row, tl.sum(tl.where(there, found.to(tl.int32) - 1, 0), axis=0).to(tl.int64))
    elif valid:
        if RANK or not BOUNDED:
            given = tl.load(start + col, mask=inside, other=float("-inf"), eviction_policy="evict_last")
        if BOUNDED:
            top, total, plain = _sum_up_bounded(start, room, scale, softcap, SMOOTHED, TILES, BLOCK)
        else:
            x = effective_tile(given, inside, scale, softcap, SCALED, CAPPED, BOUNDED)
            top = tl.maximum(tl.max(x, axis=0), LOWEST)
            total = tl.sum(exp(x - top), axis=0)
            plain = tl.sum(tl.where(inside, x, 0.0), axis=0) if SMOOTHED else top  # which nobody takes for it
        if SMOOTHED or RANK:  # before the word below, after which the row may be written
            before = tl.full((), 0, dtype=tl.int32)
            if RANK:  # what is not inside is -inf, and behind the target
                at_y = tl.load(at_target)
                ahead = (given > at_y) | ((given == at_y) & (col < (y - first).to(tl.int32)))
                before = tl.sum(ahead.to(tl.int32), axis=0)
            tl.store(more + place, _pack(plain, 1 + before))
        tl.store(sums + place, _pack(top, total))
    elif writes:
        tl.store(start + col, tl.zeros((BLOCK,), dtype=logits.dtype.element_ty), mask=inside)
        if first == 0:
            tl.store(losses + row, 0.0)
            if RANK:
                tl.store(ranks + row, -1)


def launch_in_place(
    logits: torch.Tensor,
    target: torch.Tensor,
    losses: torch.Tensor,
    ranks: torch.Tensor,
    coefficients: torch.Tensor,
    options: LossOptions,
) -> None:
    """Fills losses and, if they are wanted, ranks (M,) from logits (M, V), whose last dimension is contiguous, and puts
    the gradient of coefficient * loss, with coefficients (M,), in their place.

    Raises BackendError on AMD GPUs, whose programs may not see what others have just written."""
    if torch.version.hip and logits.is_cuda:
        raise BackendError('gradients in the place of logits need an NVIDIA GPU: train within ops.force("reference")')
    M, V = logits.shape
    block = min(power_of_2_above(V), PIECE)
    pieces = -(-V // block)
    behind = min(max(BEHIND * processors(logits.device), pieces), M * pieces)
    both = options.return_rank or options.label_smoothing != 0
    padded = max(power_of_2_above(pieces), 32) if pieces > 1 else 1  # a warp's, so that it waits as one
    parts = flags(options, logits)
    # Threads hold as many logits at once as their registers take beside what they compute with them; softcaps are
    # computed tile by tile.
    warps = block // (1024 if parts["CAPPED"] or parts["SMOOTHED"] else 2048)
    tiles = min(4, max(block // 256, 1)) if parts["BOUNDED"] else 1
    words = target.new_zeros((1 + both, M, pieces), dtype=torch.int64)
    _cross_entropy_in_place_kernel[(2 * (M * pieces + behind),)](
        logits, logits.stride(0), target, losses, ranks, coefficients, words[0], words[-1],
        M, V, behind, options.ignore_index, *numbers(options), **parts, RANK=options.return_rank,
        PIECES=pieces, PADDED=padded, TILES=tiles, BLOCK=block, num_warps=max(warps, 1),
    )  # fmt: skip
