"""`ligermodels medusa train | recipe | generate-data | eval | export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ligermodels.cli import evaluation, heads
from ligermodels.cli.options import Attention, Device, Overwrite, device_named, require_free, with_recipe_flags
from ligermodels.console import progress, say

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

STOPPED = 128 + 15
"""Exit code of a training that SIGTERM ended."""


@app.command()
@with_recipe_flags
def train(
    base: Annotated[
        str | None,
        typer.Argument(metavar="BASE", help="The model: a checkpoint folder, or a hub id.  [default: the recipe's]"),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="A YAML file of settings, or the name of one that is shipped: see `medusa recipe`."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write the heads to.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the output folder, if there is one.")
    ] = False,
    device: Device = None,
    attention: Attention = "auto",
    overwrite: Overwrite = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Train heads on a frozen model or, in stage 2, together with it.

    Settings come from the flags, else from the recipe, else from the defaults. At the end the heads are scored on what
    was held out. A run that is killed, or stopped by SIGTERM (exit code 143), goes on with --resume.
    """
    from ligermodels.training.recipe import Recipe, read_recipe

    chosen = (read_recipe(recipe) if recipe else Recipe()).changed(settings or {}, "the command line")
    chosen = chosen.changed({"base": base}) if base else chosen
    if not chosen.base:
        raise typer.BadParameter("give it, or a recipe that names it", param_hint="BASE")
    if not chosen.data:
        raise typer.BadParameter("give it, or a recipe that names it", param_hint="--data")
    if out is None:
        raise typer.BadParameter("give a folder for the heads", param_hint="--out")
    place = device_named(device)

    from ligermodels.training.folder import has_checkpoints, require_resumable
    from ligermodels.training.run import Console, train_heads

    if not resume:
        require_free(out, overwrite, is_begun=has_checkpoints(out))
    elif not overwrite:
        require_resumable(out)

    outcome = train_heads(chosen, out, device=place, attention=attention, resume=resume, console=Console(say, progress))
    if not outcome.finished:
        say(f"stopped after step {outcome.step:,} of {outcome.steps:,}; --resume goes on")
        raise typer.Exit(STOPPED)
    say(f"wrote {out}")
    if outcome.scores is not None:
        evaluation.show_scores(outcome.scores)
    if outcome.drift is not None:
        drift = outcome.drift
        say(f"the model: KL to what it was {drift.kl:.4f} nats a token, perplexity {drift.perplexity_change:+.2%}")


@app.command(name="recipe")
def show_recipe(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One of those that are shipped.")] = None,
) -> None:
    """Print a recipe, to start a file of one's own from; without a name, the names."""
    from ligermodels.training.recipe import recipe_text, shipped_recipes

    typer.echo(recipe_text(name) if name else "\n".join(shipped_recipes()), nl=name is None)


app.command(name="generate-data")(heads.generate_data)
app.command(name="eval")(evaluation.evaluate)
app.command()(heads.export)
