"""Cross entropy over given logits; the formula is at the head of `token_losses`."""

from typing import Any

import torch

from ligermodels.errors import InputError
from ligermodels.ops.dispatch import use_kernels
from ligermodels.ops.library import as_rows, empty_like, once_differentiable, opaque_op
from ligermodels.ops.token_losses import (
    LossOptions,
    Reduction,
    check_loss,
    check_targets,
    row_coefficients,
    row_losses_reference,
)
from ligermodels.ops.token_losses_in_place import launch_in_place
from ligermodels.ops.token_losses_kernels import launch_gradient, launch_rows, scale_
from ligermodels.ops.weigh_rows import weigh_rows


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    token_weights: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_rank: bool = False,
    in_place: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of logits against class indices (the formula is at the head of `token_losses`).

    logits: (..., V), any floating dtype and strides. target: (...), int64, in [0, V) or ignore_index: such rows have no
        loss and a gradient of exact zeros.
    token_weights: (...), floating, not negative, multiplied into each row's loss; they get no gradient.
    reduction: "none" gives a loss for each row, (...); "sum" their sum; "mean" their sum over the number of rows not
        ignored, or over the sum of those rows' token_weights if given. With nothing to count the loss is 0 (where
        torch gives nan) and so are the gradients.
    return_rank: also return (...) int64, how many classes stand before the target: those of a greater logit, and those
        of an equal logit and a smaller index; -1 for ignored rows. So rank < k is top-k accuracy.
    in_place: with "mean" or "sum", the gradient may take the place of the logits, whose values are lost then: no memory
        of its own, and one pass over the logits less. Whoever else saved them for a backward pass fails in it; this one
        runs once.
    Returns the loss in float32 (float64 for float64 logits), or (loss, rank).
    Raises InputError if shapes, dtypes, devices or options do not fit, or, on the CPU, for a target out of range. On
    CUDA such a target fails a device-side assertion (no wait for the device), and is never read through.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, return_rank)
    check_loss("cross_entropy", logits, "logits", target, token_weights, reduction, options)
    target, coefficient = weigh_rows(target, logits.shape[-1], ignore_index, reduction, token_weights, logits.dtype)
    if in_place and _can_overwrite(logits, reduction):
        loss, rank = _CrossEntropyInPlace.apply(logits, target, coefficient, options)
        return (loss, rank) if return_rank else loss
    if use_kernels(logits):
        losses, rank = _CrossEntropy.apply(logits, target, options)
    else:
        losses, rank = row_losses_reference(logits, target, options)
    loss = losses * coefficient if reduction == "none" else (losses * coefficient).sum()
    return (loss, rank) if return_rank else loss


def _can_overwrite(logits: torch.Tensor, reduction: Reduction) -> bool:
    """Whether the gradient can be computed in the forward pass, and in the logits' place. Raises InputError for logits
    that are a parameter."""
    if reduction == "none" or not (torch.is_grad_enabled() and logits.requires_grad):
        return False
    if logits.is_leaf:
        raise InputError("cross_entropy: in_place would overwrite logits that are a leaf of the graph; pass a copy")
    # float16 may not hold the gradient before the loss scale, which comes with the backward pass, is multiplied in.
    held = logits.dtype != torch.float16 and logits.is_contiguous() and logits.numel() > 0
    return held and use_kernels(logits) and not torch.compiler.is_compiling()


def cross_entropy_reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    reduction: Reduction = "mean",
    token_weights: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The specification of `cross_entropy`, in plain torch; the same arguments."""
    chosen = LossOptions(**options)
    check_targets(target, logits.shape[-1], chosen.ignore_index)
    losses, rank = row_losses_reference(logits, target, chosen)
    losses = losses * row_coefficients(target, chosen.ignore_index, reduction, token_weights, logits.dtype)
    loss = losses if reduction == "none" else losses.sum()
    return (loss, rank) if chosen.return_rank else loss


def _forward_fake(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    return_rank: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    losses, maxima, log_sums = (target.new_empty(target.shape, dtype=torch.float32) for _ in range(3))
    return losses, maxima, log_sums, target.new_empty(target.shape if return_rank else (0,))


@opaque_op(_forward_fake)
def _cross_entropy_forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    return_rank: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each row's loss, max, log of the sum of exp(x - max), and rank. Targets have been checked: one that is none is
    ignored."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, return_rank)
    outputs = _forward_fake(logits, target, *options)
    launch_rows(as_rows(logits), target.contiguous(), *outputs, options)
    return outputs


def _backward_fake(
    coefficient: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    maxima: torch.Tensor,
    log_sums: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    return_rank: bool,
) -> torch.Tensor:
    return empty_like(logits)


@opaque_op(_backward_fake)
def _cross_entropy_backward(
    coefficient: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    maxima: torch.Tensor,
    log_sums: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    return_rank: bool,
) -> torch.Tensor:
    """The gradient of the logits, given that of each row's loss."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    gradient = empty_like(logits)
    launch_gradient(as_rows(logits), gradient, target.contiguous(), maxima, log_sums, coefficient.contiguous(), options)
    return gradient


class _CrossEntropy(torch.autograd.Function):
    """Each row's loss and rank."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, options: LossOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        losses, maxima, log_sums, rank = _cross_entropy_forward(logits, target, *options)
        ctx.save_for_backward(logits, target, maxima, log_sums)
        ctx.options = options
        ctx.mark_non_differentiable(rank)
        return losses, rank

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, coefficient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _cross_entropy_backward(coefficient, *ctx.saved_tensors, *ctx.options), None, None


class _CrossEntropyInPlace(torch.autograd.Function):
    """The reduced loss, and the ranks; the logits become the gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, coefficient: torch.Tensor, options: LossOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        losses = torch.empty_like(coefficient, memory_format=torch.contiguous_format)
        rank = target.new_empty(target.shape if options.return_rank else (0,))
        ctx.gradient = logits.detach()
        torch.autograd.graph.increment_version(logits)
        with torch.cuda.device_of(logits):
            rows = as_rows(ctx.gradient)
            launch_in_place(rows, target.contiguous(), losses, rank, coefficient.contiguous(), options)
        ctx.mark_non_differentiable(rank)
        return (losses * coefficient).sum(), rank

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradient is None:
            raise RuntimeError("cross_entropy: the backward pass of an in-place loss runs once")
        gradient, ctx.gradient = ctx.gradient, None
        scale_(gradient, grad)
        return gradient, None, None, None
