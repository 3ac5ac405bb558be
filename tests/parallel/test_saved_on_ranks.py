"""Callbacks on several ranks hear of a checkpoint at the same step."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_parallel_runs import EXACT, run, tuning
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_ranks

from ligermodels.training import Callback
from ligermodels.training.checkpoints import Checkpoints


class Steps(Callback):
    """The steps of checkpoints, each with the step after which the callback heard of it."""

    def __init__(self) -> None:
        self.step, self.heard = 0, list[Any]()

    def on_step(self, event: Any) -> None:
        self.step = event.step

    def on_save(self, event: Any) -> None:
        self.heard.append([event.step, self.step])


def saves(rank: int, folder: Path, mesh: DeviceMesh, base: Path, data: Path) -> None:
    if rank:  # its part of the checkpoint takes longer
        asked, is_written = list[Any](), Checkpoints.is_written

        def slowly(checkpoints: Checkpoints) -> bool:
            asked.append(None)
            return len(asked) > 2 and is_written(checkpoints)

        Checkpoints.is_written = slowly  # type: ignore[method-assign]
    callback = Steps()
    settings = {**EXACT, "steps": 12, "checkpoint_every": 6, "report_every": 1}
    run(tuning(base, data, **settings), folder / "out", callbacks=[callback])
    (folder / f"heard-{rank}.json").write_text(json.dumps(callback.heard))


@pytest.mark.usefixtures("one_thread")
def test_ranks_hear_of_checkpoints_together(base: Path, data: Path, tmp_path: Path) -> None:
    in_ranks(2, saves, tmp_path, base, data)
    heard = [json.loads((tmp_path / f"heard-{rank}.json").read_text()) for rank in range(2)]
    assert heard[0] == heard[1] and [step for step, _ in heard[0]] == [6, 12]
    assert heard[0][0][1] > 6
