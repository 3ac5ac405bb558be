"""Advantages of sampled completions: their rewards, relative to the other completions of the same prompt."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ligermodels.arguments import check_count
from ligermodels.errors import InputError
from ligermodels.losses.sequences import check_choice

OP = "group_advantages"
SCALES = ("group", "batch", "none")
ScaleRewards = Literal["group", "batch", "none"]
EPSILON = 1e-4
"""Added to a standard deviation before a division by it, as in TRL."""


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: ScaleRewards = "group") -> Tensor:
    """Rewards less the mean of their group, divided by a standard deviation (with Bessel's correction) plus 1e-4:
    equation 3 of https://arxiv.org/abs/2402.03300, as TRL computes it.

    Args:
        rewards: (B,), floating; the completions of a prompt are adjacent. NaN: a completion without a reward, which
            counts in no mean.
        num_generations: completions of each prompt, at least 2; divides B.
        scale_rewards: "group" (default): divide by the standard deviation of the group; "batch": by the standard
            deviation of all rewards (https://arxiv.org/abs/2508.08221); "none": do not divide
            (https://arxiv.org/abs/2503.20783).

    Returns:
        (B,), float32 (float64 for float64 rewards), 0 for completions without a reward.

    Raises:
        InputError: an argument has a wrong type or shape, or is out of range.

    Examples:
        >>> group_advantages(torch.tensor([1.0, 0.0, 2.0, 2.0]), num_generations=2, scale_rewards="none")
        tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """
    check_choice(OP, "scale_rewards", scale_rewards, SCALES)
    size = check_count(f"{OP}: num_generations", num_generations, least=2)
    if not isinstance(rewards, Tensor) or rewards.ndim != 1 or not rewards.is_floating_point() or len(rewards) % size:
        raise InputError(f"{OP}: rewards: must be floating (B,), with B a multiple of num_generations ({size})")
    groups = rewards.to(torch.promote_types(rewards.dtype, torch.float32)).view(-1, size)
    differences = groups - groups.nanmean(1, keepdim=True)
    if scale_rewards != "none":
        deviation = nan_std(groups, 1)[:, None] if scale_rewards == "group" else nan_std(groups.flatten(), 0)
        differences = differences / (deviation.masked_fill(deviation.isnan(), 0.0) + EPSILON)
    return differences.flatten().masked_fill(rewards.isnan(), 0.0)


def nan_std(values: Tensor, dim: int) -> Tensor:
    """The standard deviation along `dim`, with Bessel's correction, of values that are not NaN; NaN for fewer than 2.

    Args:
        values: floating, any shape.
        dim: the dimension that is reduced.
    """
    count = (~values.isnan()).sum(dim)
    squares = (values - values.nanmean(dim, keepdim=True)).square().nansum(dim)
    return torch.where(count > 1, squares / (count - 1), torch.nan).sqrt()
