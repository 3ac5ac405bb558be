"""The language model head by chunks of rows, so that the logits never exist whole: what the losses share.

Per chunk one GEMM for the logits, the numbers of each row, which `rows_in_place` replaces by gradients if any are
needed, and one GEMM for each of those. Rows without targets are left out of all of them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.loss.gradient_sum import GradientSum
from ligermodels.ops.loss.rows_in_place import RowResults, bytes_in_torch, rows_in_place
from ligermodels.ops.loss.token_losses import (
    LossOptions,
    LossWeights,
    Reduction,
    check_class_weights,
    check_loss,
    checked_loss_weights,
)
from ligermodels.ops.loss.token_losses_kernels import scale_
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import custom_op, is_dtensor, is_fake, reject_dtensors
from ligermodels.ops.runtime.tensors import as_rows, check_tensor, empty_gradient, under_autocast

if TYPE_CHECKING:
    from ligermodels.ops.runtime.class_shards import ClassShard

ROW_MULTIPLE = 128  # chunks of whole GEMM tiles
COLUMN_MULTIPLE = 16  # on CUDA logits are held in rows of a multiple of this, which keeps them aligned for odd V
SKIP_BELOW = 0.97  # rows without targets are left out if the share of rows with targets is below this


class Head(NamedTuple):
    """Checked arguments of a loss that begins at hidden states, and what follows from them."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    loss_weights: LossWeights
    class_weights: Tensor | None
    num_targets: int
    needs: tuple[bool, bool, bool]  # which gradients are needed: of hidden, weight and bias
    shard: "ClassShard | None"  # the classes that weight and bias are of, where these are not all

    @property
    def num_classes(self) -> int:
        return len(self.weight) if self.shard is None else self.shard.num_classes


def checked_head(
    op: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, token_weights: Tensor | None,
    reduction: Reduction, options: LossOptions, memory_budget: int, num_targets: int | None,
    class_weights: Tensor | None = None,
) -> Head:  # fmt: skip
    """Raises InputError unless all fit one another. Under autocast hidden, weight and bias are cast to its dtype.

    Of a weight and bias that are DTensors, sharded by classes, it has this rank's part."""
    shard = None
    if is_dtensor(weight):
        from ligermodels.ops.runtime.class_shards import shard_of_head  # imports DTensors

        hidden, weight, bias, shard = shard_of_head(op, hidden, weight, bias)
    hidden, weight, bias = under_autocast(hidden, weight, bias)
    check_loss(op, hidden, "hidden", target, token_weights, reduction, options)
    reject_dtensors(op, weight, bias)
    check_tensor(op, "weight", weight, ("V", hidden.shape[-1]), hidden.device, hidden.dtype)
    V, dtype, ignore_index = weight.shape[0], hidden.dtype, options.ignore_index
    if V == 0:
        raise InputError(f"{op}: weight must be of one class or more")
    if bias is not None:
        check_tensor(op, "bias", bias, (V,), hidden.device, dtype)
    V = V if shard is None else shard.num_classes
    if memory_budget <= 0:
        raise InputError(f"{op}: memory_budget must be a positive number of bytes, got {memory_budget}")
    class_weights = check_class_weights(op, class_weights, V, hidden.device, dtype)
    target, loss_weights = checked_loss_weights(
        target, V, ignore_index, reduction, token_weights, dtype, class_weights
    )  # fmt: skip
    if num_targets is None:
        counted = target.device.type == "cpu" and not torch.compiler.is_compiling()
        num_targets = int((target != ignore_index).sum()) if counted else target.numel()
    # Determined here: inside autograd.Function.forward gradient mode is off.
    graded = torch.is_grad_enabled()
    needs = (
        graded and hidden.requires_grad,
        graded and weight.requires_grad,
        graded and bias is not None and bias.requires_grad,
    )
    return Head(hidden, weight, bias, target, loss_weights, class_weights, num_targets, needs, shard)


@custom_op()
def linear_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss_weights: Tensor,
    class_weights: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None,
    logit_scale: float, return_rank: bool, return_predicted: bool, return_entropy: bool, return_lse: bool,
    return_mean: bool, memory_budget: int, num_targets: int, need_hidden: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The `RowResults` of all rows, and the gradients by hidden, weight and bias of the sum of loss_weights * losses;
    those not asked for are empty. Targets have been checked. class_weights, (V,), are those of the means."""
    losses, dx = loss_weights.new_empty(loss_weights.shape), empty_gradient(hidden, need_hidden, hidden)
    ranks, predicted = (target.new_empty(target.shape if r else (0,)) for r in (return_rank, return_predicted))
    entropies, maxima, totals, means = (
        losses.new_empty(losses.shape if r else (0,)) for r in (return_entropy, return_lse, return_lse, return_mean)
    )
    if is_fake(losses):
        of_weight, of_bias = (empty_gradient(t, need, hidden) for t, need in ((weight, need_weight), (bias, need_bias)))
        return losses, ranks, predicted, entropies, maxima, totals, means, dx, of_weight, of_bias
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, return_rank)
    V, H = weight.shape
    rows, targets = as_rows(hidden), target.reshape(-1)
    asked = {"losses": losses, "ranks": ranks}
    asked |= {"predicted": predicted} if return_predicted else {}
    asked |= {"entropies": entropies} if return_entropy else {}
    asked |= {"maxima": maxima, "totals": totals} if return_lse else {}
    asked |= {"means": means} if return_mean else {}

    chosen = rows_with_targets(targets, num_targets, ignore_index)
    T = len(targets if chosen is None else chosen)
    if chosen is not None:
        for x in (losses, entropies, maxima, means, dx):
            x.zero_()
        totals.fill_(1)
        for x in (ranks, predicted):
            x.fill_(-1)

    def take(x: Tensor, chunk: slice) -> Tensor:
        return x[chunk].contiguous() if chosen is None else x.index_select(0, chosen[chunk])

    def put(values: Tensor, x: Tensor, chunk: slice) -> None:
        if chosen is None:
            x[chunk] = values
        else:
            x.index_copy_(0, chosen[chunk], values)

    in_torch = 0 if use_kernels(hidden) else bytes_in_torch(V, hidden.dtype, options, return_entropy)
    size = chunk_rows(T, V, H, hidden, in_torch, memory_budget, need_weight)
    dw = GradientSum(weight, several=size < T) if need_weight else None
    db = GradientSum(bias, several=True) if bias is not None and need_bias else None
    columns = -(-V // COLUMN_MULTIPLE) * COLUMN_MULTIPLE if hidden.is_cuda else V  # CPU GEMMs may read such gaps
    workspace = hidden.new_empty(size, columns)[:, :V]
    for start in range(0, T, size):
        chunk = slice(start, min(start + size, T))
        x, logits = take(rows, chunk), workspace[: chunk.stop - start]
        if bias is None:
            torch.mm(x, weight.t(), out=logits)
        else:
            torch.addmm(bias, x, weight.t(), out=logits)
        found = {name: whole.new_empty(logits.shape[0] if whole.numel() else 0) for name, whole in asked.items()}
        graded = need_hidden or need_weight or need_bias
        weights = take(loss_weights.reshape(-1), chunk) if graded else None
        rows_in_place(logits, take(targets, chunk), RowResults(**found), weights, options, class_weights)
        for name, values in found.items():
            if values.numel():
                put(values, asked[name].view(-1), chunk)
        if need_hidden and chosen is None:
            torch.mm(logits, weight, out=dx.view(-1, H)[chunk])
        elif need_hidden:
            put(logits @ weight, dx.view(-1, H), chunk)
        if dw is not None:
            dw.add(logits, x)
        if db is not None:
            db.add(logits)
    gradients = [weight.new_empty(0) if g is None else g.close() for g in (dw, db)]
    return losses, ranks, predicted, entropies, maxima, totals, means, dx, gradients[0], gradients[1]


def rows_with_targets(targets: Tensor, num_targets: int, ignore_index: int) -> Tensor | None:
    """The numbers of the rows with targets, in order; None if nearly all rows have one, which are then all taken."""
    if num_targets >= SKIP_BELOW * len(targets):
        return None
    valid = targets != ignore_index
    torch._assert_async(valid.sum() == num_targets, "num_targets is not the number of targets not ignored")
    return valid.argsort(descending=True, stable=True)[:num_targets]


def chunk_rows(T: int, V: int, H: int, hidden: Tensor, in_torch: int, memory_budget: int, need_weight: bool) -> int:
    """Rows per chunk, see `rows_per_chunk`.

    in_torch: bytes for a row beside its logits. need_weight: whether the weight's gradient is summed over chunks."""
    item, wide = hidden.dtype.itemsize, max(hidden.dtype.itemsize, 4)
    accumulation = 0
    if need_weight and not hidden.is_cuda and wide > item:  # see GradientSum
        accumulation = (V + H) * wide
    per_row = -(-V // COLUMN_MULTIPLE) * COLUMN_MULTIPLE * item + max(in_torch, accumulation)
    return rows_per_chunk(T, per_row, V * H * item if need_weight and wide > item else 0, memory_budget)


def rows_per_chunk(T: int, bytes_per_row: int, bytes_of_sum: int, memory_budget: int) -> int:
    """Rows per chunk of T rows: as many as the budget allows, spread evenly, in multiples of ROW_MULTIPLE if there are
    as many, and at least one.

    bytes_of_sum: what several chunks need for the sum of the weight's gradient (`GradientSum`). A single chunk needs no
    such sum, and may have its memory. It is part of the budget if it is no more than half of it, else it comes on top.
    """
    if T * bytes_per_row <= memory_budget + bytes_of_sum:
        return max(T, 1)
    if 2 * bytes_of_sum <= memory_budget:
        memory_budget -= bytes_of_sum
    rows = max(memory_budget // bytes_per_row, 1)
    if rows >= ROW_MULTIPLE:
        rows -= rows % ROW_MULTIPLE
    chunks = -(-T // rows)
    return min(rows, -(-T // (chunks * ROW_MULTIPLE)) * ROW_MULTIPLE)


def keep_gradients(ctx: Any, inputs: Sequence[Tensor | None], gradients: list[Tensor], needs: Sequence[bool]) -> None:
    """Save what a forward pass has computed of the gradients, or else its inputs, for `kept_gradients`."""
    # A compiled graph keeps the gradients as saved tensors and may not write into them. Eagerly they are handed out,
    # once, without a second copy: autograd's own saved tensors would stay alive through the backward pass.
    ctx.functional = any(needs) and torch.compiler.is_compiling()
    if ctx.functional:
        ctx.save_for_backward(*gradients)
    else:
        ctx.save_for_backward(*inputs)
        ctx.gradients = gradients if any(needs) else None


def kept_gradients(ctx: Any, grad: Tensor) -> list[Tensor] | None:
    """The gradients times `grad`, a scalar; None if they are to be computed from the inputs."""
    if ctx.functional:
        return [g * grad for g in ctx.saved_tensors]
    if ctx.gradients is None:
        return None
    gradients: list[Tensor] = ctx.gradients
    ctx.gradients = None
    for g in gradients:
        scale_(g, grad)
    return gradients
