"""Helpers of the norm ops: loads and stores of tiles of rows, launch sizes, and the sum over programs of the partial
gradients of weights."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.runtime.devices import num_sms, power_of_2_above, shared_memory
from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import kernel

MAX_KERNEL_WIDTH = 32768  # a row is held in registers; the reference serves wider ones
BLOCK_ELEMENTS = 2048  # elements of a tile in the forward pass, about: a tile has several rows if they are narrow
TILE_BYTES = 2**14  # bytes of a tile in the backward pass
NARROW = 5 * 2**10  # bytes of a row


@triton.jit
def load_rows(source, stride, row, end, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Loads rows row, row + 1, ... below end of `source`, N columns, `stride` elements from row to row, as a tile
    (ROWS, BLOCK) with zeros elsewhere."""
    rows = row + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (rows < end)[:, None] & (col < N)[None, :]
    return tl.load(source + rows[:, None] * stride + col[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(destination, values, row, end, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = row + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (rows < end)[:, None] & (col < N)[None, :]
    tl.store(destination + rows[:, None] * N + col[None, :], values.to(destination.dtype.element_ty), mask=inside)


@kernel
def _sum_rows_kernel(x, out, more, M, N, OUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(0, M, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < M)[:, None] & (col < OUTS * N)[None, :]
        total += tl.load(x + row[:, None] * (OUTS * N) + col[None, :], mask=inside, other=0.0)
    total = tl.sum(total, axis=0)
    tl.store(out + col, total.to(out.dtype.element_ty), mask=col < N)
    if OUTS == 2:
        tl.store(more + (col - N), total.to(more.dtype.element_ty), mask=(col >= N) & (col < 2 * N))


def sum_rows(x: Tensor, *outs: Tensor) -> None:
    """Fills outs, one (N,) or two, with the sums over M of x, contiguous float32 (M, N) or (M, 2, N), rounded once."""
    M, N = x.shape[0], outs[0].shape[0]
    programs, rows = -(-len(outs) * N // 32), min(power_of_2_above(M), 256)  # mostly all rows at once
    _sum_rows_kernel[(programs,)](x, outs[0], outs[-1], M, N, OUTS=len(outs), ROWS=rows, BLOCK=32, num_warps=4)


class Launch(NamedTuple):
    """Launch sizes: rows per tile, padded width, warps, rows per program, programs, and pipeline stages (tiles in
    flight through shared memory)."""

    rows: int
    width: int
    warps: int
    rows_per_program: int
    programs: int
    stages: int = 1


@functools.lru_cache(256)
def forward_launch(M: int, N: int) -> Launch:
    """Sizes for M rows of N: one tile of rows per program, with threads for N rather than for the padded width. Tuned
    on an H200."""
    width = power_of_2_above(N)
    rows = max(1, BLOCK_ELEMENTS // width)
    warps = min(max(power_of_2_above(rows * N // 512 + 1) // 2, 4), max(width // 1024, 8))
    return Launch(rows, width, warps, rows, -(-M // rows))


def backward_launch(M: int, N: int, item: int, sources: int, device: torch.device) -> Launch:
    """Sizes for a backward pass over M rows of N on `device`, from `sources` tensors of `item` bytes per value.

    There is one program per multiprocessor, or two for NARROW rows, so that there are few partial gradients of weights.
    Each source has a tile of TILE_BYTES (half for NARROW rows) in three pipeline stages; in more if rows are narrower
    than their padded width, in fewer if shared memory is short. Tuned on an H200."""
    return _backward_launch(M, N, item, sources, shared_memory(device), num_sms(device))


@functools.lru_cache(256)
def _backward_launch(M: int, N: int, item: int, sources: int, memory: int, sms: int) -> Launch:
    width = power_of_2_above(N)
    share = 2 if N * item <= NARROW else 1
    rows = max(TILE_BYTES // share // (width * item), 1)
    stages = min(max(memory // share // (sources * rows * width * item), 1), 3 * width // N)
    rows_per_program = max(-(-M // (share * sms * rows)), 1) * rows
    warps = min(max(rows * width // 1024, 4), 32)
    return Launch(rows, width, warps, rows_per_program, -(-M // rows_per_program), stages)
