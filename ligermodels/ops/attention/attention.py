"""Causal grouped-query attention: one public function, and the choice of its backend.

Each backend is a file in this folder, and its `refuses` says which calls it cannot serve. `BACKENDS` lists them,
fastest first; the first backend that can serve a call does, unless its `defers` says that a later one is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import BackendError, InputError
from ligermodels.ops.attention.backend import AttentionRequest, Backend
from ligermodels.ops.attention.flash_attention import FLASH, INSTALLED, META
from ligermodels.ops.attention.reference import REFERENCE
from ligermodels.ops.attention.sdpa import SDPA
from ligermodels.ops.attention.triton_attention import TRITON
from ligermodels.ops.attention.varlen import MISSING, VARLEN
from ligermodels.ops.runtime.checks import Signature, check_rising, check_scores
from ligermodels.ops.runtime.dispatch import HAS_TRITON
from ligermodels.ops.runtime.tensors import without_autocast

BACKENDS = {backend.name: backend for backend in (*FLASH, TRITON, VARLEN, SDPA, REFERENCE)}

_TENSORS = Signature(
    dtensors="kept", q="B T Hq D+", k="B S Hkv D =q", v="B S Hkv Dv+ =q", mask="B T S bool ?",
    cu_seqlens="bounds int32 ?", sinks="Hq ?",
)  # fmt: skip
_ALIGNMENT = 16
"""Bytes: on a GPU, fused kernels need each token's heads to begin at a multiple of this."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention: each query attends to the keys up to its own position. Autocast has no effect on it.

    Args:
        q: (B, T, Hq, D), floating.
        k: (B, S, Hkv, D) with S >= T and Hkv dividing Hq, of q's dtype. Query t is at the position of key S - T + t.
        v: (B, S, Hkv, Dv), of q's dtype.
        softmax_scale: factor on q·k; D ** -0.5 when None.
        window: number of keys that a query sees, its own included (Mistral's sliding window); None for all.
        softcap: scores become softcap * tanh(scores / softcap) before masking (Gemma 2); None for no bound.
        mask: bool (B, T, S), True where a query sees a key; in place of the causal rule and of `window`. Every query
            must see a key.
        cu_seqlens: int32 (n + 1,), bounds of n sequences that are packed into one row of keys (B = 1). Queries are
            the last T tokens of that row.
        sinks: floating (Hq,), one more logit in the softmax denominator of each query head, after scale and softcap.
            Its share of the softmax weights goes to no value (gpt-oss, https://arxiv.org/abs/2508.10925).
        backend: "auto", or a name in `backends()`.

    Returns:
        (B, T, Hq, Dv), in q's dtype.

    Raises:
        InputError: shapes or devices do not fit together, an argument has another dtype, an option of the
            scores is no number within its bounds, or, on the CPU, `cu_seqlens` do not rise from 0 to S.
        BackendError: the named backend is unknown, not installed, or cannot serve this call.

    Examples:
        >>> q, k, v = torch.randn(2, 5, 8, 64), torch.randn(2, 5, 2, 64), torch.randn(2, 5, 2, 64)
        >>> attention(q, k, v, window=3).shape
        torch.Size([2, 5, 8, 64])
    """
    _TENSORS.check("attention", q, k, v, mask, cu_seqlens, sinks)
    if softmax_scale is not None or window is not None or softcap is not None:
        _check_options(softmax_scale, window, softcap, mask)
    (batch, length, heads, head_dim), (_, num_keys, kv_heads, value_dim) = q.shape, v.shape
    if not kv_heads or heads % kv_heads:
        raise InputError(f"attention: q has {heads} heads, k {kv_heads}; the heads of k must divide those of q")
    if num_keys < length:
        raise InputError(f"attention: {length} queries but only {num_keys} keys; give at least as many keys")
    if cu_seqlens is not None:
        _check_bounds(cu_seqlens, batch, num_keys, mask)
    request = AttentionRequest(
        device=q.device.type, dtype=q.dtype, head_dim=head_dim, query_length=length, key_length=num_keys,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        window=None if window is None or window >= num_keys else window,  # backends are slower with a window
        softcap=softcap, masked=mask is not None, packed=cu_seqlens is not None, sinks=sinks is not None,
        compiling=torch.compiler.is_compiling(), value_dim=None if value_dim == head_dim else value_dim,
    )  # fmt: skip
    if _recorded is not None:
        _recorded.append((request, backend))
    if q.is_cuda:
        q, k, v = (_aligned(x, request.compiling) for x in (q, k, v))
    with without_autocast(q):  # or some backends would return autocast's dtype
        return choose(request, backend).run(q, k, v, request, mask, cu_seqlens, sinks)


def _check_options(softmax_scale: Any, window: Any, softcap: Any, mask: Tensor | None) -> None:
    check_scores("attention", softmax_scale, window, softcap)
    if mask is not None and window is not None:
        raise InputError("attention: window: a mask replaces the causal rule and the window; leave the window out")


def choose(request: AttentionRequest, name: str = "auto") -> Backend:
    """The backend that serves a request: the first one that can and does not defer to a later one, or the named one.
    Tensors on the meta device get their shapes, whichever backend is named.

    Raises BackendError if `name` is unknown, or why that backend cannot serve the request.
    """
    if name != "auto":
        return _named(request, name)
    if request.device == "meta":
        return META
    for backend in BACKENDS.values():
        if not backend.refuses(request) and not backend.defers(request):
            return backend
    raise BackendError(f"batch_invariant: no attention backend serves this call: {REFERENCE.refuses(request)}")


def _named(request: AttentionRequest, name: str) -> Backend:
    if name not in BACKENDS:
        raise BackendError(f"attention backend {name!r} is unknown; there are: auto, {', '.join(BACKENDS)}")
    if request.device == "meta":
        return META
    if reason := BACKENDS[name].refuses(request):
        raise BackendError(f"attention backend {name!r} cannot serve this call: {reason}")
    return BACKENDS[name]


_recorded: list[tuple[AttentionRequest, str]] | None = None


@contextmanager
def recorded_requests() -> Iterator[list[tuple[AttentionRequest, str]]]:
    """Within the context, collects the request and the `backend` argument of every call of `attention`."""
    global _recorded
    previous, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = previous


def backends() -> dict[str, bool]:
    """Name of every backend, fastest first, and whether it is installed here."""
    installed = INSTALLED | {"varlen": MISSING is None, "triton": HAS_TRITON}
    return {name: installed.get(name, True) for name in BACKENDS}


def _check_bounds(cu_seqlens: Tensor, batch: int, num_keys: int, mask: Tensor | None) -> None:
    if batch != 1 or mask is not None:
        raise InputError(f"attention: cu_seqlens needs one row (B = 1) and no mask; got B = {batch}")
    check_rising("attention", cu_seqlens, num_keys)


def _aligned(x: Tensor, compiling: bool) -> Tensor:
    """x, or a contiguous copy if its heads do not begin at multiples of _ALIGNMENT.

    torch 2.11 chooses kernels that need this alignment without looking at addresses and strides
    (pytorch/pytorch#183484). While compiling, addresses are unknown, but a contiguous tensor is aligned."""
    if compiling:
        return x if x.is_contiguous() else x.contiguous()
    strides = () if x.is_contiguous() else x.stride()[:-1]
    is_aligned = not any(offset % _ALIGNMENT for offset in (x.data_ptr(), *(s * x.element_size() for s in strides)))
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)
