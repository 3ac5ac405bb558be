"""Optimizers and their parameter groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import nn
from torch.optim import Adafactor, Optimizer

from ligermodels.arguments import OptimizerName
from ligermodels.models.hidden_matrices import hidden_matrices
from ligermodels.training.fused_adamw import FusedAdamW
from ligermodels.training.muon_optimizer import Muon
from ligermodels.training.parameter_groups import parameter_groups


def adamw(
    parameters: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
    lr: float,
    *,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    state_bits: Literal[8] | None = None,
) -> FusedAdamW:
    """AdamW for a model's parameters; parameters that require no gradient are left out.

    Args:
        parameters: the parameters, such as `model.parameters()`, or with their names `model.named_parameters()`.
        lr: learning rate.
        weight_decay: weight decay, for matrices only. Stacked biases of experts are known by their names.
        betas: decay rates of the first and second moments.
        eps: added to the square root of the second moment.
        rounding: rounding of bfloat16 parameters; "nearest", as in torch, loses small updates.
        state_bits: 8: moments of matrices have 8 bits per element. Default: None, they have the parameter's dtype.

    Raises:
        InputError: no parameter requires a gradient, or a number is out of range.

    Examples:
        >>> optimizer = adamw(model.parameters(), 2e-5)
        >>> schedule = warmup_cosine(optimizer, 1000, warmup_steps=40)
    """
    named = [each if isinstance(each, tuple) else ("", each) for each in parameters]
    names = {id(parameter): name for name, parameter in named}
    groups = parameter_groups([([parameter for _, parameter in named], lr)], weight_decay, names=names)
    return FusedAdamW(groups, lr=lr, betas=betas, eps=eps, rounding=rounding, state_bits=state_bits)


def optimizer_named(
    name: OptimizerName,
    groups: list[dict[str, Any]],
    *,
    model: nn.Module,
    betas: tuple[float, float],
    momentum: float = 0.95,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    seed: int = 0,
) -> Optimizer:
    """The optimizer of a recipe.

    Args:
        name: name of the optimizer.
        groups: parameter groups with learning rates.
        model: the model that is trained; Muon finds the hidden matrices in it.
        betas: AdamW: decay rates of the moments.
        momentum: Muon: decay rate of the momentum.
        rounding: AdamW and Muon: rounding of bfloat16 parameters.
        seed: AdamW and Muon: seed of stochastic rounding.
    """
    if name == "adafactor":
        return Adafactor(groups)
    options: dict[str, Any] = {"betas": betas, "rounding": rounding, "seed": seed}
    options["state_bits"] = 8 if name.endswith("8bit") else None
    if name.startswith("muon"):
        return Muon(groups, matrices=hidden_matrices(model), momentum=momentum, **options)
    return FusedAdamW(groups, **options)
