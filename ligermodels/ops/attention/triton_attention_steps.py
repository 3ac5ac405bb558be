"""The steps of flash attention that the Triton kernels share: loading a tile, the online softmax over a tile of keys,
and the gradients of a tile of queries and of a tile of keys."""

from ligermodels.ops.runtime.dispatch import HAS_TRITON, tl, triton

LOG2_E = tl.constexpr(1.4426950408889634) if HAS_TRITON else None
LOWEST = tl.constexpr(-1e30) if HAS_TRITON else None
"""Below every finite score; the running maximum begins here, because -inf - -inf is NaN."""


@triton.jit
def load_tile(x, row, start, stride, rows, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Rows start + row of x, of DIM channels; zeros beyond `rows` if MASKED.

    Args:
        x: pointer to the first row.
        row: indices from 0.
        start: index of the first row of the tile.
        stride: elements from row to row.
        rows: number of rows.
        DIM: number of channels.
        BLOCK_DIM: a power of 2 from DIM on.
        MASKED: whether the tile may reach beyond `rows`.
    """
    d = tl.arange(0, BLOCK_DIM)[None, :]
    at = x + tl.cast(start, tl.int64) * stride + row[:, None] * stride + d
    if MASKED:
        return tl.load(at, mask=(start + row < rows)[:, None] & (d < DIM), other=0.0)
    if DIM != BLOCK_DIM:
        return tl.load(at, mask=d < DIM, other=0.0)
    return tl.load(at)


@triton.jit
def store_tile(x, row, start, stride, rows, values, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    d = tl.arange(0, BLOCK_DIM)[None, :]
    at = x + tl.cast(start, tl.int64) * stride + row[:, None] * stride + d
    tl.store(at, values.to(x.dtype.element_ty), mask=(start + row < rows)[:, None] & (d < DIM))


@triton.jit
def _scores(products, scale, softcap):
    """Scores to base 2 of q·k, and their derivative's factor that depends on q·k. `scale` and `softcap` are prepared by
    the host: without a softcap scores are scale * q·k, else softcap * tanh(x) with exp(2x) = exp2(scale * q·k)."""
    scores = products * scale
    slope = scores
    if softcap is not None:
        share = 1.0 / (1.0 + tl.exp2(scores))
        slope = 4.0 * share * (1.0 - share)
        scores = softcap * (1.0 - 2.0 * share)
    return scores, slope


@triton.jit
def attend(
    q, k, k_token, v, v_token, start, position, first, top, total, acc, S, scale, softcap,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax (https://arxiv.org/abs/1805.02867) over a tile of keys. Returns top, total and acc
    with these keys.

    Args:
        q: (BLOCK_T, BLOCK_DIM), a tile of queries in registers.
        k, k_token: pointer to the first key of a head, and elements from key to key.
        v, v_token: pointer to the first value of the head, and elements from value to value.
        start: index of the tile's first key.
        position, first: (BLOCK_T,), last and first key that each query sees.
        top, total: float32 (BLOCK_T,), highest score so far, and sum of the weights relative to it.
        acc: float32 (BLOCK_T, BLOCK_VALUE), weighted sum of values so far.
        S: number of keys.
        scale, softcap: of `_scores`.
        DIM, VALUE_DIM, BLOCK_S: channels of a key and of a value, and keys of a tile.
        BLOCK_DIM, BLOCK_VALUE: powers of 2 from DIM and from VALUE_DIM on.
        MASKED: whether some query may not see some key of the tile.
    """
    row = tl.arange(0, BLOCK_S)
    keys = load_tile(k, row, start, k_token, S, DIM, BLOCK_DIM, MASKED)
    scores, _ = _scores(tl.dot(q, tl.trans(keys), input_precision="ieee"), scale, softcap)
    if MASKED:
        key = (start + row)[None, :]
        scores = tl.where((key <= position[:, None]) & (key >= first[:, None]), scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - highest[:, None])
    decay = tl.exp2(top - highest)
    total = total * decay + tl.sum(weights, axis=1)
    values = load_tile(v, row, start, v_token, S, VALUE_DIM, BLOCK_VALUE, MASKED)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return highest, total, acc


@triton.jit
def key_ranges(position, first, BLOCK_S: tl.constexpr):
    """The tiles of keys that a tile of queries meets. Tiles in [begin, full) and [rest, end) are to be masked, tiles in
    [full, rest) are seen by every query as a whole.

    Args:
        position: index of the key of each query's own token.
        first: index of the first key that each query sees.
        BLOCK_S: keys of a tile.
    """
    begin = tl.min(first) // BLOCK_S * BLOCK_S
    end = tl.max(position) + 1
    rest = (tl.min(position) + 1) // BLOCK_S * BLOCK_S
    full = tl.minimum(tl.cdiv(tl.max(first), BLOCK_S) * BLOCK_S, rest)
    return begin, full, rest, end


@triton.jit
def query_gradient(
    q, dout, row_lse, row_delta, k, k_token, v, v_token, start, position, first, dq, S, scale, softcap,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the share of a tile of keys to the gradient of a tile of queries, up to softmax_scale. Returns dq with it.

    Args:
        q, dout: (BLOCK_T, BLOCK_DIM) and (BLOCK_T, BLOCK_VALUE), tiles of queries and of the result's gradient.
        row_lse, row_delta: float32 (BLOCK_T,), lse of each query, and the sum of out * dout over its channels.
        k, k_token, v, v_token, start, position, first, S, scale, softcap: see `attend`.
        dq: float32 (BLOCK_T, BLOCK_DIM), the gradient so far.
        DIM, VALUE_DIM, BLOCK_S, BLOCK_DIM, BLOCK_VALUE, MASKED: see `attend`.
    """
    row = tl.arange(0, BLOCK_S)
    keys = load_tile(k, row, start, k_token, S, DIM, BLOCK_DIM, MASKED)
    values = load_tile(v, row, start, v_token, S, VALUE_DIM, BLOCK_VALUE, MASKED)
    scores, slope = _scores(tl.dot(q, tl.trans(keys), input_precision="ieee"), scale, softcap)
    weights = tl.exp2(scores - row_lse[:, None])
    if MASKED:
        key = (start + row)[None, :]
        weights = tl.where((key <= position[:, None]) & (key >= first[:, None]), weights, 0.0)
    dscores = weights * (tl.dot(dout, tl.trans(values), input_precision="ieee") - row_delta[:, None])
    if softcap is not None:
        dscores *= slope
    return tl.dot(dscores.to(keys.dtype), keys, dq, input_precision="ieee")


@triton.jit
def key_gradient(
    keys, values, q, q_token, dout, dout_token, lse, delta, start, visible, dk, dv, T, scale, softcap,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Adds the share of a tile of queries to the gradients of a tile of keys, up to softmax_scale, and of values.
    Returns dk and dv with it. The scores are transposed: (keys, queries).

    Args:
        keys, values: (BLOCK_S, BLOCK_DIM) and (BLOCK_S, BLOCK_VALUE), tiles in registers.
        q, q_token, dout, dout_token: pointers to a head's first query and its gradient, and elements from row to row.
        lse, delta: pointers to float32 (T,), lse of each query, and the sum of out * dout over its channels.
        start: index of the tile's first query.
        visible: (BLOCK_S, BLOCK_T), the queries that see each key; None where every query sees every key.
        dk, dv: float32 (BLOCK_S, BLOCK_DIM) and (BLOCK_S, BLOCK_VALUE), the gradients so far.
        T: number of queries.
        BLOCK_T: queries of a tile.
        scale, softcap, DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE: see `attend`.
    """
    MASKED: tl.constexpr = visible is not None
    row = tl.arange(0, BLOCK_T)
    token = start + row
    queries = load_tile(q, row, start, q_token, T, DIM, BLOCK_DIM, MASKED)
    douts = load_tile(dout, row, start, dout_token, T, VALUE_DIM, BLOCK_VALUE, MASKED)
    if MASKED:
        row_lse = tl.load(lse + token, mask=token < T, other=0.0)
        row_delta = tl.load(delta + token, mask=token < T, other=0.0)
    else:
        row_lse, row_delta = tl.load(lse + token), tl.load(delta + token)
    scores, slope = _scores(tl.dot(keys, tl.trans(queries), input_precision="ieee"), scale, softcap)
    weights = tl.exp2(scores - row_lse[None, :])
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    dv = tl.dot(weights.to(douts.dtype), douts, dv, input_precision="ieee")
    dscores = weights * (tl.dot(values, tl.trans(douts), input_precision="ieee") - row_delta[None, :])
    if softcap is not None:
        dscores *= slope
    return tl.dot(dscores.to(queries.dtype), queries, dk, input_precision="ieee"), dv
