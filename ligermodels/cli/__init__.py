"""The command line: `ligermodels COMMAND`. Commands import torch and the models only when they run."""

import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ligermodels import __version__
from ligermodels.cli import (
    chat,
    checkpoint,
    data,
    demo,
    describe,
    draft_heads,
    generation,
    launch,
    lora,
    plan,
    runs,
    verify,
)
from ligermodels.console import outlive_terminal, say
from ligermodels.errors import InputError, LigerModelsError
from ligermodels.training.fine_tuning_recipe import FineTuningRecipe

# Some releases of typer depend on click, others contain a copy of it; this is the class that they raise.
CLICK_ERROR: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class Commands(TyperGroup):
    """Runs a command. An error that a user can cause is one line on standard error and an exit code, no traceback."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        arguments = list(args)  # parsing empties `args`
        with _one_line_errors():
            context = super().make_context(info_name, args, *rest, **extra)
        context.meta[launch.ARGUMENTS] = arguments
        return context

    def invoke(self, ctx: Any) -> Any:
        """Exit codes: 0 fine, 1 an error or a failed check, 2 wrong usage, 130 interrupted."""
        try:
            with _one_line_errors(), warnings.catch_warnings():
                warnings.filterwarnings("always", category=DeprecationWarning, module=r"ligermodels\.")
                shown: set[str] = set()  # a command may load a checkpoint, and so warn, several times
                warnings.showwarning = lambda message, *_: _warn_once(str(message), shown)
                result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # standard output is closed; without this Python would report it again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            if ctx.params["debug"]:
                raise
            if launch.is_first_to("interrupted"):
                say("interrupted")
            raise typer.Exit(130) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if not launch.is_first_to("error"):  # the first one is the cause, or the same on all ranks
                raise typer.Exit(1) from None
            message = _out_of_memory(error)
            if ctx.params["debug"] or not (message or isinstance(error, LigerModelsError | OSError)):
                raise
            rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
            say(f"{rank}error: {_in_flags(_one_line(message or error))}")
            raise typer.Exit(1) from None


def _warn_once(message: str, shown: set[str]) -> None:
    if message not in shown:
        shown.add(message)
        if launch.is_first_to(message):
            say(f"warning: {message}")


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Print wrong usage in the style of other errors."""
    try:
        yield
    except CLICK_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            raise
        ctx = getattr(error, "ctx", None)
        where = f" (see `{ctx.command_path} --help`)" if ctx is not None else ""
        message = _one_line(error.format_message()).replace("Value error, ", "").rstrip(".")
        options = {name for parameter in ctx.command.params for name in parameter.opts} if ctx is not None else set()
        if "unexpected extra argument" in message and "--data" in options:  # as of a pattern that the shell expands
            message += "; give --data for each file, or quote a pattern"
        say(f"error: {message}{where}")
        raise typer.Exit(error.exit_code) from None


def _one_line(error: Exception | str) -> str:
    first, *others = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    return f"{first} {'; '.join(others)}".strip()


def _in_flags(message: str) -> str:
    """`message` with flags in place of the arguments of Python that it tells to give."""
    message = re.sub(r"\b(overwrite|resume)=True", r"--\1", message)
    return re.sub(r"\bkeep='([\w-]+)'", r"--keep \1", message)


def _out_of_memory(error: Exception) -> str:
    """The message for an out-of-memory error of a GPU or the host; empty for any other error."""
    if type(error).__name__ == "OutOfMemoryError":  # by name: torch is not imported for every command
        return str(error)
    size = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(error))
    if size is None and not isinstance(error, MemoryError):
        return ""
    allocation = f" for {int(size[1]):,} bytes" if size else ""
    return f"out of memory{allocation}: give fewer tokens at a time, a smaller dtype, or another device"


app = typer.Typer(
    cls=Commands,
    help="Native transformer models: Hugging Face checkpoints in, trained models and Medusa heads out.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"ligermodels {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="LIGERMODELS_DEBUG", help="Show tracebacks of errors.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import", metavar="MODULE", help="Import a Python module or file first, which registers architectures."
        ),
    ] = None,
) -> None:
    # --debug and --version are read before this runs: see Commands.invoke and _version.
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for module in modules or ():
        _import(module)


def _import(name: str) -> None:
    """Import a module by its name, or a Python file."""
    path = Path(name)
    try:
        if path.suffix == ".py":
            spec = importlib.util.spec_from_file_location(f"imported_{path.stem}", path)
            if spec is None or spec.loader is None:
                raise ImportError("not a Python file")
            sys.path.insert(0, str(path.parent.resolve()))  # as for a script: it may import files in its folder
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, os.getcwd())
            importlib.import_module(name)
    except (ImportError, FileNotFoundError) as error:
        raise InputError(f"--import {name}: {error}") from error


for command in (describe.info, verify.verify, generation.generate, chat.chat, checkpoint.export, demo.demo):
    app.command()(command)
app.command(name="train")(
    runs.train_command(
        FineTuningRecipe,
        "Train a whole language model on texts, or on the assistant's turns of chats.\n\nAt the end the model is "
        "evaluated on the validation split and written as a Hugging Face checkpoint.",
        name="MODEL",
        base_help="A checkpoint folder, or a hub id, to fine-tune; or a config without weights, a folder or a .json "
        "file, to train from random weights.",
    )
)
app.command()(data.data)
app.command()(plan.plan)
app.command(name="recipe")(runs.show_recipe_of(FineTuningRecipe))
app.add_typer(lora.app, name="lora", help="LoRA adapters in PEFT's format.")
for kind, (trained, commands) in draft_heads.APPS.items():
    app.add_typer(commands, name=kind, help=f"Train, evaluate and export {trained}.")


def main() -> None:
    """Run the command line and exit."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by >&-; without this a file of the run would get its descriptor
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (open to the end)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # for characters that the terminal cannot encode
    outlive_terminal()
    app(prog_name="ligermodels")
