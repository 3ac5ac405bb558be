"""Trackers that show metrics of runs: TensorBoard, trackio and Weights & Biases, each an optional package."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ligermodels.convert.ranks import Ranks
from ligermodels.errors import BackendError
from ligermodels.training.folder import TENSORBOARD
from ligermodels.training.run_plan import RunPlan


@dataclass(frozen=True)
class TrackedRun:
    """A run for a tracker.

    folder: folder of the run.
    project, name: names of the project and of the run in the tracker.
    id: identifies the run; a resumed run keeps it.
    start: step that the run resumes after; 0 for a new run.
    settings: the recipe, as JSON types.
    """

    folder: Path
    project: str
    name: str
    id: str
    start: int
    settings: dict[str, Any]

    @classmethod
    def of(cls, plan: RunPlan, folder: Path) -> TrackedRun:
        """The run of `plan` in `folder`. By default its name is the name of `folder`, and its project the name of the
        parent folder."""
        recipe, path = plan.recipe, folder.absolute()
        project = recipe.project or path.parent.name or "ligermodels"
        return cls(folder, project, recipe.run_name or path.name, plan.run_id, plan.start, recipe.settings())


class Tracker(Protocol):
    """The interface of trackers."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers of a step, by name. Steps may repeat."""

    def finish(self, failed: bool) -> None:
        """Complete the record. `failed`: an error ended the run."""


class TensorBoard:
    """Event files in the folder of the run. A resumed run replaces points of later steps."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._writer: Any = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._writer is None:  # the folder of a new run is emptied before
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._run.folder / TENSORBOARD), purge_step=self._run.start + 1)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class Trackio:
    """A trackio run, found again by its name when the run resumes. Messages of trackio go to standard error."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        names = {"project": run.project, "name": run.name}
        with redirect_stdout(sys.stderr):
            self._run = trackio.init(**names, config=run.settings, resume="allow" if run.start else "never")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, failed: bool) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


class Wandb:
    """A run of Weights & Biases, found again by its id when the run resumes.

    wandb drops values of a step that is lower than a step before, as after a resume; so `step` is logged as a metric,
    and is the x axis of all others.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=run.settings["project"] or os.environ.get("WANDB_PROJECT", run.project),
            name=run.name,
            id=os.environ.get("WANDB_RUN_ID", run.id),
            resume="allow",
            config=run.settings,
            allow_val_change=True,
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": Wandb}
"""Name, which is the name of the package too -> its tracker."""


def tracker_names(track: Sequence[str]) -> list[str]:
    """Names of the trackers of a setting `track`; by default TensorBoard, if it is installed.

    Raises BackendError that names the package of a tracker that is not installed."""
    names = [name for name in dict.fromkeys(track) if name != "none"]
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise BackendError(
                f"track: {name} cannot be imported ({error}); pip install {name}, or choose another tracker"
            ) from error
    return names if track else [name for name in ("tensorboard",) if find_spec(name) is not None]


@contextmanager
def open_trackers(plan: RunPlan, folder: Path, ranks: Ranks) -> Iterator[list[Tracker]]:
    """Context manager that starts trackers on the first rank, and completes their records at the end.

    Args:
        plan: the run.
        folder: folder of the run.
        ranks: all ranks.

    Raises:
        BackendError: a tracker cannot start, for example because nobody is logged in.
    """
    trackers: list[Tracker] = []
    with ExitStack() as opened:
        opened.push(partial(_finish, trackers))
        with ranks.step("track", ""):
            if ranks.writes:
                run = TrackedRun.of(plan, folder)
                for name in tracker_names(plan.recipe.track):
                    trackers.append(_started(name, run))
        yield trackers


def _started(name: str, run: TrackedRun) -> Tracker:
    try:
        return TRACKERS[name](run)
    except Exception as error:  # of a type of the package
        raise BackendError(f"track: {name} cannot start: {error}") from error


def _finish(trackers: Sequence[Tracker], kind: type[BaseException] | None, *_: object) -> None:
    with ExitStack() as all_of_them:  # also those after one that fails
        for tracker in reversed(trackers):
            all_of_them.callback(tracker.finish, failed=kind is not None)
