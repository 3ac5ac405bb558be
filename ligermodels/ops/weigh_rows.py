"""What each row counts in a loss, and whether its target is one: in one kernel what takes torch a dozen small ones."""

import torch

from ligermodels.ops.dispatch import power_of_2_above, tl, triton, use_kernels
from ligermodels.ops.launcher import after_previous_kernel, kernel
from ligermodels.ops.library import opaque_op
from ligermodels.ops.token_losses import Reduction, check_targets, not_a_target, row_coefficients

MAX_BLOCK = 8192  # rows taken at a time


def weigh_rows(
    target: torch.Tensor,
    num_classes: int,
    ignore_index: int,
    reduction: Reduction,
    token_weights: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`row_coefficients` of targets that it checks as `check_targets` does."""
    if dtype == torch.float64 or not use_kernels(target, token_weights):
        check_targets(target, num_classes, ignore_index)
        return row_coefficients(target, ignore_index, reduction, token_weights, dtype)
    if not target.is_cuda:
        check_targets(target, num_classes, ignore_index)  # which names the target
    weights = None if token_weights is None else token_weights.detach()
    return _weigh_rows(target, weights, num_classes, ignore_index, reduction == "mean")


@triton.jit
def _weigh(target, weights, row, T, ignore_index, WEIGHTED: tl.constexpr):
    """Targets of some rows, and what these weigh; those beyond T are ignored."""
    inside = row < T
    y = tl.load(target + row, mask=inside, other=ignore_index)
    counted = y != ignore_index
    if WEIGHTED:
        weight = tl.load(weights + row, mask=inside & counted, other=0.0).to(tl.float32)
    else:
        weight = counted.to(tl.float32)
    return y, weight


@kernel
def _weigh_rows_kernel(
    target, weights, coefficients, good, T, num_classes, ignore_index,
    WEIGHTED: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program weighs all rows, a second time if it takes the first to know what all of them weigh."""
    after_previous_kernel()
    block = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    bad = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, T, BLOCK):
        y, weight = _weigh(target, weights, first + block, T, ignore_index, WEIGHTED)
        bad |= ((y != ignore_index) & ((y < 0) | (y >= num_classes))).to(tl.int32)
        total += weight
    tl.store(good, 1 - tl.max(bad, axis=0))
    whole = tl.sum(total, axis=0)
    for first in range(0, T, BLOCK):
        _, weight = _weigh(target, weights, first + block, T, ignore_index, WEIGHTED)
        if MEAN:
            weight = tl.where(whole != 0.0, weight / whole, 0.0)
        tl.store(coefficients + first + block, weight, mask=first + block < T)


def _fake(
    target: torch.Tensor, weights: torch.Tensor | None, num_classes: int, ignore_index: int, mean: bool
) -> torch.Tensor:
    return target.new_empty(target.shape, dtype=torch.float32)


@opaque_op(_fake)
def _weigh_rows(
    target: torch.Tensor, weights: torch.Tensor | None, num_classes: int, ignore_index: int, mean: bool
) -> torch.Tensor:
    """The coefficients; a target that is none fails an assertion, on CUDA one of the device's own."""
    coefficients = _fake(target, weights, num_classes, ignore_index, mean)
    T = target.numel()
    if T == 0:
        return coefficients
    good = target.new_empty((), dtype=torch.int32)
    block = min(power_of_2_above(T), MAX_BLOCK)
    _weigh_rows_kernel[(1,)](
        target.contiguous(), None if weights is None else weights.contiguous(), coefficients, good,
        T, num_classes, ignore_index, WEIGHTED=weights is not None, MEAN=mean, BLOCK=block,
        num_warps=max(block // 512, 1),
    )  # fmt: skip
    torch._assert_async(good, not_a_target(num_classes, ignore_index))
    return coefficients
