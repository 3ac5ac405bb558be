"""Ops of a mixture of experts: sorting rows by expert, and one GEMM for all experts.

Shapes: N tokens, each sent to k of E experts, make N * k rows. Nothing here waits for the GPU, except the loop over
experts that replaces a missing grouped GEMM. The order of sums is fixed.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.arguments import check_count
from ligermodels.errors import InputError
from ligermodels.ops.linear.linear import dense_linear
from ligermodels.ops.runtime.checks import Signature, check_tensors
from ligermodels.ops.runtime.devices import gpu_of
from ligermodels.ops.runtime.dispatch import is_recording, set_batch_invariant, use_kernels
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import under_autocast

ALIGNMENT = 16  # bytes: rows of the operands of torch's grouped GEMM begin at multiples of this


# -- sorting -----------------------------------------------------------------------------------------------------------


class Routes(NamedTuple):
    """The order of rows sorted by expert.

    order: long (N * k,); sorted row r is row order[r] = n * k + j, token n's j-th choice.
    inverse: long (N * k,), the inverse permutation of `order`.
    offsets: int32 (E,), the end of each expert's sorted rows.
    """

    order: Tensor
    inverse: Tensor
    offsets: Tensor


def sort_by_expert(experts: Tensor, num_experts: int) -> Routes:
    """Sorts rows by expert, then by token.

    Args:
        experts: long (N, k), the experts chosen for each token, in [0, num_experts).
        num_experts: number E of experts.

    Returns:
        The routes of the N * k rows.

    Raises:
        InputError: `experts` are no tensor of integers, or `num_experts` is no whole number of at least 1.
    """
    check_tensors("sort_by_expert", experts=experts)
    if experts.dtype.is_floating_point or experts.dtype == torch.bool:
        raise InputError(f"sort_by_expert: experts must be integers, got {experts.dtype}")
    if not torch.compiler.is_compiling():
        check_count("sort_by_expert: num_experts", num_experts)
    sorted_experts, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(num_experts, device=order.device, dtype=sorted_experts.dtype)
    offsets = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
    rows = torch.arange(order.numel(), device=order.device)
    return Routes(order, torch.empty_like(order).scatter_(0, order, rows), offsets)


# -- grouped GEMM ------------------------------------------------------------------------------------------------------

_GROUPED = Signature(x="R K", weights="E+ M K", offsets="E int32", biases="E M =weights ?")


def grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor, biases: Tensor | None = None) -> Tensor:
    """Rows of x times the weight of their group: y[r] = weights[e] @ x[r] for offsets[e - 1] <= r < offsets[e].

    In bfloat16 on CUDA with K and M multiples of 8, on Hopper (or any GPU from Ampere on with torch 2.10), this is
    torch's own grouped GEMM. Otherwise it is a loop over the groups, and on a GPU it waits for the offsets. A CUDA
    graph capture cannot wait: there each group's weight multiplies all rows. Each gradient is a grouped GEMM too,
    computed only if its operand needs it; the gradients of the weights and bias of a group without rows are zero.

    Args:
        x: (R, K), any floating dtype.
        weights: (E, M, K), of x's dtype. Under autocast x, weights and biases are cast to the dtype of autocast.
        offsets: int32 (E,), the end of each group; they do not decrease, and the last is R.
        biases: (E, M), of x's dtype: biases[e] is added to the rows of group e; None for none.

    Returns:
        (R, M), of x's dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or (in the loop) the offsets decrease or do not end at R.
    """
    _GROUPED.check("grouped_mm", x, weights, offsets, biases)
    x, weights, biases = under_autocast(x, weights, biases)
    if x.dtype != weights.dtype:
        raise InputError(f"grouped_mm: weights must be of x's dtype {x.dtype}, got {weights.dtype}")
    return _GroupedMM.apply(x, weights, biases, offsets, use_kernels(x, weights))


def grouped_mm_reference(x: Tensor, weights: Tensor, offsets: Tensor, biases: Tensor | None = None) -> Tensor:
    """The specification of `grouped_mm`, in plain torch, with the same arguments x, weights, offsets and biases."""
    parts = x.split(_counts(offsets, x.shape[0]))
    added = [None] * len(parts) if biases is None else biases.unbind()
    return torch.cat([dense_linear(*operands) for operands in zip(parts, weights.unbind(), added, strict=True)])


def _counts(offsets: Tensor, rows: int) -> list[int]:
    """Rows of each group, on the host."""
    ends = offsets.tolist()
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    if ends[-1] != rows or min(counts) < 0:
        raise InputError(f"grouped_mm: offsets must not decrease, and end at x's {rows} rows; got {ends}")
    return counts


@custom_op()
def _grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor, kernels: bool, biases: Tensor | None = None) -> Tensor:
    """x (R, K), weights (E, M, K), biases (E, M) -> (R, M)."""
    if is_fake(x):
        return x.new_empty(x.shape[0], weights.shape[1])
    if kernels and not set_batch_invariant.value and _has_grouped_gemm(x, weights.shape[1]):
        y = torch._grouped_mm(_aligned(x), _aligned(weights).transpose(1, 2), offs=offsets)
    elif x.is_cuda and is_recording():
        y = _grouped_mm_without_a_wait(x, weights, offsets)
    else:
        return grouped_mm_reference(x, weights, offsets, biases)
    return y if biases is None else y.add_(biases[group_of_rows(x, offsets)])


def _grouped_mm_without_a_wait(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], weights.shape[1])
    group = group_of_rows(x, offsets)
    for index, weight in enumerate(weights.unbind()):
        y = torch.where((group == index)[:, None], dense_linear(x, weight), y)
    return y


def group_of_rows(x: Tensor, offsets: Tensor) -> Tensor:
    """Long (R,): the group of each row of x (R, ...), by int32 offsets (E,), the end of each group."""
    return torch.bucketize(torch.arange(x.shape[0], device=x.device), offsets, right=True)


@custom_op()
def _grouped_outer(dy: Tensor, x: Tensor, offsets: Tensor, kernels: bool) -> Tensor:
    """dy (R, M), x (R, K) -> (E, M, K): the sum of outer products of rows, for each group."""
    if is_fake(x):
        return x.new_empty(offsets.shape[0], dy.shape[1], x.shape[1])
    if kernels and _has_grouped_gemm(x, dy.shape[1]):
        out = torch._grouped_mm(_aligned(dy).t(), _aligned(x), offs=offsets)
        if not (gpu := gpu_of(x.device)) or not gpu.is_hopper:
            # Only Hopper's kernel writes the zeros of an empty group (https://github.com/pytorch/pytorch/issues/172439).
            empty = offsets.diff(prepend=offsets.new_zeros(1)) == 0
            out.masked_fill_(empty[:, None, None], 0)
        return out
    counts = _counts(offsets, x.shape[0])
    out = x.new_empty(len(counts), dy.shape[1], x.shape[1])
    for product, left, right in zip(out, dy.split(counts), x.split(counts), strict=True):
        torch.mm(left.t(), right, out=product)
    return out


def _has_grouped_gemm(x: Tensor, columns: int) -> bool:
    """Whether torch has a grouped GEMM for x (R, K) and operands of `columns` columns."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or x.shape[0] == 0 or not hasattr(torch, "_grouped_mm"):
        return False
    gpu = gpu_of(x.device)
    fits = all(size > 0 and size * x.itemsize % ALIGNMENT == 0 for size in (x.shape[1], columns))
    return fits and gpu is not None and (gpu.is_hopper or (gpu.capability >= (8, 0) and hasattr(F, "grouped_mm")))


def _aligned(x: Tensor) -> Tensor:
    """x itself if torch's grouped GEMM can read it, else a contiguous copy."""
    others = [stride for stride in x.stride() if stride != 1]
    aligned = all(stride > 0 and stride * x.itemsize % ALIGNMENT == 0 for stride in (*others, x.data_ptr()))
    return x if aligned and 1 in x.stride()[-2:] else x.clone(memory_format=torch.contiguous_format)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, biases, offsets, kernels):
        need_x, need_weights = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if need_weights else None, weights if need_x else None, offsets)
        ctx.kernels = kernels
        return _grouped_mm(x, weights, offsets, kernels, biases)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weights, offsets = ctx.saved_tensors
        dx = None if weights is None else _grouped_mm(dy, weights.transpose(1, 2), offsets, ctx.kernels)
        dw = None if x is None else _grouped_outer(dy, x, offsets, ctx.kernels)
        db = None
        if ctx.needs_input_grad[2]:  # sums over the rows of each group, in a fixed order
            db = _grouped_outer(dy, dy.new_ones(dy.shape[0], ALIGNMENT // 2), offsets, ctx.kernels)[..., 0].contiguous()
        return dx, dw, db
