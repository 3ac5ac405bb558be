"""Options that several commands share, and what they stand for."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ligermodels.console import progress
from ligermodels.errors import BackendError, CheckpointError

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


def load_heads(base: CausalLM, folder: Path) -> MedusaModel:
    """Medusa heads for `base`, with a bar."""
    from ligermodels.archs.medusa import MedusaModel

    with progress(f"loading {folder}", in_bytes=True) as update:
        return MedusaModel.from_pretrained(base, folder, progress=update)


def require_free(folder: Path, overwrite: bool) -> None:
    """CheckpointError when `folder` could not be written at the end: better said before hours of work than after."""
    if not overwrite and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder}: exists and is not an empty folder; give another, or --overwrite")
