"""Kernels for the gradients of the gated delta rule with a decay for each key channel; notation, precision and layouts
are the same as in the forward kernels.

With dO and the gradient dS of the state after a chunk,

    dU = M^T dO + K'' dS;  dX = T^T dU;  dV = beta dX                              `channel_states_backward_kernel`,
    dS before the chunk = kept_last dS + Q'^T dO - K'^T (beta dX)                  the last chunk first
    dM = dO U^T;  dA = -dX U^T                                                     `channel_squares_kernel`
    dQ' = dO S^T;  dK' = -beta dX S^T;  dK'' = U dS^T;  dkept_last = sum_v S dS    `channel_pairs_backward_kernel`
    dbeta = sum_v V dX - sum_c K' (dX S^T) + sum_j L dA

`channel_pairs_backward_kernel` continues from these to the gradients of the normalised q and k and of g. The factors of
a decay give the decay's gradient: for exp(G_i - G_j) the product of the pair, added to dG_i and subtracted from dG_j.
The decay of a token to itself is 1 and has no part in them, not even by rounding. `channel_finish_kernel` sums over the
heads of a group, and continues through the normalisation.
"""

from ligermodels.ops.linear_attention.delta_channels_forward import (
    decay_of_level,
    decays_of_channels,
    inverse_lengths,
    pairs_of_level,
)
from ligermodels.ops.linear_attention.delta_chunks_forward import ancestors_of_chunk, descendants_of_chunk, product
from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import kernel


@kernel
def channel_states_backward_kernel(
    reads, known, late, kept_last, solved, attending, dout, dout_batch, dout_token, dout_head, beta, dfinal, dv,
    dstates, dx, dinitial, T, K, V, heads, padded, blocks,
    OPERAND: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_V columns of the state of a head, from the last chunk to the first.

    Args:
        reads, known, late, kept_last, solved, attending, beta, T, K, heads, OPERAND, CHUNK: see `channel_pairs_kernel`.
        dout, dout_batch, dout_token, dout_head: gradient of the outputs (B, T, heads, V), and its strides.
        dfinal, dinitial: float32 (B, heads, K, V), contiguous, gradients of the last state, read with FINAL, and of
            the first, written with INITIAL.
        dv: (B, T, heads, V), contiguous; written.
        dstates, dx: the gradient of the state after each chunk, (B * heads, chunks, K, V), and dX of each chunk,
            (B * heads, chunks, CHUNK, V), of OPERAND; written.
        V, padded, blocks, BLOCK_K, BLOCK_V, STAGES: see `channel_states_kernel`.
        FINAL, INITIAL: whether the last state has a gradient, and the first one needs one.
    """
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
def channel_squares_kernel(
    v, v_batch, v_token, v_head, dout, dout_batch, dout_token, dout_head, beta, first, updates, dx, alike, da, dm,
    dweight, T, V, heads, chunks,
    PACKED: tl.constexpr, OPERAND: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes a chunk of a head.

    Args:
        v, v_batch, v_token, v_head: values (B, T, heads, V), and their strides.
        dout, dout_batch, dout_token, dout_head: gradient of the outputs (B, T, heads, V), and its strides.
        beta, first, alike, T, heads, chunks, PACKED, OPERAND, CHUNK: see `channel_pairs_kernel`.
        updates, dx: U and dX of each chunk, from `channel_states_kernel` and `channel_states_backward_kernel`.
        da, dm: beta dA, the gradient of L, and dM of each chunk, (B * heads, chunks, CHUNK, CHUNK) of OPERAND; written.
        dweight: float32 (B * heads, chunks, CHUNK), the terms of dbeta from V and L; written.
        V: channels of a value.
        BLOCK_V, STAGES: channels of values per tile, and stages of the loop's pipeline.
    """
    chunk, row = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    batch, head = row // heads, row % heads
    start, tile = tl.cast(chunk, tl.int64) * CHUNK, row * chunks + chunk
    n = tl.arange(0, CHUNK)
    is_token = n < T - start
    v += batch * v_batch + head * v_head + start * v_token
    dout += batch * dout_batch + head * dout_head + start * dout_token
    updates += tile * CHUNK * V
    dx += tile * CHUNK * V
    by_keys, attends = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    along = tl.zeros([CHUNK], tl.float32)
    for at in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        j = at + tl.arange(0, BLOCK_V)
        of_values, of_tile = is_token[:, None] & (j < V)[None, :], (j < V)[None, :]
        u_across = tl.load(updates + n[None, :] * V + j[:, None], mask=(j < V)[:, None], other=0.0)
        do = tl.load(dout + n[:, None] * dout_token + j[None, :], mask=of_values, other=0.0)
        attends = product(do, u_across, attends, OPERAND)
        d = tl.load(dx + n[:, None] * V + j[None, :], mask=of_tile, other=0.0)
        by_keys = product(d, u_across, by_keys, OPERAND)
        value = tl.load(v + n[:, None] * v_token + j[None, :], mask=of_values, other=0.0).to(tl.float32)
        along += tl.sum(d.to(tl.float32) * value, axis=1)
    above = ancestors_of_chunk(first, start, n, T, PACKED)
    square = tile * CHUNK * CHUNK + n[:, None] * CHUNK + n[None, :]
    tl.store(dm + square, tl.where(above, attends, 0.0).to(OPERAND))
    by_keys = tl.where(above & (n[:, None] > n[None, :]), -by_keys, 0.0)
    along += tl.sum(by_keys * tl.load(alike + square).to(tl.float32), axis=1)
    weight = tl.load(beta + (batch * T + start + n) * heads + head, mask=is_token, other=0.0).to(tl.float32)
    tl.store(da + square, (by_keys * weight[:, None]).to(OPERAND))
    tl.store(dweight + tile * CHUNK + n, along)


@kernel
def channel_pairs_backward_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, dout, dout_batch, dout_token, dout_head, path, beta,
    first, states, dstates, updates, dx, da, dm, dweight, dquery, dkey, dg, dbeta, T, K, V, heads, repeats, chunks,
    scale,
    PACKED: tl.constexpr, OPERAND: tl.constexpr, EPS: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes a chunk of a head.

    Args:
        q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, path, beta, first, T, K, heads, repeats, chunks,
            scale, PACKED, OPERAND, EPS, LEVELS, CHUNK, BLOCK_K: see `channel_pairs_kernel`.
        dout, dout_batch, dout_token, dout_head, da, dm, dweight, V, BLOCK_V, STAGES: see `channel_squares_kernel`.
        states, updates: from `channel_states_kernel`.
        dstates, dx: from `channel_states_backward_kernel`.
        dquery, dkey: float32 (B * heads, chunks, CHUNK, K), gradients of the normalised queries and keys; written.
        dg, dbeta: (B, T, heads, K) and (B, T, heads), contiguous; written.
    """
    chunk, row = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    batch, head = row // heads, row % heads
    start, tile = tl.cast(chunk, tl.int64) * CHUNK, row * chunks + chunk
    n = tl.arange(0, CHUNK)
    is_token = n < T - start
    q += batch * q_batch + head // repeats * q_head + start * q_token
    k += batch * k_batch + head // repeats * k_head + start * k_token
    dout += batch * dout_batch + head * dout_head + start * dout_token
    first_row, of_chunk, square = (batch * T + start) * heads + head, tile * CHUNK * K, n[:, None] * CHUNK + n[None, :]
    path, dquery, dkey = path + of_chunk, dquery + of_chunk, dkey + of_chunk
    states, dstates = states + tile * K * V, dstates + tile * K * V
    updates, dx = updates + tile * CHUNK * V, dx + tile * CHUNK * V
    da, dm = da + tile * CHUNK * CHUNK, dm + tile * CHUNK * CHUNK
    query_factor = inverse_lengths(q, q_token, n, is_token, K, EPS, BLOCK_K) * scale
    key_factor = inverse_lengths(k, k_token, n, is_token, K, EPS, BLOCK_K)
    weight = tl.load(beta + first_row + n * heads, mask=is_token, other=0.0).to(tl.float32)
    own = tl.load(dm + n * CHUNK + n).to(tl.float32)[:, None]
    along = tl.load(dweight + tile * CHUNK + n)
    zeros = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    for at in range(0, K, BLOCK_K):
        i = at + tl.arange(0, BLOCK_K)
        of_keys, of_out = is_token[:, None] & (i < K)[None, :], (i < K)[None, :]
        # gradients of a query; of a key that reads, as the later token of a pair; of a key that is written
        by_query, by_read, by_write, shrunk = zeros, zeros, zeros, tl.zeros([BLOCK_K], tl.float32)
        for column in tl.range(0, V, BLOCK_V, num_stages=STAGES):
            j = column + tl.arange(0, BLOCK_V)
            of_values, of_tile = is_token[:, None] & (j < V)[None, :], (j < V)[None, :]
            of_state, matrix = of_out & (j < V)[:, None], i[None, :] * V + j[:, None]
            state = tl.load(states + matrix, mask=of_state, other=0.0)
            do = tl.load(dout + n[:, None] * dout_token + j[None, :], mask=of_values, other=0.0)
            by_query = product(do, state, by_query, OPERAND)
            d = tl.load(dx + n[:, None] * V + j[None, :], mask=of_tile, other=0.0)
            by_read = product(d, state, by_read, OPERAND)
            dstate = tl.load(dstates + matrix, mask=of_state, other=0.0)
            update = tl.load(updates + n[:, None] * V + j[None, :], mask=of_tile, other=0.0)
            by_write = product(update, dstate, by_write, OPERAND)
            shrunk += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=0)
        query = tl.load(q + n[:, None] * q_token + i[None, :], mask=of_keys, other=0.0).to(tl.float32)
        key = tl.load(k + n[:, None] * k_token + i[None, :], mask=of_keys, other=0.0).to(tl.float32)
        query, key = query * query_factor[:, None], key * key_factor[:, None]
        out = n[:, None] * K + i[None, :]
        here = tl.load(path + out, mask=of_out, other=0.0)
        kept, to_last, over_chunk = decays_of_channels(here, path, i, first, start, n, T, K, PACKED)
        by_query *= kept
        by_read *= kept
        by_write *= to_last
        along -= tl.sum(by_read * key, axis=1)
        by_read *= -weight[:, None]
        shrunk = shrunk * over_chunk + tl.sum(by_write * key, axis=0)
        for level in tl.range(0, LEVELS, num_stages=1):
            decay = decay_of_level(here, path, i, n, level, K)
            pairs = pairs_of_level(n, level)
            decayed = (key * decay).to(OPERAND)
            of_query = tl.load(dm + square, mask=pairs, other=0.0)
            of_key = tl.load(da + square, mask=pairs, other=0.0)
            by_query += product(of_query, decayed, zeros, OPERAND) * decay
            by_read += product(of_key, decayed, zeros, OPERAND) * decay
            # Two sums: of a product that another one continues, Triton lets each half of the warps compute all.
            by_write += product(tl.trans(of_query), query * decay, zeros, OPERAND) * decay
            by_write += product(tl.trans(of_key), decayed, zeros, OPERAND) * decay
        # Loaded again: registers do not suffice for them in the layout of products too.
        query = tl.load(q + n[:, None] * q_token + i[None, :], mask=of_keys, other=0.0, volatile=True).to(tl.float32)
        key = tl.load(k + n[:, None] * k_token + i[None, :], mask=of_keys, other=0.0, volatile=True).to(tl.float32)
        query, key = query * query_factor[:, None], key * key_factor[:, None]
        tl.store(dquery + out, by_query + own * key, mask=of_out)
        tl.store(dkey + out, by_read + by_write + own * query, mask=of_out)
        # Parts of dG cancel in these sums, so it enters as the sum of two operands.
        dpath = query * by_query + key * (by_read - by_write)
        dpath += tl.where((n == CHUNK - 1)[:, None], shrunk[None, :], 0.0)
        after, half = descendants_of_chunk(first, start, n, T, PACKED).to(tl.float32), dpath.to(OPERAND)
        dgate = product(after, dpath - half.to(tl.float32), zeros, OPERAND)
        dgate = product(after, half, dgate, OPERAND)
        tl.store(dg + (first_row + n[:, None] * heads) * K + i[None, :], dgate.to(dg.dtype.element_ty), mask=of_keys)
    tl.store(dbeta + first_row + n * heads, along.to(dbeta.dtype.element_ty), mask=is_token)


@triton.jit
def before_normalisation(
    x, x_token, d, n, i, is_token, heads, chunks, K, scale, CHUNK: tl.constexpr, EPS: tl.constexpr
):
    """The gradient of the chunk `x` of queries or keys, (C, BLOCK_K), from the gradients d of scale x / |x|: d is the
    chunk's matrix of the first of `heads` heads, whose gradients are summed."""
    mask = is_token[:, None] & (i < K)[None, :]
    total = tl.zeros([n.shape[0], i.shape[0]], tl.float32)
    for head in tl.range(0, heads, num_stages=1):
        of_head = d + tl.cast(head, tl.int64) * chunks * CHUNK * K
        total += tl.load(of_head + n[:, None] * K + i[None, :], mask=mask, other=0.0)
    unit = tl.load(x + n[:, None] * x_token + i[None, :], mask=mask, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(unit * unit, axis=1) + EPS)
    unit *= factor[:, None]
    return (scale * factor)[:, None] * (total - unit * tl.sum(unit * total, axis=1)[:, None])


@kernel
def channel_finish_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, dquery, dkey, dq, dk, T, K, heads, repeats, chunks, scale,
    EPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program takes a chunk of a group of heads.

    Args:
        q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, T, K, heads, repeats, chunks, scale, EPS, CHUNK: see
            `channel_pairs_kernel`.
        dquery, dkey: from `channel_pairs_backward_kernel`.
        dq, dk: (B, T, heads / repeats, K), contiguous; written.
        BLOCK_K: a power of 2 from K on.
    """
    chunk, of_group = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    groups = heads // repeats
    batch, group = of_group // groups, of_group % groups
    start = tl.cast(chunk, tl.int64) * CHUNK
    n, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    is_token = n < T - start
    mask = is_token[:, None] & (i < K)[None, :]
    q += batch * q_batch + group * q_head + start * q_token
    k += batch * k_batch + group * k_head + start * k_token
    of_chunk = (of_group * repeats * chunks + chunk) * CHUNK * K
    out = ((batch * T + start + n[:, None]) * groups + group) * K + i[None, :]
    d = before_normalisation(
        q, q_token, dquery + of_chunk, n, i, is_token, repeats, chunks, K, scale, CHUNK, EPS
    )  # fmt: skip
    tl.store(dq + out, d.to(dq.dtype.element_ty), mask=mask)
    d = before_normalisation(k, k_token, dkey + of_chunk, n, i, is_token, repeats, chunks, K, 1.0, CHUNK, EPS)
    tl.store(dk + out, d.to(dk.dtype.element_ty), mask=mask)
