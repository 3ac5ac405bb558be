"""Shared parts of the commands that train: options, recipe, output folder, and the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ligermodels.cli import launch, options
from ligermodels.cli.dry_run import show_dry_run
from ligermodels.console import is_first_rank, progress, say
from ligermodels.errors import ConfigError
from ligermodels.training.mtp_recipe import NEW
from ligermodels.training.recipe import R, TrainingRecipe
from ligermodels.training.recipe_file import parse_setting, recipe_settings, recipe_text, shipped_recipes

if TYPE_CHECKING:
    from ligermodels.training import Console, Outcome

Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting, with its value as in a recipe. May be repeated."),
]
Out = Annotated[Path | None, typer.Option(help="Folder to write the result to.")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Continue the run in the output folder, with its settings; with more --steps, extend it."
    ),
]

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Train and write nothing: read the data, and print counts, steps, memory and the first batch."
    ),
]


def recipe_of(
    recipe_class: type[R],
    file: str | None,
    base: str | None,
    settings: Mapping[str, Any],
    assignments: Sequence[str],
    *,
    resumed: Path | None = None,
) -> R:
    """The recipe of a command.

    Args:
        recipe_class: class of the recipe.
        file: a YAML file or the name of a shipped recipe; None for the defaults.
        base: the base model; None for the base in the recipe.
        settings: settings from flags.
        assignments: settings from --set, as KEY=VALUE; they take precedence over flags.
        resumed: folder of the run to resume; its settings take the place of the defaults. None for a new run.

    Raises:
        ConfigError: the file cannot be read, a setting is unknown, or a value is wrong; or `resumed` is a run of
            another command.
    """
    recipe = recipe_class() if resumed is None else _recipe_of_run(recipe_class, resumed)
    if file:
        recipe = recipe.changed(recipe_settings(file, recipe_class.kind), file)
    given = dict(settings)
    for name, value in (parse_setting(text, "--set") for text in assignments):
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
    return recipe_class.read(file)


def require_given(recipe: TrainingRecipe, resumed: Path | None, base_name: str) -> None:
    """Raise typer.BadParameter if the recipe has no base (argument `base_name`) or no data; `resumed` is the folder of
    the run to resume."""
    for value, name in ((recipe.base, base_name), (recipe.data, "--data")):
        if not value:
            run = "" if resumed is None else f"; there is no run in {resumed} to take it from"
            raise typer.BadParameter(f"give it, or a recipe that names it{run}", param_hint=name)


def require_usable(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise CheckpointError if the run could not write to `out`, or not resume there.

    Under torchrun only the first process checks this; its failure ends the others.

    Args:
        out: the output folder.
        resume: whether the run resumes.
        overwrite: whether the content of the folder may be replaced.
    """
    if not is_first_rank():
        return
    from ligermodels.training import folder

    folder.require_usable(out, resume=resume, overwrite=overwrite)


def run(
    ctx: typer.Context,
    recipe_class: type[R],
    train: str,
    base_name: str,
    base: str | None,
    recipe: str | None,
    settings: Mapping[str, Any] | None,
    assignments: Sequence[str] | None,
    out: Path | None,
    *,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    gpus: int | None,
    device: str | None,
    attention: str,
) -> Outcome:
    """Train, in this process or in several, and print where the result is.

    Args:
        ctx: context of the command.
        recipe_class: class of the recipe.
        train: name of the function in `ligermodels.training` that trains.
        base_name: name of the argument for the base model.
        base: the base model; None for the base in the recipe.
        recipe: a YAML file or the name of a shipped recipe; None for the defaults.
        settings: settings from flags.
        assignments: settings from --set, as KEY=VALUE.
        out: the output folder.
        resume: continue from the newest checkpoint in `out`.
        overwrite: replace the content of `out`.
        dry_run: describe the run instead.
        gpus: number of processes, see `launch`; None for this process.
        device: device of the model; None for a GPU if there is one.
        attention: attention backend, or "auto".

    Raises:
        typer.Exit: the run was stopped, was described, or has run in other processes.
    """
    resumed = out if resume else None
    chosen = recipe_of(recipe_class, recipe, base, settings or {}, assignments or [], resumed=resumed)
    if resume and out is None:
        raise typer.BadParameter("give the folder of the run to resume", param_hint="--out")
    require_given(chosen, resumed, base_name)
    where: dict[str, Any] = {"attention": attention, "resume": resume, "overwrite": overwrite}
    if dry_run:
        show_dry_run(chosen, out, gpus=gpus or 1, device=options.device_named(device), console=console(), **where)
        raise typer.Exit
    if out is None:
        raise typer.BadParameter("give a folder for the result", param_hint="--out")
    require_usable(out, resume=resume, overwrite=overwrite)
    start: str | None = chosen.settings().get("start_from")
    if start is not None and start != NEW and not resume:
        options.require_heads(start, chosen.kind)
    if gpus is not None and gpus > 1:  # here, so that such an error is not that of a rank
        from ligermodels.training.preview import check_names

        check_names(chosen)
    launch.launch(ctx, gpus, device)
    device = options.device_named(device)

    from ligermodels import training

    with resumable(out):
        outcome: Outcome = getattr(training, train)(chosen, out, device=device, console=console(), **where)
    show_end(outcome, out)
    return outcome


def train_heads_command(recipe_class: type[TrainingRecipe], train: str, about: str) -> Callable[..., None]:
    """A command that trains heads and prints their scores.

    Args:
        recipe_class: class of the recipe.
        train: name of the function in `ligermodels.training` that trains.
        about: first line of the command's help.
    """

    def command(
        ctx: typer.Context,
        base: Annotated[
            str | None,
            typer.Argument(
                metavar="BASE", help="The model: a checkpoint folder, or a hub id.  [default: the recipe's]"
            ),
        ] = None,
        recipe: Annotated[
            str | None,
            typer.Option(help="A YAML file of settings, or the name of a shipped recipe: see the command `recipe`."),
        ] = None,
        assignments: Assignments = None,
        out: Out = None,
        resume: Resume = False,
        dry_run: DryRun = False,
        gpus: launch.Gpus = None,
        device: options.Device = None,
        attention: options.Attention = "auto",
        overwrite: options.Overwrite = False,
        settings: dict[str, Any] | None = None,
    ) -> None:
        outcome = run(
            ctx, recipe_class, train, "BASE", base, recipe, settings, assignments, out, resume=resume,
            overwrite=overwrite, dry_run=dry_run, gpus=gpus, device=device, attention=attention,
        )  # fmt: skip
        if (evaluation := outcome.evaluation) is None:
            return
        from ligermodels.cli.evaluation import show_scores

        show_scores(evaluation.scores)
        if (kl := evaluation.kl) is not None:
            say(f"the model: KL to the reference {kl.kl:.4f} nats per token, perplexity {kl.perplexity_change:+.2%}")

    command.__name__, command.__doc__ = "train", f"{about}\n\n{HOW_A_RUN_GOES}"
    return options.with_recipe_flags(recipe_class)(command)


HOW_A_RUN_GOES = """Flags take precedence over the recipe, and the recipe over the defaults. At the end the heads are
evaluated on the validation split. On SIGTERM and Ctrl-C the run finishes the step and saves a checkpoint. --resume
--out FOLDER continues a run that was stopped or killed, with the settings in its folder; with more --steps it is
extended."""


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
