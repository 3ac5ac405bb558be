"""`ligermodels dflash | dspark`, each with `train | recipe | self-distillation-data | eval | export`."""

from __future__ import annotations

from collections.abc import Mapping

import typer

from ligermodels.cli import evaluation, heads, runs
from ligermodels.training.dspark_recipe import BlockRecipe, DFlashRecipe, DSparkRecipe


def _commands(recipe: type[BlockRecipe], name: str, profiles: Mapping[str, str]) -> typer.Typer:
    """The commands of a kind of heads, which messages call `name`."""
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    app.command(name="train")(
        runs.train_heads_command(recipe, f"train_{recipe.kind}", f"Train a {name} head on a frozen model.")
    )
    app.command(name="recipe")(runs.show_recipe_of(recipe))
    app.command()(heads.self_distillation_data)
    app.command(name="eval")(evaluation.evaluate)
    app.command(name="export")(heads.draft_export(recipe.kind, f"{name}Model", profiles))
    return app


dflash = _commands(DFlashRecipe, "DFlash", {"speculators": "vLLM reads", "z-lab": "SGLang and vLLM read"})
dspark = _commands(DSparkRecipe, "DSpark", {"speculators": "vLLM reads", "deepspec": "SGLang and vLLM read"})
