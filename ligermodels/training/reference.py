"""Log-probabilities of a run's preference data by the reference: the base model, before the first step."""

from __future__ import annotations

import hashlib
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from ligermodels.convert.ranks import Ranks
from ligermodels.data.batches import on_device
from ligermodels.data.examples import REFERENCES, Examples, reference_cells
from ligermodels.generation.eval_mode import evaluating
from ligermodels.models.causal_lm import CausalLM
from ligermodels.training.console import Console
from ligermodels.training.folder import REFERENCE, write_atomically
from ligermodels.training.preference import completion_log_probs
from ligermodels.training.run_plan import RunPlan

SETTINGS = ("dtype", "seq_len", "excess_length_strategy", "date", "quantize", "quantize_exclude")
"""Settings of a recipe that the reference's log-probabilities depend on, beside the content of its files."""


def add_reference(plan: RunPlan, model: CausalLM, console: Console) -> None:
    """Give the documents of a run their reference log-probabilities: those in the folder of the run if they are of the
    same data, model and settings, and otherwise the model's, which are then written there.

    Args:
        plan: the plan of the run; its documents are `Examples`.
        model: the model with the parameters of the base. LoRA that has not been trained changes nothing.
        console: where messages and progress go.
    """
    documents: Any = plan.documents
    path, ranks, fingerprint = plan.folder / REFERENCE, Ranks.of_group(), _fingerprint(plan)
    values = ranks.from_first(str(path), lambda: _read(path, fingerprint))
    if values is None:
        values = _merged(ranks.gather(_computed(plan, documents, model, console)))
        if ranks.writes:
            _write(path, values, fingerprint)
    else:
        console.say("reference log-probabilities: as computed at the start of the run")
    documents.reference = values


def _computed(plan: RunPlan, documents: Examples, model: CausalLM, console: Console) -> NDArray[np.float64]:
    """The values that this rank computes, NaN elsewhere."""
    values = np.full((len(documents), REFERENCES), np.nan)
    done, total = 0, len(documents)
    with console.progress("reference log-probabilities") as update, evaluating(model):
        for batch in plan.all_batches():
            log_probs = completion_log_probs(model, on_device(batch, model.device)).cpu()
            cells = tuple(index.numpy() for index in reference_cells(batch["examples"]))
            counted = log_probs.view(-1, len(batch["examples"])).T.numpy()
            values[cells] = np.where(np.isnan(counted), values[cells], counted)
            done += len(batch["examples"])
            update(min(done, total), total)
    return values


def _merged(values: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    merged = values[0]
    for other in values[1:]:
        merged = np.where(np.isnan(merged), other, merged)
    return merged


def _fingerprint(plan: RunPlan) -> str:
    names = SETTINGS if plan.base.weights is not None else (*SETTINGS, "seed")  # of random weights
    settings = {name: value for name, value in plan.recipe.settings().items() if name in names}
    if (dtype := plan.recipe.parallel.param_dtype) is not None:  # of the computation
        settings["param_dtype"] = dtype
    digests = {name: [file["digest"] for file in files] for name, files in plan.content.items()}
    text = json.dumps([settings, plan.recipe.data_form._replace(prompt_targets=False), digests], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path, fingerprint: str) -> NDArray[np.float64] | None:
    """The values in a file; None if there is no readable file, or it has another fingerprint."""
    with suppress(OSError, ValueError, KeyError, EOFError, BadZipFile), np.load(path, allow_pickle=False) as arrays:
        if str(arrays["fingerprint"]) == fingerprint:
            values: NDArray[np.float64] = arrays["log_probs"]
            return values
    return None


def _write(path: Path, values: NDArray[np.float64], fingerprint: str) -> None:
    content = io.BytesIO()
    np.savez(content, log_probs=values, fingerprint=np.array(fingerprint))
    write_atomically(path, content.getvalue())
