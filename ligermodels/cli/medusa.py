"""`ligermodels medusa train | recipe | self-distillation-data | eval | export`."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from ligermodels.cli import evaluation, heads, options, runs
from ligermodels.training.medusa_recipe import MedusaRecipe
from ligermodels.training.renamed import COMMANDS, EVAL_FLAGS, TRAIN_FLAGS, TRAIN_VALUES, warn


class Commands(TyperGroup):
    """Commands that are also found by their old names."""

    def get_command(self, ctx: Any, name: str) -> Any:
        if name in COMMANDS:
            warn(name, COMMANDS[name])
        return super().get_command(ctx, COMMANDS.get(name, name))


app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None)


app.command(name="train", cls=options.renaming(TRAIN_FLAGS, TRAIN_VALUES))(
    runs.train_heads_command(
        MedusaRecipe, "train_heads", "Train heads on a frozen model or, in stage 2, together with it."
    )
)
app.command(name="recipe")(runs.show_recipe_of(MedusaRecipe))
app.command()(heads.self_distillation_data)
app.command(name="eval", cls=options.renaming(EVAL_FLAGS))(evaluation.evaluate)
app.command()(heads.export)
