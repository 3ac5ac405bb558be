"""`rope_qkv` for decoding: keys and values go straight into their slots of a preallocated cache."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.norm.rms_norm import CastingMode, rms_norm, rms_norm_reference
from ligermodels.ops.rope.rope import PackedShape, check_packed, rope_qkv, split_heads
from ligermodels.ops.rope.rope_kernels import load_angles, load_heads, load_weight, strided_tables, turn_heads
from ligermodels.ops.runtime.checks import Signature, check_eps, check_strides
from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import set_batch_invariant, tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel, wait_for_previous
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import contiguous

_CACHES = Signature(qkv="B T C", k_cache="B S Hkv D =qkv", v_cache="B S Hkv D =qkv", slots="B int32 int64")


def rope_qkv_cached(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: CastingMode = "llama",
    value_norm_eps: float | None = None,
) -> Tensor:
    """Splits the packed projection, normalises and rotates q and k like `rope_qkv`, and writes k and v to the cache.

    Token t of sequence b goes to slot slots[b] + t, and is dropped if the cache has no such slot. Nothing waits for the
    device, so a CUDA graph can capture the call. No gradient.

    Args:
        qkv: (B, T, num_kv_heads * (group_size + 2) * head_dim), any floating dtype: for each key/value head its
            group_size query heads, then its key, then its value.
        cos: (B or 1, T, R/2) with R <= head_dim, any floating dtype; None, like sin, for no rotation.
        sin: like cos.
        num_kv_heads: number of key/value heads.
        group_size: query heads per key/value head.
        head_dim: channels per head.
        k_cache: (B, S, num_kv_heads, head_dim) of qkv's dtype, any strides but the last dimension contiguous; written
            in place.
        v_cache: like k_cache.
        slots: int32 or int64 (B,), the slot of each sequence's first token.
        q_norm: (head_dim,), any floating dtype: weight of an `rms_norm` of each query head; None for no norm.
        k_norm: the same for each key head.
        eps: added to the mean square, in both norms.
        offset: added to the weights of both norms.
        casting_mode: where both norms round, "llama" or "gemma": see `rms_norm`.
        value_norm_eps: divides each head of v by sqrt(mean square + value_norm_eps) (Gemma 4); None for no norm of v.

    Returns:
        Contiguous q (B, T, num_kv_heads * group_size, head_dim), in qkv's dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit, `casting_mode` is unknown, an epsilon is negative, or autograd
            would need a gradient.
    """
    shape = PackedShape(num_kv_heads, group_size, head_dim)
    check_packed("rope_qkv_cached", qkv, cos, sin, shape, q_norm, k_norm, casting_mode, eps)
    if value_norm_eps is not None:
        check_eps("rope_qkv_cached", value_norm_eps, "value_norm_eps")
    _CACHES.check("rope_qkv_cached", qkv, k_cache, v_cache, slots, Hkv=num_kv_heads, D=head_dim)
    check_strides("rope_qkv_cached", k_cache=k_cache, v_cache=v_cache)
    inputs = (qkv, k_cache, v_cache, q_norm, k_norm)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise InputError("rope_qkv_cached has no gradient: call it under torch.no_grad(), or use rope_qkv")
    kernels = use_kernels(qkv, cos, sin, q_norm, k_norm)
    if not (kernels or is_fake(qkv) or torch.compiler.is_compiling()):  # the reference reads `slots`
        norm: dict[str, Any] = {"eps": eps, "offset": offset, "casting_mode": casting_mode}
        norm["value_norm_eps"] = value_norm_eps
        return rope_qkv_cached_reference(qkv, cos, sin, *shape, k_cache, v_cache, slots, q_norm, k_norm, **norm)
    has_norm = not (q_norm is None and k_norm is None and value_norm_eps is None)
    if has_norm and kernels and set_batch_invariant.value:
        norm = {"eps": eps, "offset": offset, "casting_mode": casting_mode}
        qkv = _normalised_and_rotated(qkv, cos, sin, shape, q_norm, k_norm, value_norm_eps, **norm)
        cos = sin = q_norm = k_norm = value_norm_eps = None
    return _rope_cached(
        qkv, cos, sin, k_cache, v_cache, slots, q_norm, k_norm, *shape, eps, offset, casting_mode == "llama",
        value_norm_eps, kernels,
    )  # fmt: skip


def _normalised_and_rotated(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, shape: PackedShape, q_norm: Tensor | None,
    k_norm: Tensor | None, value_norm_eps: float | None, **norm: Any,
) -> Tensor:  # fmt: skip
    """qkv after the norms and the rotation, by the kernels of `rope_qkv` and `rms_norm`, which training has: the cached
    kernel sums the squares of a head in another order."""
    q, k, v = rope_qkv(qkv, cos, sin, *shape, q_norm, k_norm, **norm)
    v = v if value_norm_eps is None else rms_norm(v, None, eps=value_norm_eps)
    return torch.cat([q.unflatten(2, shape[:2]), k[..., None, :], v[..., None, :]], 3).flatten(2)


def rope_qkv_cached_reference(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, num_kv_heads: int, group_size: int, head_dim: int,
    k_cache: Tensor, v_cache: Tensor, slots: Tensor, q_norm: Tensor | None = None, k_norm: Tensor | None = None,
    *, value_norm_eps: float | None = None, **norm: Any,
) -> Tensor:  # fmt: skip
    """The specification of `rope_qkv_cached`, in plain torch, with the same arguments: qkv, cos, sin, num_kv_heads,
    group_size, head_dim, k_cache, v_cache, slots, q_norm, k_norm, value_norm_eps, and the options of the norms."""
    shape = PackedShape(num_kv_heads, group_size, head_dim)
    q, k, v = split_heads(qkv, cos, sin, shape, q_norm, k_norm, **norm)
    v = v if value_norm_eps is None else rms_norm_reference(v, None, value_norm_eps)
    q = q.clone(memory_format=torch.contiguous_format) if q.data_ptr() == qkv.data_ptr() else q.contiguous()
    if qkv.is_cpu:  # reading slots costs nothing there, and indexing costs most
        firsts = slots.tolist()
        if len(set(firsts)) == 1:
            _write(k_cache, k, firsts[0])
            _write(v_cache, v, firsts[0])
            return q
        for row, first in enumerate(firsts):
            _write(k_cache[row : row + 1], k[row : row + 1], first)
            _write(v_cache[row : row + 1], v[row : row + 1], first)
        return q
    slot = slots[:, None].long() + torch.arange(qkv.shape[1], device=qkv.device)
    batch, token = ((slot >= 0) & (slot < k_cache.shape[1])).nonzero(as_tuple=True)
    k_cache[batch, slot[batch, token]] = k[batch, token]
    v_cache[batch, slot[batch, token]] = v[batch, token]
    return q


def _write(cache: Tensor, new: Tensor, first: int) -> None:
    """Writes tokens (B, T, heads, D) to the slots of the cache (B, S, heads, D) from `first` on; drops tokens without a
    slot."""
    start, end = max(first, 0), min(first + new.shape[1], cache.shape[1])
    if start < end:
        cache[:, start:end] = new if end - start == new.shape[1] else new[:, start - first : end - first]


@kernel
def _rope_cached_kernel(
    qkv, qkv_batch, qkv_token, cos, cos_batch, cos_token, sin, sin_batch, sin_token, q_norm, k_norm, eps, offset,
    value_eps, q, k_cache, k_batch, k_slot, k_head, v_cache, v_batch, v_slot, v_head, slots, T, S,
    GROUP: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    V_NORM: tl.constexpr, CAST_BEFORE: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Each program takes one kv head of one token, with its group of query heads."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    batch, token = row // T, row % T
    q_w1, q_w2, k_w1, k_w2 = 1.0, 1.0, 1.0, 1.0
    if Q_NORM:
        q_w1, q_w2 = load_weight(q_norm, offset, HALF, DIM, BLOCK)
    if K_NORM:
        k_w1, k_w2 = load_weight(k_norm, offset, HALF, DIM, BLOCK)
    c = load_angles(cos, cos_batch, cos_token, row, T, HALF, BLOCK)
    s = load_angles(sin, sin_batch, sin_token, row, T, HALF, BLOCK)
    group = qkv + batch * qkv_batch + token * qkv_token + head * (GROUP + 2) * DIM
    q1, q2 = load_heads(group, 0, DIM, GROUP, GROUP, HALF, DIM, BLOCK_GROUP, BLOCK)
    k1, k2 = load_heads(group + GROUP * DIM, 0, 0, 1, 1, HALF, DIM, 1, BLOCK)
    v1, v2 = load_heads(group + (GROUP + 1) * DIM, 0, 0, 1, 1, 0, DIM, 1, BLOCK)
    turn_heads(
        q1, q2, q1, q2, q + (row * heads + head) * GROUP * DIM, row, 0, 0, DIM, c, s, q_w1, q_w2, 0.0, 0.0, eps,
        GROUP, GROUP, HALF, DIM, Q_NORM, CAST_BEFORE, False, True, False, BLOCK_GROUP, BLOCK,
    )  # fmt: skip
    slot = tl.load(slots + batch).to(tl.int64) + token
    if (slot >= 0) & (slot < S):
        k_place = k_cache + batch * k_batch + slot * k_slot + head * k_head
        v_place = v_cache + batch * v_batch + slot * v_slot + head * v_head
        turn_heads(
            k1, k2, k1, k2, k_place, row, 0, 0, 0, c, s, k_w1, k_w2, 0.0, 0.0, eps,
            1, 1, HALF, DIM, K_NORM, CAST_BEFORE, False, True, False, 1, BLOCK,
        )  # fmt: skip
        turn_heads(
            v1, v2, v1, v2, v_place, row, 0, 0, 0, c, s, 1.0, 1.0, 0.0, 0.0, value_eps,
            1, 1, 0, DIM, V_NORM, CAST_BEFORE, False, True, False, 1, BLOCK,
        )  # fmt: skip


@custom_op(mutates_args=("k_cache", "v_cache"))
def _rope_cached(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, num_kv_heads: int, group_size: int, head_dim: int, eps: float,
    offset: float, cast_before: bool, value_norm_eps: float | None, kernels: bool,
) -> Tensor:  # fmt: skip
    shape = num_kv_heads, group_size, head_dim
    if not kernels and not is_fake(qkv):
        norm: dict[str, Any] = {"eps": eps, "offset": offset, "casting_mode": "llama" if cast_before else "gemma"}
        norm["value_norm_eps"] = value_norm_eps
        return rope_qkv_cached_reference(qkv, cos, sin, *shape, k_cache, v_cache, slots, q_norm, k_norm, **norm)
    q = qkv.new_empty(*qkv.shape[:2], num_kv_heads * group_size, head_dim)
    if is_fake(q):
        return q
    B, T, _ = qkv.shape
    qkv = qkv if qkv.stride(2) == 1 else qkv.contiguous()
    block_group, block = power_of_2_above(group_size), power_of_2_above((head_dim + 1) // 2)
    if B * T:
        _rope_cached_kernel[(B * T, num_kv_heads)](
            qkv, *qkv.stride()[:2], *strided_tables(cos, sin), contiguous(q_norm), contiguous(k_norm), eps, offset,
            0.0 if value_norm_eps is None else value_norm_eps, q, k_cache, *k_cache.stride()[:3],
            v_cache, *v_cache.stride()[:3], slots.contiguous(), T, k_cache.shape[1],
            GROUP=group_size, DIM=head_dim, HALF=0 if cos is None else cos.shape[2],
            Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
            V_NORM=value_norm_eps is not None, CAST_BEFORE=cast_before,
            BLOCK_GROUP=block_group, BLOCK=block, num_warps=min(max(block_group * block // 256, 1), 8),
        )  # fmt: skip
    return q
