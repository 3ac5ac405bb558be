"""What the commands that train share: their options, the recipe, the folder, and how a run ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ligermodels.cli import options
from ligermodels.console import is_first_rank, progress, say
from ligermodels.training.recipe import R, TrainingRecipe
from ligermodels.training.recipe_file import recipe_text, shipped_recipes

if TYPE_CHECKING:
    from ligermodels.training import Console, Outcome

Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting, its value as in a recipe. May be repeated."),
]
Out = Annotated[Path | None, typer.Option(help="Folder to write the result to.")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue from the newest checkpoint in the output folder, if any; with more --steps, extend the run.",
    ),
]

STOPPED, INTERRUPTED = 128 + 15, 128 + 2
"""Exit codes of a run that SIGTERM stopped, or Ctrl-C."""


def recipe_of(
    kind: type[R], file: str | None, base: str | None, settings: Mapping[str, Any], assignments: Sequence[str]
) -> R:
    """The recipe in `file`, by default that of the defaults, with `settings`, then `assignments`, of the command line.

    Raises ConfigError as `TrainingRecipe.read`, `changed` and `changed_by`.
    """
    found = (kind.read(file) if file else kind()).changed(settings, "the command line")
    found = found.changed_by(assignments, "--set")
    return found.changed({"base": base}) if base else found


def require_given(recipe: TrainingRecipe, out: Path | None, base_name: str) -> Path:
    """`out`; typer.BadParameter where the recipe lacks a base or data, or there is no output folder."""
    if not recipe.base:
        raise typer.BadParameter("give it, or a recipe that names it", param_hint=base_name)
    if not recipe.data:
        raise typer.BadParameter("give it, or a recipe that names it", param_hint="--data")
    if out is None:
        raise typer.BadParameter("give a folder for the result", param_hint="--out")
    return out


def require_usable(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Raises CheckpointError when `out` could not be written at the end, or holds nothing to resume. Of torchrun's
    processes the first one finds out: its failure ends the others."""
    if not is_first_rank():
        return
    from ligermodels.training.folder import has_checkpoints, require_resumable

    if not resume:
        options.require_free(out, overwrite, is_run=has_checkpoints(out))
    elif not overwrite:
        require_resumable(out)


def train_heads(
    kind: type[R],
    train: str,
    base: str | None,
    recipe: str | None,
    settings: Mapping[str, Any] | None,
    assignments: Sequence[str] | None,
    out: Path | None,
    *,
    resume: bool,
    overwrite: bool,
    device: str | None,
    attention: str,
) -> None:
    """What the commands that train heads do: a run by the function `train` of `ligermodels.training`, by its name, and
    the scores at its end."""
    chosen = recipe_of(kind, recipe, base, settings or {}, assignments or [])
    out = require_given(chosen, out, "BASE")
    place = options.device_named(device)
    require_usable(out, resume=resume, overwrite=overwrite)
    start: str | None = chosen.settings().get("start_from")
    if start is not None and not resume:
        options.require_heads(start)

    from ligermodels import training
    from ligermodels.cli.evaluation import show_scores

    run = getattr(training, train)
    with resumable(out):
        outcome = run(chosen, out, device=place, attention=attention, resume=resume, console=console())
    show_end(outcome, out)
    if (found := outcome.evaluation) is not None:
        show_scores(found.scores)
        if (kl := found.kl) is not None:
            say(f"the model: KL to the reference {kl.kl:.4f} nats per token, perplexity {kl.perplexity_change:+.2%}")


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Ctrl-C ends a run with what `--resume` can do then, and INTERRUPTED."""
    from ligermodels.training.folder import has_checkpoints

    try:
        yield
    except KeyboardInterrupt as error:
        if is_first_rank():
            how = "--resume continues" if has_checkpoints(out) else "there is no checkpoint yet"
            say(f"{str(error) or 'interrupted'}; {how}")
        raise typer.Exit(INTERRUPTED) from None


def console() -> Console:
    """A run's messages and progress, on standard error; of torchrun's processes the first one reports."""
    from ligermodels.training import Console

    return Console(say, progress) if is_first_rank() else Console()


def show_end(outcome: Outcome, out: Path) -> None:
    """Say where the result is. Exits with STOPPED for a run that has not finished, and ends other ranks than the
    first."""
    if is_first_rank():
        stopped = f"stopped after step {outcome.step:,} of {outcome.steps:,}; --resume continues"
        say(f"wrote {out}" if outcome.finished else stopped)
    if not outcome.finished:
        raise typer.Exit(STOPPED)
    if not is_first_rank():
        raise typer.Exit


def show_recipe_of(kind: type[TrainingRecipe]) -> Callable[[str | None], None]:
    """A command that prints shipped recipes of this kind."""

    def show_recipe(
        name: Annotated[str | None, typer.Argument(metavar="NAME", help="A shipped recipe.")] = None,
    ) -> None:
        typer.echo(recipe_text(name, kind.kind) if name else "\n".join(shipped_recipes(kind.kind)), nl=name is None)

    command = {"medusa": "medusa train", "mtp": "mtp train"}.get(kind.kind, kind.kind)
    show_recipe.__doc__ = f"Print a shipped recipe for `{command}`, as a starting point; without a name, list them."
    return show_recipe
