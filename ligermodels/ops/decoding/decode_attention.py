"""Attention of a few new tokens over a preallocated cache, for sequences of different lengths.

Everything that varies from step to step is read from device memory, so that one CUDA graph serves every step. The
filled slots of a sequence are split among several programs (flash-decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html), and a second kernel combines their results.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.attention.attention import attention
from ligermodels.ops.loss.token_losses_kernels import effective
from ligermodels.ops.runtime.dispatch import num_sms, power_of_2_above, tl, triton, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake, reject_dtensors
from ligermodels.ops.runtime.tensors import check_caches, check_tensor

MAX_KERNEL_HEAD_DIM = 512  # a tile of rows is held in registers; the reference serves wider heads
MIN_ROWS = 16  # of a tile of tensor cores
MAX_ROWS = 128  # query heads times tokens per program: the more, the less often the cache is read
SLOT_BYTES = 16384  # of a tile of keys, and of a tile of values
MAX_SLOTS = 64  # per tile: smaller ones split more evenly
MAX_SPLITS = 128
MIN_TILES = 4  # of slots per program, where there are more than one for each multiprocessor
COMBINED = 4096  # elements per program of the second kernel
LOG2_E = math.log2(math.e)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    tree_mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention of T new tokens of each sequence over its cache slots, which include the new keys and values.

    The cached tokens of sequence b are in slots [0, cache_seqlens[b]), the keys and values of its new tokens in the T
    slots after these. A CUDA graph can hold the call. The cost is proportional to the filled slots (within the window),
    not to the size of the cache. No gradient.

    q: (B, T, Hq, D), floating, any strides.
    k_cache, v_cache: (B, S, Hkv, D) of q's dtype with Hkv dividing Hq and S >= T; any strides, but the last dimension
        contiguous. Slots that no token sees may hold anything, even NaN.
    cache_seqlens: int32 or int64 (B,), at most S - T. This is not checked, but no slot past the end is read.
    softmax_scale: factor on q·k; D ** -0.5 when None.
    softcap: scores become softcap * tanh(scores / softcap) before masking (Gemma 2).
    tree_mask: bool (T, T) or (B, T, T), True at [t, u] if new token t sees new token u; each also sees all slots before
        the new ones. None is causal: new token t sees the slots up to its own, cache_seqlens + t.
    window: a token at position p sees only positions above p - window. The position of a token is its slot, except for
        new tokens under a tree_mask: t is at cache_seqlens + (number of new tokens that t sees, t included) - 1.
    sinks: floating (Hq,), one more logit in each query head's softmax denominator: see `ops.attention`.

    Returns contiguous (B, T, Hq, D) in q's dtype, computed in float32 (float64 for float64). A token that sees nothing
    gets zeros. Equal bits in every run.
    Raises InputError if shapes, dtypes or devices do not fit, or if autograd would need a gradient.
    """
    _check(q, k_cache, v_cache, cache_seqlens, window, tree_mask, sinks)
    softmax_scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    if not use_kernels(q, k_cache) or q.shape[3] > MAX_KERNEL_HEAD_DIM:
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": softcap, "sinks": sinks}
        batch, tokens, heads, _ = q.shape
        if q.is_cpu and batch and not (is_fake(q) or torch.compiler.is_compiling()):
            lengths = cache_seqlens.tolist()  # read at no cost
            end = max(lengths) + tokens
            if tokens == 1 and min(lengths) == max(lengths):
                seen = slice(0 if window is None else max(0, end - window), end)
                k, v = k_cache[:, seen], v_cache[:, seen]
                if softcap is not None or sinks is not None:
                    return attention(q, k, v, **options).contiguous()
                gqa = heads != k.shape[2]
                q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                out = F.scaled_dot_product_attention(q, k, v, scale=softmax_scale, enable_gqa=gqa)
                return out.transpose(1, 2).contiguous()
            k_cache, v_cache = k_cache[:, :end], v_cache[:, :end]
        options |= {"window": window, "tree_mask": tree_mask}
        return decode_attention_reference(q, k_cache, v_cache, cache_seqlens, **options)
    return _decode_attention(q, k_cache, v_cache, cache_seqlens, tree_mask, softmax_scale, window, softcap, sinks)


def decode_attention_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, *, softmax_scale: float | None = None,
    window: int | None = None, softcap: float | None = None, tree_mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The specification of `decode_attention`, in plain torch; it reads the whole cache."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    visible = _visible(q, k_cache, cache_seqlens, window, tree_mask)
    unseen = ~visible.any(1)[:, :, None, None]
    k, v = (cache.to(dtype).masked_fill(unseen, 0) for cache in (k_cache, v_cache))
    grouped = q.to(dtype).unflatten(2, (k.shape[2], q.shape[2] // k.shape[2]))
    softmax_scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bthgd,bshd->bthgs", grouped, k) * softmax_scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = ~visible[:, :, None, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(dtype).view(*scores.shape[2:4], 1).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]].masked_fill(hidden, 0)  # that of nothing is NaN
    return torch.einsum("bthgs,bshd->bthgd", weights, v).reshape(q.shape).to(q.dtype).contiguous()


def _visible(q: Tensor, k_cache: Tensor, cache_seqlens: Tensor, window: int | None, tree_mask: Tensor | None) -> Tensor:
    """Bool (B, T, S): which slots each token sees."""
    (B, T), S = q.shape[:2], k_cache.shape[1]
    slot, length = torch.arange(S, device=q.device).expand(B, S), cache_seqlens[:, None].long()
    if tree_mask is None:
        place, position = slot, length + torch.arange(T, device=q.device)  # of slots (B, S) and of new tokens (B, T)
        visible = place[:, None] <= position[:, :, None]
    else:
        node = slot - length
        new = (node >= 0) & (node < T)
        node = node.clamp(0, T - 1)
        mask = tree_mask.expand(B, T, T)
        position = length + mask.sum(-1) - 1
        place = torch.where(new, position.gather(1, node), slot)
        visible = (slot < length)[:, None] | (new[:, None] & mask.gather(2, node[:, None].expand(B, T, S)))
    if window is not None:
        visible = visible & (place[:, None] > position[:, :, None] - window)
    return visible


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, window: int | None, tree_mask: Tensor | None,
    sinks: Tensor | None,
) -> None:  # fmt: skip
    op = "decode_attention"
    reject_dtensors(op, q, k_cache, v_cache, sinks)
    check_tensor(op, "q", q, ("B", "T", "Hq", "D"), q.device)
    B, T, heads, head_dim = q.shape
    check_caches(op, k_cache, v_cache, (B, "S", "Hkv", head_dim), q)
    S, kv_heads = k_cache.shape[1:3]
    if S < T or 0 in (heads, kv_heads, head_dim) or heads % kv_heads:
        raise InputError(
            f"{op}: k_cache must have at least {T} slots, and a number of heads that divides q's {heads}; "
            f"got q {tuple(q.shape)} and k_cache {tuple(k_cache.shape)}"
        )
    check_tensor(op, "cache_seqlens", cache_seqlens, (B,), q.device, torch.int32, torch.int64)
    if tree_mask is not None:
        shape = (T, T) if tree_mask.dim() == 2 else (B, T, T)
        check_tensor(op, "tree_mask", tree_mask, shape, q.device, torch.bool)
    if sinks is not None:
        check_tensor(op, "sinks", sinks, (heads,), q.device)
    if window is not None and window < 1:
        raise InputError(f"{op}: window must be at least 1, got {window}")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k_cache, v_cache, sinks)):
        raise InputError("decode_attention has no gradient: call it under torch.no_grad(), or use ops.attention")


@triton.jit
def _depths(tree, tree_node, node, T, BLOCK_NODE: tl.constexpr, BLOCK: tl.constexpr):
    """The number of new tokens that each of these nodes sees."""
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
def _decode_attention_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_slot, k_head, v, v_batch, v_slot, v_head,
    cache_seqlens, tree, tree_batch, tree_node, sinks, out, log_sums, T, S, kv_heads, tiles, window, scale, softcap,
    GROUP: tl.constexpr, DIM: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    TREE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_SLOTS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Each program takes the query heads of a kv head for some tokens, as rows t * GROUP + g, and an even share of the
    tiles of slots that are filled and in the window. It writes their attention over these slots, and the base-2
    logarithm of the softmax denominator, of which the first share has the sinks. Without SPLIT there is one share, and
    this is the result."""
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

    # Some row sees slots in [begin, end), each row those from `oldest` to `newest`. With a tree, this range has the
    # slots before the new ones, which are a second range.
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
def _combine_attention_kernel(
    parts, log_sums, out, SPLITS: tl.constexpr, DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program sums some channels of one query's attention over all shares of the slots, weighted by the shares'
    softmax denominators. A share of which the query saw nothing may hold anything."""
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


@custom_op()
def _decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, tree_mask: Tensor | None,
    softmax_scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    out = q.new_empty(q.shape)
    if is_fake(out) or not out.numel():
        return out
    (B, T, heads, head_dim), S, kv_heads = q.shape, k_cache.shape[1], k_cache.shape[2]
    window = None if window is None or window >= S else window
    plan = _plan(B, T * heads // kv_heads, kv_heads, head_dim, S if window is None else min(S, window + T), q)
    block_rows, block_slots, block_dim, splits = plan
    tiles = -(-T * heads // kv_heads // block_rows)
    num_warps = 8 if block_rows * block_dim >= 8192 or q.dtype == torch.float32 else 4
    parts, log_sums = out, None
    if splits > 1:
        parts = q.new_empty((out.numel() // head_dim, splits, head_dim), dtype=torch.float32)
        log_sums = q.new_empty(parts.shape[:2], dtype=torch.float32)

    q = q if q.stride(3) == 1 else q.contiguous()
    tree = None if tree_mask is None else tree_mask.expand(B, T, T).view(torch.uint8)
    if tree is not None and tree.stride(2) != 1:
        tree = tree.contiguous()
    _decode_attention_kernel[(B * kv_heads * tiles, splits)](
        q, *q.stride()[:3], k_cache, *k_cache.stride()[:3], v_cache, *v_cache.stride()[:3],
        cache_seqlens.contiguous(), tree, *((0, 0) if tree is None else tree.stride()[:2]),
        None if sinks is None else sinks.contiguous(), parts, log_sums,
        T, S, kv_heads, tiles, window or 0,
        softmax_scale * LOG2_E if softcap is None else softmax_scale / softcap,
        0.0 if softcap is None else softcap * LOG2_E,
        GROUP=heads // kv_heads, DIM=head_dim, CAPPED=softcap is not None, WINDOWED=window is not None,
        TREE=tree is not None, SPLIT=splits > 1,
        BLOCK_ROWS=block_rows, BLOCK_SLOTS=block_slots, BLOCK_DIM=block_dim,
        num_warps=num_warps, num_stages=3 if block_slots > 16 else 2,
    )  # fmt: skip
    if splits > 1:
        block_splits = power_of_2_above(splits)
        block = min(max(COMBINED // block_splits, 16), block_dim)
        _combine_attention_kernel[(out.numel() // head_dim, -(-head_dim // block))](
            parts, log_sums, out, SPLITS=splits, DIM=head_dim, BLOCK_SPLITS=block_splits, BLOCK=block, num_warps=4
        )
    return out


def _plan(B: int, rows: int, kv_heads: int, head_dim: int, reach: int, q: Tensor) -> tuple[int, int, int, int]:
    """The rows, slots and channels of a tile, and the number of splits of the slots. There are as many programs as the
    device holds at once, but each has a few tiles, or the second kernel would cost more than it saves. Where that has
    little to add, in plain decoding, each multiprocessor has a program, even of a single tile. With too few slots for
    that, the rows are split instead. Tuned on an H200."""
    block_dim = max(power_of_2_above(head_dim), 16)
    block_slots = min(max(SLOT_BYTES // (block_dim * q.element_size()), 16), MAX_SLOTS)
    # Rows whose tile fits in registers, which float32 products, without tensor cores, need for themselves too.
    most = MIN_ROWS if q.dtype == torch.float32 else max(min(MAX_ROWS, MAX_ROWS * 128 // block_dim), MIN_ROWS)
    block_rows = min(max(power_of_2_above(rows), MIN_ROWS), most)
    sms, slot_tiles = num_sms(q.device), -(-reach // block_slots)
    room = sms * (2 if block_rows <= 32 else 1)
    programs = B * kv_heads * -(-rows // block_rows)
    splits = min(room // programs, slot_tiles // MIN_TILES)
    if block_rows == MIN_ROWS:
        splits = max(splits, min(sms // programs, slot_tiles))
    splits = max(min(splits, MAX_SPLITS), 1)
    while splits == 1 and block_rows > MIN_ROWS and 2 * programs <= room:
        block_rows, programs = block_rows // 2, 2 * programs
    return block_rows, block_slots, block_dim, splits
