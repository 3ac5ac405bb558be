"""Distillation from a teacher's hidden states, by chunks of rows, so that the logits of neither side ever exist whole.

With reduction "mean" or "sum" the forward pass computes the gradients too: per chunk one GEMM for the logits of each
side, the divergence, its gradient in place of the student's logits, and one GEMM for each gradient that is needed. The
backward pass only scales them. With reduction "none" and in float16 the backward pass recomputes the logits, as in
`linear_cross_entropy`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.arguments import LARGEST, Divergence, check_flags, is_number
from ligermodels.errors import InputError, short
from ligermodels.ops.loss.chunks import chunk_rows, chunks_of_logits, empty_gradients, keep_gradients, kept_gradients
from ligermodels.ops.loss.divergence_rows import bytes_in_place, divergence_in_place
from ligermodels.ops.loss.divergences import DIVERGENCES, DistillationOptions, DivergenceRows
from ligermodels.ops.loss.linear_head import checked_memory_budget, needed_gradients, select_rows
from ligermodels.ops.loss.token_losses import Reduction, check_reduction, loss_weights, with_extras
from ligermodels.ops.runtime.checks import Signature
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import count_rows, under_autocast

OP = "linear_distillation"
_TENSORS = Signature(
    hidden="... H+", weight="V+ H =hidden", bias="V =hidden ?", teacher_hidden="... G+",
    teacher_weight="V G =teacher_hidden", teacher_bias="V =teacher_hidden ?", mask="... bool ?", token_weights="... ?",
    teacher_lse="... ?",
)  # fmt: skip


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
    token_weights: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_lse: Tensor | None = None,
    return_acceptance: bool = False,
    return_agreement: bool = False,
    return_losses: bool = False,
    memory_budget: int = 2**30,
    num_tokens: int | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """The divergence of a student's next-token distributions from its teacher's, without the logits in memory.

    Exact, gradients included; formulas: head of `divergences`. A gradient is computed only if its operand requires it;
    the teacher gets none.

    Args:
        hidden: hidden states of the student, (..., H), any floating dtype and strides. Or (..., S, H): S states are
            compared with each state of the teacher, and the teacher's logits are computed once. `mask`, `token_weights`
            and the results are then (..., S).
        weight: (V, H), the dtype of `hidden`; under autocast all tensors are cast to its dtype.
        teacher_hidden: hidden states of the teacher, (..., H'), any floating dtype.
        teacher_weight: (V, H'), the dtype of `teacher_hidden`.
        mask: bool (...), the tokens that count; the others have no loss and a gradient of exact zeros. Default: all.
        bias: (V,), the dtype of `hidden`; by default none.
        teacher_bias: (V,), the dtype of `teacher_hidden`; by default none.
        divergence: "forward_kl" (default), "reverse_kl" or "jsd"; or, for draft models, "tv" (total variation), "l1" (2
            tv), "nla" (-log acceptance) or "lk" (forward KL and tv, weighted by the acceptance).
        beta: in (0, 1), the teacher's weight in the mixture of the jsd; only for "jsd". Default: 0.5.
        temperature: positive divisor of the effective logits of both sides. Default: 1.
        reduction: "mean" (default): the sum of the divergences over the number of tokens of the mask, or over the sum
            of their token weights; 0 if that sum is 0. "sum", or "none": a divergence for each token, (...).
        token_weights: floating (...): factors of the tokens' divergences, without a gradient. Not negative for "mean".
        softcap: positive: the student's logits become softcap * tanh(logits / softcap). Default: no cap.
        logit_scale: positive factor of the student's logits, before the softcap. Default: 1.
        teacher_softcap: the softcap of the teacher's logits. Default: no cap.
        teacher_logit_scale: the factor of the teacher's logits. Default: 1.
        teacher_lse: (...), where the teacher has more classes than V: the log-sum-exp of its logits over all classes,
            with its softcap, scale and temperature, such as `linear_log_probs` returns. Only the acceptance uses it.
            Default: over the V classes.
        return_acceptance: also return, for each token, the sum over classes of the smaller of the student's and the
            teacher's probability: the probability that speculative sampling accepts a token that the student samples.
            Both distributions are the ones that the divergence compares: over the V classes, with softcap, scale and
            temperature; with `teacher_lse`, the teacher's is over all its classes. (...), the dtype of the loss.
        return_agreement: also return, for each token, whether both sides have the largest logit at the same class, so
            that greedy decoding accepts the token. bool (...).
        return_losses: also return the divergence of each token, without token weights and without a gradient.
        memory_budget: bytes for the logits of a chunk, of both sides, and everything computed from them; a chunk has at
            least one row. Gradients, and the float32 sum of the weight's gradient as in `linear_cross_entropy`, may
            come in addition. Default: 1 GiB.
        num_tokens: the number of tokens in the mask, if the host knows it; for S states of the student per state of
            the teacher, the number of the teacher's states with at least one of their S tokens in the mask. The GEMMs
            then skip the other rows, and a copy of the remaining hidden states is kept. On the CPU it is counted. On
            CUDA counting would wait for the device, so that without it no row is skipped.

    Returns:
        The divergence, float32 (float64 for float64 `hidden`); or a tuple of the divergence and the requested extras,
        in the order acceptance, agreement, losses. Under every reduction these are per token, without token weights and
        without a gradient, and 0 and False outside the mask.

    Raises:
        InputError: shapes, dtypes, devices or options do not fit.

    Examples:
        >>> draft, weight = torch.randn(2, 16, 32, requires_grad=True), torch.randn(1000, 32)
        >>> target, target_weight = torch.randn(2, 16, 64), torch.randn(1000, 64)
        >>> loss, acceptance = ops.linear_distillation(
        ...     draft, weight, target, target_weight, divergence="lk", return_acceptance=True
        ... )
        >>> loss.backward()
        >>> acceptance_rate = acceptance.mean()
    """
    hidden, weight, bias = under_autocast(hidden, weight, bias)
    teacher_hidden, teacher_weight, teacher_bias = under_autocast(teacher_hidden, teacher_weight, teacher_bias)
    shared = _check_tensors(
        hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, mask, token_weights, teacher_lse
    )
    options = DistillationOptions(
        divergence, 0.5 if beta is None else beta, temperature, softcap, logit_scale, teacher_softcap,
        teacher_logit_scale,
    )  # fmt: skip
    _check_options(options, beta, reduction)
    check_flags(OP, return_acceptance=return_acceptance, return_agreement=return_agreement, return_losses=return_losses)
    memory_budget = checked_memory_budget(OP, memory_budget)
    if mask is None:
        mask = torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device)
    weights = loss_weights(mask, 0, reduction, token_weights, hidden.dtype)
    selection = select_rows(mask.any(-1) if shared else mask, num_tokens, "num_tokens")
    lses = None if teacher_lse is None else teacher_lse.detach().to(weights.dtype)
    if selection is not None:
        lses = None if lses is None else selection.take(lses)
        hidden, teacher_hidden, mask, weights = map(selection.take, (hidden, teacher_hidden, mask, weights))
    needs = needed_gradients(hidden, weight, bias)
    teacher = [None if t is None else t.detach() for t in (teacher_hidden, teacher_weight, teacher_bias)]
    results = _LinearDistillation.apply(
        hidden, weight, bias, *teacher, mask.contiguous(), weights.contiguous(), options, memory_budget,
        reduction != "none", (return_acceptance, return_agreement, return_losses), needs, lses,
    )  # fmt: skip
    return with_extras(*(results if selection is None else [selection.restore(x, 0) for x in results]))


def linear_distillation_reference(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, mask: Tensor | None = None,
    bias: Tensor | None = None, teacher_bias: Tensor | None = None, *, divergence: Divergence = "forward_kl",
    beta: float | None = None, temperature: float = 1.0, reduction: Reduction = "mean",
    token_weights: Tensor | None = None, softcap: float | None = None, logit_scale: float = 1.0,
    teacher_softcap: float | None = None, teacher_logit_scale: float = 1.0, teacher_lse: Tensor | None = None,
    return_acceptance: bool = False, return_agreement: bool = False, return_losses: bool = False,
    memory_budget: int | None = None, num_tokens: int | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """The specification of `linear_distillation`, in plain torch, with all the logits.

    Args:
        hidden: (..., H), or (..., S, H).
        weight: (V, H).
        teacher_hidden: (..., H').
        teacher_weight: (V, H').
        mask: bool (...), or None for all tokens.
        bias: (V,), or None.
        teacher_bias: (V,), or None.
        divergence: "forward_kl", "reverse_kl", "jsd", "tv", "l1", "nla" or "lk".
        beta: in (0, 1), or None for 0.5.
        temperature: positive.
        reduction: "mean", "sum" or "none".
        token_weights: floating (...), or None for ones.
        softcap: positive, or None.
        logit_scale: positive.
        teacher_softcap: positive, or None.
        teacher_logit_scale: positive.
        teacher_lse: (...), the log-sum-exp of the teacher's logits over more classes, for the acceptance; or None.
        return_acceptance: also return the acceptance of each token.
        return_agreement: also return whether each token's classes of the largest logits agree.
        return_losses: also return the divergence of each token, without token weights.
        memory_budget: not used.
        num_tokens: not used.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    mask = torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device) if mask is None else mask
    several = teacher_hidden.dim() < hidden.dim()  # states of the student for each of the teacher's
    teacher_hidden = teacher_hidden.unsqueeze(-2) if several else teacher_hidden

    def scaled(x: Tensor, w: Tensor, b: Tensor | None, cap: float | None, scale: float) -> Tensor:
        logits = torch.nn.functional.linear(x, w, b).to(wide) * scale
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return logits.masked_fill(~mask.unsqueeze(-1), 0.0) / temperature

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    log_q = scaled(hidden, weight, bias, softcap, logit_scale).log_softmax(-1)
    with torch.no_grad():
        logits = scaled(teacher_hidden, teacher_weight, teacher_bias, teacher_softcap, teacher_logit_scale)
        log_p = logits.log_softmax(-1)
        whole = log_p if teacher_lse is None else logits - teacher_lse.reshape(*teacher_hidden.shape[:-1], 1)
        accepted = torch.minimum(log_q, whole).exp().sum(-1)
    smaller, l1 = torch.minimum(log_q, log_p), (log_q.exp() - log_p.exp()).abs().sum(-1)
    if divergence == "jsd":
        beta = 0.5 if beta is None else beta
        log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
        losses = beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)
    elif divergence == "lk":
        losses = torch.lerp(l1 / 2, kl(log_p, log_q), (-3 * smaller.detach().exp().sum(-1)).exp())
    elif divergence == "nla":
        losses = -smaller.logsumexp(-1)
    elif divergence in ("tv", "l1"):
        losses = l1 if divergence == "l1" else l1 / 2
    else:
        losses = kl(log_p, log_q) if divergence == "forward_kl" else kl(log_q, log_p)
    weighted = losses * loss_weights(mask, 0, reduction, token_weights, wide)
    return with_extras(
        weighted if reduction == "none" else weighted.sum(),
        torch.where(mask, accepted, 0.0) if return_acceptance else None,
        (log_q.argmax(-1) == log_p.argmax(-1)) & mask if return_agreement else None,
        torch.where(mask, losses.detach(), 0.0) if return_losses else None,
    )


def _check_tensors(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher_hidden: Tensor, teacher_weight: Tensor,
    teacher_bias: Tensor | None, mask: Tensor | None, token_weights: Tensor | None, teacher_lse: Tensor | None,
) -> bool:  # fmt: skip
    """Whether several states of the student are compared with each of the teacher's; InputError for bad tensors."""
    both = isinstance(hidden, Tensor) and isinstance(teacher_hidden, Tensor)
    shared = both and 2 < hidden.dim() == teacher_hidden.dim() + 1
    first, tokens = hidden, [mask, token_weights]
    if shared:  # the first of them has the leading sizes of the teacher's
        first = hidden.select(-2, 0) if hidden.shape[-2] else hidden
        for i, (name, x) in enumerate((("mask", mask), ("token_weights", token_weights))):
            if not isinstance(x, Tensor):
                continue
            if x.shape != hidden.shape[:-1]:
                raise InputError(f"{OP}: {name} must be {tuple(hidden.shape[:-1])}, got {tuple(x.shape)}")
            tokens[i] = x.select(-1, 0)
    _TENSORS.check(OP, first, weight, bias, teacher_hidden, teacher_weight, teacher_bias, *tokens, teacher_lse)
    return shared


def _check_options(options: DistillationOptions, beta: float | None, reduction: str) -> None:
    if options.divergence not in DIVERGENCES:
        raise InputError(f"{OP}: divergence must be one of {', '.join(DIVERGENCES)}; got {options.divergence!r}")
    if beta is not None and options.divergence != "jsd":
        raise InputError(f"{OP}: beta belongs to the jsd; divergence {options.divergence!r} has none")
    compiling = torch.compiler.is_compiling()  # a number may be a symbol
    if not (compiling or is_number(options.beta)) or not 0 < options.beta < 1:
        raise InputError(f"{OP}: beta must be in (0, 1), got {short(beta)}; its ends are forward_kl and reverse_kl")
    check_reduction(OP, reduction)
    for name in ("temperature", "logit_scale", "teacher_logit_scale", "softcap", "teacher_softcap"):
        value = getattr(options, name)
        if value is None and name.endswith("softcap"):
            continue
        if not (compiling or is_number(value)) or not 0 < value <= LARGEST:
            raise InputError(f"{OP}: {name} must be positive and finite, got {short(value)}")


@custom_op()
def _linear_distillation(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher_hidden: Tensor, teacher_weight: Tensor,
    teacher_bias: Tensor | None, mask: Tensor, loss_weights: Tensor, divergence: str, beta: float, temperature: float,
    softcap: float | None, logit_scale: float, teacher_softcap: float | None, teacher_logit_scale: float,
    memory_budget: int, outputs: Sequence[bool], needs: Sequence[bool], teacher_lses: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """The divergence, acceptance and agreement of each row, and the gradients of sum(loss_weights * divergences) by
    hidden, weight and bias. Without elements: acceptance or agreement not in `outputs`, gradients not in `needs`.
    With S rows of `hidden` per row of the teacher, rows i * S to (i + 1) * S - 1 are compared with its row i."""
    losses, gradients = torch.empty_like(loss_weights), empty_gradients(hidden, weight, bias, needs)
    accepted = losses.new_empty(losses.shape if outputs[0] else (0,))
    agreed = losses.new_empty(losses.shape if outputs[1] else (0,), dtype=torch.bool)
    if is_fake(losses):
        return [losses, accepted, agreed, *gradients]
    options = DistillationOptions(
        divergence, beta, temperature, softcap, logit_scale, teacher_softcap, teacher_logit_scale
    )
    kernels, share = use_kernels(hidden, teacher_hidden), mask.numel() // max(count_rows(teacher_hidden), 1)
    share = max(share, 1)
    beside = bytes_in_place(len(weight), hidden.dtype, teacher_hidden.dtype, options, kernels)
    item = teacher_weight.element_size()
    size = chunk_rows(mask.numel(), weight, beside, memory_budget, needs[1], -(-item // share) if kernels else item)
    size = max(size // share, 1)  # of the teacher's rows
    student = chunks_of_logits(hidden, weight, bias, size * share, gradients)
    teacher = chunks_of_logits(teacher_hidden, teacher_weight, teacher_bias, size)
    flat_losses, flat_mask, flat_weights = losses.view(-1), mask.view(-1), loss_weights.view(-1)
    flat_accepted, flat_agreed = accepted.view(-1), agreed.view(-1)
    flat_lses = None if teacher_lses is None else teacher_lses.reshape(-1)
    for (chunk, logits), (teacher_chunk, teacher_logits) in zip(student, teacher, strict=True):
        rows = DivergenceRows(
            flat_losses[chunk], flat_mask[chunk], flat_weights[chunk] if any(needs) else None,
            accepted=flat_accepted[chunk] if outputs[0] else None, agreed=flat_agreed[chunk] if outputs[1] else None,
            teacher_lses=None if flat_lses is None else flat_lses[teacher_chunk],
        )  # fmt: skip
        divergence_in_place(logits, teacher_logits, rows, options)
    return [losses, accepted, agreed, *gradients]


class _LinearDistillation(torch.autograd.Function):
    """The reduced loss, or the loss of each row, and the requested statistics; the gradients of the loss are kept as in
    `linear_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher_hidden: Tensor, teacher_weight: Tensor,
        teacher_bias: Tensor | None, mask: Tensor, loss_weights: Tensor, options: DistillationOptions,
        memory_budget: int, reduced: bool, outputs: tuple[bool, ...], needs: tuple[bool, ...],
        teacher_lses: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        now = needs if reduced and hidden.dtype != torch.float16 else (False, False, False)
        inputs = (hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, mask, loss_weights)
        ctx.options = (*options, memory_budget)
        losses, *statistics, dx, dw, db = _linear_distillation(*inputs, *ctx.options, outputs[:2], now, teacher_lses)
        statistics = [x for x, requested in zip(statistics, outputs, strict=False) if requested]
        if outputs[2]:
            statistics.append(losses)
        ctx.mark_non_differentiable(*statistics)
        keep_gradients(ctx, inputs, [dx, dw, db], now)
        losses = losses * loss_weights
        return losses.sum() if reduced else losses, *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        kept = kept_gradients(ctx, grad)
        if kept is not None:
            return kept
        *inputs, loss_weights = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        return _linear_distillation(*inputs, loss_weights * grad, *ctx.options, (False, False), needs)[-3:]
