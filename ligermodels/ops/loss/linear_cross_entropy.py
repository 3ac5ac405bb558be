"""The language-model head and its cross entropy in one op: the loss without the logits in memory.

`linear_head` computes the plain loss, `linear_terms` the loss with class weights, token scaling, sharded classes or
further results.
"""

from typing import Any

import torch
from torch import Tensor

from ligermodels.arguments import check_flags
from ligermodels.ops.loss.cross_entropy import cross_entropy_reference
from ligermodels.ops.loss.linear_head import LinearLoss, checked_head
from ligermodels.ops.loss.linear_terms import linear_loss_terms
from ligermodels.ops.loss.token_losses import LossOptions, Reduction


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    token_weights: Tensor | None = None,
    class_weights: Tensor | None = None,
    token_scaling: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_rank: bool = False,
    return_z_loss: bool = False,
    return_predicted: bool = False,
    memory_budget: int = 2**30,
    num_targets: int | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`cross_entropy(hidden @ weight.T + bias, target)` without the logits in memory; exact, gradients included.

    A gradient is computed only if its operand requires it; under no_grad only the loss is computed. Eagerly, the first
    backward pass returns the gradients of the forward pass, and another one over a retained graph recomputes them. In
    bfloat16 they are rounded before they are multiplied by the gradient of the loss, and once more if that is no power
    of two.

    Args:
        hidden: hidden states, (..., H), any floating dtype and strides.
        weight: (V, H), the dtype of `hidden`; under autocast both are cast to its dtype. It may be a DTensor that is
            sharded by classes, over ranks with the same hidden states and targets: then no rank computes all logits of
            a row, and the gradient of `hidden` is summed over the ranks (see `sharded_statistics`).
        target: class indices, int64 (...), in [0, V) or `ignore_index`.
        bias: (V,), the dtype and sharding of `weight`; by default none.
        ignore_index: the target of ignored rows, which have no loss and a gradient of exact zeros. Default: -100.
        reduction: "mean" (default): the sum of the losses over the number of rows that are not ignored, or over the sum
            of their token weights times class weights (z-loss: of their token weights); 0 if that sum is 0. "sum", or
            "none": a loss for each row, (...).
        token_weights: floating (...): factors of the rows' losses, without a gradient. Not negative for "mean".
        class_weights: floating (V,): `weight` of torch's cross_entropy, without a gradient; not used for the z-loss.
        token_scaling: multiply each row's loss by the probability of its target, without a gradient. This, and class
            weights beside label smoothing or a z-loss, cost one more GEMM, because the backward pass recomputes logits.
        label_smoothing: in [0, 1], the fraction of the target distribution that is spread over all classes. Default: 0.
        z_loss: coefficient of the squared log-sum-exp, 0 or above. Default: 0.
        softcap: positive: logits become softcap * tanh(logits / softcap). Default: no cap.
        logit_scale: positive factor of the logits, before the softcap. Default: 1.
        return_rank: also return the number of classes that rank before the target, int64 (...), -1 for ignored rows.
        return_z_loss: also return the part of the loss that is the z-loss, reduced as the loss, without a gradient.
        return_predicted: also return the class of the largest logit, int64 (...), -1 for ignored rows.
        memory_budget: bytes for the logits of a chunk and everything computed from them; a chunk has at least one row.
            Gradients are not included. With several chunks and a 16-bit weight, the float32 sum of the weight's
            gradient takes the memory of this gradient once more (`GradientSum`): from the budget if it is at most half
            of it, else in addition. Default: 1 GiB.
        num_targets: the number of targets that are not ignored, if the host knows it: the GEMMs then skip ignored rows,
            and a copy of the other hidden states is kept. On the CPU it is counted. On CUDA counting would wait for the
            device, so that without it no row is skipped.

    Returns:
        The loss, float32 (float64 for float64 `hidden`); or a tuple of the loss and the requested extras, in the order
        ranks, z-loss, predicted classes.

    Raises:
        InputError: shapes, dtypes, devices or options do not fit, or, on the CPU, a target is out of range. On CUDA
            such a target fails a device-side assertion, unless `set_host_checks` is on.

    Examples:
        >>> hidden = torch.randn(2, 16, 64, requires_grad=True)
        >>> weight = torch.randn(1000, 64, requires_grad=True)
        >>> target = torch.randint(1000, (2, 16))
        >>> loss = ops.linear_cross_entropy(hidden, weight, target)
        >>> loss.backward()
        >>> loss, rank = ops.linear_cross_entropy(hidden, weight, target, return_rank=True)
        >>> top_5_accuracy = (rank < 5).float().mean()
    """
    flags = {"return_rank": return_rank, "return_z_loss": return_z_loss, "return_predicted": return_predicted}
    check_flags("linear_cross_entropy", token_scaling=token_scaling, **flags)
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    head = checked_head(
        "linear_cross_entropy", hidden, weight, target, bias, options, memory_budget=memory_budget,
        num_targets=num_targets, reduction=reduction, token_weights=token_weights, divided=class_weights is None,
    )  # fmt: skip
    if any(flags.values()) or class_weights is not None or token_scaling or head.shard is not None:
        return linear_loss_terms(
            head, options, reduction=reduction, class_weights=class_weights, token_scaling=token_scaling, **flags
        )
    loss: Tensor = LinearLoss.apply(*head[:5], head.needs, options, head.memory_budget, reduction != "none")
    return loss if reduction != "none" else head.restore(loss, 0)


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """The specification of `linear_cross_entropy`, in plain torch, with all the logits.

    Args:
        hidden: (..., H).
        weight: (V, H).
        target: int64 (...).
        bias: (V,), or None.
        options: keyword arguments of `linear_cross_entropy`.
    """
    for name in ("memory_budget", "num_targets"):
        options.pop(name, None)
    return cross_entropy_reference(torch.nn.functional.linear(hidden, weight, bias), target, **options)
