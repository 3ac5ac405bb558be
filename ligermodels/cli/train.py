"""`ligermodels train`: a whole language model, from a checkpoint or from a config."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ligermodels.cli import launch, options, runs
from ligermodels.console import say
from ligermodels.training.fine_tuning_recipe import FineTuningRecipe


@options.with_recipe_flags(FineTuningRecipe)
def train(
    ctx: typer.Context,
    base: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint folder, or a hub id, to fine-tune; or a config without weights, a folder or a .json "
            "file, to train from random weights.  [default: the recipe's]",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="A YAML file of settings, or the name of a shipped recipe: see `ligermodels recipe`."),
    ] = None,
    assignments: runs.Assignments = None,
    out: runs.Out = None,
    resume: runs.Resume = False,
    dry_run: runs.DryRun = False,
    gpus: launch.Gpus = None,
    device: options.Device = None,
    attention: options.Attention = "auto",
    overwrite: options.Overwrite = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Train a whole language model on texts, or on the assistant's turns of chats.

    --set takes precedence over flags, flags over the recipe, and the recipe over the defaults. At the end the model is
    evaluated on the validation split and written as a Hugging Face checkpoint. On SIGTERM and Ctrl-C the run finishes
    the step and saves a checkpoint. --resume --out FOLDER continues a run that was stopped or killed, with the
    settings in its folder; with more --steps it is extended.
    """
    outcome = runs.run(
        ctx, FineTuningRecipe, "fine_tune", "MODEL", base, recipe, settings, assignments, out,
        resume=resume, overwrite=overwrite, dry_run=dry_run, gpus=gpus, device=device, attention=attention,
    )  # fmt: skip
    if (evaluation := outcome.evaluation) is not None:
        from ligermodels.training.metrics import shown_number

        say(f"validation {', '.join(f'{name} {shown_number(value)}' for name, value in evaluation.metrics().items())}")
