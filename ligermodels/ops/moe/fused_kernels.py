"""Kernels of experts: products of rows that are sorted by expert, with gathers, gated activations and sums fused.

Rows are sorted by expert; expert e has the rows offsets[e - 1] to offsets[e]. Each tile has rows of one expert, and
`_place_tile` finds them from the offsets alone: the grid depends on no count, so nothing waits for the GPU, and experts
without rows have no tiles. Rows of a tile beyond its expert's last row read that last row again, and are not written.
Programs take tiles in turns, in an order in which tiles that run together read the same operands.

Operands may be float8: rows with a scale for each row, or for each block of a row, as long as a step of the product;
weights with one scale. The arguments of scales are None otherwise.
"""

from ligermodels.ops.float8.scaling import scale_and_inverse, store_row
from ligermodels.ops.glu.glu import gated_gradients, gated_values
from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import kernel


@triton.jit
def _tile_ends(offsets, E, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Int32 (BLOCK_E,): the number of tiles of rows up to and including each expert."""
    expert = tl.arange(0, BLOCK_E)
    end = tl.load(offsets + expert, mask=expert < E, other=0)
    start = tl.load(offsets + expert - 1, mask=(expert > 0) & (expert < E), other=0)
    return tl.cumsum((end - start + BLOCK_M - 1) // BLOCK_M, 0)


@triton.jit
def _place_tile(tile, tile_ends, offsets, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The expert, the rows (int32, the last one repeated), whether they exist, and the first column of a tile.

    GROUP tiles of rows take turns for each tile of columns, so that the operands of both stay in the L2 cache."""
    row_tiles = tl.max(tile_ends, 0)
    in_group = GROUP * columns
    first = tile // in_group * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    row_tile = first + tile % in_group % size
    expert = tl.sum((tile_ends <= row_tile).to(tl.int32), 0)
    before = tl.max(tl.where(tile_ends <= row_tile, tile_ends, 0), 0)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    row = start + (row_tile - before) * BLOCK_M + tl.arange(0, BLOCK_M)
    return expert.to(tl.int64), tl.minimum(row, end - 1), row < end, tile % in_group // size * BLOCK_N


@triton.jit
def _product(
    a, a_rows, block_scales, b, b_columns, b_stride, K, N, first_column, IN_K: tl.constexpr, IN_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Float32 (BLOCK_M, BLOCK_N): rows of a times columns of b.

    a_rows: offset of each row of a. block_scales: pointers to the scales of the first block of each row, or None.
    b_columns, b_stride: offset of each column of b, and stride along k. IN_K, IN_N: whether no tile extends beyond K or
    N."""
    k = tl.arange(0, BLOCK_K)
    a = a + a_rows[:, None] + k[None, :]
    b = b + b_columns[None, :] + (k * b_stride)[:, None]
    inside = (first_column + tl.arange(0, BLOCK_N) < N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        if IN_K:
            left = tl.load(a)
            right = tl.load(b) if IN_N else tl.load(b, mask=inside, other=0.0)
        else:
            left = tl.load(a, mask=(k < K - first)[None, :], other=0.0)
            right = tl.load(b, mask=(k < K - first)[:, None] & inside, other=0.0)
        if block_scales is None:
            total = tl.dot(left, right, total, input_precision="ieee")
        else:
            total += tl.dot(left, right) * tl.load(block_scales + first // BLOCK_K)[:, None]
        a += BLOCK_K
        b += BLOCK_K * b_stride
    return total


@triton.jit
def _index(index, row):
    """index[row] as int64, or the row itself if there is no index."""
    found = row
    if index is not None:
        found = tl.load(index + row)
    return found.to(tl.int64)


@triton.jit
def _store_blocks(
    words, scales, values, row, exists, first, N, MAX_EXPONENT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores float32 values (BLOCK_M, BLOCK), the columns from `first` on of rows of N, as float8 with a scale for each
    row of the block. words: int32 (rows, N / 4). scales: (rows, blocks)."""
    scale, inverse = scale_and_inverse(tl.max(tl.abs(values), 1).to(tl.int32, bitcast=True), MAX_EXPONENT)
    tl.store(scales + row.to(tl.int64) * tl.cdiv(N, BLOCK) + first // BLOCK, scale, mask=exists & (first < N))
    end = tl.max(row, 0) + 1
    row = tl.where(exists, row, end).to(tl.int64)
    store_row(words, values, inverse[:, None], row, first, end, N // 4, N // 4, MAX_EXPONENT, BLOCK_M, BLOCK)


@kernel
def gate_up_kernel(
    x, x_stride, x_scales, tokens, w, w_expert, w_row, w_column, w_scale, bias, offsets, z, h, h_scales,
    gate_multiplier, down_multiplier, limit, up_offset, N, K, E,
    ACTIVATION: tl.constexpr, IN_K: tl.constexpr, IN_N: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """z = x[tokens] w[e]^T + bias[e], pairs of gate and up, written unless it is None; and h, their activation: with
    h_scales in float8, as words, with blocks of BLOCK_N / 2 columns; z is then written."""
    tile_ends = _tile_ends(offsets, E, BLOCK_E, BLOCK_M)
    columns = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tl.max(tile_ends, 0) * columns, tl.num_programs(0)):
        expert, row, exists, first = _place_tile(tile, tile_ends, offsets, columns, BLOCK_M, BLOCK_N, GROUP)
        col = first + tl.arange(0, BLOCK_N)
        token = _index(tokens, row)
        total = _product(
            x, token * x_stride, None, w + expert * w_expert, col.to(tl.int64) * w_row, w_column, K, N, first,
            IN_K, IN_N, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if x_scales is not None:
            total *= (tl.load(x_scales + token) * tl.load(w_scale))[:, None]
        if bias is not None:
            total += tl.load(bias + expert * N + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        # The backward pass computes the activation again from rounded values.
        pairs = total.to(h.dtype.element_ty if h_scales is None else z.dtype.element_ty)
        if z is not None:
            place = row.to(tl.int64)[:, None] * N + col[None, :]
            tl.store(z + place, pairs, mask=exists[:, None] & (col < N)[None, :])
        g, u = tl.split(tl.reshape(pairs.to(tl.float32), (BLOCK_M, BLOCK_N // 2, 2)))
        y = gated_values(g, u, gate_multiplier, down_multiplier, limit, up_offset, ACTIVATION)
        if h_scales is None:
            half = first // 2 + tl.arange(0, BLOCK_N // 2)
            place = row.to(tl.int64)[:, None] * (N // 2) + half[None, :]
            tl.store(h + place, y.to(h.dtype.element_ty), mask=exists[:, None] & (half < N // 2)[None, :])
        else:
            _store_blocks(h, h_scales, y, row, exists, first // 2, N // 2, 8, BLOCK_M, BLOCK_N // 2)


@kernel
def product_kernel(
    a, a_scales, w, w_expert, w_row, w_column, w_scale, bias, places, offsets, out, N, K, E,
    IN_K: tl.constexpr, IN_N: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[places[r]] = a[r] w[e]^T + bias[e] for each row r of expert e. a_scales: of blocks of BLOCK_K columns."""
    tile_ends = _tile_ends(offsets, E, BLOCK_E, BLOCK_M)
    columns = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tl.max(tile_ends, 0) * columns, tl.num_programs(0)):
        expert, row, exists, first = _place_tile(tile, tile_ends, offsets, columns, BLOCK_M, BLOCK_N, GROUP)
        col = first + tl.arange(0, BLOCK_N)
        block_scales = None
        if a_scales is not None:
            block_scales = a_scales + row.to(tl.int64) * tl.cdiv(K, BLOCK_K)
        total = _product(
            a, row.to(tl.int64) * K, block_scales, w + expert * w_expert, col.to(tl.int64) * w_row, w_column, K, N,
            first, IN_K, IN_N, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if w_scale is not None:
            total *= tl.load(w_scale)
        if bias is not None:
            total += tl.load(bias + expert * N + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        place = _index(places, row)[:, None] * N + col[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=exists[:, None] & (col < N)[None, :])


@triton.jit
def _finish_gradient(
    d, weight, row, exists, first, z, dz, dz8, dz_scales, hw, need_part: tl.constexpr,
    gate_multiplier, down_multiplier, limit, up_offset, N,
    ACTIVATION: tl.constexpr, GRADIENT_EXPONENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Writes the columns from `first` on of the results of `down_gradient_kernel`; returns <d, activation(z)> of
    them."""
    col = first + tl.arange(0, BLOCK_N)
    pair = 2 * first + tl.arange(0, 2 * BLOCK_N)
    pairs = row.to(tl.int64)[:, None] * (2 * N) + pair[None, :]
    are_pairs = exists[:, None] & (pair < 2 * N)[None, :]
    values = tl.load(z + pairs, mask=are_pairs, other=0.0)
    gate, up = tl.split(tl.reshape(values, (BLOCK_M, BLOCK_N, 2)))
    g, u = gate.to(tl.float32), up.to(tl.float32)
    part = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if need_part or hw is not None:
        y = gated_values(g, u, gate_multiplier, down_multiplier, limit, up_offset, ACTIVATION)
        if need_part:
            part = tl.sum(d * y, 1)  # columns beyond N are zeros
        if hw is not None:
            if weight is not None:
                y *= weight[:, None]
            halves = row.to(tl.int64)[:, None] * N + col[None, :]
            tl.store(hw + halves, y.to(hw.dtype.element_ty), mask=exists[:, None] & (col < N)[None, :])
    if dz is not None or dz8 is not None:
        if weight is not None:
            d *= weight[:, None]
        of_gate, of_up = gated_gradients(d, g, u, gate_multiplier, down_multiplier, limit, up_offset, ACTIVATION)
        if dz is not None:
            both = tl.join(of_gate.to(dz.dtype.element_ty), of_up.to(dz.dtype.element_ty))
            tl.store(dz + pairs, tl.reshape(both, (BLOCK_M, 2 * BLOCK_N)), mask=are_pairs)
        if dz8 is not None:
            both = tl.reshape(tl.join(of_gate, of_up), (BLOCK_M, 2 * BLOCK_N))
            _store_blocks(dz8, dz_scales, both, row, exists, 2 * first, 2 * N, GRADIENT_EXPONENT, BLOCK_M, 2 * BLOCK_N)
    return part


@triton.jit
def _row_dots(a, a_rows, b, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Float32 (BLOCK_M,): <a[row], b> of rows of K channels."""
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        right = tl.load(b + k, mask=k < K, other=0.0).to(tl.float32)
        left = tl.load(a + a_rows[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0)
        total += tl.sum(left.to(tl.float32) * right[None, :], 1)
    return total


@kernel
def down_gradient_kernel(
    dy, dy_stride, dy_scales, tokens, places, w, w_expert, w_row, w_column, w_scale, bias, offsets, z, weights,
    dz, dz8, dz_scales, hw, dweights, gate_multiplier, down_multiplier, limit, up_offset, R, N, K, E,
    ACTIVATION: tl.constexpr, GRADIENT_EXPONENT: tl.constexpr, IN_K: tl.constexpr, IN_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """From the gradient dy[tokens] of the outputs, with d = dy[tokens] w[e] and the routing weight of each row:

    dz: weight * the gradient of the pairs z by d. hw: weight * activation(z). dweights: (tiles of columns, R), parts of
    the gradient <d, activation(z)> + <dy, bias[e]> of the routing weights. dz8: dz in float8, as words, with blocks of
    BLOCK_N columns, which are half of a tile's, and GRADIENT_EXPONENT of its format. Each is None if it is not needed.

    Half of the columns at a time are finished, because z and its gradient take four times the registers of d."""
    tile_ends = _tile_ends(offsets, E, BLOCK_E, BLOCK_M)
    columns = tl.cdiv(N, BLOCK_N)
    HALF: tl.constexpr = BLOCK_N // 2
    for tile in range(tl.program_id(0), tl.max(tile_ends, 0) * columns, tl.num_programs(0)):
        expert, row, exists, first = _place_tile(tile, tile_ends, offsets, columns, BLOCK_M, BLOCK_N, GROUP)
        token = _index(tokens, row)
        rows = token * dy_stride
        place = _index(places, row)
        weight = None
        if weights is not None:
            weight = tl.load(weights + place)
        left, right = None, None
        if dz is not None or dz8 is not None or dweights is not None:
            b_columns = (first + tl.arange(0, BLOCK_N)).to(tl.int64) * w_row
            d = _product(
                dy, rows, None, w + expert * w_expert, b_columns, w_column, K, N, first, IN_K, IN_N,
                BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if dy_scales is not None:
                d *= (tl.load(dy_scales + token) * tl.load(w_scale))[:, None]
            left, right = tl.split(tl.permute(tl.reshape(d, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        part = _finish_gradient(
            left, weight, row, exists, first, z, dz, dz8, dz_scales, hw, dweights is not None,
            gate_multiplier, down_multiplier, limit, up_offset, N, ACTIVATION, GRADIENT_EXPONENT, BLOCK_M, HALF,
        )  # fmt: skip
        part += _finish_gradient(
            right, weight, row, exists, first + HALF, z, dz, dz8, dz_scales, hw, dweights is not None,
            gate_multiplier, down_multiplier, limit, up_offset, N, ACTIVATION, GRADIENT_EXPONENT, BLOCK_M, HALF,
        )  # fmt: skip
        if dweights is not None:
            if bias is not None:  # noqa: SIM102  decided when the kernel is compiled; the next one, when it runs
                if first == 0:
                    dots = _row_dots(dy, rows, bias + expert * K, K, BLOCK_M, BLOCK_K)
                    if dy_scales is not None:
                        dots *= tl.load(dy_scales + token)
                    part += dots
            tl.store(dweights + (first // BLOCK_N).to(tl.int64) * R + place, part, mask=exists)


@kernel
def outer_kernel(
    a, a_stride, a_index, b, b_stride, b_index, offsets, out, M, N, E,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[e] (M, N): the sum of outer products of rows of a and b, over the rows of expert e. One program adds them in
    order, in float32."""
    across, down = tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M)
    for tile in range(tl.program_id(0), E * across * down, tl.num_programs(0)):
        expert = tile // (across * down)
        m = tile % down * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tile // down % across * BLOCK_N + tl.arange(0, BLOCK_N)
        start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets + expert)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for first in range(start, end, BLOCK_K):
            row = first + tl.arange(0, BLOCK_K)
            exists = (row < end)[:, None]
            row = tl.minimum(row, end - 1)
            left = tl.load(
                a + (_index(a_index, row) * a_stride)[:, None] + m[None, :], mask=exists & (m < M)[None, :], other=0.0
            )
            right = tl.load(
                b + (_index(b_index, row) * b_stride)[:, None] + n[None, :], mask=exists & (n < N)[None, :], other=0.0
            )
            total = tl.dot(tl.trans(left), right, total, input_precision="ieee")
        place = expert.to(tl.int64) * M * N + m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@kernel
def expert_sum_kernel(
    a, a_stride, tokens, places, weights, offsets, out, N, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[e] (N,): the sum of weight * a[tokens] over the rows of expert e, the gradient of its bias."""
    expert = tl.program_id(0)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    total = tl.zeros((BLOCK_K, BLOCK_N), dtype=tl.float32)
    for first in range(start, end, BLOCK_K):
        row = first + tl.arange(0, BLOCK_K)
        exists = (row < end)[:, None] & (col < N)[None, :]
        row = tl.minimum(row, end - 1)
        place = (_index(tokens, row) * a_stride)[:, None] + col[None, :]
        values = tl.load(a + place, mask=exists, other=0.0).to(tl.float32)
        if weights is not None:
            values *= tl.load(weights + _index(places, row))[:, None]
        total += values
    tl.store(out + expert.to(tl.int64) * N + col, tl.sum(total, 0).to(out.dtype.element_ty), mask=col < N)


@kernel
def combine_kernel(rows, weights, out, N, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    """out[n]: the sum of weight * row over the COPIES rows of token n, in their order."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for copy in tl.static_range(COPIES):
        row = token * COPIES + copy
        values = tl.load(rows + row * N + col, mask=col < N, other=0.0).to(tl.float32)
        if weights is not None:
            values *= tl.load(weights + row)
        total += values
    tl.store(out + token * N + col, total.to(out.dtype.element_ty), mask=col < N)
