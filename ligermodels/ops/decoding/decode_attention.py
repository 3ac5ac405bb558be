"""Attention of a few new tokens over a preallocated cache, for sequences of different lengths.

All values that change from step to step are read from device memory, so that one CUDA graph serves every step. The
filled slots of a sequence are split among several programs (flash-decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html), and a second kernel combines their results.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.attention.attention import attention
from ligermodels.ops.attention.backend import AttentionRequest
from ligermodels.ops.attention.reference import attend_document
from ligermodels.ops.attention.triton_attention import MAX_BYTES, launch_batch_invariant
from ligermodels.ops.decoding.decode_attention_kernels import combine_attention_kernel, decode_attention_kernel
from ligermodels.ops.runtime.checks import Signature, check_scores, check_strides, check_tensor, check_tensors
from ligermodels.ops.runtime.devices import num_sms, pipeline_stages, power_of_2_above
from ligermodels.ops.runtime.dispatch import refuse_batch_invariant, set_batch_invariant, use_kernels
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import contiguous, without_autocast

MAX_KERNEL_HEAD_DIM = 512  # a tile of rows is held in registers; the reference serves wider heads
MIN_ROWS = 16  # of a tile of tensor cores
MAX_ROWS = 128  # query heads times tokens per program: the more, the less often the cache is read
SLOT_BYTES = 16384  # of a tile of keys, and of a tile of values
MAX_SLOTS = 64  # per tile: smaller ones split more evenly
MAX_SPLITS = 128
MIN_TILES = 4  # of slots per program, where there are more than one for each multiprocessor
COMBINED = 4096  # elements per program of the second kernel
LOG2_E = math.log2(math.e)


_TENSORS = Signature(
    q="B T Hq D", k_cache="B S Hkv D =q", v_cache="B S Hkv D =q", cache_seqlens="B int32 int64", sinks="Hq ?"
)


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
    """Softmax attention of T new tokens per sequence over the sequence's cache slots, the new tokens' slots included.

    The cached tokens of sequence b are in slots [0, cache_seqlens[b]); the keys and values of its T new tokens are in
    the next T slots. A CUDA graph can capture the call. The cost grows with the filled slots (within the window), not
    with the size of the cache. It computes in float32 (float64 for float64), with equal bits in every run. No gradient.

    Args:
        q: (B, T, Hq, D), floating, any strides.
        k_cache: (B, S, Hkv, D) of q's dtype with Hkv dividing Hq and S >= T; any strides, but the last dimension
            contiguous. Slots that no token sees may hold anything, even NaN; with
            `set_batch_invariant` those before a window only finite numbers.
        v_cache: like k_cache.
        cache_seqlens: int32 or int64 (B,), at most S - T. This is not checked, but no slot past the end is read.
        softmax_scale: factor on q·k; D ** -0.5 when None.
        window: a token at position p sees only positions above p - window; None for all. The position of a token is its
            slot, except for new tokens with a tree_mask: new token t is at cache_seqlens + (number of new tokens that t
            sees, t included) - 1.
        softcap: scores become softcap * tanh(scores / softcap) before masking (Gemma 2); None for no bound.
        tree_mask: bool (T, T) or (B, T, T), True at [t, u] if new token t sees new token u; every new token also sees
            all slots before the new ones. None is causal: new token t sees the slots up to its own, cache_seqlens + t.
        sinks: floating (Hq,), one more logit in each query head's softmax denominator, see `attention`; None for none.

    Returns:
        Contiguous (B, T, Hq, D) in q's dtype; zeros for a token that sees nothing.

    Raises:
        InputError: shapes, dtypes or devices do not fit, an option of the scores is no number within its bounds, or
            autograd would need a gradient.
    """
    _check(q, k_cache, v_cache, cache_seqlens, tree_mask, sinks)
    check_scores("decode_attention", softmax_scale, window, softcap)
    softmax_scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    if set_batch_invariant.value:
        if tree_mask is not None:
            refuse_batch_invariant("decode_attention with a tree_mask", "decode without draft heads")
        return _batch_invariant_decode_attention(
            q, k_cache, v_cache, cache_seqlens, softmax_scale, window, softcap, sinks
        )
    if use_kernels(q, k_cache) and q.shape[3] <= MAX_KERNEL_HEAD_DIM:
        return _decode_attention(q, k_cache, v_cache, cache_seqlens, tree_mask, softmax_scale, window, softcap, sinks)
    with without_autocast(q):
        return _in_torch(q, k_cache, v_cache, cache_seqlens, tree_mask, softmax_scale, window, softcap, sinks)


def _in_torch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, tree_mask: Tensor | None,
    softmax_scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """`decode_attention` in plain torch. On the CPU, reading the lengths costs nothing, and shows which slots are
    filled."""
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": softcap, "sinks": sinks}
    if q.is_cpu and q.shape[0] and not (is_fake(q) or torch.compiler.is_compiling()):
        lengths = cache_seqlens.tolist()
        end = max(lengths) + q.shape[1]
        is_last = q.shape[1] == 1 and (tree_mask is None or bool(tree_mask.all()))  # one token, which sees itself
        if is_last and min(lengths) == max(lengths):
            seen = slice(0 if window is None else max(0, end - window), end)
            return _attend_to_all(q, k_cache[:, seen], v_cache[:, seen], **options)
        k_cache, v_cache = k_cache[:, :end], v_cache[:, :end]
    options |= {"window": window, "tree_mask": tree_mask}
    return decode_attention_reference(q, k_cache, v_cache, cache_seqlens, **options)


def _attend_to_all(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """One new token per sequence, which sees all of k and v."""
    if softcap is not None or sinks is not None:
        return attention(q, k, v, softmax_scale=softmax_scale, softcap=softcap, sinks=sinks).contiguous()
    has_groups = q.shape[2] != k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, scale=softmax_scale, enable_gqa=has_groups)
    return out.transpose(1, 2).contiguous()


@custom_op()
def _batch_invariant_decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, softmax_scale: float, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """By the kernel, or the tiles, that compute `attention` under `set_batch_invariant`."""
    out = q.new_empty(q.shape)
    if is_fake(q) or not out.numel():
        return out
    (B, T, heads, head_dim), S = q.shape, k_cache.shape[1]
    if use_kernels(q, k_cache) and head_dim * q.element_size() <= MAX_BYTES:
        lse = q.new_empty((B, heads, T), dtype=torch.float32)
        options: Any = softmax_scale, window, softcap
        launch_batch_invariant(out, lse, q, k_cache, v_cache, sinks, *options, cache_seqlens=cache_seqlens)
        return out
    request = AttentionRequest(q.device.type, q.dtype, head_dim, T, S, softmax_scale, window, softcap, False, False)
    for row, length in enumerate(cache_seqlens.tolist()):
        keys, values = (cache[row, : length + T] for cache in (k_cache, v_cache))
        out[row] = attend_document(q[row], keys, values, request, sinks)
    return out


def decode_attention_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, *, softmax_scale: float | None = None,
    window: int | None = None, softcap: float | None = None, tree_mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The specification of `decode_attention`, in plain torch, with the same arguments: q, k_cache, v_cache,
    cache_seqlens, softmax_scale, window, softcap, tree_mask and sinks. It reads the whole cache."""
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
    weights = scores.softmax(-1)[..., : k.shape[1]].masked_fill(hidden, 0)  # NaN for a token that sees nothing
    return torch.einsum("bthgs,bshd->bthgd", weights, v).reshape(q.shape).to(q.dtype).contiguous()


def _visible(q: Tensor, k_cache: Tensor, cache_seqlens: Tensor, window: int | None, tree_mask: Tensor | None) -> Tensor:
    """Bool (B, T, S), True where a token sees a slot."""
    (B, T), S = q.shape[:2], k_cache.shape[1]
    slot, length = torch.arange(S, device=q.device).expand(B, S), cache_seqlens[:, None].long()
    if tree_mask is None:
        slot_position = slot  # (B, S)
        position = length + torch.arange(T, device=q.device)  # of new tokens (B, T)
        visible = slot_position[:, None] <= position[:, :, None]
    else:
        node = slot - length
        new = (node >= 0) & (node < T)
        node = node.clamp(0, T - 1)
        mask = tree_mask.expand(B, T, T)
        position = length + mask.sum(-1) - 1
        slot_position = torch.where(new, position.gather(1, node), slot)
        visible = (slot < length)[:, None] | (new[:, None] & mask.gather(2, node[:, None].expand(B, T, S)))
    if window is not None:
        visible = visible & (slot_position[:, None] > position[:, :, None] - window)
    return visible


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, tree_mask: Tensor | None, sinks: Tensor | None,
) -> None:  # fmt: skip
    op = "decode_attention"
    _TENSORS.check(op, q, k_cache, v_cache, cache_seqlens, sinks)
    check_strides(op, k_cache=k_cache, v_cache=v_cache)
    B, T, heads, head_dim = q.shape
    S, kv_heads = k_cache.shape[1:3]
    if S < T or 0 in (heads, kv_heads, head_dim) or heads % kv_heads:
        raise InputError(
            f"{op}: k_cache must have at least {T} slots, and a number of heads that divides q's {heads}; "
            f"got q {tuple(q.shape)} and k_cache {tuple(k_cache.shape)}"
        )
    if tree_mask is not None:
        check_tensors(op, tree_mask=tree_mask)
        shape = (T, T) if tree_mask.dim() == 2 else (B, T, T)
        check_tensor(op, "tree_mask", tree_mask, shape, q.device, torch.bool)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k_cache, v_cache, sinks)):
        raise InputError("decode_attention has no gradient: call it under torch.no_grad(), or use ops.attention")


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
    rows = T * heads // kv_heads
    plan = _plan(B, rows, kv_heads, head_dim, S if window is None else min(S, window + T), q)
    parts, log_sums = out, None
    if plan.splits > 1:
        parts = q.new_empty((out.numel() // head_dim, plan.splits, head_dim), dtype=torch.float32)
        log_sums = q.new_empty(parts.shape[:2], dtype=torch.float32)
    q = q if q.stride(3) == 1 else q.contiguous()
    tiles = -(-rows // plan.rows)
    decode_attention_kernel[(B * kv_heads * tiles, plan.splits)](
        q, *q.stride()[:3], k_cache, *k_cache.stride()[:3], v_cache, *v_cache.stride()[:3],
        cache_seqlens.contiguous(), *_tree_and_strides(tree_mask, B, T), contiguous(sinks), parts, log_sums,
        T, S, kv_heads, tiles, window or 0, *_score_factors(softmax_scale, softcap),
        GROUP=heads // kv_heads, DIM=head_dim, CAPPED=softcap is not None, WINDOWED=window is not None,
        TREE=tree_mask is not None, SPLIT=plan.splits > 1,
        BLOCK_ROWS=plan.rows, BLOCK_SLOTS=plan.slots, BLOCK_DIM=plan.channels,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    if log_sums is not None:
        _combine(parts, log_sums, out, plan)
    return out


def _tree_and_strides(tree_mask: Tensor | None, B: int, T: int) -> tuple[Tensor | None, int, int]:
    """The tree mask as bytes, (B, T, T) with a contiguous last dimension, and its other strides."""
    if tree_mask is None:
        return None, 0, 0
    tree = tree_mask.expand(B, T, T).view(torch.uint8)
    tree = tree if tree.stride(2) == 1 else tree.contiguous()
    return tree, tree.stride(0), tree.stride(1)


def _score_factors(softmax_scale: float, softcap: float | None) -> tuple[float, float]:
    """The kernel's `scale` and `softcap`: scores are logarithms to base 2."""
    return (softmax_scale * LOG2_E, 0.0) if softcap is None else (softmax_scale / softcap, softcap * LOG2_E)


def _combine(parts: Tensor, log_sums: Tensor, out: Tensor, plan: "_Plan") -> None:
    head_dim, block_splits = out.shape[3], power_of_2_above(plan.splits)
    block = min(max(COMBINED // block_splits, 16), plan.channels)
    combine_attention_kernel[(out.numel() // head_dim, -(-head_dim // block))](
        parts, log_sums, out, SPLITS=plan.splits, DIM=head_dim, BLOCK_SPLITS=block_splits, BLOCK=block, num_warps=4
    )


class _Plan(NamedTuple):
    """Rows, slots and channels of a tile, the number of splits of the slots, warps per program, and pipeline stages."""

    rows: int
    slots: int
    channels: int
    splits: int
    warps: int
    stages: int


def _plan(B: int, rows: int, kv_heads: int, head_dim: int, reach: int, q: Tensor) -> _Plan:
    """Launch sizes for `rows` query rows per key/value head that see at most `reach` slots. Tuned on an H200.

    There are as many programs as the device holds at once, but each has a few tiles, or the second kernel would cost
    more than it saves. In plain decoding that kernel has little to add, and each multiprocessor gets a program, even
    for a single tile. If there are too few slots to occupy the device, the rows are split instead."""
    block_dim = max(power_of_2_above(head_dim), 16)
    block_slots = min(max(SLOT_BYTES // (block_dim * q.element_size()), 16), MAX_SLOTS)
    # The tile of rows must fit in registers. Products in float32 use no tensor cores and need the registers themselves.
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
    warps = 8 if block_rows * block_dim >= 8192 or q.dtype == torch.float32 else 4
    tile_bytes = 2 * block_slots * block_dim * q.element_size()  # of keys and values
    stages = pipeline_stages(
        q.device, 3 if block_slots > 16 else 2, tile_bytes, block_rows * block_dim * q.element_size()
    )
    return _Plan(block_rows, block_slots, block_dim, splits, warps, stages)
