"""flash-attn 4 as two opaque ops, forward and backward, so that torch.compile does not look into it.

Its public functions are autograd functions that torch.compile cannot trace, so the two passes below them are called;
both are looked up by name, and were tried with flash-attn-4 4.0.0b36.
"""

from typing import Any

import torch
from torch import Tensor

from ligermodels.ops.runtime.library import always, custom_op, is_fake, once_differentiable


def flash_attention_4(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, softmax_scale: float, window: int | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """Causal attention (B, T, Hq, D) of q over k, v (B, S, Hkv, D), of which queries have the last T places; packed,
    they come without the first dimension."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, _ = _FlashAttention4.apply(q, k, v, cu_seqlens, softmax_scale, window, softcap)
    return out


def flash_options(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, softmax_scale: float, softcap: float | None
) -> dict[str, Any]:
    """The options that all versions of flash-attn name alike."""
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": True, "softcap": softcap or 0.0}
    if cu_seqlens is not None:
        # Queries are those of the last places. Sequences that end before have keys alone, whose gradients are zero.
        hidden = k.shape[0] - q.shape[0]
        of_queries = cu_seqlens if hidden == 0 else (cu_seqlens - hidden).clamp(min=0)
        # The longest sequence would cost a sync to learn; the row's length bounds it.
        options |= {"cu_seqlens_q": of_queries, "cu_seqlens_k": cu_seqlens}
        options |= {"max_seqlen_q": q.shape[0], "max_seqlen_k": k.shape[0]}
    return options


def _window(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


@custom_op(keep=always)
def _flash_attention_4_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, softmax_scale: float, window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result, and the log of the sum of exponentials, ([B,] Hq, T) float32, for the backward pass."""
    if is_fake(q):
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        return out, q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    from flash_attn.cute import interface

    options = flash_options(q, k, cu_seqlens, softmax_scale, softcap) | _window(window)
    out, lse, *_ = interface._flash_attn_fwd(q, k, v, **options, return_lse=True)
    return out, lse


@custom_op()
def _flash_attention_4_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor | None,
    softmax_scale: float, window: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if is_fake(q):
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    from flash_attn.cute import interface

    options = flash_options(q, k, cu_seqlens, softmax_scale, softcap) | _window(window)
    dq, dk, dv, *_ = interface._flash_attn_bwd(q, k, v, out, dout.contiguous(), lse, **options)
    return dq, dk, dv


class _FlashAttention4(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, *options):
        out, lse = _flash_attention_4_forward(q, k, v, *options)
        ctx.save_for_backward(q, k, v, out, lse, options[0])
        ctx.options = options[1:]
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        return _flash_attention_4_backward(dout, *ctx.saved_tensors, *ctx.options)
