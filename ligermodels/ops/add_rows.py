"""Adding rows to those of a matrix that an index names, as an embedding's gradient does."""

import torch

from ligermodels.errors import InputError
from ligermodels.ops.dispatch import power_of_2_above, tl, triton, use_kernels
from ligermodels.ops.launcher import after_previous_kernel, kernel
from ligermodels.ops.library import opaque_op

ROWS = 16  # further rows of an index that are read at a time
BLOCK = 512  # columns that a program takes at most
WINDOW = 64  # places of the sorted index whose rows another program sums up, where they are all of one index


def add_rows(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """x[index[t]] += rows[t] for every t, in place, without a wait for the device: the rows of an index and x's own are
    summed in float32, in an order that is the same in every run, and rounded once.

    x: (V, H), contiguous, any floating dtype. index: long (T,), in [0, V); the kernel leaves out others. rows: (T, H)
    of x's dtype, any strides.
    Raises InputError if shapes, dtypes or devices do not fit.
    """
    if x.dim() != 2 or not x.is_contiguous() or not x.is_floating_point():
        raise InputError(f"add_rows: x must be floating, (V, H) and contiguous, got {x.dtype} {tuple(x.shape)}")
    if index.dim() != 1 or index.dtype != torch.long or index.device != x.device:
        raise InputError(
            f"add_rows: index must be long (T,) on {x.device}, got {index.dtype} {tuple(index.shape)} on {index.device}"
        )
    if rows.shape != (len(index), x.shape[1]) or rows.dtype != x.dtype or rows.device != x.device:
        raise InputError(
            f"add_rows: rows must be {x.dtype} {(len(index), x.shape[1])} on {x.device}, "
            f"got {rows.dtype} {tuple(rows.shape)} on {rows.device}"
        )
    if use_kernels(x):
        _add_rows(x, index, rows)
    else:
        add_rows_reference(x, index, rows)


def add_rows_reference(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """The specification of `add_rows`, in plain torch."""
    found, place = index.unique(return_inverse=True)
    wide = torch.promote_types(x.dtype, torch.float32)
    x[found] = x[found].to(wide).index_add_(0, place, rows.to(wide)).to(x.dtype)


@triton.jit
def _sum_rows(index, order, rows, stride, place, end, i, col, inside, ROWS: tl.constexpr):
    """The sum of the rows of up to ROWS places before `end` where the sorted index is i, all asked for at once."""
    total = tl.zeros(col.shape, dtype=tl.float32)
    for n in tl.static_range(ROWS):
        same = tl.load(index + place + n, mask=place + n < end, other=-1) == i
        source = tl.load(order + place + n, mask=same, other=0)
        total += tl.load(rows + source * stride + col, mask=inside & same, other=0.0).to(tl.float32)
    return total


@kernel
def _sum_windows_kernel(
    index, order, rows, stride, windows, H, WINDOW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """windows (T // WINDOW, H), float32: the sum of each WINDOW places' rows, where they are all of one index."""
    after_previous_kernel()
    window = tl.program_id(0).to(tl.int64)
    i = tl.load(index + window * WINDOW)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < H
    if tl.load(index + window * WINDOW + WINDOW - 1) == i:
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, WINDOW, ROWS):
            place = window * WINDOW + first
            total += _sum_rows(index, order, rows, stride, place, place + ROWS, i, col, inside, ROWS)
        tl.store(windows + window * H + col, total, mask=inside)


@kernel
def _add_rows_kernel(
    x, index, order, rows, stride, windows, V, T, H, WINDOW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program for each place in the sorted index: the first of its value sums up all rows of that."""
    after_previous_kernel()
    place = tl.program_id(0).to(tl.int64)
    i = tl.load(index + place)
    before = tl.load(index + place - 1, mask=place > 0, other=-1)
    source = tl.load(order + place)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < H
    if (i != before) & (i >= 0) & (i < V):
        out = x + i * H + col
        total = tl.load(out, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(rows + source * stride + col, mask=inside, other=0.0).to(tl.float32)
        place += 1
        while tl.load(index + place, mask=place < T, other=-1) == i:
            end = tl.minimum((place // WINDOW + 1) * WINDOW, T)  # of the window
            whole = (place % WINDOW == 0) & (place + WINDOW == end)
            if whole & (tl.load(index + end - 1) == i):
                total += tl.load(windows + place // WINDOW * H + col, mask=inside, other=0.0)
                place = end
            else:
                total += _sum_rows(index, order, rows, stride, place, end, i, col, inside, ROWS)
                place = tl.minimum(place + ROWS, end)
        tl.store(out, total.to(x.dtype.element_ty), mask=inside)


def _fake(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    pass


@opaque_op(_fake, mutates=("x",))
def _add_rows(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    (V, H), T = x.shape, len(index)
    if not (x.numel() and T):
        return
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    found, order = index.sort(stable=True)
    block = min(power_of_2_above(H), BLOCK)
    blocks, windows = -(-H // block), rows.new_empty((T // WINDOW, H), dtype=torch.float32)
    shape = {"WINDOW": WINDOW, "ROWS": ROWS, "BLOCK": block, "num_warps": 4}
    if len(windows):
        _sum_windows_kernel[(len(windows), blocks)](found, order, rows, rows.stride(0), windows, H, **shape)
    _add_rows_kernel[(T, blocks)](x, found, order, rows, rows.stride(0), windows, V, T, H, **shape)
