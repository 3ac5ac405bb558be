"""`ligermodels eagle train | recipe | self-distillation-data | eval | export`."""

from __future__ import annotations

import typer

from ligermodels.cli import evaluation, heads, runs
from ligermodels.training.eagle_recipe import EagleRecipe

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


app.command(name="train")(
    runs.train_heads_command(EagleRecipe, "train_eagle", "Train an EAGLE-3 head on a frozen model.")
)
app.command(name="recipe")(runs.show_recipe_of(EagleRecipe))
app.command()(heads.self_distillation_data)
app.command(name="eval")(evaluation.evaluate)
app.command(name="export")(
    heads.draft_export(
        "eagle",
        "Eagle3Model",
        {"speculators": "vLLM serves", "specforge": "SGLang and vLLM serve", "deepspec": "DeepSpec reads"},
    )
)
