"""`--dry-run` of the commands that train: prints the plan of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ligermodels.console import console as screen_of
from ligermodels.console import is_first_rank, readable_bytes, show_table
from ligermodels.training.recipe import TrainingRecipe

if TYPE_CHECKING:
    from ligermodels.parallel.memory import StepMemory
    from ligermodels.training.preview import DryRun, Span

TRAINED = ("⟦", "⟧")
"""Around trained text where there are no colours."""
MOST_CHARACTERS = 4000
"""Characters of a document to show."""


def show_dry_run(recipe: TrainingRecipe, out: Path | None, *, gpus: int, **options: Any) -> None:
    """Print the plan of a run.

    Args:
        recipe: the settings.
        out: the output folder, if it was given.
        gpus: number of ranks.
        options: options of `training.dry_run`.
    """
    from ligermodels.parallel.ranks import launched, world_size
    from ligermodels.training.preview import dry_run

    if launched():
        gpus = world_size()
    if not is_first_rank():
        return
    run = dry_run(recipe, out, gpus=gpus, **options)
    show_table(("", ""), list(_facts(run)))
    screen = screen_of()
    on_terminal = screen.is_terminal
    marks = "in green" if on_terminal else "in " + " ".join(TRAINED)
    print(f"\nfirst batch: {run.sources}; trained tokens are {marks}")
    for number, document in enumerate(run.first_batch, start=1):
        print(f"--- {number} of {len(run.first_batch)}")
        screen.print(_marked(document, on_terminal), soft_wrap=True)


def _facts(run: DryRun) -> Iterator[tuple[str, str]]:
    recipe, plan, epoch = run.plan.recipe, run.plan, run.epoch
    weights = "random weights" if plan.base.weights is None else f"{run.trained / run.parameters:.1%} trained"
    yield "model", f"{recipe.base}: {run.parameters:,} parameters, {run.trained:,} trained ({weights})"
    yield "data", f"{epoch.documents:,} documents, {len(plan.validation):,} more for validation"
    for reason, (documents, tokens) in run.left_out.items():
        yield "", f"{documents:,} documents {reason}" + (f" ({tokens:,} tokens)" if tokens else "")
    if bad := len(plan.documents.bad):
        yield "", f"{bad:,} unusable lines are skipped"
    yield "epoch", f"{epoch.sequences:,} sequences, {epoch.tokens:,} tokens, {epoch.targets:,} of them trained"
    epochs = plan.steps * recipe.batch_tokens / (epoch.sequences * recipe.seq_len)
    resumed = f", from step {plan.start + 1:,}" if plan.start else ""
    yield "steps", f"{plan.steps:,} ({epochs:.3g} epochs){resumed}"
    size, passes = run.micro_batches
    ranks = f" on each of {run.gpus} GPUs" if run.gpus > 1 else ""
    sequences = recipe.batch_tokens // recipe.seq_len
    yield "step", f"{sequences:,} sequences of {recipe.seq_len:,} tokens: {passes} x {size} sequences{ranks}"
    settings = list(recipe.defaults())
    block = settings[settings.index("optimizer") : settings.index("steps")]
    values = recipe.settings() | {"warmup_steps": plan.warmup_steps}
    others = ", ".join(f"{name} {values[name]}" for name in block[1:] if values[name] is not None)
    yield "optimizer", f"{recipe.optimizer}, {others}"
    yield "memory", run.memory if isinstance(run.memory, str) else _memory(run.memory) + ranks
    yield "attention", run.attention
    yield "CUDA graph", f"no: {run.cuda_graph}" if run.cuda_graph else "yes"


def _memory(memory: StepMemory) -> str:
    parts = {
        "weights": memory.weights,
        "optimizer": memory.optimizer_states,
        "gathered": memory.gathered,
        "activations": memory.activations,
        "backward": memory.backward,
    }
    each = ", ".join(f"{name} {readable_bytes(size)}" for name, size in parts.items() if size)
    return f"{readable_bytes(memory.total)} ({each})"


def _marked(document: list[Span], in_colour: bool) -> Text:
    text, room = Text(), MOST_CHARACTERS
    for content, is_trained in document:
        shown = content[:room]
        before, after = ("", "") if in_colour or not is_trained else TRAINED
        text.append(f"{before}{shown}{after}", style="green" if in_colour and is_trained else "")
        room -= len(shown)
        if not room:
            text.append(f" ... ({sum(len(span.text) for span in document):,} characters)")
            break
    return text
