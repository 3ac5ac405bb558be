"""Advantages of groups, against loops over Python numbers."""

import math
import statistics

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.losses import group_advantages


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rewards_relative_to_their_group(scale: str) -> None:
    rewards = torch.randn(15, dtype=torch.float64)
    rewards[[1, 6, 7]] = math.nan
    found = group_advantages(rewards, 5, scale)  # type: ignore[arg-type]
    known = [value for value in rewards.tolist() if not math.isnan(value)]
    for start in range(0, 15, 5):
        group = [value for value in rewards[start : start + 5].tolist() if not math.isnan(value)]
        spread = {"group": statistics.stdev(group), "batch": statistics.stdev(known), "none": 1 - 1e-4}[scale]
        for place in range(start, start + 5):
            value = rewards[place].item()
            wanted = 0.0 if math.isnan(value) else (value - statistics.fmean(group)) / (spread + 1e-4)
            assert found[place].item() == pytest.approx(wanted, rel=1e-12)


def test_groups_without_a_spread() -> None:
    """Equal rewards, one reward, and none have the advantage 0."""
    rewards = torch.tensor([2.0, 2.0, 1.0, math.nan, math.nan, math.nan])
    assert group_advantages(rewards, 2).tolist() == [0.0] * 6


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_infinite_rewards_are_not_hidden(scale: str) -> None:
    """They had the advantage 0, or the largest number of float32."""
    found = group_advantages(torch.tensor([1.0, -math.inf, math.nan, 2.0]), 2, scale)  # type: ignore[arg-type]
    assert not found[:2].isfinite().any() and found[2:].tolist() == [0.0, 0.0]


def test_rewards_in_bfloat16_are_those_of_float32() -> None:
    rewards = torch.rand(8).bfloat16()
    assert torch.equal(group_advantages(rewards, 4), group_advantages(rewards.float(), 4))


@pytest.mark.parametrize(
    ("rewards", "size", "scale", "message"),
    [
        (torch.ones(6), 4, "group", "rewards: must be floating .B,., with B a multiple of num_generations .4."),
        (torch.ones(6, dtype=torch.long), 2, "group", "rewards: must be floating"),
        (torch.ones(6), 1, "group", "num_generations"),
        (torch.ones(6), 2, "std", "scale_rewards must be one of group, batch, none"),
    ],
)
def test_errors(rewards: torch.Tensor, size: int, scale: str, message: str) -> None:
    with pytest.raises(InputError, match=f"group_advantages: {message}"):
        group_advantages(rewards, size, scale)  # type: ignore[arg-type]
