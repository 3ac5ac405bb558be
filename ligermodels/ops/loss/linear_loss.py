"""The loss of a linear head and its gradients, by chunks of rows, so that the logits never exist whole.

For each chunk x of rows of hidden states, with the weight W and bias b of the head:

    logits = x W^T + b                        one GEMM
    losses, and dlogits in place of logits    one kernel
    dx = dlogits W                            one GEMM each, if the gradient is needed
    dW += dlogits^T x

With reduction "mean" or "sum" the forward pass computes the gradients too, and the backward pass only scales them. The
backward pass recomputes the logits with reduction "none", because only it knows the weights of the rows, and in
float16, because gradients of logits underflow without the loss scale.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ligermodels.ops.loss.chunks import ChunkedHead, bytes_beside, chunk_rows, empty_gradients
from ligermodels.ops.loss.gradient_sum import keep_gradients, kept_gradients
from ligermodels.ops.loss.row_statistics import rows_in_place
from ligermodels.ops.loss.token_losses import LogitRows, LossOptions
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import empty_like


@custom_op()
def linear_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss_weights: Tensor, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float, memory_budget: int,
    needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """The loss of each row of a head, and the gradients of sum(loss_weights * losses).

    Args:
        hidden: (..., H).
        weight: (V, H).
        bias: (V,), or None.
        target: int64 (...), contiguous, checked.
        loss_weights: float32 or float64 (...), contiguous; gives the dtype of the losses.
        ignore_index: as the following options, see `LossOptions`.
        label_smoothing: in [0, 1].
        z_loss: 0 or above.
        softcap: positive, or None.
        logit_scale: positive.
        memory_budget: bytes for a chunk.
        needs: whether the gradients of hidden, weight and bias are needed.

    Returns:
        The losses (...); and the three gradients, without elements where not needed.
    """
    losses, gradients = empty_like(loss_weights), empty_gradients(hidden, weight, bias, needs)
    if is_fake(hidden):
        return [losses, *gradients]
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    rows = LogitRows(target, losses, weights=loss_weights if any(needs) else None)
    size = chunk_rows(target.numel(), weight, bytes_beside(weight, options), memory_budget, needs[1])
    head = ChunkedHead(hidden, weight, bias, size, gradients)
    for chunk, logits in head.chunks():
        rows_in_place(logits, rows.chunk(chunk), options)  # the losses, and dlogits in place of the logits
        head.add_gradients(chunk, logits)
    head.close()
    return [losses, *gradients]


class LinearLoss(torch.autograd.Function):
    """The reduced loss of a head, or the weighted loss of each row."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, loss_weights, needs, options, memory_budget, reduced):
        inputs = hidden, weight, bias, target, loss_weights
        now = needs if reduced and hidden.dtype != torch.float16 else (False, False, False)
        losses, *gradients = linear_loss(*inputs, *options, memory_budget, now)
        keep_gradients(ctx, inputs, gradients, now)
        ctx.options, ctx.memory_budget = options, memory_budget
        losses = losses * loss_weights
        return losses.sum() if reduced else losses

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        kept = kept_gradients(ctx, grad)
        if kept is not None:
            return kept
        *inputs, loss_weights = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        return linear_loss(*inputs, loss_weights * grad, *ctx.options, ctx.memory_budget, needs)[1:]
