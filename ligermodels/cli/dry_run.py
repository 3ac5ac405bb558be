"""`--dry-run` of the commands that train: prints the plan of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligermodels.cli.data import CLOSE, OPEN, marked
from ligermodels.console import console as screen_of
from ligermodels.console import is_first_rank, readable_bytes, show_table
from ligermodels.training.optimizer_settings import OptimizerSettings
from ligermodels.training.recipe import TrainingRecipe

if TYPE_CHECKING:
    from ligermodels.parallel.memory import StepMemory
    from ligermodels.training.preview import DryRun
    from ligermodels.training.sampling_memory import SamplingMemory

MOST_DOCUMENTS, MOST_CHARACTERS, MOST_SOURCES = 8, 4000, 200
"""Documents of the first batch to show; characters of each document, and of the names of files and lines."""


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
    marks = "in green" if on_terminal else f"in {OPEN} {CLOSE}"
    sources = run.sources if len(run.sources) <= MOST_SOURCES else f"{run.sources[:MOST_SOURCES]}..."
    print(f"\nfirst batch: {sources}; trained tokens are {marks}")
    for number, document in enumerate(run.first_batch[:MOST_DOCUMENTS], start=1):
        print(f"--- {number} of {len(run.first_batch)} documents")
        screen.print(marked(document, on_terminal, MOST_CHARACTERS), soft_wrap=True)


def _facts(run: DryRun) -> Iterator[tuple[str, str]]:
    recipe, plan, epoch = run.plan.recipe, run.plan, run.epoch
    weights = "random weights" if plan.base.weights is None else f"{run.trained / run.parameters:.1%} trained"
    yield "model", f"{recipe.base}: {run.parameters:,} parameters, {run.trained:,} trained ({weights})"
    yield "data", f"{epoch.documents:,} documents, {len(plan.validation):,} more for validation"
    for reason, (documents, tokens) in run.left_out.items():
        yield "", f"{documents:,} documents {reason}" + (f" ({tokens:,} tokens)" if tokens else "")
    if bad := len(plan.documents.bad):
        yield "", f"{bad:,} unusable lines are skipped"
    form, noun, trained = recipe.data_form, "sequences", f", {epoch.targets:,} of them trained"
    if form.samples:
        noun, trained = f"{form.record}s", f"; {form.row_sequences} completions of each are sampled, and trained"
    yield "epoch", f"{epoch.sequences:,} {noun}, {epoch.tokens:,} tokens{trained}"
    epochs = plan.steps * run.sequences / epoch.sequences / form.batch_steps
    resumed = f", from step {plan.start + 1:,}" if plan.start else ""
    yield "steps", f"{plan.steps:,} ({epochs:.3g} epochs){resumed}"
    if run.sequences > epoch.sequences:
        yield "", f"a step repeats the {epoch.sequences:,} {noun} of the data; a smaller batch_tokens does not"
    size, passes = run.micro_batches
    ranks = f" on each of {run.gpus} GPUs" if run.gpus > 1 else ""
    length = recipe.batch_tokens // run.sequences
    yield "step", f"{run.sequences:,} {noun} of {length:,} tokens: {passes} x {size} {noun}{ranks}"
    yield "optimizer", ", ".join(_optimizer_settings(run))
    yield "memory", run.memory if isinstance(run.memory, str) else _memory(run.memory) + ranks
    if run.sampling is not None:
        yield "sampling", run.sampling if isinstance(run.sampling, str) else _memory(run.sampling) + ranks
    yield "attention", run.attention
    yield "CUDA graph", f"no: {run.cuda_graph}" if run.cuda_graph else "yes"


def _optimizer_settings(run: DryRun) -> Iterator[str]:
    """The settings of the optimizer that have an effect."""
    recipe = run.plan.recipe
    values = recipe.settings() | {"warmup_steps": run.plan.warmup_steps}
    idle = {name for names, has_effect, _ in recipe.conditions if not has_effect(values) for name in names}
    yield recipe.optimizer
    for name in OptimizerSettings.model_fields:
        if name not in {"optimizer", *idle} and values[name] not in (None, {}, []):
            yield f"{name} {values[name]}"


def _memory(memory: StepMemory | SamplingMemory) -> str:
    parts = {name.removesuffix("_states"): size for name, size in vars(memory).items()}
    host = parts.pop("host", 0)
    each = ", ".join(f"{name} {readable_bytes(size)}" for name, size in parts.items() if size)
    return f"{readable_bytes(memory.total)} ({each})" + (f" and {readable_bytes(host)} of host memory" if host else "")
