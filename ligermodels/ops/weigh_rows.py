"""What each row counts in a loss, and whether its target is one: in one kernel what takes torch a dozen small ones."""

from typing import cast

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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets that have been checked as by `check_targets`, and their `row_coefficients`.

    What goes on with these targets, contiguous copies, keeps the check in a compiled graph, whatever is used of it.
    """
    weights = None if token_weights is None else token_weights.detach()
    return _weigh_rows(target, weights, num_classes, ignore_index, reduction, dtype == torch.float64)


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
    target, weights, checked, coefficients, good, T, num_classes, ignore_index,
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
        y, weight = _weigh(target, weights, first + block, T, ignore_index, WEIGHTED)
        if MEAN:
            weight = tl.where(whole != 0.0, weight / whole, 0.0)
        tl.store(checked + first + block, y, mask=first + block < T)
        tl.store(coefficients + first + block, weight, mask=first + block < T)


def _fake(
    target: torch.Tensor, weights: torch.Tensor | None, num_classes: int, ignore_index: int, reduction: str, wide: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if wide else torch.float32
    return target.new_empty(target.shape), target.new_empty(target.shape, dtype=dtype)


@opaque_op(_fake)
def _weigh_rows(
    target: torch.Tensor, weights: torch.Tensor | None, num_classes: int, ignore_index: int, reduction: str, wide: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets and their coefficients, in float64 if they are to be `wide`. A target that is none raises InputError
    on the CPU, and fails an assertion of the device's own on CUDA."""
    checked, coefficients = _fake(target, weights, num_classes, ignore_index, reduction, wide)
    T = target.numel()
    kernels = T > 0 and not wide and use_kernels(target, weights)
    if not (target.is_cuda and kernels):
        check_targets(target, num_classes, ignore_index)  # which names the target
    if not kernels:
        chosen = cast(Reduction, reduction)
        return checked.copy_(target), row_coefficients(target, ignore_index, chosen, weights, coefficients.dtype)
    good = target.new_empty((), dtype=torch.int32)
    block = min(power_of_2_above(T), MAX_BLOCK)
    _weigh_rows_kernel[(1,)](
        target.contiguous(), None if weights is None else weights.contiguous(), checked, coefficients, good,
        T, num_classes, ignore_index, WEIGHTED=weights is not None, MEAN=reduction == "mean", BLOCK=block,
        num_warps=max(block // 512, 1),
    )  # fmt: skip
    torch._assert_async(good, not_a_target(num_classes, ignore_index))
    return checked, coefficients
