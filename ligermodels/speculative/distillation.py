"""How far a model's predictions are from those of another, the reference, and the gradient of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ligermodels.errors import InputError
from ligermodels.layers import IGNORE_INDEX
from ligermodels.layers.sharding import is_sharded, is_tensor_parallel

Head = Callable[[Tensor], Tensor]
"""Hidden states (..., H) -> logits (..., V)."""

WIDE_COPIES = 6
"""Tensors of a chunk's rows by the vocabulary, in float32 or wider, that are held at once."""


def divergence(
    hidden: Tensor,
    head: nn.Module,
    reference_hidden: Tensor,
    reference_head: Head,
    targets: Tensor,
    *,
    vocab_size: int,
    reduction: str = "mean",
    memory_budget: int = 2**30,
    num_targets: int | None = None,
) -> Tensor:
    """KL(reference || model) = sum_v q_v (log q_v - log p_v) of the next token, over the places that have a target.

    Logits exist for a chunk of places at a time, and gradients are computed along with them, which is exact: the
    logits' own is p - q.

    Args:
        hidden: (..., H), and `reference_hidden` (..., H'): states after the final norm, for the heads beside them.
        head: (..., H) -> logits (..., vocab_size); its parameters get gradients.
        targets: long (...); of a place only whether it is ignored (-100) counts.
        reduction: "sum", or "mean" over the places; 0 without any.
        memory_budget: bytes for a chunk's logits and what is computed with them; at least one row is taken.
        num_targets: how many places have a target, if the caller knows; on a GPU that saves waiting for it.

    Returns a scalar, in float32 or wider. The reference gets no gradient. Raises InputError when `head` is
    tensor-parallel, or sharded and not gathered by `call_gathered`.
    """
    if is_tensor_parallel(head):
        raise InputError(
            "KL to the reference: not implemented for tensor-parallel heads; train without a reference, or by FSDP2"
        )
    if is_sharded(head):
        raise InputError("KL to the reference: the head is sharded; call divergence by call_gathered(head, ...)")
    wide = torch.promote_types(hidden.dtype, torch.float32)
    chunks = _chunks(targets, vocab_size, wide, memory_budget, num_targets)
    # Asked here: inside an autograd.Function's forward gradients are off.
    parameters = [p for p in head.parameters() if p.requires_grad and torch.is_grad_enabled()]
    total: Tensor = _Divergence.apply(
        # One that is gathered for this call must not be given back after the first chunk, as its hooks would.
        head.forward if callable(getattr(head, "unshard", None)) else head,
        reference_head,
        chunks,
        wide,
        torch.is_grad_enabled() and hidden.requires_grad,
        hidden.flatten(0, -2),
        reference_hidden.flatten(0, -2),
        *parameters,
    )
    return total if reduction == "sum" else total / max(1, sum(map(len, chunks)))


@torch.no_grad()
def divergence_and_losses(
    hidden: Tensor,
    head: Head,
    reference_hidden: Tensor,
    reference_head: Head,
    targets: Tensor,
    *,
    vocab_size: int,
    memory_budget: int = 2**30,
) -> Tensor:
    """KL(reference || model) and the cross entropies of the model and of the reference, from logits computed once.

    The arguments are those of `divergence`, but that targets (...) are the right tokens. Logits exist for a chunk of
    places at a time, and nothing gets a gradient.

    Returns (3,), in float32 or wider: sums over the places that have a target.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    hidden, reference_hidden = hidden.flatten(0, -2), reference_hidden.flatten(0, -2)
    total = hidden.new_zeros(3, dtype=wide)
    for rows in _chunks(targets, vocab_size, wide, memory_budget):
        log_p = head(hidden[rows]).to(wide).log_softmax(-1)
        log_q = reference_head(reference_hidden[rows]).to(wide).log_softmax(-1)
        right = targets.flatten()[rows]
        total += torch.stack(
            [
                F.kl_div(log_p, log_q, reduction="sum", log_target=True),
                F.nll_loss(log_p, right, reduction="sum"),
                F.nll_loss(log_q, right, reduction="sum"),
            ]
        )
    return total


def _chunks(
    targets: Tensor, vocab_size: int, wide: torch.dtype, memory_budget: int, num_targets: int | None = None
) -> tuple[Tensor, ...]:
    """Indices of the places that have a target, as many at a time as the budget has room for."""
    valid = targets.flatten() != IGNORE_INDEX
    if num_targets is not None:
        torch._assert_async(valid.sum() == num_targets, "num_targets is not the number of targets not ignored")
    count = int(valid.sum()) if num_targets is None else num_targets
    rows = valid.argsort(descending=True, stable=True)[:count]
    return rows.split(max(1, memory_budget // (WIDE_COPIES * wide.itemsize * vocab_size)))


class _Divergence(torch.autograd.Function):
    """The sum over all chunks of rows; gradients of `hidden` and of the `parameters` of `head`."""

    @staticmethod
    @torch.no_grad()
    def forward(
        ctx: Any,
        head: Head,
        reference: Head,
        chunks: Sequence[Tensor],
        wide: torch.dtype,
        of_hidden: bool,
        hidden: Tensor,
        reference_hidden: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=wide)
        gradients = [torch.zeros_like(p, dtype=wide) for p in parameters]  # One sum of all chunks, rounded once.
        of_rows = torch.zeros_like(hidden) if of_hidden else None
        for rows in chunks:
            x = hidden[rows].requires_grad_(of_hidden)
            wanted = [*([x] if of_hidden else []), *parameters]
            with torch.set_grad_enabled(bool(wanted)):
                logits = head(x)
            log_p = logits.detach().to(wide).log_softmax(-1)
            log_q = reference(reference_hidden[rows]).to(wide).log_softmax(-1)
            q = log_q.exp()
            total += (q * log_q.sub_(log_p)).sum()
            if wanted:
                found = list(
                    torch.autograd.grad(
                        logits, wanted, log_p.exp_().sub_(q).to(logits.dtype), allow_unused=True, materialize_grads=True
                    )
                )
                if of_rows is not None:
                    of_rows[rows] = found.pop(0)
                for gradient, part in zip(gradients, found, strict=True):
                    gradient += part
        ctx.of_hidden = of_hidden
        rounded = [gradient.to(p.dtype) for gradient, p in zip(gradients, parameters, strict=True)]
        ctx.save_for_backward(*([] if of_rows is None else [of_rows]), *rounded)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = [(tensor * grad).to(tensor.dtype) for tensor in ctx.saved_tensors]
        of_hidden = found.pop(0) if ctx.of_hidden else None
        return None, None, None, None, None, of_hidden, None, *found
