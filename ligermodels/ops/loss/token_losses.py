"""The loss of a row of logits, its weight in the reduced loss, and the checks that all cross entropies share.

For a row of logits l and its target y, with effective logits x = logit_scale * l, or softcap * tanh(logit_scale * l /
softcap) (Gemma 2, https://arxiv.org/abs/2408.00118), and lse = log sum exp x:

    loss = lse - (1 - label_smoothing) * x_y - label_smoothing * mean(x) + z_loss * lse^2

(label smoothing as torch and https://arxiv.org/abs/1512.00567, z-loss as PaLM, https://arxiv.org/abs/2204.02311). What
class weights and token scaling make of it: see `loss_terms`.
"""

from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.runtime.host_checks import checked_on_host
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
    return_predicted: bool = False


class RowNumbers(NamedTuple):
    """Numbers of each row, (M,): its loss, and what else is asked for, None (or empty) for what is not. Ignored rows
    have 0, and -1 for ranks and predicted classes."""

    losses: Tensor
    ranks: Tensor  # as in `cross_entropy`
    predicted: Tensor | None = None  # the class of the greatest logit, the first of equal ones
    entropies: Tensor | None = None  # of softmax(x), where x are the effective logits
    lses: Tensor | None = None  # log sum exp x
    means: Tensor | None = None  # of class_weights * x over the classes


class LossWeights(NamedTuple):
    """The factors of the terms of each row's loss, which is reduced by summing up the products.

    float32 (float64 for float64), of target's shape; 0 for ignored rows, and for all rows if what they are divided by
    is 0. Without class weights they are one tensor."""

    of_target: Tensor  # of -log p_y: the weights of the token and of its class
    of_smoothing: Tensor  # of the mean over all classes: the token's, over the same sum
    of_z_loss: Tensor  # the token's, over the sum of these


def row_numbers_reference(
    logits: Tensor, target: Tensor, options: LossOptions, class_weights: Tensor | None = None, return_lse: bool = False
) -> RowNumbers:
    """Losses, and what else is asked for, in plain torch; `means` if class_weights, (V,), are given."""
    valid = target != options.ignore_index
    x = effective_logits(logits, valid, options)
    y = torch.where(valid, target, 0).unsqueeze(-1)
    log_p = torch.log_softmax(x, dim=-1)
    losses = -(1 - options.label_smoothing) * log_p.gather(-1, y).squeeze(-1)
    if options.label_smoothing:
        losses = losses - options.label_smoothing * log_p.mean(-1)
    if options.z_loss:
        losses = losses + options.z_loss * torch.logsumexp(x, dim=-1).square()
    return RowNumbers(
        torch.where(valid, losses, 0.0),
        ranks_reference(logits, y, valid) if options.return_rank else target.new_empty(0),
        torch.where(valid, logits.argmax(-1), -1) if options.return_predicted else None,
        lses=torch.where(valid, torch.logsumexp(x, -1), 0.0) if return_lse else None,
        means=None if class_weights is None else (x * class_weights).mean(-1),
    )


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
    dtype: torch.dtype, class_weights: Tensor | None = None,
) -> tuple[Tensor, LossWeights]:  # fmt: skip
    """A contiguous copy of the targets, checked as by `check_targets`, and their `LossWeights`.

    One op: a compiled graph that uses the copy keeps the check.
    """
    tokens, classes = (None if weights is None else weights.detach() for weights in (token_weights, class_weights))
    checked, *weights = _loss_weights(
        target, tokens, classes, num_classes, ignore_index, reduction, dtype == torch.float64
    )
    return checked, LossWeights(*weights) if classes is not None else LossWeights(*weights[:1] * 3)


@custom_op()
def _loss_weights(
    target: Tensor, token_weights: Tensor | None, class_weights: Tensor | None, num_classes: int, ignore_index: int,
    reduction: str, double: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Without class weights the last two are empty: they would be the second."""
    dtype = torch.float64 if double else torch.float32
    if is_fake(target):
        of_target, of_smoothing, of_z_loss = (target.new_empty(target.shape, dtype=dtype) for _ in range(3))
    else:
        check_targets(target, num_classes, ignore_index)
        given = cast(Reduction, reduction), token_weights, class_weights, dtype
        of_target, of_smoothing, of_z_loss = (
            weights.contiguous() for weights in class_loss_weights(target, ignore_index, *given)
        )
    if class_weights is None:
        of_smoothing, of_z_loss = of_target.new_empty(0), of_target.new_empty(0)
    return target.clone(memory_format=torch.contiguous_format), of_target, of_smoothing, of_z_loss


def class_loss_weights(
    target: Tensor, ignore_index: int, reduction: Reduction, token_weights: Tensor | None,
    class_weights: Tensor | None, dtype: torch.dtype,
) -> LossWeights:  # fmt: skip
    """The `LossWeights` of targets that have been checked. With reduction "mean" and class weights, the z-loss is
    divided by another sum than the rest, as in Liger-Kernel."""
    tokens = loss_weights(target, ignore_index, reduction, token_weights, dtype)
    if class_weights is None:
        return LossWeights(tokens, tokens, tokens)
    places = target.clamp(0, len(class_weights) - 1)  # on CUDA the check has not stopped a bad target yet
    of_class = class_weights.detach().to(tokens.dtype)[places]
    each = loss_weights(target, ignore_index, "sum", token_weights, dtype)
    if reduction != "mean":
        return LossWeights(each * of_class, each, tokens)
    total = (each * of_class).sum()
    return LossWeights(
        torch.where(total != 0, each * of_class / total, 0.0), torch.where(total != 0, each / total, 0.0), tokens
    )


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
    if not options.z_loss >= 0:
        raise InputError(f"{op}: z_loss must be 0 or above, got {options.z_loss}")
    if options.softcap is not None and not options.softcap > 0:
        raise InputError(f"{op}: softcap must be positive or None, got {options.softcap}")
    if not options.logit_scale > 0:
        raise InputError(f"{op}: logit_scale must be positive, got {options.logit_scale}")


def check_class_weights(
    op: str, class_weights: Tensor | None, num_classes: int, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """The weights without a gradient, contiguous, float32 (float64 for float64); InputError unless they are floating,
    (num_classes,)."""
    if class_weights is None:
        return None
    reject_dtensors(op, class_weights)
    check_tensor(op, "class_weights", class_weights, (num_classes,), device)
    return class_weights.detach().to(torch.promote_types(dtype, torch.float32)).contiguous()


def check_targets(target: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raises InputError if a target is neither in [0, num_classes) nor ignore_index. On CUDA this is a device-side
    assertion, which does not wait for the device, unless `host_checks` are on."""
    good = (target.clamp(0, num_classes - 1) == target) | (target == ignore_index)
    if not checked_on_host(target):
        message = f"a target is neither in [0, {num_classes}) nor ignore_index ({ignore_index})"
        torch._assert_async(good.all(), message)
    elif not good.all():
        index = (~good).nonzero()[0].tolist()
        raise InputError(
            f"target{index} is {target[tuple(index)].item()}, which is neither in [0, {num_classes}) nor the "
            f"ignore_index ({ignore_index}); {int((~good).sum())} such in all"
        )
