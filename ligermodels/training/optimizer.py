"""Optimizers, their parameter groups, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.optim import Adafactor, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ligermodels.errors import InputError
from ligermodels.training.fused_adamw import FusedAdamW
from ligermodels.training.renamed import renamed_arguments


def adamw(
    parameters: Iterable[nn.Parameter],
    lr: float,
    *,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> FusedAdamW:
    """AdamW for a model's parameters; parameters that require no gradient are left out.

    Args:
        parameters: the parameters, such as `model.parameters()`.
        lr: learning rate.
        weight_decay: weight decay, for matrices only.
        betas: decay rates of the first and second moments.
        eps: added to the square root of the second moment.

    Raises:
        InputError: no parameter requires a gradient, or a number is out of range.

    Examples:
        >>> optimizer = adamw(model.parameters(), 2e-5)
        >>> schedule = warmup_cosine(optimizer, 1000, warmup_steps=40)
    """
    return FusedAdamW(parameter_groups([(parameters, lr)], weight_decay), lr=lr, betas=betas, eps=eps)


def parameter_groups(
    rates: Iterable[tuple[Iterable[nn.Parameter], float]], weight_decay: float
) -> list[dict[str, Any]]:
    """Parameter groups from pairs (parameters, learning rate): matrices with weight decay, other parameters without.

    Parameters that require no gradient are left out. Raises InputError if no parameter is left.
    """
    groups = []
    for parameters, lr in rates:
        trained = [p for p in parameters if p.requires_grad]
        groups += [
            {"params": [p for p in trained if p.ndim >= 2], "lr": lr, "weight_decay": weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "lr": lr, "weight_decay": 0.0},
        ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise InputError("no parameter requires a gradient: there is nothing to train")
    return groups


def optimizer_named(
    name: str,
    groups: list[dict[str, Any]],
    *,
    betas: tuple[float, float],
    rounding: Literal["nearest", "stochastic"] = "nearest",
    seed: int = 0,
) -> Optimizer:
    """The optimizer of a recipe.

    Args:
        name: "adamw" or "adafactor".
        groups: parameter groups with learning rates.
        betas: AdamW: decay rates of the moments.
        rounding: AdamW: rounding of bfloat16 parameters.
        seed: AdamW: seed of stochastic rounding.
    """
    if name == "adafactor":
        return Adafactor(groups)
    return FusedAdamW(groups, betas=betas, rounding=rounding, seed=seed)


def cosine_factor(step: int, steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    """Factor of the learning rate at `step`, from 0: linear warm-up to 1, then a cosine to `min_lr_ratio`.

    It is 1 / warmup_steps at step 0, 1 at step warmup_steps - 1, and min_lr_ratio from step `steps` - 1 on.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step + 1 - warmup_steps) / max(1, steps - warmup_steps))
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))


@renamed_arguments(warmup="warmup_steps", floor="min_lr_ratio")
def warmup_cosine(optimizer: Optimizer, steps: int, *, warmup_steps: int = 0, min_lr_ratio: float = 0.1) -> LambdaLR:
    """A learning-rate schedule with linear warm-up and cosine decay; `train` steps it.

    Args:
        optimizer: its learning rates are the peak learning rates.
        steps: number of optimizer steps.
        warmup_steps: steps of linear warm-up.
        min_lr_ratio: final learning rate as a fraction of the peak.

    Raises:
        InputError: unless 0 <= warmup_steps <= steps, steps > 0 and 0 <= min_lr_ratio <= 1.
    """
    if not (0 <= warmup_steps <= steps and steps > 0 and 0 <= min_lr_ratio <= 1):
        raise InputError(
            f"need 0 <= warmup_steps <= steps and 0 <= min_lr_ratio <= 1, got {warmup_steps=}, {steps=}, "
            f"{min_lr_ratio=}"
        )
    factor = partial(cosine_factor, steps=steps, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio)
    return LambdaLR(optimizer, factor)
