"""`ligermodels medusa train | recipe | self-distillation-data | eval | export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ligermodels.cli import evaluation, heads, options
from ligermodels.console import progress, say
from ligermodels.training.renamed import COMMANDS, EVAL_FLAGS, TRAIN_FLAGS, TRAIN_VALUES, warn


class Commands(TyperGroup):
    """Finds commands by their old names too."""

    def get_command(self, ctx: Any, name: str) -> Any:
        if name in COMMANDS:
            warn(name, COMMANDS[name])
        return super().get_command(ctx, COMMANDS.get(name, name))


app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None)

STOPPED = 128 + 15
"""Exit code of a run that SIGTERM stopped."""


@app.command(cls=options.renaming(TRAIN_FLAGS, TRAIN_VALUES))
@options.with_recipe_flags
def train(
    base: Annotated[
        str | None,
        typer.Argument(metavar="BASE", help="The model: a checkpoint folder, or a hub id.  [default: the recipe's]"),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A YAML file of settings, or the name of a shipped recipe: see `medusa recipe`.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write the heads to.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint in the output folder, if any.")
    ] = False,
    device: options.Device = None,
    attention: options.Attention = "auto",
    overwrite: options.Overwrite = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Train heads on a frozen model or, in stage 2, together with it.

    Flags take precedence over the recipe, and the recipe over the defaults. At the end the heads are evaluated on the
    validation split. A run that was killed, or stopped by SIGTERM (exit code 143), continues with --resume.
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
    place = options.device_named(device)

    from ligermodels.training import Console, train_heads
    from ligermodels.training.folder import has_checkpoints, require_resumable

    if not resume:
        options.require_free(out, overwrite, is_run=has_checkpoints(out))
    elif not overwrite:
        require_resumable(out)

    outcome = train_heads(chosen, out, device=place, attention=attention, resume=resume, console=Console(say, progress))
    if not outcome.finished:
        say(f"stopped after step {outcome.step:,} of {outcome.steps:,}; --resume continues")
        raise typer.Exit(STOPPED)
    say(f"wrote {out}")
    if (found := outcome.evaluation) is not None:
        evaluation.show_scores(found.scores)
        if (kl := found.kl) is not None:
            say(f"the model: KL to the reference {kl.kl:.4f} nats per token, perplexity {kl.perplexity_change:+.2%}")


@app.command(name="recipe")
def show_recipe(name: Annotated[str | None, typer.Argument(metavar="NAME", help="A shipped recipe.")] = None) -> None:
    """Print a shipped recipe, as a starting point; without a name, list them."""
    from ligermodels.training.recipe import recipe_text, shipped_recipes

    typer.echo(recipe_text(name) if name else "\n".join(shipped_recipes()), nl=name is None)


app.command()(heads.self_distillation_data)
app.command(name="eval", cls=options.renaming(EVAL_FLAGS))(evaluation.evaluate)
app.command()(heads.export)
