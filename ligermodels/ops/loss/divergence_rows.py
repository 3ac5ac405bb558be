"""Divergences of rows of logits, and gradients in place of the student's logits: by the Triton kernel, or in torch."""

import torch
from torch import Tensor

from ligermodels.ops.loss.divergence_kernels import launch_divergence
from ligermodels.ops.loss.divergences import DIVERGENCES, DistillationOptions, DivergenceRows, Labels, acceptance
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import is_fake


def divergence_in_place(student: Tensor, teacher: Tensor, rows: DivergenceRows, options: DistillationOptions) -> None:
    """Fills losses and statistics, and replaces the student's logits by the gradient of loss_weights * losses.

    In torch this needs `bytes_in_place` beside the logits, and overwrites them in any case.

    Args:
        student: logits (M, V), the last dimension contiguous. Without `rows.loss_weights` they may be overwritten.
        teacher: logits (M, V), the last dimension contiguous; they may be overwritten. Or (M / S, V): row i for the S
            rows of the student from i * S on.
        rows: numbers of each row, and memory for the results.
        options: the options of the divergence.
    """
    if is_fake(student):
        return
    if use_kernels(student, teacher):
        launch_divergence(student, teacher, rows, options)
        return
    losses, valid, loss_weights, labels, teacher_lses = (
        rows.losses, rows.valid, rows.loss_weights, rows.labels, rows.teacher_lses
    )  # fmt: skip
    if (share := len(student) // max(len(teacher), 1)) > 1:
        teacher = teacher.repeat_interleave(share, 0)
        teacher_lses = None if teacher_lses is None else teacher_lses.repeat_interleave(share)
    if rows.agreed is not None:
        rows.agreed.copy_((student.argmax(1) == teacher.argmax(1)).logical_and_(valid))
    log_q, log_p = student.to(losses.dtype), teacher.to(losses.dtype)
    slope, _ = _log_softmax_(log_q, options.logit_scale, options.softcap, options.temperature, loss_weights is not None)
    _, lses = _log_softmax_(log_p, options.teacher_logit_scale, options.teacher_softcap, options.temperature, False)
    if rows.accepted is not None:
        log_mass = None if teacher_lses is None else lses - teacher_lses
        rows.accepted.copy_(acceptance(log_q, log_p, log_mass).masked_fill_(~valid, 0.0))
    if rows.overlaps is not None:
        rows.overlaps.copy_(acceptance(log_q, log_p).masked_fill_(~valid, 0.0))
    of_labels = None if labels is None else _cross_entropy(log_q, labels, valid)
    row_losses, gradient = DIVERGENCES[options.divergence].compute(log_q, log_p, options.beta)
    losses.copy_(row_losses.masked_fill_(~valid, 0.0))
    if loss_weights is None:
        return
    if labels is not None and of_labels is not None:
        gradient.mul_(labels.divergence_weight).add_(of_labels, alpha=labels.weight)
    gradient.mul_((loss_weights * (options.logit_scale / options.temperature)).unsqueeze(1))
    if slope is not None:
        gradient.mul_(slope)
    student.copy_(gradient.masked_fill_(~valid.unsqueeze(1), 0.0))


def bytes_in_place(
    V: int, student: torch.dtype, teacher: torch.dtype, options: DistillationOptions, kernels: bool
) -> int:
    """The bytes that `divergence_in_place` needs for a row beside the logits.

    Args:
        V: the number of classes.
        student: the dtype of the student's logits.
        teacher: the dtype of the teacher's logits.
        options: the options of the divergence.
        kernels: whether kernels compute it.
    """
    if kernels:
        return 0
    wide = torch.promote_types(student, torch.float32)
    copies = (student != wide) + (teacher != wide) + (options.softcap is not None)
    return V * wide.itemsize * (copies + DIVERGENCES[options.divergence].buffers)


def _cross_entropy(log_q: Tensor, labels: Labels, valid: Tensor) -> Tensor:
    """Fills the losses and ranks of the labels, and returns the gradient of the losses, 0 without a target."""
    known = valid & (labels.targets >= 0)
    index = labels.targets.clamp(min=0).unsqueeze(1)
    at_target = log_q.gather(1, index)
    labels.losses.copy_(at_target.squeeze(1).neg().masked_fill_(~known, 0.0))
    labels.ranks.copy_((log_q > at_target).sum(1).masked_fill_(~known, log_q.shape[1]))
    gradient = log_q.exp().scatter_add_(1, index, torch.full_like(at_target, -1.0))
    return gradient.masked_fill_(~known.unsqueeze(1), 0.0)


def _log_softmax_(
    x: Tensor, scale: float, softcap: float | None, temperature: float, need_slope: bool
) -> tuple[Tensor | None, Tensor]:
    """Logits -> log-probabilities, in place. Returns the slope of the softcap, if there is one and it is needed; and
    the log-sum-exp (M,) of the logits after softcap and temperature."""
    x.mul_(scale)
    slope = None
    if softcap is not None:
        x.div_(softcap).tanh_()
        slope = x.square().neg_().add_(1) if need_slope else None
        x.mul_(softcap)
    x.div_(temperature)
    greatest = x.amax(1, keepdim=True)
    total = x.sub_(greatest).exp().sum(1, keepdim=True).log_()
    x.sub_(total)
    return slope, greatest.add_(total).squeeze(1)
