"""Reward functions of users, by import path: called as TRL calls them, and their results checked."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ligermodels.errors import ConfigError, InputError, short
from ligermodels.training.import_path import function_at, short_import

if TYPE_CHECKING:
    from ligermodels.training.run_plan import RunPlan

SAMPLES = ("prompts", "completions", "completion_ids")
"""Arguments of every reward function, beside the fields of the records."""
OF_TRL = ("trainer_state", "log_extra", "log_metric", "environments")
"""Further arguments of reward functions in TRL, which are not given here."""


LARGEST = torch.finfo(torch.float32).max


class Reward:
    """The reward function at an import path.

    Args:
        path: MODULE:FUNCTION; a module that is installed, or in the current folder.

    Raises:
        ConfigError: there is no such function, it is asynchronous, or it has a parameter that cannot be given.
    """

    def __init__(self, path: str) -> None:
        self.path, self._function = path, function_at(path, "reward")
        self._required = {name for name, has_default in self._function.parameters.items() if not has_default}
        if unknown := sorted(self._required.intersection(OF_TRL)):
            raise ConfigError(f"reward: {path}: parameter {unknown[0]!r} of TRL is not supported")

    def check_fields(self, columns: Collection[str]) -> None:
        """Raise ConfigError if the function needs a field that is not in `columns`, those of the first records."""
        if missing := sorted(self._required - {*SAMPLES, *columns}):
            known = ", ".join([*SAMPLES, *sorted({*columns} - {"prompt", *SAMPLES})])
            raise ConfigError(
                f"reward: {self.path} has a parameter {missing[0]!r}, which is no field of the first records; it is "
                f"called by name with {known}"
            )

    def __call__(self, samples: Mapping[str, Sequence[Any]], records: Sequence[Mapping[str, Any]]) -> list[float]:
        """Rate completions.

        Args:
            samples: SAMPLES -> a list with an item for each completion.
            records: the fields of each completion's record. The function gets a list for each field that it names, or
                with **kwargs for all, with None where a record lacks the field.

        Returns:
            The rewards; NaN where the function returned None.

        Raises:
            InputError: the function failed, or did not return a finite number or None for each completion.
        """
        present = {name for record in records for name in record} - {"prompt", "completion", *SAMPLES}
        values = {name: [record.get(name) for record in records] for name in sorted(present | self._required)}
        values |= {name: list(value) for name, value in samples.items()}
        names = values if self._function.takes_all else values.keys() & self._function.parameters
        try:
            result = self._function.call(**{name: values[name] for name in names})
        except Exception as error:  # the function is the user's
            raise InputError(f"reward: {self.path} failed: {type(error).__name__}: {error}") from error
        return self._checked(result, len(records))

    def _checked(self, result: Any, count: int) -> list[float]:
        rewards = result.tolist() if hasattr(result, "tolist") else result  # of torch and numpy
        if not isinstance(rewards, list | tuple):
            raise InputError(f"reward: {self.path} must return a list of numbers, got {short(result)}")
        if len(rewards) != count:
            raise InputError(
                f"reward: {self.path} returned {len(rewards)} rewards for {count} completions; return one for each"
            )
        for number, reward in enumerate(rewards, start=1):
            if reward is not None and not (isinstance(reward, Real) and abs(cast(Any, reward)) <= LARGEST):
                raise InputError(
                    f"reward: {self.path} returned {short(reward)} for completion {number} of {count}; return a finite "
                    "number of float32, or None where the function does not apply"
                )
        return [math.nan if reward is None else float(reward) for reward in rewards]


def check_reward_fields(plan: RunPlan) -> None:
    """Check that the records of a run have the fields that its reward functions, if it has any, need. Raises
    ConfigError."""
    documents: Any = plan.documents
    for path in plan.recipe.settings().get("reward", ()):
        Reward(path).check_fields(documents.columns)


class Rewards:
    """The weighted sum of several reward functions.

    Args:
        paths: import paths of the functions.
        weights: weight of each function; empty for 1.
    """

    def __init__(self, paths: Sequence[str], weights: Sequence[float] = ()) -> None:
        self.functions = [Reward(path) for path in paths]
        self._weights = torch.tensor(weights or [1.0] * len(paths))
        paths = [short_import(path) for path in paths]
        short_names = [path.rpartition(":")[2] for path in paths]
        self.names = short_names if len({*short_names}) == len(paths) else paths
        """Names of the functions, for metrics."""
        self._has_warned = False

    def __call__(self, samples: Mapping[str, Sequence[Any]], records: Sequence[Mapping[str, Any]]) -> Tensor:
        """The reward of each completion by each function, float32 (B, functions); see `Reward`.

        Warns, the first time, if no function rated some completion.
        """
        rewards = torch.tensor([function(samples, records) for function in self.functions]).T
        unrated = rewards.isnan().all(1)
        if not self._has_warned and unrated.any():
            self._has_warned = True
            names, record = ", ".join(function.path for function in self.functions), records[int(unrated.nonzero()[0])]
            warnings.warn(
                f"reward: {names} returned None for {int(unrated.sum())} of {len(rewards)} completions, which get the "
                f"advantage 0; the first is of the record {short(dict(record))}",
                stacklevel=2,
            )
        return rewards

    def total(self, rewards: Tensor) -> Tensor:
        """The weighted sum of each completion's rewards that are not NaN; NaN for a completion without any.

        Args:
            rewards: (B, functions).

        Returns:
            (B,).
        """
        return (rewards * self._weights).nansum(1).masked_fill(rewards.isnan().all(1), math.nan)
