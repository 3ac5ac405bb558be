"""`ligermodels mtp train | recipe | self-distillation-data | eval | export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ligermodels.cli import evaluation, heads, launch, options, runs
from ligermodels.cli.checkpoint import MaxShardSize
from ligermodels.console import say
from ligermodels.training.mtp_recipe import MTPRecipe

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.command()
@options.with_recipe_flags(MTPRecipe)
def train(
    ctx: typer.Context,
    base: Annotated[
        str | None,
        typer.Argument(metavar="BASE", help="The model: a checkpoint folder, or a hub id.  [default: the recipe's]"),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A YAML file of settings, or the name of a shipped recipe: see `mtp recipe`.")
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
    """Train a head of multi-token prediction on a frozen model: the model's own head, or a new head.

    Flags take precedence over the recipe, and the recipe over the defaults. At the end the head is evaluated on the
    validation split. On SIGTERM and Ctrl-C the run finishes the step and saves a checkpoint. --resume --out FOLDER
    continues a run that was stopped or killed, with the settings in its folder; with more --steps it is extended.
    """
    runs.train_heads(
        ctx, MTPRecipe, "train_mtp", base, recipe, settings, assignments, out,
        resume=resume, overwrite=overwrite, dry_run=dry_run, gpus=gpus, device=device, attention=attention,
    )  # fmt: skip


def export(
    base: heads.Base,
    head: Annotated[str, typer.Argument(metavar="HEAD", help="The head: alone, or in a checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    alone: Annotated[bool, typer.Option("--alone", help="Write the head alone.")] = False,
    max_shard_size: MaxShardSize = "5GB",
    overwrite: options.Overwrite = False,
) -> None:
    """Write a checkpoint of the model with the head in it, for decoding in vLLM and SGLang; or the head alone."""
    from ligermodels.speculative.mtp import MTPModel

    options.require_free(out, overwrite)
    options.require_heads(head)
    model = MTPModel.from_pretrained(options.load(base, None, "cpu"), head)
    if alone:
        model.save_head(out, overwrite=overwrite)
    else:
        model.save_pretrained(out, max_shard_size=max_shard_size, overwrite=overwrite)
    say(f"wrote {out}")


app.command(name="recipe")(runs.show_recipe_of(MTPRecipe))
app.command()(heads.self_distillation_data)
app.command(name="eval")(evaluation.evaluate)
app.command()(export)
