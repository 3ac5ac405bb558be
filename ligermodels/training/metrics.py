"""What a run leaves of its course: lines of JSON, and TensorBoard's files where it is installed."""

from __future__ import annotations

import json
import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ligermodels.training.evaluation import Drift, HeadScores
from ligermodels.training.folder import METRICS, TENSORBOARD, write_whole
from ligermodels.training.loop import StepMetrics


class Metrics:
    """`metrics.jsonl` in a run's folder, a line a step, and scores in between; the same for TensorBoard.

    `scored`: whether there are scores of the step that it begins after.
    """

    def __init__(self, folder: str | os.PathLike[str], *, after: int = 0) -> None:
        """Begin after step `after`: lines of later steps, and what was cut off in the middle, are of a lost run."""
        path = Path(folder) / METRICS
        entries = [(line, _entry(line)) for line in _lines(path)] if after else []
        kept = [line for line, entry in entries if entry["step"] <= after]
        self.scored = any(entry["step"] == after and "top-1" in entry for _, entry in entries)
        write_whole(path, b"".join(kept))
        self._file = path.open("a", encoding="utf-8")
        self._board: Any = None
        if find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(path.parent / TENSORBOARD), purge_step=after + 1)

    def write(self, step: int, values: dict[str, float | list[float]]) -> None:
        """Note `values` at `step`: numbers, or lists of a number for each head."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                each = {f"{name}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
                for tag, number in each.items():
                    self._board.add_scalar(tag, number, step)

    def write_steps(self, state: StepMetrics) -> None:
        """Note each of the steps reported, and, at the last, the speed, the memory and the accuracies."""
        for one in state.each:
            numbers: dict[str, float | list[float]] = {"loss": one.loss}
            if one.base_loss is not None:
                numbers["base_loss"] = one.base_loss
            numbers |= {"head_losses": list(one.head_losses)} if one.head_losses else {}
            self.write(one.step, {**numbers, "grad_norm": one.grad_norm, "learning_rate": one.learning_rate})
        about: dict[str, float | list[float]] = {"tokens_per_second": state.tokens_per_second}
        if state.memory is not None:
            about["memory"] = state.memory
        self.write(state.step, {**about, "accuracy": list(state.accuracy)})

    def write_scores(self, step: int, scores: HeadScores | None, drift: Drift | None) -> None:
        """Note, at `step`, the scores on what was held out, as far as there are any."""
        numbers: dict[str, float | list[float]] = {}
        if scores is not None:
            numbers |= {f"top-{k}": scores.accuracy(k).tolist() for k in (1, 5)}
        if drift is not None:
            numbers |= {"kl": drift.kl, "perplexity": math.exp(drift.loss)}
            numbers["perplexity_change"] = drift.perplexity_change
        self.write(step, numbers)

    def close(self) -> None:
        """Write all there is."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.is_file() else []


def _entry(line: bytes) -> dict[str, Any]:
    """What a line says; of one that is not whole, that it is of no step before infinity."""
    try:
        found: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
        return {**found, "step": float(found["step"])}
    except (ValueError, LookupError, TypeError):
        return {"step": math.inf}
