"""What a run prints: counts at the start, what the loss is a mean of, the validation loss when it is computed."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import recipe_for

import ligermodels as lm
from ligermodels.data.batches import Batch
from ligermodels.data.documents import Documents
from ligermodels.training import Console, FineTuningRecipe, fine_tune, train_heads
from ligermodels.training.inputs import packed

pytestmark = pytest.mark.usefixtures("one_thread")


class Output:
    """A console that keeps messages and notes of progress."""

    def __init__(self) -> None:
        self.said, self.notes = list[str](), list[tuple[str, int, str]]()
        self.console = Console(self.said.append, self._progress)

    @contextmanager
    def _progress(self, title: str, **_: Any) -> Iterator[Any]:
        yield lambda done, total, note="": self.notes.append((title, done, note))


def targets_of(batch: Batch) -> int:
    """Labels that a token before them in the same document predicts."""
    labels = batch["labels"].flatten().clone()
    labels[batch["cu_seqlens"][:-1].long()] = -100
    return int((labels >= 0).sum())


def settings(base: Path, data: Path, **changes: Any) -> dict[str, Any]:
    names = ("base", "data", "max_bad_lines", "validation_fraction", "seq_len", "batch_tokens", "date", "seed")
    values = recipe_for(base, data).settings()
    return {name: values[name] for name in names} | {"excess_length_strategy": "split"} | changes


@pytest.mark.parametrize("length", [{"steps": 6}, {"epochs": 1.0}], ids=lambda length: next(iter(length)))
def test_the_start_counts_documents_tokens_and_parameters(
    length: dict[str, Any], base: Path, data: Path, tmp_path: Path
) -> None:
    output, recipe = Output(), FineTuningRecipe(**settings(base, data, **length))
    outcome = fine_tune(recipe, tmp_path / "out", console=output.console)
    documents = Documents.of_checkpoint(base, [data], max_bad_lines=1, on_bad_line=lambda message: None)
    training, validation = documents.corpus.split(0.2, 3)
    assert (len(training), len(validation)) == (26, 6)
    tokens = []
    for indices, seed in ((training, 3), (validation, None)):
        batches = list(packed(recipe, documents, indices, batch_size=1, seed=seed, epochs=1))
        count = sum(batch["labels"].numel() for batch in batches)
        tokens.append(f"{count:,} tokens in {len(batches):,} sequences of 16 tokens")
    steps = {"steps": "; 6 steps of 4 sequences of 16 tokens", "epochs": f", {tokens[0]}; {outcome.steps} steps of 4"}
    assert f"training: 26 documents{steps[next(iter(length))]}" in "\n".join(output.said)
    assert f"validation: 6 documents, {tokens[1]}" in output.said
    count = sum(parameter.numel() for parameter in lm.from_pretrained(base).parameters())
    assert f"training {count:,} of {count:,} parameters (100.00%)" in output.said


@pytest.mark.parametrize(("batch_tokens", "steps"), [(64, 1), (32, 2), (16, 3)])
def test_an_epoch_smaller_than_a_step_is_said(batch_tokens: int, steps: int, base: Path, tmp_path: Path) -> None:
    """Three epochs of one sequence are three steps only if a step takes no more."""
    output, data = Output(), tmp_path / "one.txt"
    data.write_text("Hi there")
    changes = {"epochs": 3.0, "batch_tokens": batch_tokens, "validation_fraction": 0.0}
    outcome = fine_tune(FineTuningRecipe(**settings(base, data, **changes)), tmp_path / "out", console=output.console)
    told = [message for message in output.said if message.startswith("batch_tokens")]
    wanted = (
        f"batch_tokens: a step takes {batch_tokens // 16} sequences, and an epoch has 1, so a step repeats them; "
        f"with 3 epochs, steps = {steps}. Give fewer batch_tokens for steps without repeats"
    )
    assert outcome.steps == steps and told == ([wanted] if batch_tokens > 16 else [])


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_parameters_of_lora(quantize: str | None, base: Path, data: Path, tmp_path: Path) -> None:
    """Rank 2 on q_proj has 2 (in + out) parameters; a quantised weight counts its elements."""
    output = Output()
    changes = {"lora_rank": 2, "lora_targets": ("q_proj",), "quantize": quantize, "steps": 1}
    fine_tune(FineTuningRecipe(**settings(base, data, **changes)), tmp_path / "out", console=output.console)
    model, added = lm.from_pretrained(base), 2 * (32 + 32)
    count = sum(parameter.numel() for parameter in model.parameters()) + added
    assert f"training {added} of {count:,} parameters ({added / count:.2%})" in output.said


def test_the_loss_is_the_mean_over_the_targets_of_the_report(base: Path, data: Path, tmp_path: Path) -> None:
    """Whole chats, so that steps have different numbers of targets."""
    output = Output()
    recipe = FineTuningRecipe(**settings(base, data, steps=8, report_every=4, evaluate_every=4, seq_len=32))
    fine_tune(recipe.changed({"packing_strategy": "bfd"}), tmp_path / "out", console=output.console)
    documents = Documents.of_checkpoint(
        base, [data], max_bad_lines=1, on_bad_line=lambda message: None, packing_strategy="bfd"
    )
    training, _ = documents.corpus.split(0.2, 3)
    batches = packed(recipe, documents, training, batch_size=2, seed=3)
    targets = [targets_of(next(batches)) for _ in range(8)]
    assert len(set(targets)) > 1
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    notes = [note for title, _, note in output.notes if title == "training"]
    for part, note in zip((slice(0, 4), slice(4, 8)), notes, strict=True):
        counts = torch.tensor(targets[part], dtype=torch.float64)
        mean = float(torch.tensor(losses[part], dtype=torch.float64) @ counts / counts.sum())
        assert note.startswith(f"loss {mean:.4f} (mean of {int(counts.sum()):,} targets), ")
        assert re.search(r"[\d,]+ tokens/s, peak memory [\d.]+ GiB$", note)
    evaluations = {line["step"]: line for line in lines if "validation_loss" in line}
    said = [message for message in output.said if message.startswith("step ")]
    assert said == [
        f"step {n}: validation loss {evaluations[n]['validation_loss']:.4f}, "
        f"perplexity {evaluations[n]['validation_perplexity']:.4f}"
        for n in (4, 8)
    ]


def test_heads_have_a_validation_loss(base: Path, data: Path, tmp_path: Path) -> None:
    output = Output()
    outcome = train_heads(recipe_for(base, data, steps=2, evaluate_every=None), tmp_path, console=output.console)
    mean = float(outcome.evaluation.scores.losses.mean())
    assert output.said[-1].startswith(f"step 2: validation loss {mean:.4f}, top1 0.")
