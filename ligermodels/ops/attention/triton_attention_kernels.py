"""The Triton kernels of the attention backend "triton": the forward pass, and the gradients of queries, of keys and
values.

Each program has one tile of queries (or of keys) in registers and loops over tiles of keys (or of queries). Tiles
outside the causal triangle, the window or the documents are never read. Only tiles at a border are masked. Scores are
logarithms to base 2. No atomics: each result is written by one program, in a fixed order of summation. The method is
FlashAttention-2's (https://arxiv.org/abs/2307.08691).

Query t is at position S - T + t. `cu_seqlens`, `sinks` and `window` may be None.
"""

from functools import partial

from ligermodels.ops.attention.triton_attention_steps import (
    LOG2_E,
    LOWEST,
    attend,
    key_gradient,
    key_ranges,
    load_tile,
    query_gradient,
    store_tile,
)
from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import kernel

kernel_for_any_length = partial(kernel, do_not_specialize=("T", "S", "heads", "count", "steps", "window"))
"""One compiled kernel serves every length, number of documents and window."""


@triton.jit
def _document(cu_seqlens, position, count, steps, S):
    """First position of the document of each position, and the end of that document. Positions after the last bound
    are one more document. Binary search over cu_seqlens (count + 1,) in `steps` steps."""
    low = tl.zeros_like(position)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        passed = tl.load(cu_seqlens + 1 + middle, mask=middle < count, other=S) <= position
        low = tl.where(passed, middle + 1, low)
        high = tl.where(passed, high, middle)
    start = tl.load(cu_seqlens + low)
    return start, tl.load(cu_seqlens + low + 1, mask=low < count, other=S)


@triton.jit
def _first_visible(position, cu_seqlens, count, steps, window, S):
    """The first key that the query at each position sees."""
    first = tl.zeros_like(position)
    if cu_seqlens is not None:
        first, _ = _document(cu_seqlens, position, count, steps, S)
    if window is not None:
        first = tl.maximum(first, position - window + 1)
    return first


@kernel_for_any_length
def attention_forward_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head,
    cu_seqlens, sinks, out, lse, T, S, heads, count, steps, window, scale, softcap,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Each program writes out and lse for one tile of queries of one head. Tiles with the most keys begin first.

    Args:
        q, q_batch, q_token, q_head: queries (B, T, heads, DIM), and their strides in elements.
        k, k_batch, k_token, k_head: keys (B, S, heads // GROUP, DIM), and their strides.
        v, v_batch, v_token, v_head: values (B, S, heads // GROUP, VALUE_DIM), and their strides.
        cu_seqlens: int32 (count + 1,), bounds of packed documents, or None.
        sinks: (heads,), the score of one more key of each head, whose value is zero, or None.
        out: (B, T, heads, VALUE_DIM), contiguous; written.
        lse: float32 (B, heads, T), base-2 logarithm of the softmax denominator; written.
        T, S, heads, count: numbers of queries, keys, query heads, and documents in cu_seqlens.
        steps: steps of a binary search among the documents.
        window: keys that a query sees, its own included, or None.
        scale, softcap: see `triton_attention.score_factors`.
        GROUP, DIM, VALUE_DIM: query heads per key/value head, channels of a query, and channels of a value.
        BLOCK_T, BLOCK_S, BLOCK_DIM, BLOCK_VALUE: queries and keys of a tile; powers of 2 from DIM and VALUE_DIM on.
    """
    head, batch = (tl.program_id(0) % heads).to(tl.int64), (tl.program_id(0) // heads).to(tl.int64)
    start_t = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_T
    row = tl.arange(0, BLOCK_T)
    token = start_t + row
    position = tl.minimum(token, T - 1) + (S - T)
    first = _first_visible(position, cu_seqlens, count, steps, window, S)
    queries = load_tile(q + batch * q_batch + head * q_head, row, start_t, q_token, T, DIM, BLOCK_DIM, True)
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head // GROUP * v_head

    top = tl.full((BLOCK_T,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK_T,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_T, BLOCK_VALUE), dtype=tl.float32)
    if sinks is not None:  # the score of one more key, whose value is zero
        top = tl.maximum(top, tl.load(sinks + head).to(tl.float32) * LOG2_E)
        total += 1.0
    begin, full, rest, end = key_ranges(position, first, BLOCK_S)
    for start in range(full, rest, BLOCK_S):
        top, total, acc = attend(
            queries, k, k_token, v, v_token, start, position, first, top, total, acc, S, scale, softcap,
            DIM, VALUE_DIM, BLOCK_S, BLOCK_DIM, BLOCK_VALUE, False,
        )  # fmt: skip
    left = (full - begin) // BLOCK_S
    for i in range(0, left + tl.cdiv(end - rest, BLOCK_S)):
        start = tl.where(i < left, begin, rest - left * BLOCK_S) + i * BLOCK_S
        top, total, acc = attend(
            queries, k, k_token, v, v_token, start, position, first, top, total, acc, S, scale, softcap,
            DIM, VALUE_DIM, BLOCK_S, BLOCK_DIM, BLOCK_VALUE, True,
        )  # fmt: skip

    tl.store(lse + (batch * heads + head) * T + token, top + tl.log2(total), mask=token < T)
    out += batch * T * heads * VALUE_DIM + head * VALUE_DIM
    store_tile(out, row, start_t, heads * VALUE_DIM, T, acc / total[:, None], VALUE_DIM, BLOCK_VALUE)


@kernel_for_any_length
def attention_query_gradient_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head,
    dout, dout_batch, dout_token, dout_head, cu_seqlens, out, lse, delta, dq,
    T, S, heads, count, steps, window, scale, softcap, softmax_scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Each program writes dq and delta for one tile of queries of one head. The gradients of keys and sinks need delta
    too.

    Args:
        q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head, cu_seqlens, T, S, heads,
            count, steps, window, scale, softcap, GROUP, DIM, VALUE_DIM, BLOCK_T, BLOCK_S, BLOCK_DIM, BLOCK_VALUE: see
            `attention_forward_kernel`.
        dout, dout_batch, dout_token, dout_head: gradient of out (B, T, heads, VALUE_DIM), and its strides.
        out, lse: as the forward kernel writes them.
        delta: float32 (B, heads, T), sums of out * dout over channels; written.
        dq: (B, T, heads, DIM), contiguous; written.
        softmax_scale: factor on q·k.
    """
    head, batch = (tl.program_id(0) % heads).to(tl.int64), (tl.program_id(0) // heads).to(tl.int64)
    start_t = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_T
    row = tl.arange(0, BLOCK_T)
    token = start_t + row
    position = tl.minimum(token, T - 1) + (S - T)
    first = _first_visible(position, cu_seqlens, count, steps, window, S)
    queries = load_tile(q + batch * q_batch + head * q_head, row, start_t, q_token, T, DIM, BLOCK_DIM, True)
    dout += batch * dout_batch + head * dout_head
    douts = load_tile(dout, row, start_t, dout_token, T, VALUE_DIM, BLOCK_VALUE, True)
    out += batch * T * heads * VALUE_DIM + head * VALUE_DIM
    outs = load_tile(out, row, start_t, heads * VALUE_DIM, T, VALUE_DIM, BLOCK_VALUE, True)
    row_delta = tl.sum(outs.to(tl.float32) * douts.to(tl.float32), axis=1)
    place = (batch * heads + head) * T + token
    tl.store(delta + place, row_delta, mask=token < T)
    row_lse = tl.load(lse + place, mask=token < T, other=0.0)
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head // GROUP * v_head

    acc = tl.zeros((BLOCK_T, BLOCK_DIM), dtype=tl.float32)
    begin, full, rest, end = key_ranges(position, first, BLOCK_S)
    for start in range(full, rest, BLOCK_S):
        acc = query_gradient(
            queries, douts, row_lse, row_delta, k, k_token, v, v_token, start, position, first, acc, S, scale, softcap,
            DIM, VALUE_DIM, BLOCK_S, BLOCK_DIM, BLOCK_VALUE, False,
        )  # fmt: skip
    left = (full - begin) // BLOCK_S
    for i in range(0, left + tl.cdiv(end - rest, BLOCK_S)):
        start = tl.where(i < left, begin, rest - left * BLOCK_S) + i * BLOCK_S
        acc = query_gradient(
            queries, douts, row_lse, row_delta, k, k_token, v, v_token, start, position, first, acc, S, scale, softcap,
            DIM, VALUE_DIM, BLOCK_S, BLOCK_DIM, BLOCK_VALUE, True,
        )  # fmt: skip
    dq += batch * T * heads * DIM + head * DIM
    store_tile(dq, row, start_t, heads * DIM, T, acc * softmax_scale, DIM, BLOCK_DIM)


@kernel_for_any_length
def attention_key_gradient_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head,
    dout, dout_batch, dout_token, dout_head, cu_seqlens, lse, delta, dk, dv,
    T, S, heads, count, steps, window, scale, softcap, softmax_scale,
    GROUP: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Each program writes dk and dv for one tile of keys, summed over GROUP query heads. Tiles that the most queries
    see begin first.

    Args:
        q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head, cu_seqlens, T, S, heads,
            count, steps, window, scale, softcap, DIM, VALUE_DIM, BLOCK_T, BLOCK_S, BLOCK_DIM, BLOCK_VALUE: see
            `attention_forward_kernel`.
        dout, dout_batch, dout_token, dout_head: gradient of out (B, T, heads, VALUE_DIM), and its strides.
        lse, delta: as the forward and the query gradient's kernel write them.
        dk, dv: (B, S, heads // GROUP, DIM) and (B, S, heads // GROUP, VALUE_DIM), contiguous; written.
        softmax_scale: factor on q·k.
        GROUP, PARTS: query heads per program, and programs per key/value head: PARTS * GROUP query heads share it.
    """
    groups = heads // GROUP
    head, batch = (tl.program_id(0) % groups).to(tl.int64), (tl.program_id(0) // groups).to(tl.int64)
    start_s = tl.program_id(1) * BLOCK_S
    row = tl.arange(0, BLOCK_S)
    key = start_s + row
    last = tl.zeros_like(key) + (S - 1)  # the last position that sees each key
    if cu_seqlens is not None:
        _, document_end = _document(cu_seqlens, tl.minimum(key, S - 1), count, steps, S)
        last = document_end - 1
    if window is not None:
        last = tl.minimum(last, key + window - 1)
    keys = load_tile(k + batch * k_batch + head // PARTS * k_head, row, start_s, k_token, S, DIM, BLOCK_DIM, True)
    v += batch * v_batch + head // PARTS * v_head
    values = load_tile(v, row, start_s, v_token, S, VALUE_DIM, BLOCK_VALUE, True)

    # Tokens, not positions. Tiles in [begin, full) and [rest, end) are to be masked, in [full, rest) they are seen as
    # a whole.
    offset = S - T
    begin = tl.maximum(start_s - offset, 0) // BLOCK_T * BLOCK_T
    end = tl.minimum(tl.max(last) + 1 - offset, T)
    tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_T)
    full = tl.cdiv(tl.maximum(start_s + BLOCK_S - 1 - offset, 0), BLOCK_T) * BLOCK_T
    full = tl.minimum(full, begin + tiles * BLOCK_T)
    rest = tl.maximum(tl.maximum(tl.minimum(tl.min(last) + 1 - offset, T), 0) // BLOCK_T * BLOCK_T, full)
    left = (full - begin) // BLOCK_T
    whole = (rest - full) // BLOCK_T
    masked = tiles - whole

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
            delta + member * T, start, None, dk_acc, dv_acc, T, scale, softcap,
            DIM, VALUE_DIM, BLOCK_T, BLOCK_DIM, BLOCK_VALUE,
        )  # fmt: skip
    length = tl.maximum(masked, 1)
    for i in range(0, masked * GROUP):
        member = (i // length).to(tl.int64)
        tile = i % length
        start = tl.where(tile < left, begin, rest - left * BLOCK_T) + tile * BLOCK_T
        position = (start + offset + tl.arange(0, BLOCK_T))[None, :]
        visible = (key[:, None] <= position) & (position <= last[:, None])
        dk_acc, dv_acc = key_gradient(
            keys, values, q + member * q_head, q_token, dout + member * dout_head, dout_token, lse + member * T,
            delta + member * T, start, visible, dk_acc, dv_acc, T, scale, softcap,
            DIM, VALUE_DIM, BLOCK_T, BLOCK_DIM, BLOCK_VALUE,
        )  # fmt: skip
    dk += batch * S * groups * DIM + head * DIM
    store_tile(dk, row, start_s, groups * DIM, S, dk_acc * softmax_scale, DIM, BLOCK_DIM)
    dv += batch * S * groups * VALUE_DIM + head * VALUE_DIM
    store_tile(dv, row, start_s, groups * VALUE_DIM, S, dv_acc, VALUE_DIM, BLOCK_VALUE)
