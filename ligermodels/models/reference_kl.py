"""KL divergence of a model's predictions from the predictions of a reference model, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.layers import IGNORE_INDEX
from ligermodels.layers.sharding import holds_shards, is_fsdp, is_tensor_parallel
from ligermodels.ops.runtime.library import once_differentiable

Head = Callable[[Tensor], Tensor]
"""Hidden states (..., H) -> logits (..., V)."""

WIDE_COPIES = 6
"""Number of (rows, vocabulary) tensors of a chunk, in float32 or wider, in memory at once."""


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
    """KL(reference || model) = sum_v q_v (log q_v - log p_v) of the next token, over the tokens with a target.

    Logits are materialised for one chunk of tokens at a time. The forward pass also computes the exact gradients; the
    gradient of the logits is p - q.

    Args:
        hidden: (..., H), the model's hidden states after the final norm.
        head: (..., H) -> logits (..., vocab_size); its parameters get gradients.
        reference_hidden: (..., H'), the reference's hidden states after the final norm.
        reference_head: (..., H') -> logits (..., vocab_size); it gets no gradient.
        targets: long (...), -100 for tokens without a target; the other values are not used.
        vocab_size: V.
        reduction: "sum", or "mean" over the tokens with a target, 0 if there are none.
        memory_budget: bytes for the logits of a chunk and their temporaries; a chunk has at least one token.
        num_targets: number of tokens with a target. If it is given, the host does not wait for the GPU to count them.

    Returns:
        A scalar, in float32 or wider.

    Raises:
        InputError: `head` is tensor-parallel, or sharded and not gathered by `call_gathered`.
    """
    if is_tensor_parallel(head):
        raise InputError(
            "KL to the reference: not implemented for tensor-parallel heads; train without a reference, or with FSDP2"
        )
    if holds_shards(head):
        raise InputError("KL to the reference: the head is sharded; call divergence by call_gathered(head, ...)")
    wide = torch.promote_types(hidden.dtype, torch.float32)
    chunks = _chunks(targets, vocab_size, wide, memory_budget, num_targets)
    # Inside the forward of an autograd.Function, is_grad_enabled() is False.
    parameters = [p for p in head.parameters() if p.requires_grad and torch.is_grad_enabled()]
    total: Tensor = _Divergence.apply(
        # FSDP2's hooks would release the head's gathered parameters after the first chunk.
        head.forward if is_fsdp(head) else head,
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

    Logits are materialised for one chunk of tokens at a time. There are no gradients.

    Args:
        hidden: (..., H), the model's hidden states after the final norm.
        head: (..., H) -> logits (..., vocab_size).
        reference_hidden: (..., H'), the reference's hidden states after the final norm.
        reference_head: (..., H') -> logits (..., vocab_size).
        targets: long (...), the next tokens, -100 where ignored.
        vocab_size: V.
        memory_budget: bytes for the logits of a chunk and their temporaries; a chunk has at least one token.

    Returns:
        (3,), in float32 or wider: the KL, the model's and the reference's cross entropy, summed over the tokens with a
        target.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    hidden, reference_hidden = hidden.flatten(0, -2), reference_hidden.flatten(0, -2)
    total = hidden.new_zeros(3, dtype=wide)
    for rows in _chunks(targets, vocab_size, wide, memory_budget):
        log_p = head(hidden[rows]).to(wide).log_softmax(-1)
        log_q = reference_head(reference_hidden[rows]).to(wide).log_softmax(-1)
        labels = targets.flatten()[rows]
        total += torch.stack(
            [
                F.kl_div(log_p, log_q, reduction="sum", log_target=True),
                F.nll_loss(log_p, labels, reduction="sum"),
                F.nll_loss(log_q, labels, reduction="sum"),
            ]
        )
    return total


def _chunks(
    targets: Tensor, vocab_size: int, wide: torch.dtype, memory_budget: int, num_targets: int | None = None
) -> tuple[Tensor, ...]:
    """Indices of the tokens with a target, in chunks that fit the memory budget."""
    valid = targets.flatten() != IGNORE_INDEX
    if targets.is_meta:  # a plan of the memory: at most all tokens have a target
        num_targets = valid.numel()
    elif num_targets is not None:
        torch._assert_async(valid.sum() == num_targets, "num_targets: differs from the number of targets")
    count = int(valid.sum()) if num_targets is None else num_targets
    rows = valid.argsort(descending=True, stable=True)[:count]
    return rows.split(max(1, memory_budget // (WIDE_COPIES * wide.itemsize * vocab_size)))


class _Divergence(torch.autograd.Function):
    """The sum over all chunks, with gradients for `hidden` and for the `parameters` of `head`."""

    @staticmethod
    @torch.no_grad()
    def forward(
        ctx: Any,
        head: Head,
        reference: Head,
        chunks: Sequence[Tensor],
        wide: torch.dtype,
        hidden_needs_grad: bool,
        hidden: Tensor,
        reference_hidden: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=wide)
        gradients = [torch.zeros_like(p, dtype=wide) for p in parameters]  # rounded once, after all chunks
        hidden_grad = torch.zeros_like(hidden) if hidden_needs_grad else None
        for rows in chunks:
            x = hidden[rows].requires_grad_(hidden_needs_grad)
            operands = [*([x] if hidden_needs_grad else []), *parameters]
            with torch.set_grad_enabled(bool(operands)):
                logits = head(x)
            log_p = logits.detach().to(wide).log_softmax(-1)
            log_q = reference(reference_hidden[rows]).to(wide).log_softmax(-1)
            q = log_q.exp()
            total += (q * log_q.sub_(log_p)).sum()
            if operands:
                grads = list(
                    torch.autograd.grad(
                        logits,
                        operands,
                        log_p.exp_().sub_(q).to(logits.dtype),
                        allow_unused=True,
                        materialize_grads=True,
                    )
                )
                if hidden_grad is not None:
                    hidden_grad[rows] = grads.pop(0)
                for gradient, chunk_gradient in zip(gradients, grads, strict=True):
                    gradient += chunk_gradient
        ctx.hidden_needs_grad = hidden_needs_grad
        rounded = [gradient.to(p.dtype) for gradient, p in zip(gradients, parameters, strict=True)]
        ctx.save_for_backward(*([] if hidden_grad is None else [hidden_grad]), *rounded)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = [(tensor * grad).to(tensor.dtype) for tensor in ctx.saved_tensors]
        grad_of_hidden = grads.pop(0) if ctx.hidden_needs_grad else None
        return None, None, None, None, None, grad_of_hidden, None, *grads
