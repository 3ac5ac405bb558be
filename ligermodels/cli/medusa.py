"""`ligermodels medusa train | recipe | self-distillation-data | eval | export`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ligermodels.cli import evaluation, heads, launch, options, runs
from ligermodels.training.medusa_recipe import MedusaRecipe
from ligermodels.training.renamed import COMMANDS, EVAL_FLAGS, TRAIN_FLAGS, TRAIN_VALUES, warn


class Commands(TyperGroup):
    """Commands that are also found by their old names."""

    def get_command(self, ctx: Any, name: str) -> Any:
        if name in COMMANDS:
            warn(name, COMMANDS[name])
        return super().get_command(ctx, COMMANDS.get(name, name))


app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None)


@app.command(cls=options.renaming(TRAIN_FLAGS, TRAIN_VALUES))
@options.with_recipe_flags(MedusaRecipe)
def train(
    ctx: typer.Context,
    base: Annotated[
        str | None,
        typer.Argument(metavar="BASE", help="The model: a checkpoint folder, or a hub id.  [default: the recipe's]"),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A YAML file of settings, or the name of a shipped recipe: see `medusa recipe`.")
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
    """Train heads on a frozen model or, in stage 2, together with it.

    Flags take precedence over the recipe, and the recipe over the defaults. At the end the heads are evaluated on the
    validation split. On SIGTERM and Ctrl-C the run finishes the step and saves a checkpoint. --resume --out FOLDER
    continues a run that was stopped or killed, with the settings in its folder; with more --steps it is extended.
    """
    runs.train_heads(
        ctx, MedusaRecipe, "train_heads", base, recipe, settings, assignments, out,
        resume=resume, overwrite=overwrite, dry_run=dry_run, gpus=gpus, device=device, attention=attention,
    )  # fmt: skip


app.command(name="recipe")(runs.show_recipe_of(MedusaRecipe))
app.command()(heads.self_distillation_data)
app.command(name="eval", cls=options.renaming(EVAL_FLAGS))(evaluation.evaluate)
app.command()(heads.export)
