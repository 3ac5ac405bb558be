"""Divergences of rows of logits, and gradients in place of the student's logits: by the Triton kernel, or in torch."""

import torch
from torch import Tensor

from ligermodels.ops.loss.divergence_kernels import launch_divergence
from ligermodels.ops.loss.divergences import DIVERGENCES, DistillationOptions, Labels, acceptance
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import is_fake


def divergence_in_place(
    student: Tensor, teacher: Tensor, losses: Tensor, valid: Tensor, loss_weights: Tensor | None,
    options: DistillationOptions, accepted: Tensor | None = None, agreed: Tensor | None = None,
    teacher_lses: Tensor | None = None, overlaps: Tensor | None = None, labels: Labels | None = None,
) -> None:  # fmt: skip
    """Fills losses and statistics, and replaces the student's logits by the gradient of loss_weights * losses.

    In torch this needs `bytes_in_place` beside the logits, and overwrites them in any case.

    Args:
        student: logits (M, V), the last dimension contiguous.
        teacher: logits (M, V), the last dimension contiguous; they may be overwritten. Or (M / S, V): row i for the S
            rows of the student from i * S on; so `teacher_lses`.
        losses: (M,), the dtype of the computation, filled with the divergences; 0 in rows that are not valid.
        valid: bool (M,).
        loss_weights: (M,), the dtype of the losses; None: no gradient is needed, and the student's logits may be
            overwritten.
        options: the options of the divergence.
        accepted: (M,), the dtype of the losses, filled with the `acceptance` of each row; None: not computed.
        agreed: bool (M,), filled with whether both sides have the largest logit at the same class; None: not computed.
        teacher_lses: (M,), the log-sum-exp of the teacher's logits over all its classes, for `accepted`, where it has
            more than V; None: over these V.
        overlaps: (M,), filled with the acceptance over these V classes; None: not computed.
        labels: a cross entropy beside the divergence; the gradient is of their weighted sum. None: the divergence's.
    """
    if is_fake(student):
        return
    if use_kernels(student, teacher):
        launch_divergence(
            student, teacher, losses, valid, loss_weights, options, accepted, agreed, teacher_lses, overlaps, labels
        )
        return
    if (share := len(student) // max(len(teacher), 1)) > 1:
        teacher = teacher.repeat_interleave(share, 0)
        teacher_lses = None if teacher_lses is None else teacher_lses.repeat_interleave(share)
    if agreed is not None:
        agreed.copy_((student.argmax(1) == teacher.argmax(1)).logical_and_(valid))
    log_q, log_p = student.to(losses.dtype), teacher.to(losses.dtype)
    slope, _ = _log_softmax_(log_q, options.logit_scale, options.softcap, options.temperature, loss_weights is not None)
    _, lses = _log_softmax_(log_p, options.teacher_logit_scale, options.teacher_softcap, options.temperature, False)
    if accepted is not None:
        log_mass = None if teacher_lses is None else lses - teacher_lses
        accepted.copy_(acceptance(log_q, log_p, log_mass).masked_fill_(~valid, 0.0))
    if overlaps is not None:
        overlaps.copy_(acceptance(log_q, log_p).masked_fill_(~valid, 0.0))
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
