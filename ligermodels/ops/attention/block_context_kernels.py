"""The Triton kernels of `block_context_attention`: the forward pass, and the gradients of queries and of keys.

The A blocks of a row are one sequence of T = A * L slots, the context one of S keys. Each slot sees an interval of the
context, from the start of the document or of the window to the anchor, and an interval of its own block. Both are flash
attention over tiles, by the functions of `triton_attention_steps`. A tile of slots holds several blocks. With
ascending anchors they see nearly the same context, so that few tiles need a mask. No atomics: each result is written by
one program, in a fixed order of summation.
"""

from functools import partial
from typing import Any

from ligermodels.ops.attention.triton_attention_steps import (
    LOWEST,
    attend,
    key_gradient,
    key_ranges,
    load_tile,
    query_gradient,
    store_tile,
)
from ligermodels.ops.runtime.dispatch import HAS_TRITON, tl, triton
from ligermodels.ops.runtime.launcher import kernel

SCAN: Any = tl.constexpr(256) if HAS_TRITON else None
"""Anchors that are compared at once."""

kernel_for_any_length = partial(kernel, do_not_specialize=("T", "S", "A", "L", "heads", "window"))
"""One compiled kernel serves every number and length of blocks, every length of the context and every window."""


@triton.jit
def _context_of(slot, anchors, starts, T, L, window):
    """First and last key of the context that each slot sees; the last comes before the first if it sees none."""
    slot = tl.minimum(slot, T - 1)
    anchor = tl.load(anchors + slot // L).to(tl.int32)
    first = tl.load(starts + slot // L)
    if window is not None:
        first = tl.maximum(first, anchor + slot % L - window + 1)
    return first, anchor - 1


@triton.jit
def _block_of(slot, T, L, window, CAUSAL: tl.constexpr):
    """First and last slot of its own block that each slot sees."""
    slot = tl.minimum(slot, T - 1)
    first = slot // L * L
    last = first + L - 1
    if CAUSAL:
        last = slot
    if window is not None:
        first = tl.maximum(first, slot - window + 1)
    return first, last


@kernel_for_any_length
def block_context_forward_kernel(
    q, q_batch, q_token, q_head, own_k, own_k_batch, own_k_token, own_k_head, own_v, own_v_batch, own_v_token,
    own_v_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head, anchors, starts, out, lse,
    T, S, A, L, heads, window, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Each program writes out and lse for one tile of slots of one head. The last tiles, with the most keys, begin
    first.

    Args:
        q, q_batch, q_token, q_head: queries of the slots (B, T, heads, DIM), and their strides in elements.
        own_k, own_k_batch, own_k_token, own_k_head: keys of the blocks (B, T, heads // GROUP, DIM), and their strides.
        own_v, own_v_batch, own_v_token, own_v_head: values of the blocks (B, T, heads // GROUP, VALUE_DIM), and their
            strides.
        k, k_batch, k_token, k_head: keys of the context (B, S, heads // GROUP, DIM), and their strides.
        v, v_batch, v_token, v_head: values of the context (B, S, heads // GROUP, VALUE_DIM), and their strides.
        anchors: int64 (B, A), number of context keys before each block.
        starts: int32 (B, A), first context key of each block's document.
        out: (B, T, heads, VALUE_DIM), contiguous; written.
        lse: float32 (B, heads, T), base-2 logarithm of the softmax denominator; written.
        T, S: numbers of slots, A * L, and of context keys.
        A, L: blocks of a row, and slots of a block.
        heads: number of query heads.
        window: keys that a slot sees, its own included, or None.
        scale: factor on q·k, for scores to base 2.
        GROUP, DIM, VALUE_DIM: query heads per key/value head, channels of a query, and channels of a value.
        CAUSAL: whether slots see no later slot of their block.
        BLOCK_T, BLOCK_S, BLOCK_DIM, BLOCK_VALUE: slots and keys of a tile; powers of 2 from DIM and VALUE_DIM on.
    """
    head, batch = (tl.program_id(0) % heads).to(tl.int64), (tl.program_id(0) // heads).to(tl.int64)
    start_t = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_T
    row = tl.arange(0, BLOCK_T)
    slot = start_t + row
    queries = load_tile(q + batch * q_batch + head * q_head, row, start_t, q_token, T, DIM, BLOCK_DIM, True)
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head // GROUP * v_head
    own_k += batch * own_k_batch + head // GROUP * own_k_head
    own_v += batch * own_v_batch + head // GROUP * own_v_head

    top = tl.full((BLOCK_T,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK_T,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_T, BLOCK_VALUE), dtype=tl.float32)
    first, last = _context_of(slot, anchors + batch * A, starts + batch * A, T, L, window)
    begin, full, rest, end = key_ranges(last, first, BLOCK_S)
    for start in range(full, rest, BLOCK_S):
        top, total, acc = attend(
            queries, k, k_token, v, v_token, start, last, first, top, total, acc, S, scale, None,
            DIM, VALUE_DIM, BLOCK_S, BLOCK_DIM, BLOCK_VALUE, False,
        )  # fmt: skip
    left = (full - begin) // BLOCK_S
    for i in range(0, left + tl.cdiv(end - rest, BLOCK_S)):
        start = tl.where(i < left, begin, rest - left * BLOCK_S) + i * BLOCK_S
        top, total, acc = attend(
            queries, k, k_token, v, v_token, start, last, first, top, total, acc, S, scale, None,
            DIM, VALUE_DIM, BLOCK_S, BLOCK_DIM, BLOCK_VALUE, True,
        )  # fmt: skip
    first, last = _block_of(slot, T, L, window, CAUSAL)
    for start in range(tl.min(first), tl.max(last) + 1, BLOCK_S):
        top, total, acc = attend(
            queries, own_k, own_k_token, own_v, own_v_token, start, last, first, top, total, acc, T, scale, None,
            DIM, VALUE_DIM, BLOCK_S, BLOCK_DIM, BLOCK_VALUE, True,
        )  # fmt: skip

    tl.store(lse + (batch * heads + head) * T + slot, top + tl.log2(total), mask=slot < T)
    out += batch * T * heads * VALUE_DIM + head * VALUE_DIM
    store_tile(out, row, start_t, heads * VALUE_DIM, T, acc / total[:, None], VALUE_DIM, BLOCK_VALUE)


@kernel_for_any_length
def block_context_query_gradient_kernel(
    q, q_batch, q_token, q_head, own_k, own_k_batch, own_k_token, own_k_head, own_v, own_v_batch, own_v_token,
    own_v_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head, dout, dout_batch, dout_token, dout_head,
    anchors, starts, out, lse, delta, dq, T, S, A, L, heads, window, scale, softmax_scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Each program writes dq and delta, for the gradients of keys, for one tile of slots of one head.

    Args:
        q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head, anchors, starts, own_k,
            own_k_batch, own_k_token, own_k_head, own_v, own_v_batch, own_v_token, own_v_head, T, S, A, L, heads,
            window, scale, GROUP, DIM, VALUE_DIM, CAUSAL, BLOCK_T, BLOCK_S, BLOCK_DIM, BLOCK_VALUE: see
            `block_context_forward_kernel`.
        dout, dout_batch, dout_token, dout_head: gradient of out (B, T, heads, VALUE_DIM), and its strides.
        out, lse: as the forward kernel writes them.
        delta: float32 (B, heads, T), sums of out * dout over channels; written.
        dq: (B, T, heads, DIM), contiguous; written.
        softmax_scale: factor on q·k.
    """
    head, batch = (tl.program_id(0) % heads).to(tl.int64), (tl.program_id(0) // heads).to(tl.int64)
    start_t = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_T
    row = tl.arange(0, BLOCK_T)
    slot = start_t + row
    queries = load_tile(q + batch * q_batch + head * q_head, row, start_t, q_token, T, DIM, BLOCK_DIM, True)
    dout += batch * dout_batch + head * dout_head
    douts = load_tile(dout, row, start_t, dout_token, T, VALUE_DIM, BLOCK_VALUE, True)
    out += batch * T * heads * VALUE_DIM + head * VALUE_DIM
    outs = load_tile(out, row, start_t, heads * VALUE_DIM, T, VALUE_DIM, BLOCK_VALUE, True)
    row_delta = tl.sum(outs.to(tl.float32) * douts.to(tl.float32), axis=1)
    place = (batch * heads + head) * T + slot
    tl.store(delta + place, row_delta, mask=slot < T)
    row_lse = tl.load(lse + place, mask=slot < T, other=0.0)
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head // GROUP * v_head
    own_k += batch * own_k_batch + head // GROUP * own_k_head
    own_v += batch * own_v_batch + head // GROUP * own_v_head

    acc = tl.zeros((BLOCK_T, BLOCK_DIM), dtype=tl.float32)
    first, last = _context_of(slot, anchors + batch * A, starts + batch * A, T, L, window)
    begin, full, rest, end = key_ranges(last, first, BLOCK_S)
    for start in range(full, rest, BLOCK_S):
        acc = query_gradient(
            queries, douts, row_lse, row_delta, k, k_token, v, v_token, start, last, first, acc, S, scale, None,
            DIM, VALUE_DIM, BLOCK_S, BLOCK_DIM, BLOCK_VALUE, False,
        )  # fmt: skip
    left = (full - begin) // BLOCK_S
    for i in range(0, left + tl.cdiv(end - rest, BLOCK_S)):
        start = tl.where(i < left, begin, rest - left * BLOCK_S) + i * BLOCK_S
        acc = query_gradient(
            queries, douts, row_lse, row_delta, k, k_token, v, v_token, start, last, first, acc, S, scale, None,
            DIM, VALUE_DIM, BLOCK_S, BLOCK_DIM, BLOCK_VALUE, True,
        )  # fmt: skip
    first, last = _block_of(slot, T, L, window, CAUSAL)
    for start in range(tl.min(first), tl.max(last) + 1, BLOCK_S):
        acc = query_gradient(
            queries, douts, row_lse, row_delta, own_k, own_k_token, own_v, own_v_token, start, last, first, acc, T,
            scale, None, DIM, VALUE_DIM, BLOCK_S, BLOCK_DIM, BLOCK_VALUE, True,
        )  # fmt: skip
    dq += batch * T * heads * DIM + head * DIM
    store_tile(dq, row, start_t, heads * DIM, T, acc * softmax_scale, DIM, BLOCK_DIM)


@triton.jit
def _blocks_that_see(key, last_key, anchors, starts, A, L, window):
    """The blocks that see a tile of the context, keys [key, last_key].

    Blocks outside [begin, end) see no key of the tile. In blocks [full, rest) every slot sees every key of the tile.
    The second interval is empty if other blocks stand between the blocks with this property."""
    begin, end, full, rest, count = A, 0, A, 0, 0
    for start in range(0, A, SCAN):
        block = start + tl.arange(0, SCAN)
        anchor = tl.load(anchors + block, mask=block < A, other=0).to(tl.int32)  # an anchor of 0 sees no context
        of_first = tl.load(starts + block, mask=block < A, other=0)  # the first key that the block's first slot sees
        of_last = of_first
        if window is not None:
            of_last = tl.maximum(of_first, anchor + L - window)
            of_first = tl.maximum(of_first, anchor - window + 1)
        seen = (anchor > key) & (of_first <= last_key)
        whole = (anchor > last_key) & (of_last <= key)
        begin = tl.minimum(begin, tl.min(tl.where(seen, block, A)))
        end = tl.maximum(end, tl.max(tl.where(seen, block + 1, 0)))
        full = tl.minimum(full, tl.min(tl.where(whole, block, A)))
        rest = tl.maximum(rest, tl.max(tl.where(whole, block + 1, 0)))
        count += tl.sum(whole.to(tl.int32))
    end = tl.maximum(begin, end)
    is_run = rest - full == count
    return begin, tl.where(is_run, full, begin), tl.where(is_run, rest, begin), end


@kernel_for_any_length
def block_context_key_gradient_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head,
    dout, dout_batch, dout_token, dout_head, anchors, starts, lse, delta, dk, dv,
    T, S, A, L, heads, window, scale, softmax_scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Each program writes dk and dv for one tile of keys of one head, summed over the query heads that share it.

    Args:
        q, q_batch, q_token, q_head, anchors, starts, T, S, A, L, heads, window, scale, GROUP, DIM, VALUE_DIM, CAUSAL,
            BLOCK_T, BLOCK_S, BLOCK_DIM, BLOCK_VALUE: see `block_context_forward_kernel`.
        k, k_batch, k_token, k_head: keys (B, S, heads // GROUP, DIM) of the context or the blocks, and their strides.
        v, v_batch, v_token, v_head: values (B, S, heads // GROUP, VALUE_DIM), and their strides.
        dout, dout_batch, dout_token, dout_head: gradient of out (B, T, heads, VALUE_DIM), and its strides.
        lse, delta: as the forward and the query gradient's kernel write them.
        dk, dv: (B, S, heads // GROUP, DIM) and (B, S, heads // GROUP, VALUE_DIM), contiguous; written.
        softmax_scale: factor on q·k.
        OWN: whether the keys are those of the blocks (S = T), not of the context.
    """
    kv_heads = heads // GROUP
    head, batch = (tl.program_id(0) % kv_heads).to(tl.int64), (tl.program_id(0) // kv_heads).to(tl.int64)
    start_s = tl.program_id(1) * BLOCK_S
    row = tl.arange(0, BLOCK_S)
    key, last_key = (start_s + row)[:, None], tl.minimum(start_s + BLOCK_S, S) - 1
    keys = load_tile(k + batch * k_batch + head * k_head, row, start_s, k_token, S, DIM, BLOCK_DIM, True)
    values = load_tile(v + batch * v_batch + head * v_head, row, start_s, v_token, S, VALUE_DIM, BLOCK_VALUE, True)
    anchors += batch * A
    starts += batch * A

    # From blocks to slots. Tiles of slots in [begin, full) and after the whole ones are masked, up to `end`.
    if OWN:
        begin, end = start_s // L * L, last_key // L * L + L
        full, rest = begin, begin
    else:
        begin, full, rest, end = _blocks_that_see(start_s, last_key, anchors, starts, A, L, window)
        begin, full, rest, end = begin * L, full * L, rest * L, end * L
    left = tl.cdiv(full - begin, BLOCK_T)
    full = begin + left * BLOCK_T
    whole = tl.maximum(rest - full, 0) // BLOCK_T
    masked = left + tl.cdiv(tl.maximum(end - full - whole * BLOCK_T, 0), BLOCK_T)

    dk_acc = tl.zeros((BLOCK_S, BLOCK_DIM), dtype=tl.float32)
    dv_acc = tl.zeros((BLOCK_S, BLOCK_VALUE), dtype=tl.float32)
    q += batch * q_batch + head * GROUP * q_head
    dout += batch * dout_batch + head * GROUP * dout_head
    statistics = (batch * heads + head * GROUP) * T
    lse += statistics
    delta += statistics
    # The first steps' loads are issued before a loop, even one without steps: their addresses may not divide by 0.
    length = tl.maximum(whole, 1)
    for i in range(0, whole * GROUP):
        member = (i // length).to(tl.int64)
        start = full + i % length * BLOCK_T
        dk_acc, dv_acc = key_gradient(
            keys, values, q + member * q_head, q_token, dout + member * dout_head, dout_token, lse + member * T,
            delta + member * T, start, None, dk_acc, dv_acc, T, scale, None,
            DIM, VALUE_DIM, BLOCK_T, BLOCK_DIM, BLOCK_VALUE,
        )  # fmt: skip
    length = tl.maximum(masked, 1)
    for i in range(0, masked * GROUP):
        member = (i // length).to(tl.int64)
        tile = i % length
        start = begin + tl.where(tile < left, tile, tile + whole) * BLOCK_T
        slot = start + tl.arange(0, BLOCK_T)
        if OWN:
            first, last = _block_of(slot, T, L, window, CAUSAL)
        else:
            first, last = _context_of(slot, anchors, starts, T, L, window)
        dk_acc, dv_acc = key_gradient(
            keys, values, q + member * q_head, q_token, dout + member * dout_head, dout_token, lse + member * T,
            delta + member * T, start, (key >= first[None, :]) & (key <= last[None, :]), dk_acc, dv_acc, T, scale, None,
            DIM, VALUE_DIM, BLOCK_T, BLOCK_DIM, BLOCK_VALUE,
        )  # fmt: skip
    dk += batch * S * kv_heads * DIM + head * DIM
    store_tile(dk, row, start_s, kv_heads * DIM, S, dk_acc * softmax_scale, DIM, BLOCK_DIM)
    dv += batch * S * kv_heads * VALUE_DIM + head * VALUE_DIM
    store_tile(dv, row, start_s, kv_heads * VALUE_DIM, S, dv_acc, VALUE_DIM, BLOCK_VALUE)
