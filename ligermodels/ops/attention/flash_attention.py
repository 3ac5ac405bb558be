"""The attention backends "flash-attn-4", "flash-attn-3" and "flash-attn-2", each if its package is installed.

They support bfloat16 and float16 on CUDA, heads of up to 256 channels, windows, softcap and packed sequences; no masks,
no sinks, no values of another width than keys. Only flash-attn-4 supports torch.compile.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

from torch import Tensor

from ligermodels.ops.attention.backend import (
    FLASH_HEAD_DIM,
    HALF,
    AttentionRequest,
    Backend,
    refuses_scale,
    repeat_heads,
)
from ligermodels.ops.attention.flash_attention_4 import flash_attention_4, flash_options

_MODULES = {"flash-attn-4": "flash_attn.cute", "flash-attn-3": "flash_attn_interface", "flash-attn-2": "flash_attn"}
_FILES = {"flash-attn-4": "cute", "flash-attn-2": "flash_attn_interface.py"}
"""A file or folder of each version in the package `flash_attn`, which versions 4 and 2 share."""


def _find(name: str) -> bool:
    """Whether a version is installed. It looks for files instead of importing: importing version 2 takes seconds."""
    spec = importlib.util.find_spec(_MODULES[name].partition(".")[0])
    if spec is None or name not in _FILES:
        return spec is not None
    return any((Path(folder) / _FILES[name]).exists() for folder in spec.submodule_search_locations or ())


INSTALLED = {name: _find(name) for name in _MODULES}

# Packed, flash-attn 4.0.0b36 gave wrong gradients with head_dim 16 and 80 on an H200, and right ones with these.
_PACKED_HEAD_DIMS = {"flash-attn-4": (64, 128, 256)}


_LACKS = {"sinks": "sinks are not implemented on it", "masked": "it takes no arbitrary mask"}


def _limit(name: str, request: AttentionRequest) -> str | None:
    if request.head_dim > FLASH_HEAD_DIM or request.head_dim % 8:
        return f"head_dim {request.head_dim} is not a multiple of 8 up to {FLASH_HEAD_DIM}"
    if request.value_dim is not None:
        return f"values of {request.value_dim} channels beside keys of {request.head_dim} are not implemented on it"
    if request.packed and request.head_dim not in _PACKED_HEAD_DIMS.get(name, (request.head_dim,)):
        return f"packed sequences of head_dim {request.head_dim}: their gradients are not known to be right"
    if request.compiling and name != "flash-attn-4":
        return "torch.compile is not known to trace it"
    return refuses_scale(request) if INSTALLED[name] else not_installed(name)


def not_installed(name: str) -> str:
    """The refusal of a backend that needs only to be installed."""
    return f"{_MODULES[name]} is not installed"


def _run(
    name: str, q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, _: None, cu_seqlens: Tensor | None,
    sinks: None,
) -> Tensor:  # fmt: skip
    if cu_seqlens is not None:
        q, k, v = q[0], k[0], v[0]
    if name == "flash-attn-4":
        out = flash_attention_4(q, k, v, cu_seqlens, request.softmax_scale, request.window, request.softcap)
    else:
        module = importlib.import_module(_MODULES[name])
        function = module.flash_attn_func if cu_seqlens is None else module.flash_attn_varlen_func
        options = flash_options(q, k, cu_seqlens, request.softmax_scale, request.softcap)
        out = function(q, k, v, **options, window_size=(-1, -1) if request.window is None else (request.window - 1, 0))
        out = out[0] if isinstance(out, tuple) else out
    return out if cu_seqlens is None else out[None]


FLASH = [Backend(name, partial(_run, name), True, HALF, _LACKS, partial(_limit, name)) for name in _MODULES]


def _run_meta(
    q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, mask: Tensor | None, cu_seqlens: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """On the meta device: shapes of the result and of the tensors that a GPU's fused kernels keep for the backward
    pass, without scores of all queries and keys. The kernel for wide heads keeps keys and values per query head."""
    if request.head_dim > FLASH_HEAD_DIM and q.shape[2] != k.shape[2]:
        k, v = repeat_heads(q, k, v)
    return flash_attention_4(q, k, v, cu_seqlens, request.softmax_scale, request.window, request.softcap)


META = Backend("meta", _run_meta)
