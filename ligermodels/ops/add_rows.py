"""Adding rows to those of a matrix that an index names, as an embedding's gradient does."""

import torch

from ligermodels.errors import InputError
from ligermodels.ops.dispatch import power_of_2_above, tl, use_kernels
from ligermodels.ops.launcher import after_previous_kernel, kernel
from ligermodels.ops.library import opaque_op

ROWS = 16  # further rows of an index that are read at a time
BLOCK = 512  # columns that a program takes at most


def add_rows(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """x[index[t]] += rows[t] for every t, in place, without a wait for the device: the rows of an index and x's own are
    summed in float32, in the order of t, and rounded once.

    x: (V, H), contiguous, any floating dtype. index: long (T,), in [0, V); the kernel leaves out others. rows: (T, H)
    of x's dtype, any strides. One program sums up all rows of an index, which shows where thousands have the same.
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


@kernel
def _add_rows_kernel(x, index, order, rows, stride, V, T, H, ROWS: tl.constexpr, BLOCK: tl.constexpr):
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
            for n in tl.static_range(ROWS):  # all of them asked for at once
                same = tl.load(index + place + n, mask=place + n < T, other=-1) == i
                source = tl.load(order + place + n, mask=same, other=0)
                total += tl.load(rows + source * stride + col, mask=inside & same, other=0.0).to(tl.float32)
            place += ROWS
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
    _add_rows_kernel[(T, -(-H // block))](
        x, found, order, rows, rows.stride(0), V, T, H, ROWS=ROWS, BLOCK=block, num_warps=4
    )
