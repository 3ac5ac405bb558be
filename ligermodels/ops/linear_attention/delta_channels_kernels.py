"""Kernels of the gated delta rule with a decay for each key channel (Kimi Delta Attention): first, for all chunks at
once, what does not depend on states; then the states, chunk after chunk.

In the notation of `gated_delta_rule`, with q and k normalised and kept = exp(G) for tokens that the state S before the
chunk reaches (else 0), all of (tokens, K),

    Q' = kept Q;  K' = kept K;  K'' = decay_last K                                         `channel_pairs_kernel`
    A_ij = beta_i sum_c k_ic k_jc decay_ijc;  T = (1 + A)^-1;  M_ij = sum_c q_ic k_jc decay_ijc
    X = beta (V - K' S);  U = T X;  O = Q' S + M U                                         `channel_states_kernel`
    state after the chunk = kept_last S + K''^T U

The sums of pairs are products of blocks of BLOCK tokens: with the sum of g up to the end of the block before token i,
decay_ijc is a factor of token i times a factor of token j, none above 1. Within a block each pair has its own factors.

Precision: see `delta_chunks_forward`. All buffers are float32. The first operand of each product is computed, so it is
in registers, and the second operands of a kernel have rows of one length: see `delta_chunks.MIN_WIDTH`.
"""

from ligermodels.ops.linear_attention.delta_chunks_forward import (
    ancestors_of_chunk,
    descendants_of_chunk,
    inverse,
    product,
    split,
)
from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import kernel


@triton.jit
def inverse_lengths(x, x_token, n, there, K, EPS: tl.constexpr, BLOCK_K: tl.constexpr):
    """1 / sqrt(sum of squares + EPS) of rows n of x."""
    squares = tl.zeros([n.shape[0]], tl.float32)
    for at in range(0, K, BLOCK_K):
        i = at + tl.arange(0, BLOCK_K)
        mask = there[:, None] & (i < K)[None, :]
        values = tl.load(x + n[:, None] * x_token + i[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += tl.sum(values * values, axis=1)
    return 1.0 / tl.sqrt(squares + EPS)


@triton.jit
def path_at(path, n, token):
    """Row `token` of path (C, columns)."""
    return tl.sum(tl.where(n[:, None] == token, path, 0.0), axis=0)


@triton.jit
def decays_of_channels(path, last, first, start, n, T, PACKED: tl.constexpr):
    """kept, decay_last and kept_last of the chunk that begins at `start`, from path (C, columns), the sums of g, and
    its `last` row. first: first token of each token's document, read with PACKED."""
    kept, to_last = tl.exp(path.to(tl.float32)), tl.exp((last[None, :] - path).to(tl.float32))
    kept_last = tl.exp(last.to(tl.float32))
    if PACKED:
        begin = tl.load(first + tl.minimum(start + n, T - 1))
        begin_last = tl.load(first + tl.minimum(start + n.shape[0] - 1, T - 1))
        before = tl.maximum(start - 1, 0)
        kept = tl.where((begin <= before)[:, None], kept, 0.0)
        to_last = tl.where((start + n >= begin_last)[:, None], to_last, 0.0)
        kept_last = tl.where(begin_last <= before, kept_last, 0.0)
    return kept, to_last, kept_last


@triton.jit
def decays_of_block(path, n, b, BLOCK: tl.constexpr):
    """Factors whose products are the decays from tokens before block b to those in the block: of the tokens in it, and
    of those before it; 0 elsewhere."""
    fall = (path - path_at(path, n, b * BLOCK - 1)[None, :]).to(tl.float32)
    within = tl.where(n[:, None] // BLOCK == b, tl.exp(tl.minimum(fall, 0.0)), 0.0)
    before = tl.where(n[:, None] < b * BLOCK, tl.exp(-tl.maximum(fall, 0.0)), 0.0)
    return within, before


@triton.jit
def in_blocks(x, BLOCK: tl.constexpr):
    """x (C, columns) -> (C / BLOCK, BLOCK, columns)."""
    COUNT: tl.constexpr = x.shape[0] // BLOCK
    WIDTH: tl.constexpr = x.shape[1]
    return tl.reshape(x, [COUNT, BLOCK, WIDTH])


@triton.jit
def row_of_blocks(x, place, j):
    """Row j of each block of x (COUNT, BLOCK, columns): (COUNT, 1, columns)."""
    return tl.sum(tl.where(place[None, :, None] == j, x, 0.0), axis=1)[:, None, :]


@triton.jit
def decay_within_blocks(high, low, place, j):
    """The decay from token j of each block to the tokens of the block, (COUNT, BLOCK, columns); 0 for those before it.
    high, low: two float32 numbers whose sum is the path; differences of paths are then exact to float32."""
    fall = (high - row_of_blocks(high, place, j)) + (low - row_of_blocks(low, place, j))
    return tl.where(place[None, :, None] >= j, tl.exp(tl.minimum(fall, 0.0)), 0.0)


@triton.jit
def on_diagonal(blocks):
    """blocks (COUNT, BLOCK, BLOCK) -> (C, C), zero elsewhere."""
    COUNT: tl.constexpr = blocks.shape[0]
    BLOCK: tl.constexpr = blocks.shape[1]
    block = tl.arange(0, COUNT)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    whole = tl.where(diagonal, blocks[:, :, None, :], tl.zeros([COUNT, BLOCK, COUNT, BLOCK], tl.float32))
    return tl.reshape(whole, [COUNT * BLOCK, COUNT * BLOCK])


@kernel
def channel_pairs_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, g, beta, first, reads, known, late, kept_last, solved,
    attending, T, K, heads, repeats, chunks, scale,
    PACKED: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program takes a chunk of a head. It writes Q' to `reads`, K' to `known`, K'' to `late`, the decay of the
    state over the chunk to `kept_last`, T to `solved` and M to `attending`."""
    COUNT: tl.constexpr = CHUNK // BLOCK
    chunk, row = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    batch, head = row // heads, row % heads
    start = tl.cast(chunk, tl.int64) * CHUNK
    n, place = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    there = n < T - start
    q += batch * q_batch + head // repeats * q_head + start * q_token
    k += batch * k_batch + head // repeats * k_head + start * k_token
    ours = (batch * T + start) * heads + head
    query_factor = inverse_lengths(q, q_token, n, there, K, EPS, BLOCK_K) * scale
    key_factor = inverse_lengths(k, k_token, n, there, K, EPS, BLOCK_K)
    alike, attends = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    alike_near = tl.zeros([COUNT, BLOCK, BLOCK], tl.float32)
    attends_near = tl.zeros([COUNT, BLOCK, BLOCK], tl.float32)
    for at in range(0, K, BLOCK_K):
        i = at + tl.arange(0, BLOCK_K)
        of_keys, of_out = there[:, None] & (i < K)[None, :], (i < K)[None, :]
        query = tl.load(q + n[:, None] * q_token + i[None, :], mask=of_keys, other=0.0).to(tl.float32)
        key = tl.load(k + n[:, None] * k_token + i[None, :], mask=of_keys, other=0.0).to(tl.float32)
        query, key = query * query_factor[:, None], key * key_factor[:, None]
        gate = tl.load(g + (ours + n[:, None] * heads) * K + i[None, :], mask=of_keys, other=0.0).to(tl.float64)
        path = tl.cumsum(gate, axis=0)
        last = path_at(path, n, CHUNK - 1)
        kept, to_last, over_chunk = decays_of_channels(path, last, first, start, n, T, PACKED)
        out = ((row * chunks + chunk) * CHUNK + n[:, None]) * K + i[None, :]
        tl.store(reads + out, query * kept, mask=of_out)
        tl.store(known + out, key * kept, mask=of_out)
        tl.store(late + out, key * to_last, mask=of_out)
        tl.store(kept_last + (row * chunks + chunk) * K + i, over_chunk, mask=i < K)
        for b in tl.range(1, COUNT, num_stages=1):
            within, before = decays_of_block(path, n, b, BLOCK)
            high_b, low_b = split(tl.trans(key * before), HALF)
            high, low = split(key * within, HALF)
            alike = product(high, low, high_b, low_b, alike, HALF)
            high, low = split(query * within, HALF)
            attends = product(high, low, high_b, low_b, attends, HALF)
        high_path = path.to(tl.float32)
        low_path = in_blocks((path - high_path.to(tl.float64)).to(tl.float32), BLOCK)
        high_path, queries, keys = in_blocks(high_path, BLOCK), in_blocks(query, BLOCK), in_blocks(key, BLOCK)
        for j in tl.range(0, BLOCK, num_stages=1):
            decayed = decay_within_blocks(high_path, low_path, place, j) * row_of_blocks(keys, place, j)
            column = place[None, None, :] == j
            alike_near += tl.where(column, tl.sum(keys * decayed, axis=2)[:, :, None], 0.0)
            attends_near += tl.where(column, tl.sum(queries * decayed, axis=2)[:, :, None], 0.0)
    above = ancestors_of_chunk(first, start, n, T, PACKED)
    weight = tl.load(beta + ours + n * heads, mask=there, other=0.0).to(tl.float32)
    alike = (alike + on_diagonal(alike_near)) * weight[:, None]
    alike = tl.where(above & (n[:, None] > n[None, :]), alike, 0.0)
    square = (row * chunks + chunk) * CHUNK * CHUNK + n[:, None] * CHUNK + n[None, :]
    tl.store(attending + square, tl.where(above, attends + on_diagonal(attends_near), 0.0))
    tl.store(solved + square, inverse(alike, HALF))


@kernel
def channel_states_kernel(
    reads, known, late, kept_last, solved, attending, v, v_batch, v_token, v_head, beta, initial, out, final, states,
    updates, T, K, V, heads, chunks, blocks,
    HALF: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, OUTPUT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_V columns of the state of a head, from the first chunk to the last: with OUTPUT it
    writes the outputs, else the state before each chunk and its `updates`, U."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = row // heads, row % heads
    n, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    j = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    v += batch * v_batch + head * v_head
    of_keys, across, of_columns = (i < K)[None, :], (i < K)[:, None], (j < V)[None, :]
    of_state, matrix = across & of_columns, i[:, None] * V + j[None, :]
    square = n[:, None] * CHUNK + n[None, :]
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if INITIAL:
        state = tl.load(initial + row * K * V + matrix, mask=of_state, other=0.0)
    none = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for chunk in tl.range(0, chunks, num_stages=1):
        start = tl.cast(chunk, tl.int64) * CHUNK
        there = n < T - start
        tile = row * chunks + chunk
        ours = (batch * T + start) * heads + head
        rows = tile * CHUNK * K + n[:, None] * K + i[None, :]
        of_values = there[:, None] & of_columns
        value = tl.load(v + (start + n[:, None]) * v_token + j[None, :], mask=of_values, other=0.0).to(tl.float32)
        weight = tl.load(beta + ours + n * heads, mask=there, other=0.0).to(tl.float32)
        high_state, low_state = split(state, HALF)
        high, low = split(tl.load(known + rows, mask=of_keys, other=0.0), HALF)
        x = weight[:, None] * (value - product(high, low, high_state, low_state, none, HALF))
        high_b, low_b = split(x, HALF)
        high, low = split(tl.load(solved + tile * CHUNK * CHUNK + square), HALF)
        u = product(high, low, high_b, low_b, none, HALF)
        high_u, low_u = split(u, HALF)
        if OUTPUT:
            high, low = split(tl.load(reads + rows, mask=of_keys, other=0.0), HALF)
            o = product(high, low, high_state, low_state, none, HALF)
            high, low = split(tl.load(attending + tile * CHUNK * CHUNK + square), HALF)
            o = product(high, low, high_u, low_u, o, HALF)
            place = ours * V + n[:, None] * (heads * V) + j[None, :]
            tl.store(out + place, o.to(out.dtype.element_ty), mask=of_values)
        else:
            tl.store(states + tile * K * V + matrix, state, mask=of_state)
            tl.store(updates + tile * CHUNK * V + n[:, None] * V + j[None, :], u, mask=of_columns)
        rows_across = tile * CHUNK * K + n[None, :] * K + i[:, None]
        high, low = split(tl.load(late + rows_across, mask=across, other=0.0), HALF)
        kept = tl.load(kept_last + tile * K + i, mask=i < K, other=0.0)
        state = product(high, low, high_u, low_u, state * kept[:, None], HALF)
    if FINAL:
        tl.store(final + row * K * V + matrix, state, mask=of_state)


@kernel
def channel_states_backward_kernel(
    reads, known, late, kept_last, solved, attending, dout, dout_batch, dout_token, dout_head, beta, dfinal, dv,
    dstates, dx, dinitial, T, K, V, heads, chunks, blocks,
    HALF: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_V columns of the state of a head, from the last chunk to the first: it writes the
    gradient dS of the state after each chunk, dX and dV. With dU = M^T dO + K'' dS and dX = T^T dU, the gradient of
    the state before the chunk is kept_last dS + Q'^T dO - K'^T (beta dX)."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = row // heads, row % heads
    n, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    j = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    dout += batch * dout_batch + head * dout_head
    of_keys, across, of_columns = (i < K)[None, :], (i < K)[:, None], (j < V)[None, :]
    of_state, matrix = across & of_columns, i[:, None] * V + j[None, :]
    transposed = n[:, None] + n[None, :] * CHUNK
    dstate = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if FINAL:
        dstate = tl.load(dfinal + row * K * V + matrix, mask=of_state, other=0.0)
    none = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for done in tl.range(0, chunks, num_stages=1):
        chunk = chunks - 1 - done
        start = tl.cast(chunk, tl.int64) * CHUNK
        there = n < T - start
        tile = row * chunks + chunk
        ours = (batch * T + start) * heads + head
        of_values = there[:, None] & of_columns
        do = tl.load(dout + (start + n[:, None]) * dout_token + j[None, :], mask=of_values, other=0.0)
        high_do, low_do = split(do.to(tl.float32), HALF)
        weight = tl.load(beta + ours + n * heads, mask=there, other=0.0).to(tl.float32)
        tl.store(dstates + tile * K * V + matrix, dstate, mask=of_state)
        high_b, low_b = split(dstate, HALF)
        rows = tile * CHUNK * K + n[:, None] * K + i[None, :]
        high, low = split(tl.load(late + rows, mask=of_keys, other=0.0), HALF)
        du = product(high, low, high_b, low_b, none, HALF)
        high, low = split(tl.load(attending + tile * CHUNK * CHUNK + transposed), HALF)
        du = product(high, low, high_do, low_do, du, HALF)
        high_b, low_b = split(du, HALF)
        high, low = split(tl.load(solved + tile * CHUNK * CHUNK + transposed), HALF)
        d = product(high, low, high_b, low_b, none, HALF)
        tl.store(dx + tile * CHUNK * V + n[:, None] * V + j[None, :], d, mask=of_columns)
        d *= weight[:, None]
        tl.store(dv + ours * V + n[:, None] * (heads * V) + j[None, :], d.to(dv.dtype.element_ty), mask=of_values)
        rows_across = tile * CHUNK * K + n[None, :] * K + i[:, None]
        kept = tl.load(kept_last + tile * K + i, mask=i < K, other=0.0)
        high, low = split(tl.load(reads + rows_across, mask=across, other=0.0), HALF)
        dstate = product(high, low, high_do, low_do, dstate * kept[:, None], HALF)
        high_b, low_b = split(-d, HALF)
        high, low = split(tl.load(known + rows_across, mask=across, other=0.0), HALF)
        dstate = product(high, low, high_b, low_b, dstate, HALF)
    if INITIAL:
        tl.store(dinitial + row * K * V + matrix, dstate, mask=of_state)


@kernel
def channel_pairs_backward_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, g, beta, first, dreads, dknown, dlate, dkept_last, da, dm,
    dq, dk, dg, dbeta, T, K, heads, repeats, chunks, scale,
    PACKED: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program takes a chunk of a head: from the gradients of Q', K', K'', kept_last, A and M (those of A and M
    zero where they are) it writes those of the normalised q and k, of g, and the part of dbeta that comes from A.

    The factors of a decay give the decay's gradient: for exp(G_i - G_j) the product of the pair, added to dG_i and
    subtracted from dG_j."""
    COUNT: tl.constexpr = CHUNK // BLOCK
    chunk, row = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    batch, head = row // heads, row % heads
    start = tl.cast(chunk, tl.int64) * CHUNK
    n, place, block = tl.arange(0, CHUNK), tl.arange(0, BLOCK), tl.arange(0, COUNT)
    there = n < T - start
    q += batch * q_batch + head // repeats * q_head + start * q_token
    k += batch * k_batch + head // repeats * k_head + start * k_token
    ours, tile = (batch * T + start) * heads + head, row * chunks + chunk
    query_factor = inverse_lengths(q, q_token, n, there, K, EPS, BLOCK_K) * scale
    key_factor = inverse_lengths(k, k_token, n, there, K, EPS, BLOCK_K)
    weight = tl.load(beta + ours + n * heads, mask=there, other=0.0).to(tl.float32)
    after = descendants_of_chunk(first, start, n, T, PACKED).to(tl.float32)
    plain, transposed = n[:, None] * CHUNK + n[None, :], n[:, None] + n[None, :] * CHUNK
    near = (block[:, None, None] * BLOCK + place[None, :, None]) * CHUNK
    near += block[:, None, None] * BLOCK + place[None, None, :]
    da += tile * CHUNK * CHUNK
    dm += tile * CHUNK * CHUNK
    # The decay of a token to itself is 1: its products are no part of the gradients of decays, not even by rounding.
    da_near = tl.load(da + near)
    dm_near = tl.load(dm + near, mask=place[None, :, None] > place[None, None, :], other=0.0)
    own = tl.load(dm + n * CHUNK + n)[:, None]
    dweight = tl.zeros([CHUNK], tl.float32)
    none = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    for at in range(0, K, BLOCK_K):
        i = at + tl.arange(0, BLOCK_K)
        of_keys, of_out = there[:, None] & (i < K)[None, :], (i < K)[None, :]
        query = tl.load(q + n[:, None] * q_token + i[None, :], mask=of_keys, other=0.0).to(tl.float32)
        key = tl.load(k + n[:, None] * k_token + i[None, :], mask=of_keys, other=0.0).to(tl.float32)
        query, key = query * query_factor[:, None], key * key_factor[:, None]
        gate_of = (ours + n[:, None] * heads) * K + i[None, :]
        path = tl.cumsum(tl.load(g + gate_of, mask=of_keys, other=0.0).to(tl.float64), axis=0)
        last = path_at(path, n, CHUNK - 1)
        # pairs of tokens: gradients of a query, of a key as the later one of two without beta, as the earlier one
        dquery, dlater, dearlier = none, none, none
        for b in tl.range(1, COUNT, num_stages=1):
            within, before = decays_of_block(path, n, b, BLOCK)
            in_block, of_earlier = n // BLOCK == b, n < b * BLOCK
            high_b, low_b = split(key * before, HALF)
            mask = in_block[:, None] & of_earlier[None, :]
            high, low = split(tl.load(dm + plain, mask=mask, other=0.0), HALF)
            dquery += product(high, low, high_b, low_b, none, HALF) * within
            high, low = split(tl.load(da + plain, mask=mask, other=0.0), HALF)
            dlater += product(high, low, high_b, low_b, none, HALF) * within
            mask = of_earlier[:, None] & in_block[None, :]
            high_b, low_b = split(query * within, HALF)
            high, low = split(tl.load(dm + transposed, mask=mask, other=0.0), HALF)
            found = product(high, low, high_b, low_b, none, HALF)
            high_b, low_b = split(key * weight[:, None] * within, HALF)
            high, low = split(tl.load(da + transposed, mask=mask, other=0.0), HALF)
            dearlier += product(high, low, high_b, low_b, found, HALF) * before
        high_path = path.to(tl.float32)
        low_path = in_blocks((path - high_path.to(tl.float64)).to(tl.float32), BLOCK)
        high_path, queries, keys = in_blocks(high_path, BLOCK), in_blocks(query, BLOCK), in_blocks(key, BLOCK)
        weighted = in_blocks(key * weight[:, None], BLOCK)
        empty = tl.zeros([COUNT, BLOCK, BLOCK_K], tl.float32)
        dqueries, dlaters, dearliers = empty, empty, empty
        for j in tl.range(0, BLOCK, num_stages=1):
            decay = decay_within_blocks(high_path, low_path, place, j)
            column = place[None, None, :] == j
            of_m = tl.sum(tl.where(column, dm_near, 0.0), axis=2)[:, :, None] * decay
            of_a = tl.sum(tl.where(column, da_near, 0.0), axis=2)[:, :, None] * decay
            other = row_of_blocks(keys, place, j)
            dqueries += of_m * other
            dlaters += of_a * other
            of_row = tl.sum(of_m * queries + of_a * weighted, axis=1)[:, None, :]
            dearliers += tl.where(place[None, :, None] == j, of_row, 0.0)
        dquery += tl.reshape(dqueries, [CHUNK, BLOCK_K])
        dlater += tl.reshape(dlaters, [CHUNK, BLOCK_K])
        dearlier += tl.reshape(dearliers, [CHUNK, BLOCK_K])
        dweight += tl.sum(dlater * key, axis=1)
        dlater *= weight[:, None]
        dpath = query * dquery + key * (dlater - dearlier)
        # Q', K', K'' and kept_last
        kept, to_last, over_chunk = decays_of_channels(path, last, first, start, n, T, PACKED)
        out = (tile * CHUNK + n[:, None]) * K + i[None, :]
        by_read = tl.load(dreads + out, mask=of_out, other=0.0) * kept
        by_known = tl.load(dknown + out, mask=of_out, other=0.0) * kept
        by_late = tl.load(dlate + out, mask=of_out, other=0.0) * to_last
        dpath += query * by_read + key * (by_known - by_late)
        shrunk = tl.load(dkept_last + tile * K + i, mask=i < K, other=0.0) * over_chunk
        shrunk += tl.sum(key * by_late, axis=0)
        dpath += tl.where((n == CHUNK - 1)[:, None], shrunk[None, :], 0.0)
        tl.store(dq + out, dquery + own * key + by_read, mask=of_out)
        tl.store(dk + out, dlater + dearlier + own * query + by_known + by_late, mask=of_out)
        high_b, low_b = split(dpath, HALF)
        high, low = split(after, HALF)
        dgate = product(high, low, high_b, low_b, none, HALF, True)
        tl.store(dg + gate_of, dgate.to(dg.dtype.element_ty), mask=of_keys)
    tl.store(dbeta + tile * CHUNK + n, dweight)
