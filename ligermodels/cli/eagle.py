"""`ligermodels eagle train | recipe | self-distillation-data | eval | export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ligermodels.cli import evaluation, heads, options, runs
from ligermodels.console import progress, say
from ligermodels.training.eagle_recipe import EagleRecipe

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def export(
    base: heads.Base,
    head: Annotated[str, typer.Argument(metavar="HEAD", help="The head, in any of the formats.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    profile: Annotated[
        Literal["speculators", "specforge", "deepspec"],
        typer.Option(help="Format: speculators for vLLM, specforge for SGLang and vLLM, or deepspec."),
    ] = "speculators",
    base_model: Annotated[
        str | None, typer.Option(help="Name of the model, which the format speculators contains.  [default: BASE]")
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Write a head in the format of a server."""
    from ligermodels.speculative.eagle3 import Eagle3Model

    options.require_free(out, overwrite)
    options.require_heads(head)
    model = options.load(base, None, "cpu")
    with progress(f"loading {head}", in_bytes=True) as update:
        eagle = Eagle3Model.from_pretrained(model, head, progress=update)
    eagle.export(out, profile, base_model=base_model or base, overwrite=overwrite)
    say(f"wrote {out}")


app.command(name="train")(
    runs.train_heads_command(EagleRecipe, "train_eagle", "Train an EAGLE-3 head on a frozen model.")
)
app.command(name="recipe")(runs.show_recipe_of(EagleRecipe))
app.command()(heads.self_distillation_data)
app.command(name="eval")(evaluation.evaluate)
app.command()(export)
