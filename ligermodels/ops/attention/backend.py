"""The description of a call of attention, and the interface of its backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.runtime.dispatch import set_batch_invariant

HALF = torch.bfloat16, torch.float16
FLASH_HEAD_DIM = 256
"""Widest heads that flash attention kernels take, flash-attn's and torch's alike."""


class AttentionRequest(NamedTuple):
    """The properties of a call that decide which backends can serve it; none is read from device memory.

    device: type of the device, "cuda" or "cpu".
    dtype, head_dim: of queries and keys.
    query_length, key_length: number of queries T and of keys S.
    softmax_scale: factor on q·k.
    window: number of keys that a query sees, its own included, below S; None for no window.
    softcap: bound of the scores; None for no bound.
    masked, packed, sinks: whether the call has a mask, cu_seqlens, sinks.
    compiling: whether torch.compile traces the call.
    value_dim: channels of values; None if values have head_dim channels.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    query_length: int
    key_length: int
    softmax_scale: float
    window: int | None
    softcap: float | None
    masked: bool
    packed: bool
    compiling: bool = False
    sinks: bool = False
    value_dim: int | None = None


@dataclass(frozen=True)
class Backend:
    """An implementation of attention.

    name: the name by which users choose it.
    run: computes (q, k, v, request, mask, cu_seqlens, sinks) -> (B, T, Hq, Dv). Only called if `refuses` gave None.
    cuda_only: whether it runs on CUDA alone; otherwise on every device.
    dtypes: the dtypes that it takes; empty for all.
    lacks: fields of `AttentionRequest` that it does not support, and for each the reason.
    limit: further limits: why it cannot serve a request, or None if it can.
    defers: whether a backend after this one in `BACKENDS` serves the request faster.
    batch_invariant: whether it serves requests under `set_batch_invariant`.
    """

    name: str
    run: Callable[[Tensor, Tensor, Tensor, AttentionRequest, Tensor | None, Tensor | None, Tensor | None], Tensor]
    cuda_only: bool = False
    dtypes: tuple[torch.dtype, ...] = ()
    lacks: dict[str, str] = field(default_factory=dict)
    limit: Callable[[AttentionRequest], str | None] = lambda request: None
    defers: Callable[[AttentionRequest], bool] = lambda request: False
    batch_invariant: bool = False

    def refuses(self, request: AttentionRequest) -> str | None:
        """Why the backend cannot serve a request; None if it can."""
        if set_batch_invariant.value and not self.batch_invariant:
            return "batch_invariant is on, and its sums depend on the batch"
        if self.cuda_only and request.device != "cuda":
            return f"it runs on CUDA, not on {request.device}"
        if self.dtypes and request.dtype not in self.dtypes:
            return f"it takes {' and '.join(str(d).removeprefix('torch.') for d in self.dtypes)}, not {request.dtype}"
        for option, reason in self.lacks.items():
            if getattr(request, option) not in (None, False):
                return reason
        return self.limit(request)


def refuses_scale(request: AttentionRequest) -> str | None:
    """Why kernels that scale the scores after they mask them cannot serve a request: -inf times a factor that is not
    above 0 is inf or NaN. None if they can."""
    return None if request.softmax_scale > 0 else "it needs a softmax_scale above 0"


def needs_mask(request: AttentionRequest) -> bool:
    """Whether the causal rule of torch's scaled_dot_product_attention (`is_causal`) is not enough: packed sequences, a
    window, or several queries, but fewer than keys."""
    return request.packed or request.window is not None or 1 < request.query_length < request.key_length


def visible(request: AttentionRequest, device: torch.device, cu_seqlens: Tensor | None = None) -> Tensor:
    """The causal mask of a request.

    Args:
        request: gives the number of queries T and of keys S, and the window.
        device: device of the mask.
        cu_seqlens: int32 (n + 1,), bounds of packed sequences; queries see no key of another sequence.

    Returns:
        bool (T, S), True where a query sees a key.
    """
    keys = torch.arange(request.key_length, device=device)
    queries = keys[request.key_length - request.query_length :, None]
    allowed = keys <= queries
    if request.window is not None:
        allowed = allowed & (keys > queries - request.window)
    if cu_seqlens is not None:
        document = torch.bucketize(keys, cu_seqlens[1:], right=True)
        allowed = allowed & (document == document[queries])
    return allowed


def query_bounds(cu_seqlens: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """Bounds of packed sequences among the queries.

    Args:
        cu_seqlens: int32 (n + 1,), bounds among the keys.
        num_queries: number of queries: the last tokens of the row of keys.
        num_keys: number of keys.

    Returns:
        int32 (n + 1,). Sequences that end before the first query have no queries.
    """
    return cu_seqlens if num_queries == num_keys else (cu_seqlens - (num_keys - num_queries)).clamp(min=0)


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with each head repeated for the heads of q that share it."""
    count = q.shape[2] // k.shape[2]
    return k.repeat_interleave(count, dim=2), v.repeat_interleave(count, dim=2)
