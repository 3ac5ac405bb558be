"""Attention of blocks of queries to the tokens before an anchor, and to the keys of their own block.

DFlash and DSpark train a draft head on many blocks of a text at once (https://arxiv.org/abs/2602.06036). A block of L
slots stands at the positions a, ..., a + L - 1 of its anchor a. Its queries see the context, keys made from the model's
states at the tokens before a, and the L keys of their own block, in one softmax. They see no other block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ligermodels.arguments import check_flag
from ligermodels.errors import InputError
from ligermodels.ops.attention.block_context_kernels import (
    block_context_forward_kernel,
    block_context_key_gradient_kernel,
    block_context_query_gradient_kernel,
)
from ligermodels.ops.attention.triton_attention import LOG2_E, MAX_BYTES, kernel_constants, launch_tiles
from ligermodels.ops.runtime.checks import Signature, check_rising, check_scores
from ligermodels.ops.runtime.dispatch import checked_on_host, refuse_batch_invariant, use_kernels
from ligermodels.ops.runtime.library import always, custom_op, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import empty_gradient, heads_and_strides, without_autocast

OP = "block_context_attention"
_TENSORS = Signature(
    dtensors="kept", q="B A L Hq D+", k_block="B A L Hkv D =q", v_block="B A L Hkv D =q", k_context="B T Hkv D =q",
    v_context="B T Hkv D =q", anchors="B A int64", cu_seqlens="bounds int32 ?",
    starts="B A int32 ?",
)  # fmt: skip


def block_context_attention(
    q: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    anchors: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    starts: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Attention of A blocks of L queries per row to their context and to themselves; gradients for all operands.

    Args:
        q: (B, A, L, Hq, D), floating.
        k_block: (B, A, L, Hkv, D), keys of the blocks, of q's dtype, Hkv dividing Hq.
        v_block: (B, A, L, Hkv, D), values of the blocks, of q's dtype.
        k_context: (B, T, Hkv, D), keys of the row's tokens, of q's dtype.
        v_context: (B, T, Hkv, D), values of the row's tokens, of q's dtype.
        anchors: int64 (B, A), the index in the row of each block's first slot, from 0 to T. The queries of a block see
            the context at smaller indices. Any order is right; ascending anchors are the fastest.
        cu_seqlens: int32 (n + 1,), bounds of n documents that are packed into one row (B = 1). A block sees only the
            context in the document of its anchor; an anchor of T belongs to the last document.
        starts: int32 (B, A), the first token of the document of each anchor, in place of `cu_seqlens`: the result of
            `context_starts`, so that the layers of a model check anchors and bounds once. Default: computed here.
        softmax_scale: factor on q·k; D ** -0.5 when None.
        causal: a query sees no key of its block after its own; False: it sees all keys of its block.
        window: number of positions that a query sees up to its own, in the context and in the block; None for all. It
            hides no later keys.

    Returns:
        (B, A, L, Hq, D), in q's dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit together, an option has another type or value, an anchor is not
            in [0, T], or, on the CPU, `cu_seqlens` do not rise from 0.

    Examples:
        >>> q, k, context = torch.randn(1, 3, 7, 8, 64), torch.randn(1, 3, 7, 2, 64), torch.randn(1, 50, 2, 64)
        >>> block_context_attention(q, k, k, context, context, torch.tensor([[4, 17, 40]])).shape
        torch.Size([1, 3, 7, 8, 64])
    """
    refuse_batch_invariant("block_context_attention")
    _check(q, k_block, v_block, k_context, v_context, anchors, cu_seqlens, starts)
    check_scores(OP, softmax_scale, window)
    check_flag(f"{OP}: causal", causal)
    scale = q.shape[4] ** -0.5 if softmax_scale is None else softmax_scale
    starts = context_starts(anchors, cu_seqlens, k_context.shape[1]) if starts is None else starts.contiguous()
    if use_kernels(q, k_context, v_context) and q.shape[4] * q.element_size() <= MAX_BYTES:
        out: Tensor
        out, _ = _BlockContextAttention.apply(
            q, k_block, v_block, k_context, v_context, anchors, starts, scale, causal, window
        )
        return out
    return block_context_attention_reference(
        q, k_block, v_block, k_context, v_context, anchors, starts, softmax_scale=scale, causal=causal, window=window
    )


def block_context_attention_reference(
    q: Tensor, k_block: Tensor, v_block: Tensor, k_context: Tensor, v_context: Tensor, anchors: Tensor,
    starts: Tensor, *, softmax_scale: float, causal: bool = False, window: int | None = None,
) -> Tensor:  # fmt: skip
    """The specification of `block_context_attention`: one softmax over all scores, in fp32 (fp64 for fp64).

    `starts` (B, A) has the first token of the document of each anchor, see `context_starts`.

    Args:
        q: (B, A, L, Hq, D).
        k_block: (B, A, L, Hkv, D).
        v_block: (B, A, L, Hkv, D).
        k_context: (B, T, Hkv, D).
        v_context: (B, T, Hkv, D).
        anchors: int64 (B, A).
        starts: int32 (B, A).
        softmax_scale: factor on q·k.
        causal: a query sees no key of its block after its own.
        window: number of positions that a query sees; None for all.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(compute).unflatten(3, (k_block.shape[3], -1))
    tokens, slots = (torch.arange(n, device=q.device) for n in (k_context.shape[1], q.shape[2]))
    anchors, starts = anchors[:, :, None, None], starts[:, :, None, None]
    in_context = (tokens < anchors) & (tokens >= starts)  # (B, A, 1 or L, T)
    in_block = slots <= slots[:, None] if causal else slots >= 0  # (L, L)
    if window is not None:
        in_context = in_context & (tokens > anchors + slots[:, None] - window)
        in_block = in_block & (slots > slots[:, None] - window)
    with without_autocast(q):
        context = torch.einsum("balhgd,bthd->balhgt", grouped, k_context.to(compute)) * softmax_scale
        context = context.masked_fill(~in_context[:, :, :, None, None], float("-inf"))
        block = torch.einsum("balhgd,bashd->balhgs", grouped, k_block.to(compute)) * softmax_scale
        block = block.masked_fill(~in_block.expand(len(slots), -1)[:, None, None], float("-inf"))
        weights = torch.cat([context, block], dim=-1).softmax(-1)
        of_context, of_block = weights.split([len(tokens), len(slots)], dim=-1)
        out = torch.einsum("balhgt,bthd->balhgd", of_context, v_context.to(compute))
        out = out + torch.einsum("balhgs,bashd->balhgd", of_block, v_block.to(compute))
    return out.reshape(q.shape).to(q.dtype)


@custom_op()
def context_starts(anchors: Tensor, cu_seqlens: Tensor | None, num_tokens: int) -> Tensor:
    """Checks the anchors, and returns the first token of the document of each anchor.

    Args:
        anchors: int64 (B, A).
        cu_seqlens: int32 (n + 1,), bounds of the row's documents; None for one document.
        num_tokens: number of tokens T of the row.

    Returns:
        int32 (B, A).

    Raises:
        InputError: an anchor is not in [0, T].
    """
    if is_fake(anchors):
        return anchors.new_empty(anchors.shape, dtype=torch.int32)
    anchors = anchors.contiguous()
    valid = (anchors >= 0) & (anchors <= num_tokens)
    if not checked_on_host(anchors):
        torch._assert_async(valid.all(), f"{OP}: an anchor is not in [0, {num_tokens}], the indices of the context")
    elif not valid.all():
        wrong = anchors[~valid][0].item()
        raise InputError(f"{OP}: anchors must be in [0, {num_tokens}], the indices of the context; got {wrong}")
    if cu_seqlens is None:
        return torch.zeros_like(anchors, dtype=torch.int32)
    return cu_seqlens[torch.bucketize(anchors.clamp(max=num_tokens - 1), cu_seqlens[1:], right=True)]


class _BlockContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k_block: Tensor, v_block: Tensor, k_context: Tensor, v_context: Tensor,
                *options: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = _block_context_forward(q, k_block, v_block, k_context, v_context, *options)
        ctx.save_for_backward(q, k_block, v_block, k_context, v_context, *options[:2], out, lse)
        ctx.options = options[2:]
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Tensor, ...]:
        needs = ctx.needs_input_grad
        return _block_context_backward(dout, *ctx.saved_tensors, any(needs[1:3]), any(needs[3:5]), *ctx.options)


def _arguments(*tensors: Tensor) -> list[Any]:
    """Tensors (B, A, L, heads, D) as (B, A * L, heads, D), and others, with their strides, as the kernels take them."""
    return [part for x in tensors for part in heads_and_strides(x.flatten(1, 2) if x.dim() == 5 else x)]


def _sizes(q: Tensor, k_context: Tensor) -> tuple[int, int, int, int, int]:
    """The numbers T of slots, S of tokens of the context, A of blocks, L of slots per block, and of heads."""
    _, blocks, length, heads, _ = q.shape
    return blocks * length, k_context.shape[1], blocks, length, heads


@custom_op(keep=always)
def _block_context_forward(
    q: Tensor, k_block: Tensor, v_block: Tensor, k_context: Tensor, v_context: Tensor, anchors: Tensor, starts: Tensor,
    softmax_scale: float, causal: bool, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result; for the backward pass the base-2 logarithm of the softmax denominator, (B, Hq, A * L) float32."""
    sizes = T, _, _, _, heads = _sizes(q, k_context)
    out, lse = q.new_empty(q.shape), q.new_empty((q.shape[0], heads, T), dtype=torch.float32)
    if is_fake(q) or not out.numel():
        return out, lse
    arguments = (
        *_arguments(q, k_block, v_block, k_context, v_context), anchors.contiguous(), starts, out, lse, *sizes, window,
        softmax_scale * LOG2_E,
    )  # fmt: skip
    constants = {**kernel_constants(q, k_context, v_context), "CAUSAL": causal}
    launch_tiles("forward", block_context_forward_kernel, q.shape[0] * heads, "queries", T, arguments, constants)
    return out, lse


@custom_op()
def _block_context_backward(
    dout: Tensor, q: Tensor, k_block: Tensor, v_block: Tensor, k_context: Tensor, v_context: Tensor, anchors: Tensor,
    starts: Tensor, out: Tensor, lse: Tensor, needs_block: bool, needs_context: bool, softmax_scale: float,
    causal: bool, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k_block, v_block, k_context and v_context; without elements where they are not needed."""
    dq = q.new_empty(q.shape)
    dk_block, dv_block = (empty_gradient(x, needs_block, q) for x in (k_block, v_block))
    dk_context, dv_context = (empty_gradient(x, needs_context, q) for x in (k_context, v_context))
    gradients = dq, dk_block, dv_block, dk_context, dv_context
    if is_fake(q):
        return gradients
    if not q.numel():
        for x in gradients:
            x.zero_()
        return gradients
    T, S, *blocks, heads = _sizes(q, k_context)
    delta, anchors, batch = torch.empty_like(lse), anchors.contiguous(), q.shape[0]
    constants = {**kernel_constants(q, k_context, v_context), "CAUSAL": causal}
    numbers = *blocks, heads, window, softmax_scale * LOG2_E, softmax_scale
    arguments = (
        *_arguments(q, k_block, v_block, k_context, v_context, dout), anchors, starts, out, lse, delta, dq, T, S,
        *numbers,
    )  # fmt: skip
    launch_tiles(
        "query_gradient", block_context_query_gradient_kernel, batch * heads, "queries", T, arguments, constants
    )
    for own, keys, k, v, dk, dv in (
        (True, T, k_block, v_block, dk_block, dv_block), (False, S, k_context, v_context, dk_context, dv_context)
    ):  # fmt: skip
        if dk.numel():
            arguments = *_arguments(q, k, v, dout), anchors, starts, lse, delta, dk, dv, T, keys, *numbers
            launch_tiles(
                "key_gradient", block_context_key_gradient_kernel, batch * k.shape[-2], "keys", keys, arguments,
                constants | {"OWN": own},
            )  # fmt: skip
    return gradients


def _check(
    q: Tensor, k_block: Tensor, v_block: Tensor, k_context: Tensor, v_context: Tensor, anchors: Tensor,
    cu_seqlens: Tensor | None, starts: Tensor | None,
) -> None:  # fmt: skip
    _TENSORS.check(OP, q, k_block, v_block, k_context, v_context, anchors, cu_seqlens, starts)
    heads, kv_heads = q.shape[3], k_block.shape[3]
    if not kv_heads or heads % kv_heads:
        raise InputError(f"{OP}: q has {heads} heads, k_block {kv_heads}; the heads of k_block must divide those of q")
    if cu_seqlens is not None and len(q) != 1:
        raise InputError(f"{OP}: cu_seqlens needs one row (B = 1), got B = {len(q)}")
    if cu_seqlens is not None and starts is not None:
        raise InputError(f"{OP}: starts: give no cu_seqlens with it")
    check_rising(OP, cu_seqlens)
