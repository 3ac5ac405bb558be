"""`ligermodels mtp train | recipe | self-distillation-data | eval | export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ligermodels.cli import evaluation, heads, options, runs
from ligermodels.cli.checkpoint import MaxShardSize
from ligermodels.console import say
from ligermodels.training.mtp_recipe import MTPRecipe

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


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
    options.require_heads(head, "mtp")
    model = MTPModel.from_pretrained(options.load(base, None, "cpu"), head)
    if alone:
        model.save_head(out, overwrite=overwrite)
    else:
        model.save_pretrained(out, max_shard_size=max_shard_size, overwrite=overwrite)
    say(f"wrote {out}")


app.command(name="train")(
    runs.train_heads_command(
        MTPRecipe,
        "train_mtp",
        "Train a head of multi-token prediction on a frozen model: the model's own head, or a new head.",
    )
)
app.command(name="recipe")(runs.show_recipe_of(MTPRecipe))
app.command()(heads.self_distillation_data)
app.command(name="eval")(evaluation.evaluate)
app.command()(export)
