"""The loss of a block's slots from their hidden states, a chunk of blocks at a time, so that logits never exist whole.

For the logits d of a slot and q = softmax(d), the token x and the model's distribution p of that token:

    loss = ce_weight * -log q[x] + divergence_weight * D(p, q)

The forward pass also computes the gradients; the backward pass only scales them, as in `ops.linear_distillation`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.layers import IGNORE_INDEX
from ligermodels.ops.loss.chunks import GradientSum
from ligermodels.ops.loss.divergence_rows import divergence_in_place
from ligermodels.ops.loss.divergences import DistillationOptions, DivergenceRows, Labels
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import once_differentiable

TORCH_BYTES, KERNEL_BYTES = 28, 12
"""Bytes of a logit and all that is computed from it in a chunk, in torch and by kernels; 4 more with a softcap. Kernels
without a softcap need the two sides' logits alone."""
WHOLE_BYTES = 12
"""Bytes in addition for each token of the model, where the draft vocabulary has not all tokens."""


class SlotLoss(NamedTuple):
    """The terms of the loss of a slot.

    ce_weight: weight of the cross entropy.
    divergence: name of a divergence of `ops.linear_distillation`.
    divergence_weight: weight of the divergence.
    dpace: the constant a of D-PACE, in [0, 1]; None for weights that are given. With u_j = (1 - a) q_j[x_j] + a, slot j
        then has the weight sum over slots i >= j with a target of prod_{l <= i} u_l, without a gradient.
    memory_budget: bytes of a chunk; it has at least one block.
    softcap: of the draft's logits before the codes are added, or None.
    """

    ce_weight: float
    divergence: str
    divergence_weight: float
    dpace: float | None = None
    memory_budget: int = 2**30
    softcap: float | None = None


class BlockLosses(NamedTuple):
    """Results for N blocks of K slots; zeros for slots without a target. Only `total` has gradients.

    total: scalar, the sum of weights * losses.
    losses: (N, K), the losses of the slots.
    weights: (N, K), their weights.
    overlap: (N, K), sum_v min(p, q), where p is the distribution of the loss.
    acceptance: (N, K), sum_v min(p, q), where p is the model's distribution over all its tokens.
    agreement: bool (N, K), whether the draft's likeliest token is the model's, of all its tokens.
    ranks: long (N, K), number of tokens that are likelier than the target, -1 without one.
    """

    total: Tensor
    losses: Tensor
    weights: Tensor
    overlap: Tensor
    acceptance: Tensor
    agreement: Tensor
    ranks: Tensor


class Teacher(NamedTuple):
    """The model's side.

    hidden: (N, K, H), after its final norm.
    weight, bias, softcap, logit_scale: of its head, for all its tokens.
    tokens: long (V_d,), the tokens that the draft can propose; None for all.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    logit_scale: float
    tokens: Tensor | None = None


def block_losses(
    hidden: Tensor, weight: Tensor, codes: Tensor | None, code_weight: Tensor | None, teacher: Teacher, targets: Tensor,
    mask: Tensor, weights: Tensor, options: SlotLoss,
) -> BlockLosses:  # fmt: skip
    """The losses of N blocks of K slots.

    Args:
        hidden: (N, K, H), the draft's states after its final norm.
        weight: (V, H), the draft's head; it gets no gradient.
        codes: (N, K, r), added to the logits as codes @ code_weight.T; None for none.
        code_weight: (V, r), or None.
        teacher: the model's side.
        targets: long (N, K), ids of the draft vocabulary, -100 where the text's token is not in it.
        mask: bool (N, K), the slots that count.
        weights: (N, K), the weights of the slots; with D-PACE factors of its weights.
        options: how the losses are made.
    """
    if codes is None or code_weight is None:
        codes, code_weight = hidden.new_empty(*hidden.shape[:2], 0), weight.new_empty(len(weight), 0)
    return BlockLosses(
        *_BlockLosses.apply(hidden, codes, code_weight, weight, teacher, targets, mask, weights, options)
    )


class _BlockLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, codes: Tensor, code_weight: Tensor, weight: Tensor, teacher: Teacher,
        targets: Tensor, mask: Tensor, weights: Tensor, options: SlotLoss,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        needed = any(ctx.needs_input_grad[:3])
        dh, dc = (x.new_empty(x.shape if needed else 0) for x in (hidden, codes))
        dw = code_weight.new_empty(code_weight.shape if needed else 0)
        total = GradientSum(dw, several=True) if dw.numel() else None
        slots = _Slots.empty(targets, mask, weights, hidden, options)
        size = _blocks_of_a_chunk(hidden, weight, teacher, options)
        for start in range(0, len(targets), size):
            chunk = slice(start, start + size)
            h, c = hidden[chunk].flatten(0, 1), codes[chunk].flatten(0, 1)
            d, before = _gradients(h, weight, c, code_weight, teacher, chunk, slots, options, needed)
            if needed:
                torch.mm(before, weight, out=dh[chunk].flatten(0, 1))
                dc[chunk] = (d @ code_weight.to(d.dtype)).view_as(codes[chunk])
                if total is not None:
                    total.add(d, c.to(d.dtype))
            del d, before  # their memory serves the next chunk
        losses = options.ce_weight * slots.cross_entropy + options.divergence_weight * slots.divergence
        overlap = slots.accepted if teacher.tokens is None else slots.overlap
        others = overlap, slots.accepted, slots.agreed, slots.ranks.masked_fill(~slots.mask, -1)
        ctx.mark_non_differentiable(losses, slots.weights, *others)
        if needed:
            ctx.save_for_backward(dh, dc, dw if total is None else total.close())
        return (losses * slots.weights).sum(), losses, slots.weights, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        return *((x * grad).to(x.dtype) for x in ctx.saved_tensors), *[None] * 6


class _Slots(NamedTuple):
    """Inputs and results of all slots, each (N, K) and contiguous, so that chunks of blocks are views."""

    targets: Tensor
    mask: Tensor
    weights: Tensor
    of_gradient: Tensor  # the weights before those of D-PACE
    divergence: Tensor
    cross_entropy: Tensor
    accepted: Tensor
    overlap: Tensor
    agreed: Tensor
    ranks: Tensor

    @classmethod
    def empty(cls, targets: Tensor, mask: Tensor, weights: Tensor, hidden: Tensor, options: SlotLoss) -> _Slots:
        mask, wide = mask.contiguous(), torch.promote_types(hidden.dtype, torch.float32)
        targets, weights = targets.masked_fill(~mask, IGNORE_INDEX).contiguous(), (weights * mask).contiguous()
        of_gradient = (weights if options.dpace is None else mask).to(wide)
        numbers = hidden.new_empty((4, *mask.shape), dtype=wide).unbind()
        return cls._make(
            [targets, mask, weights, of_gradient, *numbers, torch.empty_like(mask), torch.empty_like(targets)]
        )


def _blocks_of_a_chunk(hidden: Tensor, weight: Tensor, teacher: Teacher, options: SlotLoss) -> int:
    """The number of blocks whose logits fit into the memory budget."""
    size = KERNEL_BYTES if use_kernels(hidden, teacher.hidden) else TORCH_BYTES
    if size == KERNEL_BYTES and options.softcap is None:
        size = hidden.element_size() + teacher.weight.element_size()
    size = (size + (0 if options.softcap is None else 4)) * len(weight)
    size += 0 if teacher.tokens is None else WHOLE_BYTES * len(teacher.weight)
    return max(1, options.memory_budget // (size * hidden.shape[1]))


def _gradients(
    hidden: Tensor, weight: Tensor, codes: Tensor, code_weight: Tensor, teacher: Teacher, chunk: slice, slots: _Slots,
    options: SlotLoss, needed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fills in the slots of a chunk of blocks, from its hidden states (rows, H) and codes (rows, r). If `needed`, also
    returns the gradients (rows, V_d) of the sum of weights * losses: by the logits, and by the logits before softcap
    and codes."""
    logits, slope = _draft_logits(hidden, weight, codes, code_weight, options.softcap, needed)
    truth, lses, likeliest = _teacher_logits(teacher, chunk)
    best = None if likeliest is None else logits.argmax(1)
    part = _Slots._make(x[chunk].flatten() for x in slots)
    labels = Labels(part.targets, options.ce_weight, options.divergence_weight, part.cross_entropy, part.ranks)
    rows = DivergenceRows(
        part.divergence, part.mask, part.of_gradient if needed else None, part.accepted, part.agreed, lses,
        None if lses is None else part.overlap, labels,
    )  # fmt: skip
    distillation = DistillationOptions(options.divergence, 0.5, 1.0, None, 1.0, teacher.softcap, teacher.logit_scale)
    divergence_in_place(logits, truth, rows, distillation)
    if best is not None and teacher.tokens is not None:
        part.agreed.copy_((teacher.tokens[best] == likeliest) & part.mask)
    if options.dpace is not None:
        mask = slots.mask[chunk]
        known = mask & (slots.targets[chunk] != IGNORE_INDEX)
        probabilities = (-slots.cross_entropy[chunk]).exp() * known
        part.weights.mul_(dpace_weights(probabilities, mask, options.dpace).flatten())
        if needed:
            logits.mul_(part.weights[:, None])
    d = logits.to(hidden.dtype)
    return d, d if slope is None else slope.mul_(logits).to(hidden.dtype)


def _draft_logits(
    hidden: Tensor, weight: Tensor, codes: Tensor, code_weight: Tensor, softcap: float | None, needed: bool
) -> tuple[Tensor, Tensor | None]:
    """Logits (rows, V), with a softcap in at least float32; and the slope of the softcap, where there is one and it is
    needed."""
    logits, slope = hidden @ weight.T, None
    if softcap is not None:
        logits = capped(logits.to(torch.promote_types(hidden.dtype, torch.float32)), softcap)
        slope = 1 - (logits / softcap).square() if needed else None
    if codes.shape[1]:
        logits.addmm_(codes.to(logits.dtype), code_weight.to(logits.dtype).T)
    return logits, slope


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logits / softcap); the logits themselves without one."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _teacher_logits(teacher: Teacher, chunk: slice) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The teacher's logits (rows, V_d) of a chunk without softcap and scale; of all its classes the log-sum-exp and the
    largest logit's class, None where the draft has them all."""
    x = teacher.hidden[chunk].flatten(0, 1) @ teacher.weight.T
    x = x if teacher.bias is None else x.add_(teacher.bias)
    if teacher.tokens is None:
        return x, None, None
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) * teacher.logit_scale
    return x[:, teacher.tokens], capped(wide, teacher.softcap).logsumexp(1), x.argmax(1)


def dpace_weights(probabilities: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """The weights of D-PACE (see `SlotLoss.dpace`), (N, K), from the draft's probabilities (N, K) of the right tokens.

    Args:
        probabilities: (N, K), the draft's probabilities of the text's tokens.
        mask: bool (N, K), the slots with a target, the first ones of each block.
        alpha: the constant a.
    """
    products = ((1 - alpha) * probabilities + alpha).cumprod(1) * mask
    return products.flip(1).cumsum(1).flip(1)
