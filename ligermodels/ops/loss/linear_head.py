"""The loss of a linear head, by chunks of rows, so that the logits never exist whole: the checked arguments, the
selection of the rows that have a target, so that the matrix products skip the others, and the loss and its gradients.

For each chunk x of rows of hidden states, with the weight W and bias b of the head:

    logits = x W^T + b                        one GEMM
    losses, and dlogits in place of logits    one kernel
    dx = dlogits W                            one GEMM each, if the gradient is needed
    dW += dlogits^T x

With reduction "mean" or "sum" the forward pass computes the gradients too, and the backward pass only scales them. The
backward pass recomputes the logits with reduction "none", because only it knows the weights of the rows, and in
float16, because gradients of logits underflow without the loss scale.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

import torch
from torch import Tensor

from ligermodels.arguments import is_number
from ligermodels.errors import InputError
from ligermodels.ops.loss.chunks import (
    bytes_beside,
    chunk_rows,
    chunks_of_logits,
    empty_gradients,
    keep_gradients,
    kept_gradients,
)
from ligermodels.ops.loss.row_statistics import rows_in_place
from ligermodels.ops.loss.token_losses import LogitRows, LossOptions, Reduction, checked_loss_weights
from ligermodels.ops.runtime.checks import Signature
from ligermodels.ops.runtime.library import custom_op, is_dtensor, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import empty_like, under_autocast

if TYPE_CHECKING:
    from ligermodels.ops.runtime.class_shards import ClassShard

_TENSORS = Signature(
    hidden="... H+", weight="V+ H =hidden", bias="V =hidden ?", target="... int64", token_weights="... ?"
)
SKIP_BELOW = 0.97  # rows without targets are skipped if the fraction of rows with targets is below this


class RowSelection(NamedTuple):
    """Some of the rows of tensors (..., N) or (...) with `shape` (...)."""

    indices: Tensor  # int64 (n,), none twice
    shape: torch.Size

    def take(self, x: Tensor) -> Tensor:
        """(..., N) -> (n, N), or (...) -> (n,), where N may be several dimensions; differentiable. No index occurs
        twice, so gradients are copied."""
        return cast(Tensor, _TakeRows.apply(x, self.indices, len(self.shape)))

    @overload
    def restore(self, values: Tensor, fill: float) -> Tensor: ...
    @overload
    def restore(self, values: None, fill: float) -> None: ...
    def restore(self, values: Tensor | None, fill: float) -> Tensor | None:
        """(n, ...) -> (..., ...), with `fill` in the other rows; differentiable. None and scalars are returned as they
        are."""
        if values is None or not values.dim():
            return values
        of_row = values.shape[1:]
        filled = values.new_full((math.prod(self.shape), *of_row), fill)
        return filled.index_copy(0, self.indices, values).view((*self.shape, *of_row))


def select_rows(valid: Tensor, num_valid: int | None, name: str) -> RowSelection | None:
    """The selection of the valid rows; None if nearly all rows are valid, or if their number is not known.

    Args:
        valid: bool (...).
        num_valid: the number of valid rows. None: counted on the CPU; unknown on CUDA, where counting would wait for
            the device, and in a compiled graph, which has to serve any number.
        name: the name of `num_valid`, for the assertion that it is right.
    """
    if num_valid is None:
        if valid.device.type != "cpu" or torch.compiler.is_compiling() or is_fake(valid):
            return None
        num_valid = int(valid.sum())
    if num_valid >= SKIP_BELOW * valid.numel():
        return None
    torch._assert_async(valid.sum() == num_valid, f"{name} is not the number of rows that count")
    return RowSelection(valid.flatten().argsort(descending=True, stable=True)[:num_valid], valid.shape)


class _TakeRows(torch.autograd.Function):
    """Its backward pass copies, because no index occurs twice; the backward pass of torch's indexing sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, dims: int) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.shape, ctx.dims = x.shape, dims
        return x.reshape(-1, *x.shape[dims:]).index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        gradient = grad.new_zeros(ctx.shape)
        gradient.view(-1, *ctx.shape[ctx.dims :]).index_copy_(0, indices, grad)
        return gradient, None, None


class LinearHead(NamedTuple):
    """Checked arguments, of the selected rows."""

    hidden: Tensor  # (..., H), or (n, H) of the selection
    weight: Tensor  # (V, H); with a shard the classes of this rank
    bias: Tensor | None  # (V,)
    target: Tensor  # int64 (...) or (n,)
    loss_weights: Tensor  # (...) or (n,); the registered ops take these five tensors
    needs: tuple[bool, ...]  # whether hidden, weight and bias need a gradient
    memory_budget: int  # bytes
    selection: RowSelection | None
    shard: "ClassShard | None"  # the classes of this rank, if classes are sharded over ranks

    @property
    def num_classes(self) -> int:
        return len(self.weight) if self.shard is None else self.shard.num_classes

    @overload
    def restore(self, x: Tensor, fill: float) -> Tensor: ...
    @overload
    def restore(self, x: None, fill: float) -> None: ...
    def restore(self, x: Tensor | None, fill: float) -> Tensor | None:
        """Results (n,) of the selected rows -> (...), with `fill` in the other rows; None and scalars stay."""
        return x if self.selection is None else self.selection.restore(x, fill)


def checked_head(
    op: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: LossOptions, *,
    memory_budget: int, num_targets: int | None, reduction: Reduction = "none", token_weights: Tensor | None = None,
    divided: bool = True,
) -> LinearHead:  # fmt: skip
    """Checks the arguments of an op, casts them under autocast, and selects the rows with targets.

    Args:
        op: the op's name, for error messages.
        hidden: floating (..., H).
        weight: (V, H); or a DTensor that is sharded by classes: the head then has the local shard.
        target: int64 (...).
        bias: (V,), or None; sharded as `weight` is.
        options: the options of the loss.
        memory_budget: bytes for the chunks.
        num_targets: the number of targets that are not ignored, or None.
        reduction: "mean", "sum" or "none".
        token_weights: floating (...), or None.
        divided: see `loss_weights`.

    Raises:
        InputError: a shape, dtype, device or value does not fit.
    """
    shard = None
    if is_dtensor(weight):
        from ligermodels.ops.runtime.class_shards import shard_of_head  # imports DTensors

        hidden, weight, bias, shard = shard_of_head(op, hidden, weight, bias)
    hidden, weight, bias = under_autocast(hidden, weight, bias)
    _TENSORS.check(op, hidden, weight, bias, target, token_weights)
    options.check(op, reduction)
    memory_budget = checked_memory_budget(op, memory_budget)
    num_classes = len(weight) if shard is None else shard.num_classes
    target, loss_weights = checked_loss_weights(
        target, num_classes, options.ignore_index, reduction, token_weights, hidden.dtype, divided
    )
    selection = select_rows(target != options.ignore_index, num_targets, "num_targets")
    if selection is not None:
        hidden, target, loss_weights = map(selection.take, (hidden, target, loss_weights))
    needs = needed_gradients(hidden, weight, bias)
    return LinearHead(hidden, weight, bias, target, loss_weights, needs, memory_budget, selection, shard)


def checked_memory_budget(op: str, memory_budget: float) -> int:
    """The budget in whole bytes; InputError, in eager mode, unless it is a positive number."""
    if torch.compiler.is_compiling():  # with dynamic=True a number is a symbol, which has no value yet
        return cast(int, memory_budget)
    if not is_number(memory_budget) or not 0 < memory_budget < math.inf:
        raise InputError(f"{op}: memory_budget must be a positive number of bytes, got {memory_budget}")
    return int(memory_budget)


def needed_gradients(*inputs: Tensor | None) -> tuple[bool, ...]:
    """Whether each input needs a gradient. Ask before `autograd.Function.apply`: inside of its forward pass gradient
    mode is off."""
    return tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs)


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
    for chunk, logits in chunks_of_logits(hidden, weight, bias, size, gradients):
        rows_in_place(logits, rows.chunk(chunk), options)
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
