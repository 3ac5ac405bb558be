"""`ligermodels medusa | mtp | eagle | dflash | dspark`, each with `train`, `recipe`, `eval`, `export` and more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

import ligermodels
from ligermodels.cli import evaluation, options, runs
from ligermodels.cli.options import Base, Heads, MaxShardSize, Out
from ligermodels.cli.self_distillation import self_distillation_data
from ligermodels.console import progress, say
from ligermodels.training.draft_recipe import DFlashRecipe, DSparkRecipe, EagleRecipe
from ligermodels.training.medusa_recipe import MedusaRecipe
from ligermodels.training.mtp_recipe import MTPRecipe
from ligermodels.training.recipe import TrainingRecipe
from ligermodels.training.renamed import COMMANDS, EVAL_FLAGS, TRAIN_FLAGS, TRAIN_VALUES, warn

Head = Annotated[str, typer.Argument(metavar="HEAD", help="The head: in any format of `export`, or in a checkpoint.")]


def _medusa_export(
    ctx: typer.Context,
    base: Base,
    heads: Heads,
    out: Out,
    profile: Annotated[
        str,
        typer.Option(
            help="Format: vllm, vllm-shared (one lm_head for all heads), tgi, tgi-v2 (the model's lm_head), "
            "tensorrt-llm, fasterdecoding, or full-hf (the model's checkpoint with the heads in it)."
        ),
    ] = "vllm",
    base_model: Annotated[
        str | None, typer.Option(help="Name of the model, for formats that contain it.  [default: BASE]")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="For full-hf: largest weight file, as 5GB or 500MB.")] = "5GB",
    overwrite: options.Overwrite = False,
) -> None:
    """Write heads in the format of another program.

    HEADS may be in any of these formats, so this converts between them.
    """
    from ligermodels.speculative.medusa import MedusaModel
    from ligermodels.speculative.profiles import profile_named

    chosen = profile_named(profile)
    if not chosen.prefix:
        options.refuse_given(ctx, ["max_shard_size"], f"is for full-hf, and --profile is {profile}")
    if not chosen.names_base:
        options.refuse_given(ctx, ["base_model"], f"is for formats that name the model, and {profile} does not")
    options.require_free(out, overwrite)
    options.require_heads(heads, "medusa")
    with progress(f"loading {heads}", in_bytes=True) as update:
        medusa = MedusaModel.from_pretrained(options.ON_CPU.load(base), heads, progress=update)
    named: dict[str, Any] = {"base_model": base_model or base} if chosen.names_base else {}
    sizes: dict[str, Any] = {"max_shard_size": max_shard_size} if chosen.prefix else {}
    medusa.export(out, profile, **named, **sizes, overwrite=overwrite)
    say(f"wrote {out}")


def draft_export(
    command: str, model_class: str, profiles: Mapping[str, str], naming: Sequence[str] = ("speculators",)
) -> Callable[..., None]:
    """The command `export` of a draft head with a network beside the model.

    Args:
        command: name of the command for such heads.
        model_class: name of the class in `ligermodels`.
        profiles: name of a format -> the servers that read it. The first one is the default.
        naming: names of the formats that contain the name of the base model.
    """

    def _export(
        ctx: typer.Context,
        base: Base,
        head: Head,
        out: Out,
        profile: str = next(iter(profiles)),
        base_model: str | None = None,
        overwrite: options.Overwrite = False,
    ) -> None:
        """Write a head in the format of a server."""
        if profile not in naming:
            options.refuse_given(ctx, ["base_model"], f"is for {' and '.join(naming)}, which name the model")
        options.require_free(out, overwrite)
        options.require_heads(head, command)
        model = options.ON_CPU.load(base)
        with progress(f"loading {head}", in_bytes=True) as update:
            draft = getattr(ligermodels, model_class).from_pretrained(model, head, progress=update)
        draft.export(out, profile, base_model=(base_model or base) if profile in naming else None, overwrite=overwrite)
        say(f"wrote {out}")

    about = ", or ".join(f"{name}, which {servers}" for name, servers in profiles.items())
    names: Any = Literal
    _export.__annotations__["profile"] = Annotated[names[tuple(profiles)], typer.Option(help=f"Format: {about}.")]
    name = f"Name of the model, which {' and '.join(naming)} contain.  [default: BASE]"
    _export.__annotations__["base_model"] = Annotated[str | None, typer.Option(help=name)]
    return _export


def _mtp_export(
    ctx: typer.Context,
    base: Base,
    head: Head,
    out: Out,
    alone: Annotated[bool, typer.Option("--alone", help="Write the head alone.")] = False,
    max_shard_size: MaxShardSize = "5GB",
    overwrite: options.Overwrite = False,
) -> None:
    """Write a checkpoint of the model with the head in it, for decoding in vLLM and SGLang; or the head alone."""
    from ligermodels.speculative.mtp import MTPModel

    if alone:
        options.refuse_given(ctx, ["max_shard_size"], "is for the model's checkpoint, and --alone writes the head")
    options.require_free(out, overwrite)
    options.require_heads(head, "mtp")
    model = MTPModel.from_pretrained(options.ON_CPU.load(base), head)
    if alone:
        model.save_head(out, overwrite=overwrite)
    else:
        model.save_pretrained(out, max_shard_size=max_shard_size, overwrite=overwrite)
    say(f"wrote {out}")


class OldNames(TyperGroup):
    """Commands that are also found by their old names."""

    def get_command(self, ctx: Any, name: str) -> Any:
        if name in COMMANDS:
            warn(name, COMMANDS[name])
        return super().get_command(ctx, COMMANDS.get(name, name))


KINDS: tuple[tuple[type[TrainingRecipe], str, str, Callable[..., None]], ...] = (
    (MedusaRecipe, "Medusa heads", "Train heads on a frozen model or, in stage 2, together with it.", _medusa_export),
    (
        EagleRecipe,
        "EAGLE-3 heads",
        "Train an EAGLE-3 head on a frozen model.",
        draft_export(
            "eagle",
            "Eagle3Model",
            {"speculators": "vLLM serves", "specforge": "SGLang and vLLM serve", "deepspec": "DeepSpec reads"},
            naming=("speculators", "deepspec"),
        ),
    ),
    (
        DFlashRecipe,
        "DFlash heads",
        "Train a DFlash head on a frozen model.",
        draft_export("dflash", "DFlashModel", {"speculators": "vLLM reads", "z-lab": "SGLang and vLLM read"}),
    ),
    (
        DSparkRecipe,
        "DSpark heads",
        "Train a DSpark head on a frozen model.",
        draft_export("dspark", "DSparkModel", {"speculators": "vLLM reads", "deepspec": "SGLang and vLLM read"}),
    ),
    (
        MTPRecipe,
        "heads of multi-token prediction",
        "Train a head of multi-token prediction on a frozen model: the model's own head, or a new head.",
        _mtp_export,
    ),
)
"""Class of recipes, what is trained, the first line of the help of `train`, and the command `export`."""
OLD_NAMES: dict[str, tuple[Any, Any, Any]] = {
    "medusa": (OldNames, options.renaming(TRAIN_FLAGS, TRAIN_VALUES), options.renaming(EVAL_FLAGS))
}
"""Kind of heads -> classes of the group, of `train` and of `eval` that accept old names."""

APPS: dict[str, tuple[str, typer.Typer]] = {}
"""Name of each group of commands -> what is trained, and the commands."""
for recipe, trained, about, export in KINDS:
    group, train, evaluate = OLD_NAMES.get(recipe.kind, (TyperGroup, None, None))
    app = typer.Typer(cls=group, no_args_is_help=True, rich_markup_mode=None)
    about = f"{about}\n\nAt the end the heads are evaluated on the validation split."
    app.command(name="train", cls=train)(runs.train_command(recipe, about))
    app.command(name="recipe")(runs.show_recipe_of(recipe))
    app.command()(self_distillation_data)
    app.command(name="eval", cls=evaluate)(evaluation.evaluate)
    app.command(name="export")(export)
    APPS[recipe.kind] = trained, app
