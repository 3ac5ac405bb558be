"""The Triton kernel of attention under `set_batch_invariant`, for training, prefills and decoding.

A program has a tile of queries of one document, and reads the document's keys in tiles from its first key on, in
order. So the bits of a query depend neither on other documents nor on the other queries of its tile: a tile in which
it sees no key leaves them as they are.
"""

from ligermodels.ops.attention.triton_attention_kernels import kernel_for_any_length
from ligermodels.ops.attention.triton_attention_steps import LOG2_E, LOWEST, attend, load_tile, store_tile
from ligermodels.ops.runtime.dispatch import tl, triton


@triton.jit
def _document_of(tile, query_bounds, count, steps, BLOCK_T: tl.constexpr):
    """The document of a tile, `count` for none, and the tile's number in it. Document d has the tiles from
    query_bounds[d] // BLOCK_T + d on: as many as it needs, or one more."""
    low = tl.zeros_like(tile)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        begin = tl.load(query_bounds + middle + 1, mask=middle < count, other=0) // BLOCK_T + middle + 1
        passed = (middle < count) & (begin <= tile)
        low = tl.where(passed, middle + 1, low)
        high = tl.where(passed, high, middle)
    return low, tile - tl.load(query_bounds + low) // BLOCK_T - low


@kernel_for_any_length
def batch_invariant_attention_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head,
    cu_seqlens, query_bounds, cache_seqlens, sinks, out, lse, T, S, heads, count, steps, window, scale, softcap,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Each program writes out and lse for one tile of queries of one head and document.

    Args:
        q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head, cu_seqlens, sinks, out,
            lse, T, S, heads, count, steps, window, scale, softcap, GROUP, DIM, VALUE_DIM, BLOCK_T, BLOCK_S, BLOCK_DIM,
            BLOCK_VALUE: see `attention_forward_kernel`.
        query_bounds: int32 (count + 1,), bounds of packed documents among the queries, or None.
        cache_seqlens: (B,), number of keys of each row before the keys of its T queries, or None: S - T.
    """
    head, batch = (tl.program_id(0) % heads).to(tl.int64), (tl.program_id(0) // heads).to(tl.int64)
    tile = tl.program_id(1)
    start_q, start_k, num_queries, num_keys = 0, 0, T, S
    if cache_seqlens is not None:
        num_keys = tl.minimum(tl.load(cache_seqlens + batch).to(tl.int32) + T, S)
    if cu_seqlens is not None:
        document, tile = _document_of(tile, query_bounds, count, steps, BLOCK_T)
        if document >= count:
            return
        start_q, start_k = tl.load(query_bounds + document), tl.load(cu_seqlens + document)
        num_queries = tl.load(query_bounds + document + 1) - start_q
        num_keys = tl.load(cu_seqlens + document + 1) - start_k
    if tile * BLOCK_T >= num_queries:
        return
    row = tl.arange(0, BLOCK_T)
    token = tile * BLOCK_T + row
    position = tl.minimum(token, num_queries - 1) + (num_keys - num_queries)
    first = tl.zeros_like(position)
    if window is not None:
        first = tl.maximum(first, position - window + 1)
    q += batch * q_batch + head * q_head + tl.cast(start_q, tl.int64) * q_token
    queries = load_tile(q, row, tile * BLOCK_T, q_token, num_queries, DIM, BLOCK_DIM, True)
    k += batch * k_batch + head // GROUP * k_head + tl.cast(start_k, tl.int64) * k_token
    v += batch * v_batch + head // GROUP * v_head + tl.cast(start_k, tl.int64) * v_token

    top = tl.full((BLOCK_T,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK_T,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_T, BLOCK_VALUE), dtype=tl.float32)
    if sinks is not None:  # the score of one more key, whose value is zero
        top = tl.maximum(top, tl.load(sinks + head).to(tl.float32) * LOG2_E)
        total += 1.0
    for start in range(tl.min(first) // BLOCK_S * BLOCK_S, tl.max(position) + 1, BLOCK_S):
        top, total, acc = attend(
            queries, k, k_token, v, v_token, start, position, first, top, total, acc, num_keys, scale, softcap,
            DIM, VALUE_DIM, BLOCK_S, BLOCK_DIM, BLOCK_VALUE, True,
        )  # fmt: skip

    place = (batch * heads + head) * T + start_q + token
    tl.store(lse + place, top + tl.log2(total), mask=token < num_queries)
    out += (batch * T + start_q) * heads * VALUE_DIM + head * VALUE_DIM
    store_tile(
        out, row, tile * BLOCK_T, heads * VALUE_DIM, num_queries, acc / total[:, None], VALUE_DIM, BLOCK_VALUE
    )  # fmt: skip
