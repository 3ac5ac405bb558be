"""Kernels of the gated delta rule with a decay for each key channel (Kimi Delta Attention): first, for all chunks at
once, what does not depend on states; then the states, chunk after chunk.

In the notation of `gated_delta_rule`, with q and k normalised and kept = exp(G) for tokens that the state S before the
chunk reaches (else 0), all of (tokens, K),

    Q' = kept Q;  K' = kept K;  K'' = decay_last K                                         `channel_pairs_kernel`
    A_ij = beta_i sum_c k_ic k_jc decay_ijc;  T = (1 + A)^-1;  M_ij = sum_c q_ic k_jc decay_ijc
    X = beta (V - K' S);  U = T X;  O = Q' S + M U                                         `channel_states_kernel`
    state after the chunk = kept_last S + K''^T U

The sums of pairs are matrix products, one for each of log2(C) levels. On level l the chunk is divided into blocks of a
left and a right half, of 2^l tokens each: a pair is on the level on which token j is in the left and token i in the
right half of one block. With G at the end of the left half, in between, decay_ijc is the product of a factor of token i
and a factor of token j, none of them above 1.

Precision, and the rows of operands: see `delta_chunks_forward` and `delta_chunks.MIN_WIDTH`.
"""

from ligermodels.ops.linear_attention.delta_chunks_forward import ancestors_of_chunk, inverse, product
from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import kernel


@triton.jit
def inverse_lengths(x, x_token, n, is_token, K, EPS: tl.constexpr, BLOCK_K: tl.constexpr):
    """1 / sqrt(sum of squares + EPS) of rows n of x."""
    squares = tl.zeros([n.shape[0]], tl.float32)
    for at in range(0, K, BLOCK_K):
        i = at + tl.arange(0, BLOCK_K)
        mask = is_token[:, None] & (i < K)[None, :]
        values = tl.load(x + n[:, None] * x_token + i[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += tl.sum(values * values, axis=1)
    return 1.0 / tl.sqrt(squares + EPS)


@triton.jit
def decays_of_channels(path, out, i, first, start, n, T, K, PACKED: tl.constexpr):
    """kept and decay_last, (C, BLOCK_K), and kept_last (BLOCK_K,) of the chunk that begins at `start`.

    path: the paths of the chunk in memory. out: place of each element of the chunk in it. i: channels. first: first
    token of each token's document, read with PACKED."""
    here = tl.load(path + out, mask=(i < K)[None, :], other=0.0)
    last = tl.load(path + (n.shape[0] - 1) * K + i, mask=i < K, other=0.0)
    kept, to_last = tl.exp(here.to(tl.float32)), tl.exp((last[None, :] - here).to(tl.float32))
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
def halves_of_level(path, out, i, n, level, K):
    """Of the pairs of tokens of one level, see above: the decay between each token and the end of the left half of its
    block, where the token is in the right half, and where it is in the left half, each (C, BLOCK_K), else 0; and
    whether token j is in the left and token i in the right half of one block, at [i, j].

    path: the paths of the chunk in memory; they fall from token to token, because g is at most 0. out: place of each
    element of the chunk in it."""
    half = 1 << level
    is_right = (n // half % 2 == 1)[:, None]
    end_of_left = n // (2 * half) * (2 * half) + half - 1
    middle = tl.load(path + end_of_left[:, None] * K + i[None, :], mask=(i < K)[None, :], other=0.0)
    decay = tl.exp(-tl.abs((tl.load(path + out, mask=(i < K)[None, :], other=0.0) - middle).to(tl.float32)))
    pairs = (n[:, None] // (2 * half) == n[None, :] // (2 * half)) & is_right & (n // half % 2 == 0)[None, :]
    return tl.where(is_right, decay, 0.0), tl.where(is_right, 0.0, decay), pairs


@kernel
def channel_paths_kernel(g, path, T, K, heads, chunks, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Each program takes BLOCK_K channels of a chunk of a head. path: the sums of g, float64."""
    tile, row = tl.program_id(0).to(tl.int64), (tl.program_id(0) // chunks).to(tl.int64)
    n, i = tl.arange(0, CHUNK), tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    token = tile % chunks * CHUNK + n
    mask = (token < T)[:, None] & (i < K)[None, :]
    token_row = (row // heads * T + token) * heads + row % heads
    gate = tl.load(g + token_row[:, None] * K + i[None, :], mask=mask, other=0.0).to(tl.float64)
    tl.store(path + (tile * CHUNK + n[:, None]) * K + i[None, :], tl.cumsum(gate, axis=0), mask=(i < K)[None, :])


@kernel
def channel_pairs_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, path, beta, first, reads, known, late, kept_last, solved,
    attending, T, K, heads, repeats, chunks, scale,
    PACKED: tl.constexpr, OPERAND: tl.constexpr, EPS: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program takes a chunk of a head. It writes Q' to `reads`, K' to `known`, K'' to `late`, the decay of the
    state over the chunk to `kept_last`, T to `solved` and M to `attending`."""
    chunk, row = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    batch, head = row // heads, row % heads
    start, tile = tl.cast(chunk, tl.int64) * CHUNK, row * chunks + chunk
    n = tl.arange(0, CHUNK)
    is_token = n < T - start
    q += batch * q_batch + head // repeats * q_head + start * q_token
    k += batch * k_batch + head // repeats * k_head + start * k_token
    of_chunk = tile * CHUNK * K
    path, reads, known, late = path + of_chunk, reads + of_chunk, known + of_chunk, late + of_chunk
    query_factor = inverse_lengths(q, q_token, n, is_token, K, EPS, BLOCK_K) * scale
    key_factor = inverse_lengths(k, k_token, n, is_token, K, EPS, BLOCK_K)
    zeros = tl.zeros([CHUNK, CHUNK], tl.float32)
    alike, attends, own = zeros, zeros, tl.zeros([CHUNK], tl.float32)
    for at in range(0, K, BLOCK_K):
        i = at + tl.arange(0, BLOCK_K)
        of_keys, of_out = is_token[:, None] & (i < K)[None, :], (i < K)[None, :]
        query = tl.load(q + n[:, None] * q_token + i[None, :], mask=of_keys, other=0.0).to(tl.float32)
        key = tl.load(k + n[:, None] * k_token + i[None, :], mask=of_keys, other=0.0).to(tl.float32)
        query, key = query * query_factor[:, None], key * key_factor[:, None]
        out = n[:, None] * K + i[None, :]
        kept, to_last, over_chunk = decays_of_channels(path, out, i, first, start, n, T, K, PACKED)
        tl.store(reads + out, (query * kept).to(OPERAND), mask=of_out)
        tl.store(known + out, (key * kept).to(OPERAND), mask=of_out)
        tl.store(late + out, (key * to_last).to(OPERAND), mask=of_out)
        tl.store(kept_last + tile * K + i, over_chunk, mask=i < K)
        own += tl.sum(query * key, axis=1)
        for level in tl.range(0, LEVELS, num_stages=1):
            right, left, pairs = halves_of_level(path, out, i, n, level, K)
            earlier = tl.trans((key * left).to(OPERAND))
            alike += tl.where(pairs, product(key * right, earlier, zeros, OPERAND), 0.0)
            attends += tl.where(pairs, product(query * right, earlier, zeros, OPERAND), 0.0)
    above = ancestors_of_chunk(first, start, n, T, PACKED)
    weight = tl.load(beta + (batch * T + start + n) * heads + head, mask=is_token, other=0.0).to(tl.float32)
    attends = tl.where(n[:, None] == n[None, :], own[:, None], attends)
    square = tile * CHUNK * CHUNK + n[:, None] * CHUNK + n[None, :]
    tl.store(attending + square, tl.where(above, attends, 0.0).to(OPERAND))
    tl.store(solved + square, inverse(tl.where(above, alike * weight[:, None], 0.0), OPERAND).to(OPERAND))


@kernel
def channel_states_kernel(
    reads, known, late, kept_last, solved, attending, v, v_batch, v_token, v_head, beta, initial, out, final, states,
    updates, T, K, V, heads, padded, blocks,
    OPERAND: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, OUTPUT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_V columns of the state of a head, from the first chunk to the last: with OUTPUT it
    writes the outputs, else the state before each chunk and its `updates`, U. padded: see `states_kernel`."""
    chunks = padded // CHUNK
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
    zeros = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        start = tl.cast(chunk, tl.int64) * CHUNK
        is_token = n < T - start
        tile = row * chunks + chunk
        first_row = (batch * T + start) * heads + head
        rows = tile * CHUNK * K + n[:, None] * K + i[None, :]
        of_values = is_token[:, None] & of_columns
        value = tl.load(v + (start + n[:, None]) * v_token + j[None, :], mask=of_values, other=0.0).to(tl.float32)
        weight = tl.load(beta + first_row + n * heads, mask=is_token, other=0.0).to(tl.float32)
        known_rows = tl.load(known + rows, mask=of_keys, other=0.0)
        x = weight[:, None] * (value - product(known_rows, state, zeros, OPERAND))
        u = product(tl.load(solved + tile * CHUNK * CHUNK + square), x, zeros, OPERAND)
        if OUTPUT:
            o = product(tl.load(reads + rows, mask=of_keys, other=0.0), state, zeros, OPERAND)
            o = product(tl.load(attending + tile * CHUNK * CHUNK + square), u, o, OPERAND)
            place = first_row * V + n[:, None] * (heads * V) + j[None, :]
            tl.store(out + place, o.to(out.dtype.element_ty), mask=of_values)
        else:
            tl.store(states + tile * K * V + matrix, state.to(OPERAND), mask=of_state)
            tl.store(updates + tile * CHUNK * V + n[:, None] * V + j[None, :], u.to(OPERAND), mask=of_columns)
        rows_across = tile * CHUNK * K + n[None, :] * K + i[:, None]
        kept = tl.load(kept_last + tile * K + i, mask=i < K, other=0.0)
        late_rows = tl.load(late + rows_across, mask=across, other=0.0)
        state = product(late_rows, u, state * kept[:, None], OPERAND)
    if FINAL:
        tl.store(final + row * K * V + matrix, state, mask=of_state)


@kernel
def channel_states_backward_kernel(
    reads, known, late, kept_last, solved, attending, dout, dout_batch, dout_token, dout_head, beta, dfinal, dv,
    dstates, dx, dinitial, T, K, V, heads, padded, blocks,
    OPERAND: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_V columns of the state of a head, from the last chunk to the first: it writes the
    gradient dS of the state after each chunk, dX and dV. With dU = M^T dO + K'' dS and dX = T^T dU, the gradient of
    the state before the chunk is kept_last dS + Q'^T dO - K'^T (beta dX). padded: see `states_kernel`."""
    chunks = padded // CHUNK
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
    zeros = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for done in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - done
        start = tl.cast(chunk, tl.int64) * CHUNK
        is_token = n < T - start
        tile = row * chunks + chunk
        first_row = (batch * T + start) * heads + head
        of_values = is_token[:, None] & of_columns
        do = tl.load(dout + (start + n[:, None]) * dout_token + j[None, :], mask=of_values, other=0.0)
        weight = tl.load(beta + first_row + n * heads, mask=is_token, other=0.0).to(tl.float32)
        tl.store(dstates + tile * K * V + matrix, dstate.to(OPERAND), mask=of_state)
        rows = tile * CHUNK * K + n[:, None] * K + i[None, :]
        du = product(tl.load(late + rows, mask=of_keys, other=0.0), dstate, zeros, OPERAND)
        du = product(tl.load(attending + tile * CHUNK * CHUNK + transposed), do, du, OPERAND)
        d = product(tl.load(solved + tile * CHUNK * CHUNK + transposed), du, zeros, OPERAND)
        tl.store(dx + tile * CHUNK * V + n[:, None] * V + j[None, :], d.to(OPERAND), mask=of_columns)
        d *= weight[:, None]
        tl.store(dv + first_row * V + n[:, None] * (heads * V) + j[None, :], d.to(dv.dtype.element_ty), mask=of_values)
        rows_across = tile * CHUNK * K + n[None, :] * K + i[:, None]
        kept = tl.load(kept_last + tile * K + i, mask=i < K, other=0.0)
        reads_across = tl.load(reads + rows_across, mask=across, other=0.0)
        dstate = product(reads_across, do, dstate * kept[:, None], OPERAND)
        dstate = product(tl.load(known + rows_across, mask=across, other=0.0), -d, dstate, OPERAND)
    if INITIAL:
        tl.store(dinitial + row * K * V + matrix, dstate, mask=of_state)


@kernel
def channel_pairs_backward_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, path, beta, first, dreads, dknown, dlate, dkept_last, da,
    dm, dq, dk, dg, dbeta, T, K, heads, repeats, chunks, scale,
    PACKED: tl.constexpr, OPERAND: tl.constexpr, EPS: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program takes a chunk of a head: from the gradients of Q', K', K'', kept_last, A and M it writes those of
    the normalised q and k, of g, and the part of dbeta that comes from A. It reads no gradients of the zeros of A and
    M.

    The factors of a decay give the decay's gradient: for exp(G_i - G_j) the product of the pair, added to dG_i and
    subtracted from dG_j. The decay of a token to itself is 1 and has no part in them, not even by rounding."""
    chunk, row = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    batch, head = row // heads, row % heads
    start, tile = tl.cast(chunk, tl.int64) * CHUNK, row * chunks + chunk
    n = tl.arange(0, CHUNK)
    is_token = n < T - start
    q += batch * q_batch + head // repeats * q_head + start * q_token
    k += batch * k_batch + head // repeats * k_head + start * k_token
    first_row, of_chunk = (batch * T + start) * heads + head, tile * CHUNK * K
    path, dreads, dknown, dlate = path + of_chunk, dreads + of_chunk, dknown + of_chunk, dlate + of_chunk
    query_factor = inverse_lengths(q, q_token, n, is_token, K, EPS, BLOCK_K) * scale
    key_factor = inverse_lengths(k, k_token, n, is_token, K, EPS, BLOCK_K)
    weight = tl.load(beta + first_row + n * heads, mask=is_token, other=0.0).to(tl.float32)
    above = ancestors_of_chunk(first, start, n, T, PACKED)
    plain, transposed = n[:, None] * CHUNK + n[None, :], n[:, None] + n[None, :] * CHUNK
    da += tile * CHUNK * CHUNK
    dm += tile * CHUNK * CHUNK
    own = tl.load(dm + n * CHUNK + n).to(tl.float32)[:, None]
    dweight = tl.zeros([CHUNK], tl.float32)
    zeros = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    for at in range(0, K, BLOCK_K):
        i = at + tl.arange(0, BLOCK_K)
        of_keys, of_out = is_token[:, None] & (i < K)[None, :], (i < K)[None, :]
        query = tl.load(q + n[:, None] * q_token + i[None, :], mask=of_keys, other=0.0).to(tl.float32)
        key = tl.load(k + n[:, None] * k_token + i[None, :], mask=of_keys, other=0.0).to(tl.float32)
        query, key = query * query_factor[:, None], key * key_factor[:, None]
        out = n[:, None] * K + i[None, :]
        # gradients of a query; of a key as the later token of a pair, without beta; of a key as the earlier one
        dquery, dlater, dearlier = zeros, zeros, zeros
        for level in tl.range(0, LEVELS, num_stages=1):
            right, left, pairs = halves_of_level(path, out, i, n, level, K)
            pairs &= above
            earlier = key * left
            dquery += product(tl.load(dm + plain, mask=pairs, other=0.0), earlier, zeros, OPERAND) * right
            dlater += product(tl.load(da + plain, mask=pairs, other=0.0), earlier, zeros, OPERAND) * right
            pairs = tl.trans(pairs)
            by_pair = product(tl.load(dm + transposed, mask=pairs, other=0.0), query * right, zeros, OPERAND)
            later = key * weight[:, None] * right
            by_pair = product(tl.load(da + transposed, mask=pairs, other=0.0), later, by_pair, OPERAND)
            dearlier += by_pair * left
        dweight += tl.sum(dlater * key, axis=1)
        dlater *= weight[:, None]
        dpath = query * dquery + key * (dlater - dearlier)
        # Q', K', K'' and kept_last
        kept, to_last, over_chunk = decays_of_channels(path, out, i, first, start, n, T, K, PACKED)
        by_read = tl.load(dreads + out, mask=of_out, other=0.0) * kept
        by_known = tl.load(dknown + out, mask=of_out, other=0.0) * kept
        by_late = tl.load(dlate + out, mask=of_out, other=0.0) * to_last
        dpath += query * by_read + key * (by_known - by_late)
        shrunk = tl.load(dkept_last + tile * K + i, mask=i < K, other=0.0) * over_chunk
        shrunk += tl.sum(key * by_late, axis=0)
        dpath += tl.where((n == CHUNK - 1)[:, None], shrunk[None, :], 0.0)
        tl.store(dq + of_chunk + out, dquery + own * key + by_read, mask=of_out)
        tl.store(dk + of_chunk + out, dlater + dearlier + own * query + by_known + by_late, mask=of_out)
        # Parts of dpath cancel in these sums, so it enters as the sum of two operands.
        below, half = tl.trans(above).to(tl.float32), dpath.to(OPERAND)
        dgate = product(below, dpath - half.to(tl.float32), zeros, OPERAND)
        dgate = product(below, half, dgate, OPERAND)
        tl.store(dg + (first_row + n[:, None] * heads) * K + i[None, :], dgate.to(dg.dtype.element_ty), mask=of_keys)
    tl.store(dbeta + tile * CHUNK + n, dweight)
