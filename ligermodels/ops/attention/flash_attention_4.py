"""flash-attn 4 as two opaque ops, forward and backward, so that torch.compile does not trace into it.

The public functions of flash-attn 4 are autograd functions that torch.compile cannot trace, so these ops call its
forward and backward pass directly. Both are private functions, tried with flash-attn-4 4.0.0b36.
"""

from typing import Any

import torch
from torch import Tensor

from ligermodels.ops.attention.backend import query_bounds
from ligermodels.ops.runtime.library import always, custom_op, is_fake, once_differentiable


def flash_attention_4(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, softmax_scale: float, window: int | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """Causal attention by flash-attn 4, with gradients.

    Args:
        q: (B, T, Hq, D), or (T, Hq, D) with cu_seqlens. Queries are the last T of the S tokens.
        k, v: (B, S, Hkv, D), or (S, Hkv, D) with cu_seqlens.
        cu_seqlens: int32 (n + 1,), bounds of packed sequences, or None.
        softmax_scale: factor on q·k.
        window: number of keys that a query sees, its own included; None for all.
        softcap: bound of the scores; None for no bound.

    Returns:
        The shape and dtype of q.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, _ = _FlashAttention4.apply(q, k, v, cu_seqlens, softmax_scale, window, softcap)
    return out


def flash_options(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, softmax_scale: float, softcap: float | None
) -> dict[str, Any]:
    """The options that have the same names in all versions of flash-attn, for q, k, cu_seqlens, softmax_scale and
    softcap of `flash_attention_4`."""
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": True, "softcap": softcap or 0.0}
    if cu_seqlens is not None:
        # Reading the length of the longest sequence would cost a sync; the row's length bounds it.
        options |= {"cu_seqlens_q": query_bounds(cu_seqlens, len(q), len(k)), "cu_seqlens_k": cu_seqlens}
        options |= {"max_seqlen_q": q.shape[0], "max_seqlen_k": k.shape[0]}
    return options


def _window(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


@custom_op(keep=always)
def _flash_attention_4_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, softmax_scale: float, window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result; for the backward pass the logarithm of the sum of exponentials, ([B,] Hq, T) float32."""
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
