"""Shared parts of the commands that train: options, recipe, output folder, and the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ligermodels.cli import launch, options
from ligermodels.cli.dry_run import show_dry_run
from ligermodels.cli.flags import with_groups, with_recipe_flags
from ligermodels.console import is_first_rank, progress, say
from ligermodels.errors import ConfigError
from ligermodels.training.recipe import R, TrainingRecipe
from ligermodels.training.recipe_file import parse_setting, recipe_settings, recipe_text, shipped_recipes
from ligermodels.training.settings import with_effect

if TYPE_CHECKING:
    from ligermodels.training import Console, Outcome

RECIPE = "A YAML file of settings, or the name of a shipped recipe: see the command `recipe`."


@dataclass(frozen=True)
class RunFlags:
    """The flags of a run that are no settings of its recipe: a group of options (`flags.with_groups`)."""

    recipe: Annotated[str | None, typer.Option(help=RECIPE)] = None
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting, with its value as in a recipe. May be repeated."),
    ] = None
    out: Annotated[Path | None, typer.Option(help="Folder to write the result to.")] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the run in the output folder, with its settings; with more --steps, extend it."
        ),
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Train and write nothing: read the data, and print counts, steps, memory and the first batch.",
        ),
    ] = False
    gpus: launch.Gpus = None
    device: options.Device = None
    attention: options.Attention = "auto"
    overwrite: options.Overwrite = False

    @property
    def resumed(self) -> Path | None:
        """The folder of the run to resume; None for a new run."""
        return self.out if self.resume else None


def recipe_of(recipe_class: type[R], base: str | None, flags: RunFlags, settings: Mapping[str, Any]) -> R:
    """The recipe of a command.

    Args:
        recipe_class: class of the recipe.
        base: the base model; None for the base in the recipe.
        flags: flags of the run: a file of settings, and assignments, which take precedence over `settings`. The
            settings of a run to resume take the place of the defaults.
        settings: settings from flags.

    Raises:
        ConfigError: the file cannot be read, a setting is unknown, or a value is wrong; or the run to resume is of
            another command.
    """
    recipe = recipe_class() if flags.resumed is None else _recipe_of_run(recipe_class, flags.resumed)
    if flags.recipe:
        recipe = recipe.changed(recipe_settings(flags.recipe, recipe_class.kind), flags.recipe)
    given = dict(settings)
    for name, value in (parse_setting(text, "--set") for text in flags.assignments or ()):
        both = isinstance(value, Mapping) and isinstance(given.get(name), Mapping)
        given[name] = {**given[name], **value} if both else value
    return recipe.changed(given | ({"base": base} if base else {}), "the command line")


def _recipe_of_run(recipe_class: type[R], folder: Path) -> R:
    """The recipe in the folder of a run; the defaults if there is no run in it."""
    from ligermodels.training.folder import RECIPE

    if not (file := folder / RECIPE).is_file():
        return recipe_class()
    settings = recipe_class.current_names(recipe_settings(file, recipe_class.kind), str(file))
    if unknown := settings.keys() - recipe_class.model_fields:
        raise ConfigError(
            f"{file}: has settings of another command, such as {min(unknown)}; resume the run with the command that "
            "started it"
        )
    effective = with_effect(recipe_class.conditions, settings, recipe_class.defaults())
    return recipe_class().changed({name: effective[name] for name in settings}, str(file))


def require_given(recipe: TrainingRecipe, resumed: Path | None, base_name: str) -> None:
    """Raise typer.BadParameter if the recipe has no base (argument `base_name`) or no data; `resumed` is the folder of
    the run to resume."""
    for value, name in ((recipe.base, base_name), (recipe.data, "--data")):
        if not value:
            run = "" if resumed is None else f"; there is no run in {resumed} to take it from"
            raise typer.BadParameter(f"give it, or a recipe that names it{run}", param_hint=name)


def run(
    ctx: typer.Context, recipe_class: type[R], base_name: str, base: str | None, flags: RunFlags, settings: Any
) -> Outcome:
    """Train, in this process or in several, and print where the result is.

    Args:
        ctx: context of the command.
        recipe_class: class of the recipe.
        base_name: name of the argument for the base model.
        base: the base model; None for the base in the recipe.
        flags: the flags that are no settings.
        settings: settings from flags, by name; or None.

    Raises:
        typer.Exit: the run was stopped, was described, or has run in other processes.
    """
    recipe, out = recipe_of(recipe_class, base, flags, settings or {}), flags.out
    if flags.resume and out is None:
        raise typer.BadParameter("give the folder of the run to resume", param_hint="--out")
    require_given(recipe, flags.resumed, base_name)
    where: dict[str, Any] = {"attention": flags.attention, "resume": flags.resume, "overwrite": flags.overwrite}
    if flags.dry_run:
        where |= {"device": options.device_named(flags.device), "console": console()}
        show_dry_run(recipe, out, gpus=flags.gpus or 1, **where)
        raise typer.Exit
    if out is None:
        raise typer.BadParameter("give a folder for the result", param_hint="--out")
    if is_first_rank():  # its failure ends the others
        from ligermodels.training.folder import require_usable

        require_usable(out, resume=flags.resume, overwrite=flags.overwrite)
    if recipe.start and not flags.resume:
        options.require_heads(recipe.start, recipe.kind)
    if flags.gpus is not None and flags.gpus > 1:  # here, so that such an error is not that of a rank
        from ligermodels.parallel.ranks import planned_ranks
        from ligermodels.training.preview import check_names

        with planned_ranks(flags.gpus):
            check_names(recipe, flags.resumed)
    launch.launch(ctx, flags.gpus, flags.device)
    where |= {"device": options.device_named(flags.device), "console": console()}

    from ligermodels import training

    with resumable(out):
        outcome: Outcome = getattr(training, TRAIN[recipe.kind])(recipe, out, **where)
    show_end(outcome, out)
    return outcome


TRAIN = {"train": "fine_tune", "medusa": "train_heads"} | {
    kind: f"train_{kind}" for kind in ("mtp", "eagle", "dflash", "dspark")
}
"""Kind of recipe -> the function in `ligermodels.training` that trains by it."""


def train_command(
    recipe_class: type[TrainingRecipe],
    about: str,
    *,
    name: str = "BASE",
    base_help: str = "The model: a checkpoint folder, or a hub id.",
) -> Callable[..., None]:
    """A command that trains, and prints the final evaluation.

    Args:
        recipe_class: class of the recipe.
        about: help of the command: its first line, and what happens at the end of the run.
        name: name of the argument for the base model.
        base_help: help of this argument.
    """

    def command(
        ctx: typer.Context, base: str | None = None, *, flags: RunFlags, settings: dict[str, Any] | None = None
    ) -> None:
        outcome = run(ctx, recipe_class, name, base, flags, settings)
        if outcome.evaluation is not None:
            show_evaluation(outcome.evaluation)

    base_argument = typer.Argument(metavar=name, help=f"{base_help}  [default: the recipe's]")
    command.__annotations__["base"] = Annotated[str | None, base_argument]
    command.__name__, command.__doc__ = "train", f"{about} {HOW_A_RUN_GOES}"
    return with_recipe_flags(recipe_class)(with_groups(command))


def show_evaluation(evaluation: Any) -> None:
    """Print the evaluation at the end of a run: a table of the scores of heads, or else a line with all metrics."""
    from ligermodels.cli.evaluation import show_scores
    from ligermodels.training.metrics import shown_number

    if not hasattr(evaluation, "scores"):
        values = evaluation.metrics().items()
        return say(f"validation {', '.join(f'{name} {shown_number(value)}' for name, value in values)}")
    show_scores(evaluation.scores)
    if (kl := evaluation.kl) is not None:
        say(f"the model: KL to the reference {kl.kl:.4f} nats per token, perplexity {kl.perplexity_change:+.2%}")


HOW_A_RUN_GOES = """--set takes precedence over flags, flags over the recipe, and the recipe over the defaults. On
SIGTERM and Ctrl-C, and if its terminal is closed, the run finishes the step and saves a checkpoint. --resume --out
FOLDER continues a run that was stopped or killed, with the settings in its folder; with more --steps it is extended."""


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Turn Ctrl-C into a message about --resume and the exit code `launch.INTERRUPTED`."""
    from ligermodels.training.folder import has_checkpoints

    try:
        yield
    except KeyboardInterrupt as error:
        if is_first_rank():
            how = "--resume continues" if has_checkpoints(out) else "there is no checkpoint yet"
            say(f"{str(error) or 'interrupted'}; {how}")
        raise typer.Exit(launch.INTERRUPTED) from None


def console() -> Console:
    """Messages and progress on standard error; under torchrun only of the first process."""
    from ligermodels.training import Console

    return Console(say, progress) if is_first_rank() else Console()


def show_end(outcome: Outcome, out: Path) -> None:
    """Print where the result is. Exit with `launch.STOPPED` if the run has not finished; all ranks but 0 exit too."""
    if is_first_rank():
        stopped = f"stopped after step {outcome.step:,} of {outcome.steps:,}; --resume continues"
        say(f"wrote {out}" if outcome.finished else stopped)
    if not outcome.finished:
        raise typer.Exit(launch.STOPPED)
    if not is_first_rank():
        raise typer.Exit


def show_recipe_of(recipe_class: type[TrainingRecipe]) -> Callable[[str | None], None]:
    """A command that prints shipped recipes."""
    kind = recipe_class.kind

    def show_recipe(
        name: Annotated[str | None, typer.Argument(metavar="NAME", help="A shipped recipe.")] = None,
    ) -> None:
        typer.echo(recipe_text(name, kind) if name else "\n".join(shipped_recipes(kind)), nl=name is None)

    command = f"{kind} train" if recipe_class.trains_heads else kind
    show_recipe.__doc__ = f"Print a shipped recipe for `{command}`, as a starting point; without a name, list them."
    return show_recipe
