"""Optimisers with weight decay where it belongs, and the learning rates' way up and down."""

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


def adamw(
    parameters: Iterable[nn.Parameter],
    lr: float,
    *,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> FusedAdamW:
    """AdamW over those `parameters` that require gradients. Only matrices decay: norms and biases have no reason to.

    Raises InputError when nothing is left to train.
    """
    return FusedAdamW(parameter_groups([(parameters, lr)], weight_decay), lr=lr, betas=betas, eps=eps)


def parameter_groups(
    rates: Iterable[tuple[Iterable[nn.Parameter], float]], weight_decay: float
) -> list[dict[str, Any]]:
    """Groups of an optimiser: for parameters and their learning rate, the matrices, which decay, and the others.

    A parameter that requires no gradient is in none. Raises InputError when nothing is left to train.
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
    """ "adamw", or "adafactor", which keeps sums of rows and columns where AdamW keeps two numbers a parameter.

    rounding, seed: of AdamW, see `FusedAdamW`.
    """
    if name == "adafactor":
        return Adafactor(groups)
    return FusedAdamW(groups, betas=betas, rounding=rounding, seed=seed)


def cosine_factor(step: int, steps: int, warmup: int, floor: float) -> float:
    """What the learning rate is multiplied by at `step`, from 0: linear to 1 in `warmup` steps, a cosine to `floor`.

    The first step has 1 / warmup, step `warmup - 1` has 1, the last of `steps`, and any after it, has `floor`.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step + 1 - warmup) / max(1, steps - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def warmup_cosine(optimizer: Optimizer, steps: int, *, warmup: int = 0, floor: float = 0.1) -> LambdaLR:
    """`optimizer`'s learning rates times `cosine_factor`; step it once a step, as `train` does.

    Raises InputError unless 0 <= warmup <= steps, steps > 0 and 0 <= floor <= 1.
    """
    if not (0 <= warmup <= steps and steps > 0 and 0 <= floor <= 1):
        raise InputError(f"need 0 <= warmup <= steps and 0 <= floor <= 1, got {warmup=}, {steps=}, {floor=}")
    return LambdaLR(optimizer, partial(cosine_factor, steps=steps, warmup=warmup, floor=floor))
