"""Kernels of the gated delta rule over sequences: first, for all chunks at once, the matrices that do not depend on
states; then the states, chunk after chunk.

In the notation of `gated_delta_rule`, with q and k normalised, kept = exp(G) for tokens that the state S before the
chunk reaches (else 0), and with diagonal matrices written as vectors,

    T = (1 + A)^-1;  M = (Q K^T) * decay                         `prepare_kernel`
    X = beta (V - kept K S);  U = T X;  O = kept Q S + M U       `states_kernel`, chunk after chunk
    state after the chunk = kept_last S + K^T (decay_last U)

Without DELTA they compute Mamba2 (`ssd`): q and k are not normalised, U = beta V, T does not exist, and the programs
that compute outputs also compute M. The states of a sequence are then computed in segments, side by side: each begins
with the sum of the segments before it, from `segments_kernel`.

Precision: sums are float32, operands of products are rounded to OPERAND: bfloat16 for q in bfloat16, else float32,
whose products take three TF32 products. Queries and keys enter products unnormalised, so these operands are exact;
their lengths are factors applied afterwards.

No kernel transposes a result of tensor cores; kernels load transposed instead. On Hopper, Triton 3.4 to 3.7.0 generates
wrong code for products with such a transpose (fla-org/flash-linear-attention#640, #826).
"""

from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import kernel

CHUNK = 64
"""Tokens of a chunk. Buffers of values per token are padded to whole chunks."""


@triton.jit
def product(a, b, total, OPERAND: tl.constexpr):
    """total + a b, float32; a and b are rounded to OPERAND."""
    if tl.float32 == OPERAND:
        total = tl.dot(a.to(OPERAND), b.to(OPERAND), total, input_precision="tf32x3")
    else:
        total = tl.dot(a.to(OPERAND), b.to(OPERAND), total)
    return total


@triton.jit
def decays_of_chunk(path, first, start, n, T, PACKED: tl.constexpr):
    """The decays of the chunk that begins at `start`: of the state before the chunk, after each token; of each token's
    update, after the last token; and of the state before the chunk, after the last token.

    path: sums of g. first: first token of each token's document, read with PACKED. n: tokens of the chunk. T: number of
    tokens."""
    last = tl.load(path + start + n.shape[0] - 1)
    here = tl.load(path + start + n)
    kept, to_last = tl.exp(here.to(tl.float32)), tl.exp((last - here).to(tl.float32))
    kept_last = tl.exp(last.to(tl.float32))
    if PACKED:
        begin = tl.load(first + tl.minimum(start + n, T - 1))
        begin_last = tl.load(first + tl.minimum(start + n.shape[0] - 1, T - 1))
        before = tl.maximum(start - 1, 0)
        kept = tl.where(begin <= before, kept, 0.0)
        to_last = tl.where(start + n >= begin_last, to_last, 0.0)
        kept_last = tl.where(begin_last <= before, kept_last, 0.0)
    return kept, to_last, kept_last


@triton.jit
def ancestors_of_chunk(first, start, n, T, PACKED: tl.constexpr):
    """Whether token j is token i or before it in its document, at [i, j]: tokens start + n, of T. first: first token of
    each token's document, read with PACKED."""
    found = n[:, None] >= n[None, :]
    if PACKED:
        begin = tl.load(first + tl.minimum(start + n, T - 1))
        found = found & (start + n[None, :] >= begin[:, None])
    return found


@triton.jit
def descendants_of_chunk(first, start, n, T, PACKED: tl.constexpr):
    """`ancestors_of_chunk` transposed: whether token i is token j or after it in its document, at [j, i].

    Args:
        first: int32 (T,), first token of each token's document; read with PACKED.
        start: index of the chunk's first token.
        n: (CHUNK,), indices within the chunk.
        T: number of tokens.
        PACKED: whether several documents are packed into the row.
    """
    found = n[:, None] <= n[None, :]
    if PACKED:
        begin = tl.load(first + tl.minimum(start + n, T - 1))
        found = found & (start + n[:, None] >= begin[None, :])
    return found


@triton.jit
def state_before_segment(state, sums, decays, matrix, inside, elements, earlier):
    """The state before a segment, float32 (BLOCK_K, BLOCK_V).

    Args:
        state: the state before the first segment.
        sums, decays: from `segments_kernel`, of the row's first segment.
        matrix, inside: the place of each element in a state, and whether it is inside.
        elements: of a state.
        earlier: number of segments before this one.
    """
    for segment in range(earlier):
        ended = tl.load(sums + segment * elements + matrix, mask=inside, other=0.0)
        state = state * tl.load(decays + segment) + ended
    return state


@triton.jit
def inverse(a, OPERAND: tl.constexpr):
    """(1 + a)^-1 for a strictly lower a (C, C), by forward substitution: first in the blocks of the diagonal, column by
    column in float32, all blocks at once; then block row after block row."""
    C: tl.constexpr = a.shape[0]
    BLOCK: tl.constexpr = 16
    COUNT: tl.constexpr = C // BLOCK
    block, place = tl.arange(0, COUNT), tl.arange(0, BLOCK)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    of_diagonal = tl.sum(tl.where(diagonal, tl.reshape(a, [COUNT, BLOCK, COUNT, BLOCK]), 0.0), axis=2)
    row, column = place[None, :, None], place[None, None, :]
    x = tl.where(row == column, 1.0, tl.zeros_like(of_diagonal))
    for i in range(BLOCK - 1):
        weights = tl.sum(tl.where(column == i, of_diagonal, 0.0), axis=2)
        x -= weights[:, :, None] * tl.sum(tl.where(row == i, x, 0.0), axis=1)[:, None, :]
    inverted = tl.where(diagonal, x[:, :, None, :], tl.zeros([COUNT, BLOCK, COUNT, BLOCK], tl.float32))
    inverted = tl.reshape(inverted, [C, C])
    i = tl.arange(0, C)
    below = tl.where(i[:, None] // BLOCK > i[None, :] // BLOCK, -a, 0.0)
    below = product(inverted, below, tl.zeros([C, C], tl.float32), OPERAND)
    found = inverted
    for _ in tl.static_range(COUNT - 1):  # each iteration completes one more row of blocks
        found = product(below, found, inverted, OPERAND)
    return found


@triton.jit
def path_of_chunk(g, path, heads, above, n, is_token):
    """Sums of g over the tokens up to each token of a chunk, in its document, float64 (C,); written to `path`.

    Args:
        g: gates of the chunk, `heads` elements from one token to the next.
        path: the chunk's place for them.
        heads: number of heads.
        above: from `ancestors_of_chunk`.
        n: (C,), indices within the chunk.
        is_token: (C,), whether the token is there.
    """
    gate = tl.load(g + n * heads, mask=is_token, other=0.0).to(tl.float64)
    sums = tl.sum(tl.where(above, gate[None, :], 0.0), axis=1)
    tl.store(path + n, sums)
    return sums


@kernel
def paths_kernel(g, first, path, T, heads, chunks, PACKED: tl.constexpr, CHUNK: tl.constexpr):
    """Without the delta rule: each program takes a chunk of a head.

    Args:
        g, first, path, T, heads, chunks, PACKED, CHUNK: see `prepare_kernel`.
    """
    chunk, row = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    start = tl.cast(chunk, tl.int64) * CHUNK
    n = tl.arange(0, CHUNK)
    above = ancestors_of_chunk(first, start, n, T, PACKED)
    g += (row // heads * T + start) * heads + row % heads
    path_of_chunk(g, path + (row * chunks + chunk) * CHUNK, heads, above, n, n < T - start)


@kernel
def prepare_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, g, beta, first, path, q_factor, k_factor, solved,
    attending, T, K, heads, repeats, chunks, scale,
    PACKED: tl.constexpr, OPERAND: tl.constexpr, EPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """With the delta rule: each program takes a chunk of a head.

    Args:
        q, q_batch, q_token, q_head: queries (B, T, heads / repeats, K), and their strides in elements.
        k, k_batch, k_token, k_head: keys (B, T, heads / repeats, K), and their strides.
        g, beta: (B, T, heads), contiguous, logarithms of the decays, and weights of the tokens.
        first: int32 (T,), first token of each token's document; read with PACKED.
        path: fp64 (rows, chunks * CHUNK), sums of g within chunks and documents, for B * heads rows; written.
        q_factor, k_factor: float32 (B * heads / repeats, chunks * CHUNK), which normalise queries and keys; written.
        solved, attending: T and M of each chunk, (rows, chunks, CHUNK, CHUNK) of OPERAND; written.
        T, K, heads, repeats, chunks: numbers of tokens, channels of a key, value heads, value heads per key head,
            chunks.
        scale: factor on the normalised queries.
        PACKED: whether documents are packed into the row.
        OPERAND: dtype of the operands of products, and of buffers.
        EPS: added to the squared lengths of queries and keys.
        CHUNK, BLOCK_K: tokens of a chunk, and a power of 2 from K on.
    """
    chunk, row = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    batch, head = row // heads, row % heads
    group = head // repeats
    start = tl.cast(chunk, tl.int64) * CHUNK
    n, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    there = n < T - start
    q += batch * q_batch + group * q_head + start * q_token
    k += batch * k_batch + group * k_head + start * k_token
    inside = there[:, None] & (i < K)[None, :]
    key = tl.load(k + n[:, None] * k_token + i[None, :], mask=inside, other=0.0)
    query = tl.load(q + n[:, None] * q_token + i[None, :], mask=inside, other=0.0)
    wide_key, wide_query = key.to(tl.float32), query.to(tl.float32)
    key_factor = 1.0 / tl.sqrt(tl.sum(wide_key * wide_key, axis=1) + EPS)
    query_factor = scale / tl.sqrt(tl.sum(wide_query * wide_query, axis=1) + EPS)
    if head % repeats == 0:
        of_group = (batch * (heads // repeats) + group) * chunks * CHUNK + start
        tl.store(k_factor + of_group + n, key_factor)
        tl.store(q_factor + of_group + n, query_factor)

    above = ancestors_of_chunk(first, start, n, T, PACKED)
    ours = (batch * T + start) * heads + head
    here = path_of_chunk(g + ours, path + (row * chunks + chunk) * CHUNK, heads, above, n, there)
    decay = tl.where(above, tl.exp((here[:, None] - here[None, :]).to(tl.float32)), 0.0) * key_factor[None, :]

    square = (row * chunks + chunk) * CHUNK * CHUNK + n[:, None] * CHUNK + n[None, :]
    key_across, none = tl.trans(key), tl.zeros([CHUNK, CHUNK], tl.float32)
    attends = product(query, key_across, none, OPERAND) * decay * query_factor[:, None]
    tl.store(attending + square, attends.to(OPERAND))
    weight = tl.load(beta + ours + n * heads, mask=there, other=0.0).to(tl.float32)
    alike = product(key, key_across, none, OPERAND) * decay * (key_factor * weight)[:, None]
    alike = tl.where(n[:, None] > n[None, :], alike, 0.0)
    tl.store(solved + square, inverse(alike, OPERAND).to(OPERAND))


@kernel
def states_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head, beta, skip, first, path,
    q_factor, k_factor, solved, attending, initial, sums, decays, out, final, states, updates, T, K, V, heads, repeats,
    padded, blocks, segments,
    DELTA: tl.constexpr, SKIP: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, OUTPUT: tl.constexpr, SEGMENTED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_V columns of the state of a head, from the first chunk of a segment to the last.

    Args:
        q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, beta, first, path, q_factor, k_factor, solved,
            attending, T, K, heads, repeats, PACKED, OPERAND, CHUNK, BLOCK_K: see `prepare_kernel`; q_factor, k_factor,
            solved and attending are read with DELTA.
        v, v_batch, v_token, v_head: values (B, T, heads, V), and their strides.
        skip: (heads,), factors of v in the outputs; read with SKIP.
        initial, final: float32 (B, heads, K, V), contiguous, the first state, read with INITIAL, and the last, written
            with FINAL.
        sums, decays: from `segments_kernel`; read with SEGMENTED.
        out: (B, T, heads, V), contiguous, the outputs; written with OUTPUT.
        states: the state before each chunk, (rows, chunks, K, V) of OPERAND; written without OUTPUT.
        updates: U of each chunk, (rows, chunks, CHUNK, V) of OPERAND; written without OUTPUT, with DELTA.
        V: channels of a value.
        padded: tokens of all chunks of a row. Triton makes a constant of an argument that is 1, and does not pipeline a
            loop of constant length 1, see `MIN_WIDTH`.
        blocks: blocks of BLOCK_V columns of a state.
        segments: of the chunks of a row, of equal length but for the last; 1 with DELTA.
        DELTA: whether the delta rule is used; else Mamba2's sum.
        SKIP, INITIAL, FINAL, OUTPUT, SEGMENTED: whether there is a skip, a first state, a last state; outputs, or
            states and updates; several segments.
        BLOCK_V, STAGES: columns of a state per tile, and stages of the loop's pipeline.
    """
    chunks = padded // CHUNK
    segment = tl.program_id(0) // blocks % segments
    row = (tl.program_id(0) // blocks // segments).to(tl.int64)
    batch, head = row // heads, row % heads
    group = head // repeats
    n, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    j = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    q += batch * q_batch + group * q_head
    k += batch * k_batch + group * k_head
    v += batch * v_batch + head * v_head
    path += row * padded
    factors = (batch * (heads // repeats) + group) * padded
    of_state = (i < K)[:, None] & (j < V)[None, :]
    matrix = i[:, None] * V + j[None, :]
    square = n[:, None] * CHUNK + n[None, :]
    if INITIAL:
        state = tl.load(initial + row * K * V + matrix, mask=of_state, other=0.0)
    else:
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    none = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    begin, end = 0, chunks
    if SEGMENTED:
        of_row = row * segments
        state = state_before_segment(state, sums + of_row * K * V, decays + of_row, matrix, of_state, K * V, segment)
        length = tl.cdiv(chunks, segments)
        begin, end = segment * length, tl.minimum((segment + 1) * length, chunks)
    for chunk in tl.range(begin, end, num_stages=STAGES):
        start = tl.cast(chunk, tl.int64) * CHUNK
        there = n < T - start
        ours = (batch * T + start) * heads + head
        tile = row * chunks + chunk
        of_keys, of_values = there[:, None] & (i < K)[None, :], there[:, None] & (j < V)[None, :]
        of_across = there[None, :] & (i < K)[:, None]
        across = tl.load(k + start * k_token + n[None, :] * k_token + i[:, None], mask=of_across, other=0.0)
        value = tl.load(v + start * v_token + n[:, None] * v_token + j[None, :], mask=of_values, other=0.0)
        query_factor, key_factor = 1.0, 1.0
        if DELTA:
            query_factor, key_factor = tl.load(q_factor + factors + start + n), tl.load(k_factor + factors + start + n)
        weight = tl.load(beta + ours + n * heads, mask=there, other=0.0).to(tl.float32)
        kept, to_last, kept_last = decays_of_chunk(path, first, start, n, T, PACKED)

        u = weight[:, None] * value.to(tl.float32)
        if DELTA:
            key = tl.load(k + start * k_token + n[:, None] * k_token + i[None, :], mask=of_keys, other=0.0)
            known = product(key, state, none, OPERAND) * (kept * key_factor)[:, None]
            u -= weight[:, None] * known
            u = product(tl.load(solved + tile * CHUNK * CHUNK + square), u, none, OPERAND)
        if OUTPUT:
            query = tl.load(q + start * q_token + n[:, None] * q_token + i[None, :], mask=of_keys, other=0.0)
            o = product(query, state, none, OPERAND)
            o *= (kept * query_factor)[:, None]
            if DELTA:
                m = tl.load(attending + tile * CHUNK * CHUNK + square)
            else:
                here = tl.load(path + start + n)
                above = ancestors_of_chunk(first, start, n, T, PACKED)
                decay = tl.where(above, tl.exp((here[:, None] - here[None, :]).to(tl.float32)), 0.0)
                m = product(query, across, tl.zeros([CHUNK, CHUNK], tl.float32), OPERAND) * decay
            o = product(m, u, o, OPERAND)
            if SKIP:
                o += tl.load(skip + head).to(tl.float32) * value.to(tl.float32)
            at = ours * V + n[:, None] * (heads * V) + j[None, :]
            tl.store(out + at, o.to(out.dtype.element_ty), mask=of_values)
        else:
            tl.store(states + tile * K * V + matrix, state.to(OPERAND), mask=of_state)
            if DELTA:
                at = tile * CHUNK * V + n[:, None] * V + j[None, :]
                tl.store(updates + at, u.to(OPERAND), mask=(j < V)[None, :])
        state = product(across, (to_last * key_factor)[:, None] * u, state * kept_last, OPERAND)
    if FINAL:
        tl.store(final + row * K * V + matrix, state, mask=of_state & (segment == segments - 1))


@kernel
def segments_kernel(
    keys, keys_batch, keys_token, keys_head, values, values_batch, values_token, values_head, beta, first, path, sums,
    decays, T, K, V, heads, repeats, padded, blocks, segments,
    BACKWARD: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Without the delta rule, each program takes BLOCK_V columns of a state and a segment of chunks: the state after it
    if the state before it is zero, and the decay of a state over it.

    Args:
        keys, keys_batch, keys_token, keys_head: keys (B, T, heads / repeats, K), with BACKWARD queries, and strides.
        values, values_batch, values_token, values_head: values (B, T, heads, V), with BACKWARD the gradients of the
            outputs, and strides.
        beta, first, path, T, K, V, heads, repeats, padded, blocks, segments, PACKED, OPERAND, CHUNK, BLOCK_K, BLOCK_V,
            STAGES: see `states_kernel`.
        sums, decays: float32 (rows, segments, K, V) and (rows, segments), these states and decays; written, except for
            the last segment.
        BACKWARD: whether states are gradients, and run from the last chunk to the first; the last segment is the one
            with the first chunk.
    """
    chunks = padded // CHUNK
    segment = tl.program_id(0) // blocks % (segments - 1)
    row = (tl.program_id(0) // blocks // (segments - 1)).to(tl.int64)
    batch, head = row // heads, row % heads
    n, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    block = tl.program_id(0) % blocks
    j = block * BLOCK_V + tl.arange(0, BLOCK_V)
    keys += batch * keys_batch + head // repeats * keys_head
    values += batch * values_batch + head * values_head
    path += row * padded
    state, decay = tl.zeros([BLOCK_K, BLOCK_V], tl.float32), 1.0
    length = tl.cdiv(chunks, segments)
    for done in tl.range(segment * length, (segment + 1) * length, num_stages=STAGES):
        chunk = done
        if BACKWARD:
            chunk = chunks - 1 - done
        start = tl.cast(chunk, tl.int64) * CHUNK
        there = n < T - start
        across = there[None, :] & (i < K)[:, None]
        key = tl.load(keys + start * keys_token + n[None, :] * keys_token + i[:, None], mask=across, other=0.0)
        of_values = there[:, None] & (j < V)[None, :]
        value = tl.load(values + (start + n[:, None]) * values_token + j[None, :], mask=of_values, other=0.0)
        kept, to_last, kept_last = decays_of_chunk(path, first, start, n, T, PACKED)
        if BACKWARD:
            factor = kept
        else:
            factor = tl.load(beta + (batch * T + start + n) * heads + head, mask=there, other=0.0) * to_last
        state = product(key, factor[:, None] * value.to(tl.float32), state * kept_last, OPERAND)
        decay *= kept_last
    of_segment = row * segments + segment
    of_state = (i < K)[:, None] & (j < V)[None, :]
    tl.store(sums + of_segment * K * V + i[:, None] * V + j[None, :], state, mask=of_state)
    tl.store(decays + of_segment, decay, mask=block == 0)
