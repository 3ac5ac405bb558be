"""Optimizers and their parameter groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import nn
from torch.optim import Adafactor, Optimizer

from ligermodels.errors import InputError
from ligermodels.training.fused_adamw import FusedAdamW


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
