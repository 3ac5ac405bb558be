"""Kernels of the gated delta rule with a decay for each key channel (Kimi Delta Attention): first, for all chunks at
once, the matrices that do not depend on states; then the states, chunk after chunk.

In the notation of `gated_delta_rule`, with q and k normalised and kept = exp(G) for tokens that the state S before the
chunk reaches (else 0), all of (tokens, K),

    G = sums of g within the chunk                                                         `channel_paths_kernel`
    Q' = kept Q;  K' = kept K;  K'' = decay_last K                                         `channel_pairs_kernel`
    L_ij = sum_c k_ic k_jc decay_ijc;  A = beta L;  T = (1 + A)^-1;  M_ij = sum_c q_ic k_jc decay_ijc
    X = beta (V - K' S);  U = T X;  O = Q' S + M U                                         `channel_states_kernel`
    state after the chunk = kept_last S + K''^T U

The sums of pairs are matrix products, one for each of log2(C) levels. On level l the chunk is divided into blocks of a
left and a right half, of 2^l tokens each: a pair is on the level on which token j is in the left and token i in the
right half of one block. With G at the end of the left half, in between, decay_ijc is the product of a factor of token i
and a factor of token j, none of them above 1.

Precision, and the rows of operands: see `delta_chunks_forward` and `delta_chunks.MIN_WIDTH`. G is summed in float64. If
operands are bfloat16 it is stored in float32: with gates of at least LEAST_GATE it is above -2^13, so that its rounding
changes no decay by more than 5e-4, an eighth of the rounding of an operand.
"""

from ligermodels.ops.linear_attention.delta_chunks_forward import ancestors_of_chunk, inverse, product
from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import kernel

LEAST_GATE = -128.0
"""Smaller gates count as this one: exp of either is 0 in float32, and 64 of these add up to no more than -2^13."""


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
def decays_of_channels(here, path, i, first, start, n, T, K, PACKED: tl.constexpr):
    """kept and decay_last, (C, BLOCK_K), and kept_last (BLOCK_K,) of the chunk that begins at `start`.

    here: (C, BLOCK_K), G of the chunk's tokens. path: G of the chunk in memory. i: channels. first: first token of each
    token's document, read with PACKED."""
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
def pairs_of_level(n, level):
    """Whether token j is in the left and token i in the right half of one block of a level, see above, at [i, j]."""
    half = n >> level
    return tl.where(half % 2 == 1, half - 1, -1)[:, None] == half[None, :]


@triton.jit
def decay_of_level(here, path, i, n, level, K):
    """The decay between each token and the end of the left half of its block of one level, see above, (C, BLOCK_K).

    here: (C, BLOCK_K), G of the chunk's tokens; it falls from token to token, because g is at most 0. path: G of the
    chunk in memory. i: channels."""
    end_of_left = ((n >> level) | 1) * (1 << level) - 1
    middle = tl.load(path + end_of_left[:, None] * K + i[None, :], mask=(i < K)[None, :], other=0.0)
    return tl.exp(-tl.abs((here - middle).to(tl.float32)))


@kernel
def channel_paths_kernel(
    g, path, T, K, heads, chunks,
    LEAST_GATE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_K channels of a chunk of a head.

    Args:
        g: (B, T, heads, K), contiguous, logarithms of the decays; those below LEAST_GATE count as LEAST_GATE.
        path: G, (B * heads, chunks, CHUNK, K), float32 or float64; written.
        T, K, heads, chunks: numbers of tokens, channels of a key, value heads, chunks.
        CHUNK, BLOCK_K: tokens of a chunk, and channels of a tile.
    """
    tile, row = tl.program_id(0).to(tl.int64), (tl.program_id(0) // chunks).to(tl.int64)
    n, i = tl.arange(0, CHUNK), tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    token = tile % chunks * CHUNK + n
    mask = (token < T)[:, None] & (i < K)[None, :]
    token_row = (row // heads * T + token) * heads + row % heads
    gate = tl.load(g + token_row[:, None] * K + i[None, :], mask=mask, other=0.0).to(tl.float64)
    gate = tl.where(gate < LEAST_GATE, LEAST_GATE, gate)  # NaN stays
    sums = tl.cumsum(gate, axis=0).to(path.dtype.element_ty)
    tl.store(path + (tile * CHUNK + n[:, None]) * K + i[None, :], sums, mask=(i < K)[None, :])


@kernel
def channel_pairs_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, path, beta, first, reads, known, late, kept_last, solved,
    attending, alike, T, K, heads, repeats, chunks, scale,
    ALIKE: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr, EPS: tl.constexpr, LEVELS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program takes a chunk of a head.

    Args:
        q, q_batch, q_token, q_head: queries (B, T, heads / repeats, K), and their strides in elements.
        k, k_batch, k_token, k_head: keys (B, T, heads / repeats, K), and their strides.
        path: G, from `channel_paths_kernel`.
        beta: (B, T, heads), contiguous, weights of the tokens.
        first: int32 (T,), first token of each token's document; read with PACKED.
        reads, known, late: Q', K' and K'' of each chunk, (B * heads, chunks, CHUNK, K) of OPERAND; written.
        kept_last: float32 (B * heads, chunks, K), the decays of a state over a chunk; written.
        solved, attending, alike: T, M and L of each chunk, (B * heads, chunks, CHUNK, CHUNK) of OPERAND; written,
            L with ALIKE.
        T, K, heads, chunks: see `channel_paths_kernel`.
        repeats: value heads per key head.
        scale: factor on the normalised queries.
        ALIKE: whether L is written, for the gradient of beta.
        PACKED: whether documents are packed into the row.
        OPERAND: dtype of the operands of products, and of buffers.
        EPS: added to the squared lengths of queries and keys.
        LEVELS: log2(CHUNK).
        CHUNK, BLOCK_K: tokens of a chunk, and channels of a tile.
    """
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
    keys_alike, attends, own = zeros, zeros, tl.zeros([CHUNK], tl.float32)
    for at in range(0, K, BLOCK_K):
        i = at + tl.arange(0, BLOCK_K)
        of_keys, of_out = is_token[:, None] & (i < K)[None, :], (i < K)[None, :]
        query = tl.load(q + n[:, None] * q_token + i[None, :], mask=of_keys, other=0.0).to(tl.float32)
        key = tl.load(k + n[:, None] * k_token + i[None, :], mask=of_keys, other=0.0).to(tl.float32)
        query, key = query * query_factor[:, None], key * key_factor[:, None]
        out = n[:, None] * K + i[None, :]
        here = tl.load(path + out, mask=of_out, other=0.0)
        kept, to_last, over_chunk = decays_of_channels(here, path, i, first, start, n, T, K, PACKED)
        tl.store(reads + out, (query * kept).to(OPERAND), mask=of_out)
        tl.store(known + out, (key * kept).to(OPERAND), mask=of_out)
        tl.store(late + out, (key * to_last).to(OPERAND), mask=of_out)
        tl.store(kept_last + tile * K + i, over_chunk, mask=i < K)
        own += tl.sum(query * key, axis=1)
        for level in tl.range(0, LEVELS, num_stages=1):
            decay = decay_of_level(here, path, i, n, level, K)
            pairs = pairs_of_level(n, level)
            decayed = (key * decay).to(OPERAND)
            across = tl.trans(decayed)
            keys_alike += tl.where(pairs, product(decayed, across, zeros, OPERAND), 0.0)
            attends += tl.where(pairs, product(query * decay, across, zeros, OPERAND), 0.0)
    above = ancestors_of_chunk(first, start, n, T, PACKED)
    weight = tl.load(beta + (batch * T + start + n) * heads + head, mask=is_token, other=0.0).to(tl.float32)
    attends = tl.where(n[:, None] == n[None, :], own[:, None], attends)
    square = tile * CHUNK * CHUNK + n[:, None] * CHUNK + n[None, :]
    tl.store(attending + square, tl.where(above, attends, 0.0).to(OPERAND))
    keys_alike = tl.where(above, keys_alike, 0.0)
    if ALIKE:
        tl.store(alike + square, keys_alike.to(OPERAND))
    tl.store(solved + square, inverse(keys_alike * weight[:, None], OPERAND).to(OPERAND))


@kernel
def channel_states_kernel(
    reads, known, late, kept_last, solved, attending, v, v_batch, v_token, v_head, beta, initial, out, final, states,
    updates, T, K, V, heads, padded, blocks,
    OPERAND: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, OUTPUT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_V columns of the state of a head, from the first chunk to the last.

    Args:
        reads, known, late, kept_last, solved, attending, beta, T, K, heads, OPERAND, CHUNK: see `channel_pairs_kernel`.
        v, v_batch, v_token, v_head: values (B, T, heads, V), and their strides.
        initial, final: float32 (B, heads, K, V), contiguous, the first state, read with INITIAL, and the last, written
            with FINAL.
        out: (B, T, heads, V), contiguous, the outputs; written with OUTPUT.
        states, updates: the state before each chunk, (B * heads, chunks, K, V), and U of each chunk, (B * heads,
            chunks, CHUNK, V), of OPERAND; written without OUTPUT.
        V: channels of a value.
        padded, blocks, BLOCK_V, STAGES: see `states_kernel`.
        INITIAL, FINAL, OUTPUT: whether there is a first state, a last state; outputs, or states and updates.
        BLOCK_K: a power of 2 from K on.
    """
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
