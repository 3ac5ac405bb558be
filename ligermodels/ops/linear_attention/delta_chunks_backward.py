"""Kernels for the gradients of the gated delta rule over sequences; notation, precision and layouts are the same as in
the forward kernels.

With dO and the gradient dS of the state after a chunk, the gradients of the chunk's values are

    dU = M^T dO + decay_last K dS;  dX = T^T dU;  dV = beta dX                        `states_backward_kernel`,
    dS before the chunk = kept_last dS + Q^T (kept dO) - K^T (beta kept dX)           the last chunk first
    dM = dO U^T * decay;  dA = -beta dX U^T * decay, of the products of keys in A     `pairs_kernel`
    dQ = dM K + kept dO S^T                                         `within_chunks_kernel`, `with_states_kernel`
    dK = dA K + dM^T Q + dA^T K - beta kept dX S^T + decay_last U dS^T

The factors of a decay give the decay's gradient. For exp(G_i - G_j) that is the product of the pair, added to dG_i and
subtracted from dG_j; it is the same number, so pairs within one token or one document cancel. For kept, decay_last and
kept_last it is the products of queries, keys and updates with states. `finish_kernel` sums dG over the tokens that a
gate decays, and continues through the normalisation of q and k.

q and k are unnormalised. Before the last kernel, dq and dk are gradients with the lengths of q and k held constant:
the lengths are factors of rows and columns.
"""

from ligermodels.ops.linear_attention.delta_chunks_forward import (
    ancestors_of_chunk,
    decays_of_chunk,
    product,
    state_before_segment,
)
from ligermodels.ops.runtime.dispatch import tl
from ligermodels.ops.runtime.launcher import kernel


@kernel
def states_backward_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, dout, dout_batch, dout_token, dout_head, beta, first,
    path, q_factor, k_factor, solved, attending, dfinal, sums, decays, dv, dstates, dx, dinitial, T, K, V, heads,
    repeats, padded, blocks, segments,
    DELTA: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr,
    FINAL: tl.constexpr, INITIAL: tl.constexpr, SEGMENTED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_V columns of the state of a head, from the last chunk of a segment to the first: it
    writes dS after each chunk and, with DELTA, dX and dV.

    Args:
        q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, beta, first, path, q_factor, k_factor, solved,
            attending, DELTA, PACKED, OPERAND, CHUNK, BLOCK_K: see `states_kernel`.
        dout, dout_batch, dout_token, dout_head: gradient of the outputs (B, T, heads, V), and its strides.
        dfinal, dinitial: float32 (B, heads, K, V), gradients of the last state, read, and of the first, written.
        sums, decays: from `segments_kernel` with BACKWARD; read with SEGMENTED.
        dv: (B, T, heads, V), contiguous; written with DELTA.
        dstates: gradient of the state after each chunk, (rows, chunks, K, V) of OPERAND; written.
        dx: dX of each chunk, (rows, chunks, CHUNK, V) of OPERAND; written with DELTA.
        T, K, V, heads, repeats, padded, blocks, segments: see `states_kernel`.
        FINAL, INITIAL, SEGMENTED: whether the last state has a gradient, the first one needs one, and there are several
            segments.
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
    dout += batch * dout_batch + head * dout_head
    path += row * padded
    factors = (batch * (heads // repeats) + group) * padded
    of_state = (i < K)[:, None] & (j < V)[None, :]
    matrix = i[:, None] * V + j[None, :]
    transposed = n[:, None] + n[None, :] * CHUNK
    if FINAL:
        dstate = tl.load(dfinal + row * K * V + matrix, mask=of_state, other=0.0)
    else:
        dstate = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    none = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    begin, end = 0, chunks
    if SEGMENTED:
        of_row = row * segments
        dstate = state_before_segment(dstate, sums + of_row * K * V, decays + of_row, matrix, of_state, K * V, segment)
        length = tl.cdiv(chunks, segments)
        begin, end = segment * length, tl.minimum((segment + 1) * length, chunks)
    for done in tl.range(begin, end, num_stages=STAGES):
        chunk = chunks - 1 - done
        start = tl.cast(chunk, tl.int64) * CHUNK
        there = n < T - start
        ours = (batch * T + start) * heads + head
        tile = row * chunks + chunk
        of_keys, of_values = there[:, None] & (i < K)[None, :], there[:, None] & (j < V)[None, :]
        across = there[None, :] & (i < K)[:, None]
        query_across = tl.load(q + start * q_token + n[None, :] * q_token + i[:, None], mask=across, other=0.0)
        do = tl.load(dout + start * dout_token + n[:, None] * dout_token + j[None, :], mask=of_values, other=0.0)
        query_factor = 1.0
        if DELTA:
            query_factor = tl.load(q_factor + factors + start + n)
        kept, to_last, kept_last = decays_of_chunk(path, first, start, n, T, PACKED)

        tl.store(dstates + tile * K * V + matrix, dstate.to(OPERAND), mask=of_state)
        if DELTA:
            key = tl.load(k + start * k_token + n[:, None] * k_token + i[None, :], mask=of_keys, other=0.0)
            key_across = tl.load(k + start * k_token + n[None, :] * k_token + i[:, None], mask=across, other=0.0)
            key_factor = tl.load(k_factor + factors + start + n)
            weight = tl.load(beta + ours + n * heads, mask=there, other=0.0).to(tl.float32)
            du = product(key, dstate, none, OPERAND) * (to_last * key_factor)[:, None]
            du = product(tl.load(attending + tile * CHUNK * CHUNK + transposed), do, du, OPERAND)
            d = product(tl.load(solved + tile * CHUNK * CHUNK + transposed), du, none, OPERAND)
            at = tile * CHUNK * V + n[:, None] * V + j[None, :]
            tl.store(dx + at, d.to(OPERAND), mask=(j < V)[None, :])
            d *= weight[:, None]
            tl.store(dv + ours * V + n[:, None] * (heads * V) + j[None, :], d.to(dv.dtype.element_ty), mask=of_values)
        by_query = (kept * query_factor)[:, None] * do.to(tl.float32)
        dstate = product(query_across, by_query, dstate * kept_last, OPERAND)
        if DELTA:
            dstate = product(key_across, -(kept * key_factor)[:, None] * d, dstate, OPERAND)
    if INITIAL:
        tl.store(dinitial + row * K * V + matrix, dstate, mask=of_state & (segment == segments - 1))


@kernel
def pairs_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head, dout, dout_batch,
    dout_token, dout_head, beta, first, path, q_factor, k_factor, updates, dx, da, dm, dpath, dbeta,
    T, K, V, heads, repeats, chunks,
    PACKED: tl.constexpr, OPERAND: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes a chunk of a head, and writes dA, dM, and the parts of dG and dbeta from values and products
    of pairs.

    Args:
        q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, beta, first, path, q_factor, k_factor, T, K, heads,
            repeats, chunks, PACKED, OPERAND, CHUNK, BLOCK_K: see `prepare_kernel`.
        v, v_batch, v_token, v_head: values (B, T, heads, V), and their strides.
        dout, dout_batch, dout_token, dout_head: gradient of the outputs (B, T, heads, V), and its strides.
        updates, dx: U and dX of each chunk, (rows, chunks, CHUNK, V) of OPERAND.
        da, dm: dA and dM of each chunk, (rows, chunks, CHUNK, CHUNK) of OPERAND; written.
        dpath, dbeta: float32 (rows, chunks * CHUNK), parts of dG and of the gradient of beta; written.
        V, BLOCK_V, STAGES: channels of a value, channels of them per tile, and stages of the loop's pipeline.
    """
    chunk, row = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    batch, head = row // heads, row % heads
    start = tl.cast(chunk, tl.int64) * CHUNK
    n, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    there = n < T - start
    q += batch * q_batch + head // repeats * q_head + start * q_token
    k += batch * k_batch + head // repeats * k_head + start * k_token
    v += batch * v_batch + head * v_head + start * v_token
    dout += batch * dout_batch + head * dout_head + start * dout_token
    tile = row * chunks + chunk
    updates += tile * CHUNK * V
    dx += tile * CHUNK * V
    alike, attends = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    along = tl.zeros([CHUNK], tl.float32)
    for at in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        j = at + tl.arange(0, BLOCK_V)
        of_values, of_tile = there[:, None] & (j < V)[None, :], (j < V)[None, :]
        do = tl.load(dout + n[:, None] * dout_token + j[None, :], mask=of_values, other=0.0)
        u_across = tl.load(updates + n[None, :] * V + j[:, None], mask=(j < V)[:, None], other=0.0)
        attends = product(do, u_across, attends, OPERAND)
        d = tl.load(dx + n[:, None] * V + j[None, :], mask=of_tile, other=0.0)
        alike = product(d, u_across, alike, OPERAND)
        value = tl.load(v + n[:, None] * v_token + j[None, :], mask=of_values, other=0.0).to(tl.float32)
        along += tl.sum(d.to(tl.float32) * value, axis=1)
    factors = (row // repeats * chunks + chunk) * CHUNK + n
    query_factor, key_factor = tl.load(q_factor + factors), tl.load(k_factor + factors)
    of_row = (row * chunks + chunk) * CHUNK + n
    here = tl.load(path + of_row)
    above = ancestors_of_chunk(first, start, n, T, PACKED)
    decay = tl.where(above, tl.exp((here[:, None] - here[None, :]).to(tl.float32)), 0.0) * key_factor[None, :]
    square = tile * CHUNK * CHUNK + n[:, None] * CHUNK + n[None, :]
    attends *= decay * query_factor[:, None]
    tl.store(dm + square, attends.to(OPERAND))
    of_keys = there[:, None] & (i < K)[None, :]
    key = tl.load(k + n[:, None] * k_token + i[None, :], mask=of_keys, other=0.0)
    query = tl.load(q + n[:, None] * q_token + i[None, :], mask=of_keys, other=0.0)
    key_across, below, none = tl.trans(key), n[:, None] > n[None, :], tl.zeros([CHUNK, CHUNK], tl.float32)
    of_decay = tl.where(below, attends * product(query, key_across, none, OPERAND), 0.0)
    alike = tl.where(below, alike * decay * -key_factor[:, None], 0.0)
    weight = tl.load(beta + (batch * T + start + n) * heads + head, mask=there, other=0.0).to(tl.float32)
    tl.store(da + square, (alike * weight[:, None]).to(OPERAND))
    alike *= product(key, key_across, none, OPERAND)
    tl.store(dbeta + of_row, along + tl.sum(alike, axis=1))
    of_decay += alike * weight[:, None]
    tl.store(dpath + of_row, tl.sum(of_decay, axis=1) - tl.sum(of_decay, axis=0))


@kernel
def within_chunks_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, da, dm, dq, dk, T, K, heads, repeats, chunks, blocks,
    DELTA: tl.constexpr, OPERAND: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_K channels of a chunk of a group of heads, and the terms of dQ and dK that come from dM
    and, with DELTA, from dA.

    Args:
        q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, T, K, chunks, DELTA, OPERAND, CHUNK,
            BLOCK_K: see `prepare_kernel`.
        da, dm: as `pairs_kernel` writes them; without DELTA, dm alone.
        dq, dk: float32 (B * heads / repeats, chunks * CHUNK, K), contiguous; written.
        heads, repeats, blocks: matrices dM of a chunk, these of a key head, and blocks of BLOCK_K channels of a key.
    """
    block = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks % chunks
    of_group = (tl.program_id(0) // blocks // chunks).to(tl.int64)
    groups = heads // repeats
    batch, group = of_group // groups, of_group % groups
    start = tl.cast(chunk, tl.int64) * CHUNK
    n, i = tl.arange(0, CHUNK), block * BLOCK_K + tl.arange(0, BLOCK_K)
    of_keys = (n < T - start)[:, None] & (i < K)[None, :]
    q += batch * q_batch + group * q_head + start * q_token
    k += batch * k_batch + group * k_head + start * k_token
    query = tl.load(q + n[:, None] * q_token + i[None, :], mask=of_keys, other=0.0)
    key = tl.load(k + n[:, None] * k_token + i[None, :], mask=of_keys, other=0.0)
    dquery, dkey = tl.zeros([CHUNK, BLOCK_K], tl.float32), tl.zeros([CHUNK, BLOCK_K], tl.float32)
    plain, transposed = n[:, None] * CHUNK + n[None, :], n[:, None] + n[None, :] * CHUNK
    for head in tl.range(group * repeats, group * repeats + repeats, num_stages=1):
        row = batch * heads + head
        square = (row * chunks + chunk) * CHUNK * CHUNK
        dquery = product(tl.load(dm + square + plain), key, dquery, OPERAND)
        dkey = product(tl.load(dm + square + transposed), query, dkey, OPERAND)
        if DELTA:
            dkey = product(tl.load(da + square + plain), key, dkey, OPERAND)
            dkey = product(tl.load(da + square + transposed), key, dkey, OPERAND)
    place, inside = n[:, None] * K + i[None, :], (i < K)[None, :]
    of_tokens = (of_group * chunks + chunk) * CHUNK * K
    tl.store(dq + of_tokens + place, dquery, mask=inside)
    tl.store(dk + of_tokens + place, dkey, mask=inside)


@kernel
def with_states_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head, dout, dout_batch,
    dout_token, dout_head, beta, first, path, q_factor, k_factor, states, dstates, updates, dx, dq, dk, dpath, dbeta,
    T, K, V, heads, repeats, chunks, blocks, dpath_block,
    DELTA: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds to the dq and dk of `within_chunks_kernel` the terms that come from states and their gradients.

    Args:
        q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, beta, first, path, q_factor, k_factor, T, K, heads,
            repeats, chunks, DELTA, PACKED, OPERAND, CHUNK, BLOCK_K: see `prepare_kernel`.
        v, v_batch, v_token, v_head: values (B, T, heads, V), and their strides. Without DELTA they stand in for the
            updates beta V, and beta multiplies the products.
        dout, dout_batch, dout_token, dout_head: gradient of the outputs (B, T, heads, V), and its strides.
        states, updates, dstates, dx: from `states_kernel` and `states_backward_kernel`; updates and dx with DELTA.
        dq, dk: the results of `within_chunks_kernel`; added to.
        dpath, dbeta: float32 (blocks, rows, chunks * CHUNK), the blocks' parts of dG and of the gradient of beta;
            written.
        V, blocks: channels of a value, and blocks of BLOCK_K channels of a key.
        dpath_block: elements of a block's part of dpath.
        BLOCK_V, STAGES: columns of a state per tile, and stages of the loop's pipeline.
    """
    block = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks % chunks
    of_group = (tl.program_id(0) // blocks // chunks).to(tl.int64)
    groups = heads // repeats
    batch, group = of_group // groups, of_group % groups
    start = tl.cast(chunk, tl.int64) * CHUNK
    n, i = tl.arange(0, CHUNK), block * BLOCK_K + tl.arange(0, BLOCK_K)
    there = n < T - start
    of_keys = there[:, None] & (i < K)[None, :]
    q += batch * q_batch + group * q_head + start * q_token
    k += batch * k_batch + group * k_head + start * k_token
    v += batch * v_batch + start * v_token
    dout += batch * dout_batch + start * dout_token
    of_tokens = (of_group * chunks + chunk) * CHUNK
    key = tl.load(k + n[:, None] * k_token + i[None, :], mask=of_keys, other=0.0).to(tl.float32)
    query = tl.load(q + n[:, None] * q_token + i[None, :], mask=of_keys, other=0.0).to(tl.float32)
    query_factor, key_factor = 1.0, 1.0
    if DELTA:
        query_factor, key_factor = tl.load(q_factor + of_tokens + n), tl.load(k_factor + of_tokens + n)
    none, of_none = tl.zeros([CHUNK, BLOCK_K], tl.float32), tl.zeros([CHUNK], tl.float32)
    dquery, dkey, found, dweight = none, none, of_none, of_none
    value_blocks = tl.cdiv(V, BLOCK_V)
    # One loop over the heads and their blocks of values: a loop of few blocks inside of another is not pipelined.
    for step in tl.range(0, repeats * value_blocks, num_stages=STAGES):
        at = step % value_blocks * BLOCK_V
        head = group * repeats + step // value_blocks
        row = batch * heads + head
        tile = row * chunks + chunk
        j = at + tl.arange(0, BLOCK_V)
        of_values, of_tile = there[:, None] & (j < V)[None, :], (j < V)[None, :]
        of_state, matrix = (i < K)[None, :] & (j < V)[:, None], i[None, :] * V + j[:, None]
        row_of_tile = tile * CHUNK * V + n[:, None] * V + j[None, :]
        state = tl.load(states + tile * K * V + matrix, mask=of_state, other=0.0)
        dstate = tl.load(dstates + tile * K * V + matrix, mask=of_state, other=0.0)
        do = tl.load(dout + head * dout_head + n[:, None] * dout_token + j[None, :], mask=of_values, other=0.0)
        weight = tl.load(beta + (batch * T + start + n) * heads + head, mask=there, other=0.0).to(tl.float32)
        kept, to_last, kept_last = decays_of_chunk(path + row * chunks * CHUNK, first, start, n, T, PACKED)
        found, dweight = tl.where(at == 0, of_none, found), tl.where(at == 0, of_none, dweight)
        by_query = product(do, state, none, OPERAND) * (kept * query_factor)[:, None]
        dquery += by_query
        found += tl.sum(by_query * query, axis=1)
        if DELTA:
            update = tl.load(updates + row_of_tile, mask=of_tile, other=0.0)
        else:
            update = tl.load(v + head * v_head + n[:, None] * v_token + j[None, :], mask=of_values, other=0.0)
        by_update = product(update, dstate, none, OPERAND) * (to_last * key_factor)[:, None]
        last = tl.sum(by_update * key, axis=1)
        if DELTA:
            d = tl.load(dx + row_of_tile, mask=of_tile, other=0.0)
            by_key = product(d, state, none, OPERAND) * (kept * key_factor)[:, None]
            of_weight = -tl.sum(by_key * key, axis=1)
            found += weight * of_weight
            dkey += by_update - by_key * weight[:, None]
        else:
            of_weight = last
            last *= weight
            dkey += by_update * weight[:, None]
        dweight += of_weight
        shrunk = tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1), axis=0)
        found += tl.where(n == CHUNK - 1, tl.sum(last, axis=0) + kept_last * shrunk, 0.0) - last
        of_row = block * dpath_block + (row * chunks + chunk) * CHUNK + n
        tl.store(dpath + of_row, found)
        tl.store(dbeta + of_row, dweight)
    dq += of_tokens * K
    dk += of_tokens * K
    place, inside = n[:, None] * K + i[None, :], (i < K)[None, :]
    tl.store(dq + place, dquery + tl.load(dq + place, mask=inside, other=0.0), mask=inside)
    tl.store(dk + place, dkey + tl.load(dk + place, mask=inside, other=0.0), mask=inside)


@kernel
def finish_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, first, q_factor, k_factor, dquery, dkey, dpath, dweight,
    dq, dk, dg, dbeta, T, K, heads, repeats, chunks, slices, parts, dpath_block, scale,
    DELTA: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program takes a chunk of up to HEADS heads of a group, a slice; the first slice writes dq and dk.

    Args:
        q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, first, q_factor, k_factor, scale, T, K, heads,
            repeats, chunks, DELTA, PACKED, CHUNK, BLOCK_K: see `prepare_kernel`.
        dquery, dkey: the dq and dk of `with_states_kernel`.
        dpath, dweight: float32 (parts, rows, chunks * CHUNK), of dpath_block elements each: parts of dG and dbeta.
        dq, dk, dg, dbeta: (B, T, heads / repeats, K) and (B, T, heads), contiguous; written.
        slices: of the heads of a group.
    """
    chunk, of_slice = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    groups = heads // repeats
    of_group, slice_begin = of_slice // slices, of_slice % slices * HEADS
    batch, group = of_group // groups, of_group % groups
    start = tl.cast(chunk, tl.int64) * CHUNK
    n, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    there = n < T - start
    inside = there[:, None] & (i < K)[None, :]
    of_tokens = (of_group * chunks + chunk) * CHUNK
    place, of_out = n[:, None] * K + i[None, :], n[:, None] * (groups * K) + i[None, :]
    q += batch * q_batch + group * q_head + start * q_token
    k += batch * k_batch + group * k_head + start * k_token
    dq += ((batch * T + start) * groups + group) * K
    dk += ((batch * T + start) * groups + group) * K
    if slice_begin == 0:
        d = tl.load(dquery + of_tokens * K + place, mask=inside, other=0.0)
        if DELTA:
            x = tl.load(q + n[:, None] * q_token + i[None, :], mask=inside, other=0.0).to(tl.float32)
            factor = tl.load(q_factor + of_tokens + n) / scale
            d -= x * (factor * factor * tl.sum(x * d, axis=1))[:, None]
        tl.store(dq + of_out, d.to(dq.dtype.element_ty), mask=inside)
        d = tl.load(dkey + of_tokens * K + place, mask=inside, other=0.0)
        if DELTA:
            x = tl.load(k + n[:, None] * k_token + i[None, :], mask=inside, other=0.0).to(tl.float32)
            factor = tl.load(k_factor + of_tokens + n)
            d -= x * (factor * factor * tl.sum(x * d, axis=1))[:, None]
        tl.store(dk + of_out, d.to(dk.dtype.element_ty), mask=inside)

    above = ancestors_of_chunk(first, start, n, T, PACKED)
    begin, end = group * repeats + slice_begin, group * repeats + tl.minimum(slice_begin + HEADS, repeats)
    for head in tl.range(begin, end, num_stages=1):
        of_row = ((batch * heads + head) * chunks + chunk) * CHUNK + n
        found, weight = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        for part in range(parts):
            found += tl.load(dpath + part * dpath_block + of_row)
            weight += tl.load(dweight + part * dpath_block + of_row)
        gate = tl.sum(tl.where(above, found[:, None], 0.0), axis=0)  # sum over the tokens after it
        ours = (batch * T + start + n) * heads + head
        tl.store(dg + ours, gate.to(dg.dtype.element_ty), mask=there)
        tl.store(dbeta + ours, weight.to(dbeta.dtype.element_ty), mask=there)
