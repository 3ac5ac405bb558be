"""The language model head and its cross entropy in one op, by chunks of rows, so that the logits never exist whole.

With reduction "mean" or "sum" the forward pass computes the gradients too: per chunk one GEMM for the logits, the loss,
whose gradient takes their place, and one GEMM for each gradient that is needed. The backward pass only scales them.
With reduction "none", whose factors are known only in the backward pass, and in float16, where the gradients of logits
underflow without the loss scale, the backward pass recomputes the logits.
"""

from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.loss.cross_entropy import cross_entropy_reference
from ligermodels.ops.loss.gradient_sum import GradientSum
from ligermodels.ops.loss.token_losses import LossOptions, Reduction, check_loss, checked_loss_weights, ranks_reference
from ligermodels.ops.loss.token_losses_kernels import launch_rows, scale_
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable, reject_dtensors
from ligermodels.ops.runtime.tensors import as_rows, check_tensor, empty_gradient

ROW_MULTIPLE = 128  # chunks of whole GEMM tiles
COLUMN_MULTIPLE = 16  # on CUDA logits are held in rows of a multiple of this, which keeps them aligned for odd V
SKIP_BELOW = 0.97  # rows without targets are left out if the share of rows with targets is below this


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    token_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_rank: bool = False,
    memory_budget: int = 2**30,
    num_targets: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`cross_entropy(hidden @ weight.T + bias, target)` without the logits in memory; exact, gradients included.

    hidden: (..., H), any floating dtype and strides. weight: (V, H) and bias: (V,), of hidden's dtype (under autocast
        all three are cast to its dtype). target, token_weights and the options: as in `cross_entropy`, and the result.
    memory_budget: bytes for a chunk's logits and for what is computed with them (at least one row is taken, whatever
        it needs). The gradients themselves come on top. With several chunks and a 16-bit weight it takes as much as the
        weight's gradient once more, for that is summed in float32 (`GradientSum`) and rounded once: of the budget, if
        that is no more than half of it, else on top. All rows at once may take that memory too, for they need no sum.
    num_targets: the number of targets that are not ignored, if known on the host: the other rows then take no part in
        the GEMMs. On the CPU it is counted; on CUDA that would wait for the device, so without it no row is skipped.
    A gradient is computed exactly if its own operand requires it; under no_grad only the loss is. Eagerly, the first
    backward pass hands out the gradients of the forward pass; a repeated one over a retained graph computes them anew.
    In bfloat16 they are rounded before they are multiplied by the loss's own gradient, and so once more if that is no
    power of two.
    Raises InputError as `cross_entropy` does.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, return_rank)
    check_loss("linear_cross_entropy", hidden, "hidden", target, token_weights, reduction, options)
    reject_dtensors("linear_cross_entropy", weight, bias)
    check_tensor("linear_cross_entropy", "weight", weight, ("V", hidden.shape[-1]), hidden.device, hidden.dtype)
    V, dtype = weight.shape[0], hidden.dtype
    if V == 0:
        raise InputError("linear_cross_entropy: weight must be of one class or more")
    if bias is not None:
        check_tensor("linear_cross_entropy", "bias", bias, (V,), hidden.device, dtype)
    if memory_budget <= 0:
        raise InputError(f"linear_cross_entropy: memory_budget must be a positive number of bytes, got {memory_budget}")
    target, loss_weights = checked_loss_weights(target, V, ignore_index, reduction, token_weights, dtype)
    # Determined here: inside autograd.Function.forward gradient mode is off.
    if num_targets is None:
        counted = not (target.is_cuda or torch.compiler.is_compiling())
        num_targets = int((target != ignore_index).sum()) if counted else target.numel()
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias))
    loss, rank = _LinearCrossEntropy.apply(
        hidden, weight, bias, target, loss_weights, options, memory_budget, num_targets, reduction != "none", needs
    )
    return (loss, rank) if return_rank else loss


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """The specification of `linear_cross_entropy`, in plain torch, with all the logits; the same arguments."""
    for name in ("memory_budget", "num_targets"):
        options.pop(name, None)
    return cross_entropy_reference(torch.nn.functional.linear(hidden, weight, bias), target, **options)


@custom_op()
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss_weights: Tensor, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float, return_rank: bool,
    memory_budget: int, num_targets: int, need_hidden: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Each row's loss and rank, and the gradients of sum(loss_weights * losses); those not needed are empty. Targets
    have been checked."""
    losses, dx = loss_weights.new_empty(loss_weights.shape), empty_gradient(hidden, need_hidden, hidden)
    ranks = target.new_empty(target.shape if return_rank else (0,))
    if is_fake(losses):
        of_weight, of_bias = (empty_gradient(t, need, hidden) for t, need in ((weight, need_weight), (bias, need_bias)))
        return losses, ranks, dx, of_weight, of_bias
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, return_rank)
    V, H = weight.shape
    rows, targets, weights_of_rows = as_rows(hidden), target.reshape(-1), loss_weights.reshape(-1)
    needed = need_hidden or need_weight or need_bias

    T, chosen = targets.shape[0], None
    if num_targets < SKIP_BELOW * T:
        valid = targets != ignore_index
        torch._assert_async(valid.sum() == num_targets, "num_targets is not the number of targets not ignored")
        chosen = valid.argsort(descending=True, stable=True)[:num_targets]
        T = num_targets
        for x, value in ((losses, 0), (ranks, -1), (dx, 0)):
            x.fill_(value)

    def take(x: Tensor, chunk: slice) -> Tensor:
        return x[chunk].contiguous() if chosen is None else x.index_select(0, chosen[chunk])

    def put(values: Tensor, x: Tensor, chunk: slice) -> None:
        if chosen is None:
            x[chunk] = values
        else:
            x.index_copy_(0, chosen[chunk], values)

    size = chunk_rows(T, V, H, hidden, options, memory_budget, need_weight)
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
        loss, rank = losses.new_empty(logits.shape[0]), ranks.new_empty(logits.shape[0] if return_rank else 0)
        weights = take(weights_of_rows, chunk) if needed else None
        _loss_in_place(logits, take(targets, chunk), loss, rank, weights, options)
        put(loss, losses.view(-1), chunk)
        if return_rank:
            put(rank, ranks.view(-1), chunk)
        if need_hidden and chosen is None:
            torch.mm(logits, weight, out=dx.view(-1, H)[chunk])
        elif need_hidden:
            put(logits @ weight, dx.view(-1, H), chunk)
        if dw is not None:
            dw.add(logits, x)
        if db is not None:
            db.add(logits)
    gradients = [weight.new_empty(0) if g is None else g.close() for g in (dw, db)]
    return losses, ranks, dx, gradients[0], gradients[1]


def chunk_rows(T: int, V: int, H: int, hidden: Tensor, options: LossOptions, budget: int, need_weight: bool) -> int:
    """Rows per chunk: as many as the budget allows, spread evenly, in multiples of ROW_MULTIPLE if there are as many.

    need_weight: whether the weight's gradient is summed over chunks, in float32 (`GradientSum`). A single chunk needs
    no such sum, and may have its memory."""
    item, wide = hidden.dtype.itemsize, max(hidden.dtype.itemsize, 4)
    loss = accumulation = 0
    if not use_kernels(hidden):  # see _loss_in_place
        loss = V * ((wide if wide > item else 0) + (wide if options.softcap is not None else 0))
        loss = max(loss, 16 * V if options.return_rank else 0)
    if need_weight and not hidden.is_cuda and wide > item:  # see GradientSum
        accumulation = (V + H) * wide
    per_row = -(-V // COLUMN_MULTIPLE) * COLUMN_MULTIPLE * item + max(loss, accumulation)
    of_sum = V * H * item if need_weight and wide > item else 0
    if T * per_row <= budget + of_sum:
        return max(T, 1)
    if 2 * of_sum <= budget:
        budget -= of_sum
    rows = max(budget // per_row, 1)
    if rows >= ROW_MULTIPLE:
        rows -= rows % ROW_MULTIPLE
    chunks = -(-T // rows)
    return min(rows, -(-T // (chunks * ROW_MULTIPLE)) * ROW_MULTIPLE)


def _loss_in_place(
    logits: Tensor, target: Tensor, losses: Tensor, ranks: Tensor, loss_weights: Tensor | None, options: LossOptions
) -> None:
    """Fills losses and ranks (M,) from logits (M, V). Given loss_weights, (M,), the gradient of loss_weights * losses
    takes the place of the logits. In torch this holds, beside the logits, a float32 copy if they are 16-bit, and as
    much again for a softcap."""
    if use_kernels(logits):
        launch_rows(logits, target, losses, ranks, options, loss_weights=loss_weights)
        return
    valid = target != options.ignore_index
    y = torch.where(valid, target, 0).unsqueeze(1)
    if options.return_rank:
        ranks.copy_(ranks_reference(logits, y, valid))

    x = logits.to(losses.dtype).mul_(options.logit_scale)
    capped = None
    if options.softcap is not None:
        capped = x.div_(options.softcap).tanh_()
        x = capped * options.softcap
    maximum = x.amax(1, keepdim=True)
    x.sub_(maximum)
    at_y = x.gather(1, y).squeeze(1)
    mean = x.mean(1) if options.label_smoothing else 0.0
    total = x.exp_().sum(1)
    log_sum = total.log()
    lse = maximum.squeeze(1) + log_sum
    loss = (1 - options.label_smoothing) * (log_sum - at_y) + options.z_loss * lse.square()
    if options.label_smoothing:
        loss += options.label_smoothing * (log_sum - mean)
    losses.copy_(loss.masked_fill_(~valid, 0.0))
    if loss_weights is None:
        return

    c = loss_weights * options.logit_scale
    x.mul_(((1 + 2 * options.z_loss * lse) / total * c).unsqueeze(1))
    if options.label_smoothing:
        x.sub_((options.label_smoothing / x.shape[1] * c).unsqueeze(1))
    x.scatter_add_(1, y, ((options.label_smoothing - 1) * c).unsqueeze(1))
    if capped is not None:
        x.mul_(capped.square_().neg_().add_(1))
    logits.copy_(x.masked_fill_(~valid.unsqueeze(1), 0.0))


class _LinearCrossEntropy(torch.autograd.Function):
    """The reduced loss (or each row's, times its weight), and the ranks."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, loss_weights, options, memory_budget, num_targets, reduced, needs):
        now = needs if reduced and hidden.dtype != torch.float16 else (False, False, False)
        losses, rank, *gradients = _linear_cross_entropy(
            hidden, weight, bias, target, loss_weights, *options, memory_budget, num_targets, *now
        )
        losses = losses * loss_weights
        ctx.options = (*options[:-1], False, memory_budget, num_targets)
        ctx.mark_non_differentiable(rank)
        # A compiled graph keeps the gradients as saved tensors and may not write into them. Eagerly they are handed
        # out, once, without a second copy: autograd's own saved tensors would stay alive through the backward pass.
        ctx.functional = any(now) and torch.compiler.is_compiling()
        if ctx.functional:
            ctx.save_for_backward(*gradients)
        else:
            ctx.save_for_backward(hidden, weight, bias, target, loss_weights)
            ctx.gradients = gradients if any(now) else None
        return losses.sum() if reduced else losses, rank

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        if ctx.functional:
            return [g * grad for g in ctx.saved_tensors]
        if ctx.gradients is not None:
            gradients, ctx.gradients = ctx.gradients, None
            for g in gradients:
                scale_(g, grad)
            return gradients
        *inputs, loss_weights = ctx.saved_tensors
        return _linear_cross_entropy(*inputs, loss_weights * grad, *ctx.options, *ctx.needs_input_grad[:3])[2:]
