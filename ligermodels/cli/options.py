"""Options that several commands share, and what they stand for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import Field, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args, get_origin

import typer

from ligermodels.console import progress
from ligermodels.errors import BackendError, CheckpointError
from ligermodels.training.recipe import HINTS, Recipe, kinds

if TYPE_CHECKING:
    import torch

    from ligermodels.archs.medusa import MedusaModel
    from ligermodels.model import CausalLM


class Dtype(str, Enum):
    """Dtypes that parameters may have; the names are torch's."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    float64 = "float64"

    @property
    def torch(self) -> torch.dtype:
        """The dtype itself."""
        import torch

        found: torch.dtype = getattr(torch, self.value)
        return found


Checkpoint = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint folder, or a Hugging Face hub id.")]
DtypeOption = Annotated[
    Dtype | None, typer.Option("--dtype", help="Dtype of the parameters.  [default: the checkpoint's]")
]
Device = Annotated[str | None, typer.Option(help="Where to run.  [default: cuda if there is one, else cpu]")]
Attention = Annotated[str, typer.Option(help="Attention backend.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is in the output folder.")]


def device_named(name: str | None) -> str:
    """`name`, checked; by default cuda if there is one, else cpu."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise typer.BadParameter(f"{name!r} is not a torch device", param_hint="--device") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"device {name!r}: torch finds no CUDA device here")
    return name


def folder_of(path: str) -> Path:
    """The local folder of a checkpoint; one on the hub is fetched first."""
    from ligermodels.convert import hub

    return hub.resolve(path)


def load(path: str | Path, dtype: Dtype | None, device: str, attention: str = "auto") -> CausalLM:
    """`from_pretrained`, with a bar."""
    from ligermodels.pretrained import from_pretrained

    with progress(f"loading {path}", in_bytes=True) as update:
        return from_pretrained(
            path, dtype=dtype.torch if dtype else None, device=device, attention=attention, progress=update
        )


def load_heads(base: CausalLM, heads: str) -> MedusaModel:
    """Medusa heads for `base`, from a folder or the hub, with a bar."""
    from ligermodels.archs.medusa import MedusaModel

    with progress(f"loading {heads}", in_bytes=True) as update:
        return MedusaModel.from_pretrained(base, heads, progress=update)


def require_free(folder: Path, overwrite: bool, *, is_begun: bool = False) -> None:
    """CheckpointError when `folder` could not be written at the end: better said before hours of work than after.

    `is_begun`: what is there is a run that --resume goes on with.
    """
    if is_begun and not overwrite:
        raise CheckpointError(
            f"{folder}: holds the checkpoints of a run; --resume goes on from the newest, --overwrite removes them and "
            "begins anew"
        )
    if not overwrite and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder}: exists and is not an empty folder; give another, or --overwrite")


SHORT = {"learning_rate": ["--lr"]}
"""Second names of flags."""


def with_recipe_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, with a flag for each setting of a recipe that is no parameter of its own.

    Those that are given come as `settings`, by name, the others not at all.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "settings"]
    names = {p.name for p in own}
    flags = [_flag(field) for field in fields(Recipe) if field.name not in names]

    def wrapped(**given: Any) -> None:
        settings = {flag.name: value for flag in flags if (value := given.pop(flag.name)) not in (None, [])}
        plain = {name: value.value if isinstance(value, Enum) else value for name, value in settings.items()}
        command(**given, settings=plain)

    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in [*own, *flags]}
    return wrapped


def _flag(field: Field[Any]) -> inspect.Parameter:
    kind: Any = next(each for each in kinds(HINTS[field.name]) if each is not type(None))
    about = dict(field.metadata)
    limits = {
        limit: kind(about[name])
        for limit, name in (("min", "at_least"), ("max", "at_most"))
        if kind in (int, float) and math.isfinite(about[name])
    }
    if get_origin(kind) is Literal:
        kind = cast(Any, Enum)(field.name, {choice: choice for choice in get_args(kind)}, type=str)
    elif get_origin(kind) is tuple:
        kind = list[str]
    text = about["help"]
    if field.default not in (None, ()) and "[default" not in text:
        text += f"  [default: {field.default}]"
    name = field.name.replace("_", "-")
    names = f"--{name}/--no-{name}" if kind is bool else f"--{name}"
    option = typer.Option(names, *SHORT.get(field.name, ()), help=text, **limits)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
