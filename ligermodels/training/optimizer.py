"""AdamW with weight decay where it belongs, and the learning rate's way up and down."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ligermodels.errors import InputError


def adamw(
    parameters: Iterable[nn.Parameter],
    lr: float,
    *,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> AdamW:
    """AdamW over those `parameters` that require gradients. Only matrices decay: norms and biases have no reason to.

    The fused kernel runs where there is one (CPU and CUDA). Raises InputError when nothing is left to train.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        raise InputError("no parameter requires a gradient: there is nothing to train")
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in trained)
    return AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps, fused=fused)


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
