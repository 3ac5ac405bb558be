"""The attention backend "varlen": torch's own flash attention over packed sequences, as two opaque ops.

`torch.nn.attention.varlen.varlen_attn` (torch >= 2.10) calls the same two functions of aten; torch 2.8 has them too.
Here they are called directly: their parameters are the same in every version, and selective activation checkpointing
keeps their results.

The backend supports bfloat16 and float16 on NVIDIA GPUs from sm_80 on, windows, fewer queries than keys, packed
sequences, and values of another width; no masks, no softcap, no sinks. Rows of a batch are packed sequences of equal
length. The kernels take as many channels of keys as of values, a multiple of 8 up to 256: others are padded with zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.ops.attention.backend import (
    FLASH_HEAD_DIM,
    HALF,
    AttentionRequest,
    Backend,
    needs_mask,
    query_bounds,
    refuses_scale,
)
from ligermodels.ops.runtime.library import always, custom_op, is_fake, once_differentiable

_PARAMETERS = {
    "_flash_attention_forward": "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask "
    "scale window_size_left window_size_right",
    "_flash_attention_backward": "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p "
    "is_causal rng_state unused scale window_size_left window_size_right",
}
"""The functions of aten, and the parameters with which they must begin."""


def _missing() -> str | None:
    """Why this build of torch cannot serve the backend; None if it can."""
    if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention for NVIDIA GPUs"
    for name, parameters in _PARAMETERS.items():
        overload = getattr(getattr(torch.ops.aten, name, None), "default", None)
        names = [argument.name for argument in overload._schema.arguments] if overload else []
        if names[: len(parameters.split())] != parameters.split():
            return f"torch {torch.__version__} has another aten::{name}"
    return None


MISSING = _missing()
"""Why this build of torch cannot serve the backend; None if it can."""


def compute_capability() -> int:
    """Major number of the current GPU's compute capability."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).major


def _limit(request: AttentionRequest) -> str | None:
    if MISSING is not None:
        return MISSING
    if compute_capability() < 8:
        return "torch's flash attention needs a GPU of compute capability 8.0 or later"
    width = max(request.head_dim, request.value_dim or 0)
    if width > FLASH_HEAD_DIM:
        return f"it takes heads of up to {FLASH_HEAD_DIM} channels, not {width}"
    if request.compiling and request.packed:
        return "its memory grows with the number of documents, which torch.compile bounds by the number of tokens"
    return refuses_scale(request)


def _run(
    q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, mask: Tensor | None, cu_seqlens: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    if cu_seqlens is None:
        rows = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        bounds_q, bounds = rows * queries, rows * keys
    else:
        bounds_q, bounds = query_bounds(cu_seqlens, queries, keys), cu_seqlens
    q, k, v = (_widened(x.flatten(0, 1), kernel_width(request)) for x in (q, k, v))
    # Reading the length of the longest sequence would cost a sync; the row's length bounds it. With a bound of one
    # query the kernels expect exactly one query in each sequence.
    options = max(queries, 2), keys, request.softmax_scale, request.window
    # torch.compile traces no autograd function that gets a tensor twice.
    out, _ = _VarlenAttention.apply(q, k, v, None if queries == keys else bounds_q, bounds, *options)
    return out[..., : request.value_dim or request.head_dim].unflatten(0, (batch, queries))


def kernel_width(request: AttentionRequest) -> int:
    """Channels that the kernels compute for a request: multiples of 8 up to 192, and 256."""
    width = max(request.head_dim, request.value_dim or 0)
    return FLASH_HEAD_DIM if width > 192 else -(-width // 8) * 8


def _widened(x: Tensor, width: int) -> Tensor:
    """x with channels of zeros up to the width, and a contiguous last dimension."""
    x = F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
    return x if x.stride(-1) == 1 else x.contiguous()


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, *options):
        out, lse = _varlen_attention_forward(q, k, v, *options)
        ctx.save_for_backward(q, k, v, out, lse, *options[:2])
        ctx.options = options[2:]
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        return _varlen_attention_backward(dout, *ctx.saved_tensors, *ctx.options)


@custom_op(keep=always)
def _varlen_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens: Tensor, max_q: int, max_k: int,
    softmax_scale: float, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result; for the backward pass the logarithm of the sum of exponentials, (Hq, T) float32.

    cu_seqlens bounds the keys of each sequence; cu_seqlens_q its queries, if they have other bounds."""
    if is_fake(q):
        return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    cu_seqlens_q = cu_seqlens if cu_seqlens_q is None else cu_seqlens_q
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens, max_q, max_k, 0.0, True, False, **_scores(softmax_scale, window)
    )
    return out, lse


@custom_op()
def _varlen_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens_q: Tensor | None,
    cu_seqlens: Tensor, max_q: int, max_k: int, softmax_scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if is_fake(q):
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    random_state = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)  # of dropout, which is 0
    cu_seqlens_q = cu_seqlens if cu_seqlens_q is None else cu_seqlens_q
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dout.contiguous(),
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens,
        max_q,
        max_k,
        0.0,
        True,
        *random_state,
        **_scores(softmax_scale, window),
    )
    return dq, dk, dv


def _scores(softmax_scale: float, window: int | None) -> dict[str, float | int | None]:
    options: dict[str, float | int | None] = {"scale": softmax_scale}
    return options if window is None else options | {"window_size_left": window - 1, "window_size_right": 0}


_LACKS = {
    "softcap": "torch's flash attention has no softcap",
    "sinks": "sinks are not implemented on it",
    "masked": "it takes no arbitrary mask",
}
VARLEN = Backend("varlen", _run, True, HALF, _LACKS, _limit, defers=lambda request: not needs_mask(request))
