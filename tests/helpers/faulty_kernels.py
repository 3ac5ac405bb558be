"""Kernels that do not run on every GPU, with calls as in `op_calls`: faults for the compile matrix to find."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton.language as tl
from triton.language.extra.cuda import gdc_wait
from triton.language.target_info import cuda_capability_geq

from ligermodels.ops.runtime.launcher import kernel


@kernel
def product_kernel(a, b, out, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, 4096, BLOCK_K):
        left = tl.load(a + rows * 4096 + start + tl.arange(0, BLOCK_K)[None, :])
        right = tl.load(b + (start + tl.arange(0, BLOCK_K)[:, None]) * BLOCK + columns)
        total = tl.dot(left, right, total)
    tl.store(out + rows * BLOCK + columns, total)


@kernel
def float8_kernel(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(tl.float8e4nv).to(tl.float32))


@kernel
def nvidia_kernel(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    gdc_wait()  # an instruction of sm_90
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


@kernel
def flag_kernel(x, out, FLAG: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    place = at[:, None] * BLOCK + at[None, :]
    tile = tl.load(x + place)
    if FLAG:
        tl.static_assert(not cuda_capability_geq(9))
    tl.store(out + place, tl.dot(tile, tile))


def product(block_k: int) -> None:
    a, b = torch.ones(128, 4096, dtype=torch.bfloat16), torch.ones(4096, 128, dtype=torch.bfloat16)
    product_kernel[(1,)](a, b, torch.empty(128, 128), BLOCK=128, BLOCK_K=block_k, num_warps=8, num_stages=3)


def elementwise(launched: Any) -> None:
    launched[(1,)](torch.ones(64), torch.empty(64), BLOCK=64, num_warps=1, num_stages=1)


def flagged(flag: bool) -> None:
    flag_kernel[(1,)](torch.ones(32, 32), torch.empty(32, 32), FLAG=flag, BLOCK=32, num_warps=1, num_stages=1)


CALLS: dict[str, list[Callable[[], Any]]] = {
    "product": [partial(product, block_k) for block_k in (16, 32, 128)],  # the last has 128 KiB in flight
    "float8": [partial(elementwise, float8_kernel)],
    "griddepcontrol": [partial(elementwise, nvidia_kernel)],
    "flag": [partial(flagged, False), partial(flagged, True)],  # small, and sm_80 compiles both
}
