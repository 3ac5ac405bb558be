"""The gated delta rule over sequences by flash-linear-attention's chunked kernels (https://github.com/fla-org). They
are optional: `pip install fla-core`.

Unlike the reference they round the values that they keep of a chunk to the operands' 16 bits: the normalised queries
and keys, the updates, and the states before the chunks. For packed documents they read the bounds on the host, once for
each tensor of bounds.
"""

from __future__ import annotations

import functools
import importlib
import re
from importlib import metadata
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ligermodels.ops.runtime.devices import gpu_of
from ligermodels.ops.runtime.tensors import without_autocast

MIN_VERSION = (0, 6)  # the first version tried; earlier versions differ in options and grouped heads
MAX_KEY_DIM = 256


class DeltaRequest(NamedTuple):
    """The properties of a call that decide whether fla can serve it; none is read from device memory.

    continued: whether there is an initial state. gradient: whether autograd may ask for gradients. recording: whether
    the call goes into a CUDA graph. by_channel: whether each key channel has a decay of its own.
    """

    device: str
    dtype: torch.dtype
    key_dim: int
    packed: bool
    continued: bool
    compiling: bool
    gradient: bool = False
    recording: bool = False
    by_channel: bool = False


@functools.cache
def installed() -> bool:
    """Whether a known version of fla-core is installed."""
    try:
        version = metadata.version("fla-core")
    except metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= MIN_VERSION


@functools.cache
def _wrong_gradients() -> bool:
    """Whether fla refuses the backward pass on this GPU with this version of Triton."""
    version = tuple(int(part) for part in re.findall(r"\d+", metadata.version("triton"))[:3])
    gpu = gpu_of(torch.device("cuda"))
    return (3, 4) <= version < (3, 7, 1) and gpu is not None and gpu.is_hopper


def refuses(request: DeltaRequest) -> str | None:
    """Why a call cannot be served, or None."""
    if request.device != "cuda":
        return f"it runs on CUDA, not on {request.device}"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {request.dtype}"
    if request.key_dim > MAX_KEY_DIM:
        return f"queries and keys of {request.key_dim} channels are more than {MAX_KEY_DIM}"
    if request.by_channel:
        return "a decay for each key channel is not implemented on it"
    if request.packed and request.continued:
        return "packed documents after an initial state are not implemented on it"
    if request.packed and request.recording:
        return "it reads the bounds of documents on the host, and a CUDA graph would keep those of the first call"
    if request.compiling:
        return "torch.compile does not trace it"
    if request.gradient and _wrong_gradients():
        return "its gradients are wrong on Hopper with Triton 3.4 to 3.7.0 (fla-org/flash-linear-attention#640)"
    return None if installed() else f"fla-core {'.'.join(map(str, MIN_VERSION))} or later is not installed"


def run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    final_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`gated_delta_rule` by fla, with the same q, k, v, g, beta, initial_state, cu_seqlens and final_state."""
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    state = None if initial_state is None else initial_state.float()
    bounds = None if cu_seqlens is None else _unchanging(cu_seqlens)
    with without_autocast(q):
        o, last = rule(
            q, k, v, g.float(), beta.float(), initial_state=state, output_final_state=final_state,
            use_qk_l2norm_in_kernel=True, cu_seqlens=bounds,
        )  # fmt: skip
    if not final_state:
        return o, o.new_empty(0)
    if cu_seqlens is not None:  # one state per document: take the state of the last document with tokens
        last = last[(cu_seqlens[:-1] < cu_seqlens[-1]).sum().view(1) - 1]
    return o, last


_COPIES = WeakTensorKeyDictionary()


def _unchanging(bounds: Tensor) -> Tensor:
    """A copy of `bounds`; the same copy until `bounds` is changed in place. fla caches the values that it read on the
    host by the identity of the tensor, and does not notice changes."""
    version = None if bounds.is_inference() else bounds._version
    cached = _COPIES.get(bounds)
    if cached is None or version is None or cached[0] != version:
        cached = _COPIES[bounds] = version, bounds.clone()
    copy: Tensor = cached[1]
    return copy
