"""The loss of a row of logits, its weight in the reduced loss, and the checks that all cross entropies share.

For a row of logits l and its target y, with effective logits x = logit_scale * l, or softcap * tanh(logit_scale * l /
softcap) (Gemma 2, https://arxiv.org/abs/2408.00118), and lse = log sum exp x:

    loss = lse - (1 - label_smoothing) * x_y - label_smoothing * mean(x) + z_loss * lse^2

(label smoothing as torch and https://arxiv.org/abs/1512.00567, z-loss as PaLM, https://arxiv.org/abs/2204.02311).
"""

from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.runtime.library import custom_op, is_fake, reject_dtensors
from ligermodels.ops.runtime.tensors import check_rows, check_tensor

Reduction = Literal["mean", "sum", "none"]


class LossOptions(NamedTuple):
    """The options of a row's loss, in the order in which the registered ops take them."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    return_rank: bool = False


def row_losses_reference(logits: Tensor, target: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """The loss of each row, 0 for ignored rows, and its rank (empty without return_rank), in plain torch."""
    valid = target != options.ignore_index
    x = effective_logits(logits, valid, options)
    y = torch.where(valid, target, 0).unsqueeze(-1)
    log_p = torch.log_softmax(x, dim=-1)
    losses = -(1 - options.label_smoothing) * log_p.gather(-1, y).squeeze(-1)
    if options.label_smoothing:
        losses = losses - options.label_smoothing * log_p.mean(-1)
    if options.z_loss:
        losses = losses + options.z_loss * torch.logsumexp(x, dim=-1).square()
    rank = ranks_reference(logits, y, valid) if options.return_rank else target.new_empty(0)
    return torch.where(valid, losses, 0.0), rank


def effective_logits(logits: Tensor, valid: Tensor, options: LossOptions) -> Tensor:
    """Logits (..., V) scaled and softcapped, in at least float32; 0 where not valid (...): NaN there has no effect."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) * options.logit_scale
    if options.softcap is not None:
        x = options.softcap * torch.tanh(x / options.softcap)
    return x.masked_fill(~valid.unsqueeze(-1), 0.0)


def ranks_reference(logits: Tensor, y: Tensor, valid: Tensor) -> Tensor:
    """The number of classes that rank before class y (..., 1) in logits (..., V), or -1 where not valid (...)."""
    at_y = logits.gather(-1, y)
    before = (logits > at_y) | ((logits == at_y) & (torch.arange(logits.shape[-1], device=y.device) < y))
    return torch.where(valid, before.sum(-1), -1)


def checked_loss_weights(
    target: Tensor, num_classes: int, ignore_index: int, reduction: Reduction, token_weights: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A contiguous copy of the targets, checked as by `check_targets`, and their `loss_weights`.

    One op: a compiled graph that uses the copy keeps the check.
    """
    weights = None if token_weights is None else token_weights.detach()
    return _loss_weights(target, weights, num_classes, ignore_index, reduction, dtype == torch.float64)


@custom_op()
def _loss_weights(
    target: Tensor, token_weights: Tensor | None, num_classes: int, ignore_index: int, reduction: str, double: bool
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if double else torch.float32
    if is_fake(target):
        return target.new_empty(target.shape), target.new_empty(target.shape, dtype=dtype)
    check_targets(target, num_classes, ignore_index)
    weights = loss_weights(target, ignore_index, cast(Reduction, reduction), token_weights, dtype)
    return target.clone(memory_format=torch.contiguous_format), weights.contiguous()


def loss_weights(
    target: Tensor, ignore_index: int, reduction: Reduction, token_weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The factor of each row's loss: the reduced loss is the sum of losses times these.

    float32 (float64 for float64), of target's shape; 0 for ignored rows, and for all rows if their weights sum to 0.
    """
    dtype, valid = torch.promote_types(dtype, torch.float32), target != ignore_index
    weights = valid.to(dtype)
    if token_weights is not None:
        weights = torch.where(valid, token_weights.detach().to(dtype), 0.0)
    if reduction != "mean":
        return weights
    total = weights.sum()
    return torch.where(total != 0, weights / total, 0.0)


def check_loss(
    op: str, scores: Tensor, scores_name: str, target: Tensor, token_weights: Tensor | None, reduction: str,
    options: LossOptions,
) -> None:  # fmt: skip
    """Raises InputError unless scores (..., N), target, weights and options fit one another."""
    reject_dtensors(op, scores, target, token_weights)
    check_rows(op, scores_name, scores)
    check_tensor(op, "target", target, scores.shape[:-1], scores.device, torch.int64)
    if token_weights is not None:
        check_tensor(op, "token_weights", token_weights, target.shape, scores.device)
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f'{op}: reduction must be "mean", "sum" or "none", got {reduction!r}')
    if not 0 <= options.label_smoothing <= 1:
        raise InputError(f"{op}: label_smoothing must be in [0, 1], got {options.label_smoothing}")
    if options.softcap is not None and not options.softcap > 0:
        raise InputError(f"{op}: softcap must be positive or None, got {options.softcap}")
    if not options.logit_scale > 0:
        raise InputError(f"{op}: logit_scale must be positive, got {options.logit_scale}")


def check_targets(target: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raises InputError if a target is neither in [0, num_classes) nor ignore_index. On CUDA this is a device-side
    assertion, which does not wait for the device."""
    good = (target.clamp(0, num_classes - 1) == target) | (target == ignore_index)
    if target.is_cuda:
        message = f"a target is neither in [0, {num_classes}) nor ignore_index ({ignore_index})"
        torch._assert_async(good.all(), message)
    elif not good.all():
        index = (~good).nonzero()[0].tolist()
        raise InputError(
            f"target{index} is {target[tuple(index)].item()}, which is neither in [0, {num_classes}) nor the "
            f"ignore_index ({ignore_index}); {int((~good).sum())} such in all"
        )
