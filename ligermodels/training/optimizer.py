"""Optimizers and their parameter groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import nn
from torch.optim import Adafactor, Optimizer

from ligermodels.training.fused_adamw import FusedAdamW
from ligermodels.training.parameter_groups import parameter_groups


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
