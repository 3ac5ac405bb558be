"""The Triton kernels of `decode_attention`: attention over a share of the cache slots, and the sum over shares."""

from ligermodels.ops.loss.logit_functions import effective
from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import kernel, wait_for_previous


@triton.jit
def _depths(tree, tree_node, node, T, BLOCK_NODE: tl.constexpr, BLOCK: tl.constexpr):
    """Number of new tokens that each node in `node` sees in the tree mask."""
    depth = tl.zeros((BLOCK_NODE,), dtype=tl.int32)
    for start in range(0, T, BLOCK):
        other = start + tl.arange(0, BLOCK)[None, :]
        sees = tl.load(tree + node[:, None] * tree_node + other, mask=(node < T)[:, None] & (other < T), other=0)
        depth += tl.sum(sees.to(tl.int32), axis=1)
    return depth


@triton.jit
def _attend(
    q, k, k_slot, v, v_slot, slot, exists, visible, top, total, acc, scale, softcap,
    CAPPED: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax (https://arxiv.org/abs/1805.02867), in powers of 2, over a tile of slots."""
    d = tl.arange(0, BLOCK_DIM)[None, :]
    within = exists[:, None] & (d < DIM)
    row = slot.to(tl.int64)[:, None]
    keys = tl.load(k + row * k_slot + d, mask=within, other=0.0)
    values = tl.load(v + row * v_slot + d, mask=within, other=0.0)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    scores, _ = effective(scores, scale, softcap, True, CAPPED)
    scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, axis=1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # the row has seen nothing yet
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return highest, total, acc


@kernel
def decode_attention_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_slot, k_head, v, v_batch, v_slot, v_head,
    cache_seqlens, tree, tree_batch, tree_node, sinks, out, log_sums, T, S, kv_heads, tiles, window, scale, softcap,
    GROUP: tl.constexpr, DIM: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    TREE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_SLOTS: tl.constexpr, BLOCK_DIM: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Each program takes the query heads of a key/value head for some tokens, as rows t * GROUP + g, and an even share
    of the tiles of slots that are filled and in the window. It writes their attention over these slots, and the base-2
    logarithm of the softmax denominator; the first share includes the sinks in it. Without SPLIT there is one share,
    and its attention is the result.

    Args:
        q, q_batch, q_token, q_head: queries (B, T, kv_heads * GROUP, DIM), and their strides in elements.
        k, k_batch, k_slot, k_head: cached keys (B, S, kv_heads, DIM), and their strides.
        v, v_batch, v_slot, v_head: cached values (B, S, kv_heads, DIM), and their strides.
        cache_seqlens: (B,), filled slots before the new tokens.
        tree, tree_batch, tree_node: bytes (B, T, T), the new tokens that each of them sees, or None; and its strides.
        sinks: (kv_heads * GROUP,), the score of one more slot of each head, whose value is zero, or None.
        out: (B, T, kv_heads * GROUP, shares, DIM), contiguous, attention of each share; written.
        log_sums: float32 (B, T, kv_heads * GROUP, shares); written with SPLIT, else None.
        T, S, kv_heads: numbers of new tokens, of slots, and of key/value heads.
        tiles: tiles of rows of a key/value head.
        window: slots that a token sees, its own included; read with WINDOWED.
        scale, softcap: see `decode_attention._score_factors`.
        GROUP, DIM: query heads per key/value head, and channels of a head.
        CAPPED, WINDOWED, TREE: whether there is a softcap, a window, a tree mask.
        SPLIT: whether there is more than one share.
        BLOCK_ROWS, BLOCK_SLOTS: rows and slots of a tile.
        BLOCK_DIM: power of 2 from DIM on.
    """
    wait_for_previous(PDL)
    tile = tl.program_id(0) % tiles
    head = (tl.program_id(0) // tiles % kv_heads).to(tl.int64)
    batch = (tl.program_id(0) // tiles // kv_heads).to(tl.int64)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = row // GROUP
    query_head = head * GROUP + row % GROUP
    exists = token < T
    d = tl.arange(0, BLOCK_DIM)[None, :]
    col = tl.arange(0, BLOCK_SLOTS)
    q += batch * q_batch
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    queries = tl.load(
        q + token[:, None] * q_token + query_head[:, None] * q_head + d, mask=exists[:, None] & (d < DIM), other=0.0
    )

    # The rows together see slots in [begin, end), each row the slots from `oldest` to `newest`. With a tree, this range
    # ends before the new tokens' slots; they are a second range.
    length = tl.load(cache_seqlens + batch).to(tl.int32)
    begin = tl.zeros((), dtype=tl.int32)
    if TREE:
        tree += batch * tree_batch
        end = tl.minimum(length, S)
        newest = tl.zeros((BLOCK_ROWS,), dtype=tl.int32) + (end - 1)
        position = newest
        if WINDOWED:
            position = length - 1 + _depths(tree, tree_node, token, T, BLOCK_ROWS, BLOCK_SLOTS)
            begin = tl.maximum(begin, length - window)
    else:
        end = tl.minimum(length + tl.minimum(T, (tile * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP + 1), S)
        position = length + token
        newest = tl.minimum(position, end - 1)
        if WINDOWED:
            begin = tl.maximum(begin, length + tile * BLOCK_ROWS // GROUP - window + 1)
    oldest = position - window + 1

    old_tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_SLOTS)
    all_tiles = old_tiles
    if TREE:
        all_tiles += tl.cdiv(T, BLOCK_SLOTS)
    low = tl.program_id(1) * all_tiles // tl.num_programs(1)
    high = (tl.program_id(1) + 1) * all_tiles // tl.num_programs(1)

    top = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_DIM), dtype=tl.float32)
    if sinks is not None:
        first = tl.program_id(1) == 0
        top = tl.where(first, tl.load(sinks + query_head).to(tl.float32) * 1.4426950408889634, top)  # log2(e)
        total = tl.where(first, 1.0, total)
    for start in range(begin + low * BLOCK_SLOTS, tl.minimum(begin + high * BLOCK_SLOTS, end), BLOCK_SLOTS):
        slot = start + col
        visible = slot[None, :] <= newest[:, None]
        if WINDOWED:
            visible = visible & (slot[None, :] >= oldest[:, None])
        top, total, acc = _attend(
            queries, k, k_slot, v, v_slot, slot, slot < end, visible, top, total, acc, scale, softcap,
            CAPPED, DIM, BLOCK_DIM,
        )  # fmt: skip
    if TREE:
        for start in range(tl.maximum(low - old_tiles, 0) * BLOCK_SLOTS, (high - old_tiles) * BLOCK_SLOTS, BLOCK_SLOTS):
            node = start + col
            slot = length + node
            there = (node < T) & (slot < S)
            sees = tree + token[:, None] * tree_node + node[None, :]
            visible = tl.load(sees, mask=exists[:, None] & there[None, :], other=0) != 0
            if WINDOWED:
                place = length - 1 + _depths(tree, tree_node, node, T, BLOCK_SLOTS, BLOCK_SLOTS)
                visible = visible & (place[None, :] >= oldest[:, None])
            top, total, acc = _attend(
                queries, k, k_slot, v, v_slot, slot, there, visible, top, total, acc, scale, softcap,
                CAPPED, DIM, BLOCK_DIM,
            )  # fmt: skip

    total = tl.where(total == 0, 1.0, total)  # for a row that saw nothing; NaN stays
    acc = acc / total[:, None]
    place = ((batch * T + token) * kv_heads * GROUP + query_head) * tl.num_programs(1) + tl.program_id(1)
    channels = DIM
    if SPLIT:
        tl.store(log_sums + place, top + tl.log2(total), mask=exists)
        written = high > low  # an empty share writes nothing, and is not read
        if sinks is not None:
            written = written | (tl.program_id(1) == 0)
        channels = tl.where(written, DIM, 0)
    tl.store(out + place[:, None] * DIM + d, acc.to(out.dtype.element_ty), mask=exists[:, None] & (d < channels))


@kernel
def combine_attention_kernel(
    parts, log_sums, out, SPLITS: tl.constexpr, DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Each program sums some channels of one query's attention over all shares of the slots, weighted by the shares'
    softmax denominators. A share without a slot that the query sees may hold anything.

    Args:
        parts: (rows, SPLITS, DIM), contiguous, the attention of each share.
        log_sums: float32 (rows, SPLITS), base-2 logarithms of the softmax denominators.
        out: (rows, DIM), contiguous; written.
        SPLITS: number of shares.
        DIM: channels of a head.
        BLOCK_SPLITS: power of 2 from SPLITS on.
        BLOCK: channels per program.
    """
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = row * SPLITS + split
    log_sum = tl.load(log_sums + place, mask=split < SPLITS, other=float("-inf"))
    top = tl.max(log_sum, axis=0)
    weight = tl.exp2(log_sum - tl.where(top == float("-inf"), 0.0, top))
    there = (split < SPLITS)[:, None] & (d < DIM)[None, :]  # read in one go, used or not
    part = tl.load(parts + place[:, None] * DIM + d[None, :], mask=there, other=0.0)
    part = tl.where((weight > 0)[:, None], part, 0.0)
    total = tl.sum(weight, axis=0)
    y = tl.sum(part * weight[:, None], axis=0) / tl.where(total == 0, 1.0, total)
    tl.store(out + row * DIM + d, y.to(out.dtype.element_ty), mask=d < DIM)
