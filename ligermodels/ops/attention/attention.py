"""Causal grouped-query attention. Each backend states the calls that it cannot serve; the first that can is used."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ligermodels.errors import BackendError, InputError
from ligermodels.ops.attention.flash_attention_4 import flash_attention_4, flash_options
from ligermodels.ops.runtime.tensors import check_tensor


class AttentionRequest(NamedTuple):
    """The properties of a call by which a backend is chosen; none is read from device memory. `value_dim` is None
    where values have as many channels as keys."""

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
    """`refuses` gives the reason why a request cannot be served, or None; `run` serves it."""

    name: str
    refuses: Callable[[AttentionRequest], str | None]
    run: Callable[[Tensor, Tensor, Tensor, AttentionRequest, Tensor | None, Tensor | None, Tensor | None], Tensor]


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
    """Softmax attention of each query over the keys at or before its own place.

    Args:
        q: (B, T, Hq, D).
        k, v: (B, S, Hkv, D) and (B, S, Hkv, Dv) with S >= T and Hkv dividing Hq; query t is at the position of key
            S - T + t.
        softmax_scale: factor on q·k; D ** -0.5 when None.
        window: number of keys a query sees, its own included (Mistral's sliding window); None for all.
        softcap: logits become softcap * tanh(logits / softcap) before masking (Gemma 2).
        mask: bool (B, T, S), True where a query sees a key; replaces the causal rule. Every query must see a key.
        cu_seqlens: int32 (n + 1,), the bounds of n sequences packed into the one row of keys (B = 1). Queries are
            those of its last T places.
        sinks: floating (Hq,), for each query head one more logit in the denominator of its softmax, after scale and
            softcap; what it takes of the weights goes to no value (gpt-oss, https://arxiv.org/abs/2508.10925).
        backend: "auto", or the name of one of `backends()`.

    Returns:
        (B, T, Hq, Dv), in q's dtype.

    Raises:
        InputError: shapes that do not fit together.
        BackendError: the named backend is unknown, not installed, or cannot serve this call.
    """
    batch, length, heads, head_dim = q.shape
    if k.shape[:3] != v.shape[:3] or k.shape[0] != batch or k.shape[3] != head_dim or heads % k.shape[2]:
        raise InputError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together"
        )
    if k.shape[1] < length:
        raise InputError(f"attention: {length} queries but only {k.shape[1]} keys")
    if mask is not None:
        check_tensor("attention", "mask", mask, (batch, length, k.shape[1]), q.device, torch.bool)
    if cu_seqlens is not None and (batch != 1 or mask is not None):
        raise InputError("attention: cu_seqlens needs one row (B = 1), and no mask")
    if sinks is not None:
        check_tensor("attention", "sinks", sinks, (heads,), q.device)
    request = AttentionRequest(
        device=q.device.type,
        dtype=q.dtype,
        head_dim=head_dim,
        query_length=length,
        key_length=k.shape[1],
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        window=None if window is None or window >= k.shape[1] else window,  # none is faster than one that hides nothing
        softcap=softcap,
        masked=mask is not None,
        packed=cu_seqlens is not None,
        compiling=torch.compiler.is_compiling(),
        sinks=sinks is not None,
        value_dim=None if v.shape[3] == head_dim else v.shape[3],
    )
    if q.is_cuda:
        q, k, v = (_aligned(each, request.compiling) for each in (q, k, v))
    return choose(request, backend).run(q, k, v, request, mask, cu_seqlens, sinks)


def choose(request: AttentionRequest, name: str = "auto") -> Backend:
    """The first backend that serves `request`, or the named one; BackendError says why it cannot."""
    if name != "auto":
        backend = _BACKENDS.get(name)
        if backend is None:
            raise BackendError(f"attention backend {name!r} is unknown; there are: auto, {', '.join(_BACKENDS)}")
        if reason := backend.refuses(request):
            raise BackendError(f"attention backend {name!r} cannot serve this call: {reason}")
        return backend
    if request.device == "meta":
        return _META
    return next(backend for backend in _BACKENDS.values() if not backend.refuses(request))


def backends() -> dict[str, bool]:
    """Name of every backend, fastest first, and whether it is installed here."""
    return {name: name not in _MODULES or _INSTALLED[name] for name in _BACKENDS}


def visible(request: AttentionRequest, device: torch.device, cu_seqlens: Tensor | None = None) -> Tensor:
    """Bool (T, S): the causal rule with the request's window, and within one document when packed."""
    keys = torch.arange(request.key_length, device=device)
    queries = keys[request.key_length - request.query_length :, None]
    allowed = keys <= queries
    if request.window is not None:
        allowed = allowed & (keys > queries - request.window)
    if cu_seqlens is not None:
        document = torch.bucketize(keys, cu_seqlens[1:], right=True)
        allowed = allowed & (document == document[queries])
    return allowed


_ALIGNMENT = 16
"""Bytes at multiples of which the heads of each token begin for fused kernels on a GPU."""


def _aligned(x: Tensor, compiling: bool) -> Tensor:
    """x, or a contiguous copy of it where its heads do not begin at such multiples: torch 2.11 chooses kernels that
    need this without a look at addresses and at the distances between heads (pytorch/pytorch#183484)."""
    if compiling:  # addresses are not known; of a contiguous tensor they are multiples
        return x if x.is_contiguous() else x.contiguous()
    places = [x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1])]
    fits = not any(place % _ALIGNMENT for place in (places[:1] if x.is_contiguous() else places))
    return x if fits else x.clone(memory_format=torch.contiguous_format)


# -- reference ---------------------------------------------------------------------------------------------------------


def _reference(
    q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, mask: Tensor | None, cu_seqlens: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """The specification: fp32 (or fp64) scores and softmax, every option; memory grows with T * S."""
    batch, length, heads, _ = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(compute).unflatten(2, (k.shape[2], heads // k.shape[2]))
    scores = torch.einsum("bthgd,bshd->bhgts", grouped, k.to(compute)) * request.softmax_scale
    if request.softcap is not None:
        scores = request.softcap * torch.tanh(scores / request.softcap)
    allowed = visible(request, q.device, cu_seqlens) if mask is None else mask[:, None, None]
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        sink = sinks.to(compute).view(*scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    out = torch.einsum("bhgts,bshd->bthgd", weights, v.to(compute))
    return out.reshape(batch, length, heads, v.shape[3]).to(q.dtype)


# -- torch SDPA --------------------------------------------------------------------------------------------------------

_LONG = 512
"""Queries from which on cuDNN's kernels, on Hopper nearly twice as fast as torch's flash ones, pay for their set-up."""

_CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _sdpa_refuses(request: AttentionRequest) -> str | None:
    if request.softcap is not None:
        return "torch's scaled_dot_product_attention has no softcap"
    return "sinks need a softmax_scale other than 0" if request.sinks and request.softmax_scale == 0 else None


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, mask: Tensor | None, cu_seqlens: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    if cu_seqlens is not None and request.device == "cpu" and not request.compiling:
        # Here bounds can be read without a sync, and separate sequences cost less than a T x T mask.
        alone, hidden = [], request.key_length - request.query_length
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            first = max(start, hidden)  # of the queries
            if first < end:
                window = request.window if request.window is not None and request.window < end - start else None
                part = request._replace(query_length=end - first, key_length=end - start, window=window, packed=False)
                queries = q[:, first - hidden : end - hidden]
                alone.append(_sdpa(queries, k[:, start:end], v[:, start:end], part, None, None, sinks))
        return torch.cat(alone, dim=1)
    shifted = request.key_length != request.query_length and request.query_length > 1
    if mask is None and (shifted or request.window is not None) and _takes_strided_masks(request):
        return _sdpa_backwards(q, k, v, request)
    if mask is not None:
        mask = mask[:, None]
    elif cu_seqlens is not None or shifted or request.window is not None:
        mask = visible(request, q.device, cu_seqlens)
    value_dim = v.shape[3]
    if sinks is not None:
        q, k, v = _with_sink(q, k, v, sinks, request.softmax_scale)
        mask = None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)
    if q.is_cuda and q.shape[2] != k.shape[2] and _needs_equal_heads(q, mask):
        k, v = _for_each_query_head(q, k, v)
    causal = False
    if mask is None and request.query_length > 1:  # a branch, for SDPA takes no symbolic bool from a compiler
        causal = True
    long = q.is_cuda and request.query_length >= _LONG and not request.compiling
    with sdpa_kernel(_CUDNN_FIRST, set_priority=True) if long else nullcontext():
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=causal,
            scale=request.softmax_scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    out = out.transpose(1, 2)
    return out if sinks is None else out[:, 1:, :, :value_dim]


def _needs_equal_heads(q: Tensor, mask: Tensor | None) -> bool:
    """Whether the call may go to a GPU's memory-efficient kernel, which wants as many key and value heads as query
    heads: those with masks, which flash kernels refuse and cuDNN takes on some GPUs, in 32 bits, or of wide heads. If
    heads are not repeated for it, SDPA falls back to its composite, which keeps all scores in fp32."""
    return mask is not None or q.dtype.itemsize > 2 or q.shape[3] > _FLASH_HEAD_DIM


def _for_each_query_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with each head repeated for the query heads that share it."""
    count = q.shape[2] // k.shape[2]
    return k.repeat_interleave(count, dim=2), v.repeat_interleave(count, dim=2)


def _takes_strided_masks(request: AttentionRequest) -> bool:
    """Whether SDPA's kernel reads a mask where it lies, as that of CPUs does; those of GPUs copy it."""
    return request.device == "cpu" and not (request.sinks or request.packed or request.compiling)


def _sdpa_backwards(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest) -> Tensor:
    """The last query first: whether it sees a key goes by the sum of both places, so that a mask of all pairs (T, S) is
    a view of T + S numbers."""
    queries, keys = request.query_length, request.key_length
    place = torch.arange(queries + keys - 1, device=q.device)
    seen = place < keys
    if request.window is not None:
        seen = seen & (place >= keys - request.window)
    line = torch.zeros(len(place), dtype=q.dtype, device=q.device).masked_fill(~seen, float("-inf"))
    out = F.scaled_dot_product_attention(
        q.flip(1).transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=line.as_strided((queries, keys), (1, 1)),
        scale=request.softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2).flip(1)


def _with_sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v after one more position, whose key meets each query head with its sink, and whose value is zero.

    Kernels of SDPA give no denominator from which autograd could go on, but they take this key as any other. A channel
    beyond those of the heads makes its product with every query the sink, and that of the other keys zero. The query
    of that position keeps the causal rule square. Channels are filled up to the next multiple of 8, for fused kernels.
    """
    head_dim = q.shape[3]
    q, k, v = (F.pad(each, (0, 8 - head_dim % 8, 0, 0, 1, 0)) for each in (q, k, v))
    q[..., head_dim] = sinks.to(q.dtype)
    k[:, 0, :, head_dim] = 1 / softmax_scale
    return q, k, v


# -- flash-attn 4, 3 and 2 ---------------------------------------------------------------------------------------------

_MODULES = {"flash-attn-4": "flash_attn.cute", "flash-attn-3": "flash_attn_interface", "flash-attn-2": "flash_attn"}
_PARTS = {"flash-attn-4": "cute", "flash-attn-2": "flash_attn_interface.py"}
"""What a version has in the package `flash_attn`, which versions 4 and 2 share."""


def _find(name: str) -> bool:
    """Whether a version is installed. Files are looked for instead of imported: importing version 2 takes seconds."""
    spec = importlib.util.find_spec(_MODULES[name].partition(".")[0])
    if spec is None or name not in _PARTS:
        return spec is not None
    return any((Path(folder) / _PARTS[name]).exists() for folder in spec.submodule_search_locations or ())


_INSTALLED = {name: _find(name) for name in _MODULES}

_FLASH_HEAD_DIM = 256

# Packed, flash-attn 4.0.0b36 gave wrong gradients with head_dim 16 and 80 on an H200, and right ones with these.
_PACKED_HEAD_DIMS = {"flash-attn-4": (64, 128, 256)}


def _flash_refuses(name: str, request: AttentionRequest) -> str | None:
    if request.device != "cuda":
        return f"it runs on CUDA, not on {request.device}"
    if not _INSTALLED[name]:
        return f"{_MODULES[name]} is not installed"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {request.dtype}"
    if request.head_dim > _FLASH_HEAD_DIM or request.head_dim % 8:
        return f"head_dim {request.head_dim} is not a multiple of 8 up to {_FLASH_HEAD_DIM}"
    if request.value_dim is not None:
        return f"values of {request.value_dim} channels beside keys of {request.head_dim} are not implemented on it"
    if request.packed and request.head_dim not in _PACKED_HEAD_DIMS.get(name, (request.head_dim,)):
        return f"packed sequences of head_dim {request.head_dim}: their gradients are not known to be right"
    if request.sinks:
        return "sinks are not implemented on it"
    if request.compiling and name != "flash-attn-4":
        return "torch.compile is not known to trace it"
    return "it takes no arbitrary mask" if request.masked else None


def _flash(
    name: str, q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, _: None, cu_seqlens: Tensor | None,
    sinks: None,
) -> Tensor:  # fmt: skip
    packed = cu_seqlens is not None
    q, k, v = (q[0], k[0], v[0]) if packed else (q, k, v)
    if name == "flash-attn-4":
        out = flash_attention_4(q, k, v, cu_seqlens, request.softmax_scale, request.window, request.softcap)
        return out[None] if packed else out
    module = importlib.import_module(_MODULES[name])
    options = flash_options(q, k, cu_seqlens, request.softmax_scale, request.softcap)
    options["window_size"] = (-1, -1) if request.window is None else (request.window - 1, 0)
    out = (module.flash_attn_varlen_func if packed else module.flash_attn_func)(q, k, v, **options)
    out = out[0] if isinstance(out, tuple) else out
    return out[None] if packed else out


def _meta(
    q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, mask: Tensor | None, cu_seqlens: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Shapes, and what the fused kernels of a GPU keep for the backward pass: no scores of all queries and keys. The
    one for wide heads keeps keys and values of every query head."""
    if request.head_dim > _FLASH_HEAD_DIM and q.shape[2] != k.shape[2]:
        k, v = _for_each_query_head(q, k, v)
    return flash_attention_4(q, k, v, cu_seqlens, request.softmax_scale, request.window, request.softcap)


_FLASH = [Backend(name, partial(_flash_refuses, name), partial(_flash, name)) for name in _MODULES]
_META = Backend("meta", lambda request: None, _meta)
_SDPA, _REFERENCE = Backend("sdpa", _sdpa_refuses, _sdpa), Backend("reference", lambda request: None, _reference)
_BACKENDS = {backend.name: backend for backend in (*_FLASH, _SDPA, _REFERENCE)}
