"""Distillation from a teacher's hidden states, by chunks of rows, so that neither side's logits ever exist whole.

With reduction "mean" or "sum" the forward pass computes the gradients too: per chunk one GEMM for the logits of each
side, the divergence, whose gradient takes the place of the student's logits, and one GEMM for each gradient that is
needed. The backward pass only scales them. With reduction "none" and in float16 the backward pass recomputes the
logits, for the reasons that `linear_cross_entropy` gives.
"""

from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.loss.chunks import COLUMN_MULTIPLE, SKIP_BELOW, keep_gradients, kept_gradients, rows_per_chunk
from ligermodels.ops.loss.divergences import (
    DIVERGENCES,
    DistillationOptions,
    Divergence,
    bytes_in_place,
    divergence_in_place,
)
from ligermodels.ops.loss.gradient_sum import GradientSum
from ligermodels.ops.loss.token_losses import Reduction, loss_weights
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable, reject_dtensors
from ligermodels.ops.runtime.tensors import as_rows, check_rows, check_tensor, empty_gradient, under_autocast

OP = "linear_distillation"


def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    divergence: Divergence = "forward_kl",
    beta: float | None = None,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    memory_budget: int = 2**30,
    num_tokens: int | None = None,
) -> Tensor:
    """The divergence of a student's next-token distributions from its teacher's (formulas: head of `divergences`),
    without the logits of either in memory; exact, gradients included.

    hidden: (..., H), any floating dtype and strides. weight: (V, H) and bias: (V,), of hidden's dtype.
    teacher_hidden: (..., H'), the same leading dimensions. teacher_weight: (V, H') and teacher_bias: (V,), of
        teacher_hidden's dtype, which need not be the student's. They get no gradient. Under autocast all are cast.
    mask: (...), bool, the tokens that count; None: all of them. The others have no loss and a gradient of exact zeros.
    divergence, beta, temperature: as the formulas name them; beta, in (0, 1), is the jsd's alone: None stands for 0.5.
    softcap, logit_scale and teacher_...: how each side's effective logits come from hidden @ weight.T + bias.
    reduction: "none" gives a divergence for each token, (...); "sum" their sum; "mean" their mean over the mask's
        tokens, 0 if there are none.
    memory_budget: bytes for a chunk's logits, of both sides, and for what is computed with them (at least one row is
        taken, whatever it needs), and for the sum of the weight's gradient as in `linear_cross_entropy`. The gradients
        themselves come on top, and a copy of the mask's hidden states if the other rows are left out.
    num_tokens: the number of tokens in the mask, if known on the host: the other rows then take no part in the GEMMs.
        On the CPU it is counted; on CUDA that would wait for the device, so without it no row is skipped.
    Returns float32 (float64 for float64 hidden states).
    A gradient is computed exactly if its own operand requires it; under no_grad only the loss is.
    Raises InputError if shapes, dtypes, devices or options do not fit.
    """
    hidden, weight, bias = under_autocast(hidden, weight, bias)
    teacher_hidden, teacher_weight, teacher_bias = under_autocast(teacher_hidden, teacher_weight, teacher_bias)
    _check_tensors(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, mask)
    options = DistillationOptions(
        divergence, 0.5 if beta is None else beta, temperature, softcap, logit_scale, teacher_softcap,
        teacher_logit_scale,
    )  # fmt: skip
    _check_options(options, beta, reduction, memory_budget)
    if mask is None:
        mask = torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device)
    weights = loss_weights(mask, 0, reduction, None, hidden.dtype)
    if num_tokens is None:
        counted = not (mask.is_cuda or torch.compiler.is_compiling())
        num_tokens = int(mask.sum()) if counted else mask.numel()
    # Determined here: inside autograd.Function.forward gradient mode is off.
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias))
    teacher = [None if t is None else t.detach() for t in (teacher_hidden, teacher_weight, teacher_bias)]
    return _LinearDistillation.apply(
        hidden, weight, bias, *teacher, mask, weights, options, memory_budget, num_tokens, reduction != "none", needs
    )


def linear_distillation_reference(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, mask: Tensor | None = None,
    bias: Tensor | None = None, teacher_bias: Tensor | None = None, *, divergence: Divergence = "forward_kl",
    beta: float | None = None, temperature: float = 1.0, reduction: Reduction = "mean", softcap: float | None = None,
    logit_scale: float = 1.0, teacher_softcap: float | None = None, teacher_logit_scale: float = 1.0,
    memory_budget: int | None = None, num_tokens: int | None = None,
) -> Tensor:  # fmt: skip
    """The specification of `linear_distillation`, in plain torch, with all the logits; the same arguments."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    mask = torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device) if mask is None else mask

    def log_probs(x: Tensor, w: Tensor, b: Tensor | None, cap: float | None, scale: float) -> Tensor:
        logits = torch.nn.functional.linear(x, w, b).to(wide) * scale
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return torch.log_softmax(logits.masked_fill(~mask.unsqueeze(-1), 0.0) / temperature, -1)

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    log_q = log_probs(hidden, weight, bias, softcap, logit_scale)
    with torch.no_grad():
        log_p = log_probs(teacher_hidden, teacher_weight, teacher_bias, teacher_softcap, teacher_logit_scale)
    if divergence == "jsd":
        share = 0.5 if beta is None else beta
        log_m = (share * log_p.exp() + (1 - share) * log_q.exp()).log()
        losses = share * kl(log_p, log_m) + (1 - share) * kl(log_q, log_m)
    else:
        losses = kl(log_p, log_q) if divergence == "forward_kl" else kl(log_q, log_p)
    losses = losses * loss_weights(mask, 0, reduction, None, wide)
    return losses if reduction == "none" else losses.sum()


def _check_tensors(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher_hidden: Tensor, teacher_weight: Tensor,
    teacher_bias: Tensor | None, mask: Tensor | None,
) -> None:  # fmt: skip
    reject_dtensors(OP, hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, mask)
    check_rows(OP, "hidden", hidden)
    check_rows(OP, "teacher_hidden", teacher_hidden)
    check_tensor(OP, "weight", weight, ("V", hidden.shape[-1]), hidden.device, hidden.dtype)
    V, teacher = weight.shape[0], teacher_hidden.dtype
    if V == 0:
        raise InputError(f"{OP}: weight must be of one class or more")
    check_tensor(OP, "teacher_hidden", teacher_hidden, (*hidden.shape[:-1], teacher_hidden.shape[-1]), hidden.device)
    check_tensor(OP, "teacher_weight", teacher_weight, (V, teacher_hidden.shape[-1]), hidden.device, teacher)
    for name, each, dtype in (("bias", bias, hidden.dtype), ("teacher_bias", teacher_bias, teacher)):
        if each is not None:
            check_tensor(OP, name, each, (V,), hidden.device, dtype)
    if mask is not None:
        check_tensor(OP, "mask", mask, hidden.shape[:-1], hidden.device, torch.bool)


def _check_options(options: DistillationOptions, beta: float | None, reduction: str, memory_budget: int) -> None:
    if options.divergence not in DIVERGENCES:
        raise InputError(f"{OP}: divergence must be one of {', '.join(DIVERGENCES)}; got {options.divergence!r}")
    if beta is not None and options.divergence != "jsd":
        raise InputError(f"{OP}: beta belongs to the jsd; divergence {options.divergence!r} has none")
    if not 0 < options.beta < 1:
        raise InputError(f"{OP}: beta must be in (0, 1), got {beta}; its ends are forward_kl and reverse_kl")
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f'{OP}: reduction must be "mean", "sum" or "none", got {reduction!r}')
    for name in ("temperature", "logit_scale", "teacher_logit_scale", "softcap", "teacher_softcap"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise InputError(f"{OP}: {name} must be positive, got {value}")
    if memory_budget <= 0:
        raise InputError(f"{OP}: memory_budget must be a positive number of bytes, got {memory_budget}")


@custom_op()
def _linear_distillation(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher_hidden: Tensor, teacher_weight: Tensor,
    teacher_bias: Tensor | None, mask: Tensor, loss_weights: Tensor, divergence: str, beta: float, temperature: float,
    softcap: float | None, logit_scale: float, teacher_softcap: float | None, teacher_logit_scale: float,
    memory_budget: int, num_tokens: int, need_hidden: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Each row's divergence, and the gradients of sum(loss_weights * divergences); those not needed are empty."""
    losses, dx = loss_weights.new_empty(loss_weights.shape), empty_gradient(hidden, need_hidden, hidden)
    if is_fake(losses):
        of_weight, of_bias = (empty_gradient(t, need, hidden) for t, need in ((weight, need_weight), (bias, need_bias)))
        return losses, dx, of_weight, of_bias
    options = DistillationOptions(
        divergence, beta, temperature, softcap, logit_scale, teacher_softcap, teacher_logit_scale
    )
    (V, H), needed = weight.shape, need_hidden or need_weight or need_bias
    rows, teacher_rows = as_rows(hidden), as_rows(teacher_hidden)
    valid, weights_of_rows, chosen = mask.reshape(-1), loss_weights.reshape(-1), None
    row_losses, row_dx = losses.view(-1), dx.view(-1, H)
    if num_tokens < SKIP_BELOW * len(rows):
        torch._assert_async(valid.sum() == num_tokens, "num_tokens is not the number of tokens in the mask")
        chosen = valid.argsort(descending=True, stable=True)[:num_tokens]
        rows, teacher_rows, valid, weights_of_rows = (
            x.index_select(0, chosen) for x in (rows, teacher_rows, valid, weights_of_rows)
        )
        row_losses, row_dx = row_losses.new_empty(num_tokens), row_dx.new_empty(num_tokens if need_hidden else 0, H)

    columns = -(-V // COLUMN_MULTIPLE) * COLUMN_MULTIPLE if hidden.is_cuda else V  # CPU GEMMs may read such gaps
    size = rows_per_chunk(
        len(rows), _bytes_per_row(columns, weight, teacher_weight, options, need_weight),
        V * H * weight.element_size() if need_weight and weight.element_size() < 4 else 0, memory_budget,
    )  # fmt: skip
    dw = GradientSum(weight, several=size < len(rows)) if need_weight else None
    db = GradientSum(bias, several=True) if bias is not None and need_bias else None
    of_student, of_teacher = (x.new_empty(size, columns)[:, :V] for x in (rows, teacher_rows))
    for start in range(0, len(rows), size):
        chunk = slice(start, min(start + size, len(rows)))
        x, y = rows[chunk], teacher_rows[chunk]
        student, teacher = of_student[: len(x)], of_teacher[: len(x)]
        for logits, inputs, w, b in ((student, x, weight, bias), (teacher, y, teacher_weight, teacher_bias)):
            if b is None:
                torch.mm(inputs, w.t(), out=logits)
            else:
                torch.addmm(b, inputs, w.t(), out=logits)
        divergence_in_place(
            student, teacher, row_losses[chunk], valid[chunk], weights_of_rows[chunk] if needed else None, options
        )
        if need_hidden:
            torch.mm(student, weight, out=row_dx[chunk])
        if dw is not None:
            dw.add(student, x)
        if db is not None:
            db.add(student)
    if chosen is not None:
        losses.zero_().view(-1).index_copy_(0, chosen, row_losses)
        if need_hidden:
            dx.zero_().view(-1, H).index_copy_(0, chosen, row_dx)
    gradients = [weight.new_empty(0) if g is None else g.close() for g in (dw, db)]
    return losses, dx, gradients[0], gradients[1]


def _bytes_per_row(
    columns: int, weight: Tensor, teacher_weight: Tensor, options: DistillationOptions, need_weight: bool
) -> int:
    """The most that a row of a chunk needs: both sides' logits, and what is computed with them."""
    V, H = weight.shape
    inside = bytes_in_place(V, weight.dtype, teacher_weight.dtype, options)
    if need_weight and not weight.is_cuda and weight.element_size() < 4:
        inside = max(inside, (V + H) * 4)  # see GradientSum
    return columns * (weight.element_size() + teacher_weight.element_size()) + inside


class _LinearDistillation(torch.autograd.Function):
    """The reduced loss, or each row's; its gradients as `linear_cross_entropy` hands them out."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher_hidden: Tensor, teacher_weight: Tensor,
        teacher_bias: Tensor | None, mask: Tensor, loss_weights: Tensor, options: DistillationOptions,
        memory_budget: int, num_tokens: int, reduced: bool, needs: tuple[bool, ...],
    ) -> Tensor:  # fmt: skip
        now = needs if reduced and hidden.dtype != torch.float16 else (False, False, False)
        inputs = (hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, mask, loss_weights)
        ctx.options = (*options, memory_budget, num_tokens)
        losses, *gradients = _linear_distillation(*inputs, *ctx.options, *now)
        losses = losses * loss_weights
        keep_gradients(ctx, inputs, gradients, now)
        return losses.sum() if reduced else losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        kept = kept_gradients(ctx, grad)
        if kept is not None:
            return kept
        *inputs, loss_weights = ctx.saved_tensors
        return _linear_distillation(*inputs, loss_weights * grad, *ctx.options, *ctx.needs_input_grad[:3])[1:]
