"""Options that several commands share; flags made from the settings of a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from typer.core import TyperCommand

from ligermodels.arguments import QuantizedFormat
from ligermodels.console import progress
from ligermodels.errors import BackendError, InputError, arguments_named
from ligermodels.training.recipe import TrainingRecipe
from ligermodels.training.renamed import flag, warn

if TYPE_CHECKING:
    from ligermodels.models.causal_lm import CausalLM
    from ligermodels.speculative.multi_head import MultiHeadModel
    from ligermodels.speculative.tree import DynamicTree


Dtype = Literal["bfloat16", "float16", "float32", "float64"]
"""Dtypes of parameters, by torch's names."""
Checkpoint = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint folder, or a Hugging Face hub id.")]
DtypeOption = Annotated[
    Dtype | None, typer.Option("--dtype", help="Dtype of the parameters.  [default: the checkpoint's]")
]
Device = Annotated[str | None, typer.Option(help="Device to run on.  [default: cuda if there is a GPU, else cpu]")]
Attention = Annotated[str, typer.Option(help="Attention backend.")]
Base = Annotated[str, typer.Argument(metavar="BASE", help="The model: a checkpoint folder, or a Hugging Face hub id.")]
Heads = Annotated[
    str, typer.Argument(metavar="HEADS", help="The heads, in any format of `export`; an MTP head also in a checkpoint.")
]

DATA = typer.Option("--data", help=f"{TrainingRecipe.model_fields['data'].description} May be repeated.")
ChatTemplate = Annotated[str | None, typer.Option(help=TrainingRecipe.model_fields["chat_template"].description)]
Date = Annotated[str | None, typer.Option(help="YYYY-MM-DD, for chat templates that write it.  [default: today]")]
MaxShardSize = Annotated[str, typer.Option(help="Largest weight file, as 5GB or 500MB.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is in the output folder.")]


def device_named(name: str | None) -> str:
    """The device `name`; if it is None, cuda if there is a GPU, else cpu.

    Raises typer.BadParameter for a name that is no device, BackendError for a CUDA device that is not there.
    """
    import torch

    from ligermodels.parallel.ranks import rank_device_type

    if name is None:
        return rank_device_type()
    try:
        device_type = torch.device(name).type
    except RuntimeError:
        raise typer.BadParameter(f"{name!r} is not a torch device", param_hint="--device") from None
    if device_type == "meta":
        raise typer.BadParameter("the meta device has no values and computes nothing", param_hint="--device")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"device {name!r}: torch finds no CUDA device here")
    return name


def folder_of(path: str) -> Path:
    """The local folder of a checkpoint, fetched from the hub if necessary."""
    from ligermodels.convert import hub

    return hub.resolve(path)


@dataclass(frozen=True)
class Loading:
    """How a command loads its model: a group of options (`flags.with_groups`).

    Raises typer.BadParameter for options that contradict one another.
    """

    dtype: DtypeOption = None
    device: Device = None
    attention: Attention = "auto"
    quantize: Annotated[
        QuantizedFormat | None,
        typer.Option("--quantize", help="Round the weights of the blocks' linear layers while they are loaded."),
    ] = None
    quantize_exclude: Annotated[
        list[str] | None,
        typer.Option(help="Patterns of layers that are not rounded, such as mlp.experts. May be repeated."),
    ] = None
    quantize_head: Annotated[
        QuantizedFormat | None,
        typer.Option(
            help="With --quantize: round the LM head too. A head that is tied to the embedding gets a weight of its "
            "own."
        ),
    ] = None

    def __post_init__(self) -> None:
        for name, value in (("--quantize-exclude", self.quantize_exclude), ("--quantize-head", self.quantize_head)):
            if value and self.quantize is None:
                raise typer.BadParameter("is for --quantize", param_hint=name)

    def round(self, model: CausalLM) -> CausalLM:
        """Round the weights of a model by --quantize, if it is given."""
        if self.quantize is None:
            return model
        from ligermodels.adapt.quantize import quantize

        with arguments_named(exclude="--quantize-exclude", head="--quantize-head"):
            return quantize(model, self.quantize, exclude=self.quantize_exclude or (), head=self.quantize_head)

    def load(self, path: str | Path) -> CausalLM:
        """Load the model of a checkpoint, a folder or a hub id, with a progress bar."""
        from ligermodels.ops.runtime.tensors import dtype_named
        from ligermodels.pretrained import from_pretrained

        dtype = dtype_named(self.dtype)
        device, attention = device_named(self.device), self.attention
        with progress(f"loading {path}", in_bytes=True) as update:
            return from_pretrained(
                path, dtype=dtype, device=device, attention=attention, progress=update, prepare=self.round
            )


ON_CPU = Loading(device="cpu")
"""For commands that only read and write a checkpoint."""


def require_heads(heads: str, command: str | None = None) -> None:
    """Check heads, in a folder or on the hub, before their base model is loaded: of the kind of `command`, such as
    "eagle", or of any kind.

    Raises:
        CheckpointError, HubError: there are no such heads.
        ConfigError: the heads are of another kind.
    """
    from ligermodels.models.extra_heads import require_command
    from ligermodels.speculative.hub import config_of_heads

    config = config_of_heads(heads)
    if command is not None:
        require_command(config, command, heads)


def load_heads(
    base: CausalLM, heads: str, draft_tree: DynamicTree | None = None, confidence_threshold: float | None = None
) -> MultiHeadModel:
    """Load draft heads, with a progress bar.

    Args:
        base: their base model.
        heads: folder or hub id of the heads.
        draft_tree: the tree of --draft-tree.
        confidence_threshold: the number of --confidence-threshold.

    Raises:
        InputError: these heads cannot draft the tree, or have no confidences.
    """
    from ligermodels.speculative.load import load_multi_head

    with progress(f"loading {heads}", in_bytes=True) as update:
        model = load_multi_head(base, heads, progress=update)
    if confidence_threshold is not None:
        if not hasattr(model, "confidence_threshold"):
            raise InputError(f"--confidence-threshold: is for DSpark heads, and {heads} holds heads of {model.kind}")
        cast(Any, model).confidence_threshold = confidence_threshold
    if draft_tree is not None or confidence_threshold is not None:
        with arguments_named(tree="--draft-tree", confidence_threshold="--confidence-threshold"):
            model.drafter(model.default_tree() if draft_tree is None else draft_tree)
    return model


def refuse_given(ctx: typer.Context, names: Iterable[str], reason: str) -> None:
    """Refuse parameters that would do nothing.

    Args:
        ctx: the command's context.
        names: names of the parameters.
        reason: why they would do nothing, for the message after the flag.

    Raises:
        typer.BadParameter: the command line has one of them.
    """
    for name in names:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(reason, param_hint=flag(name))


def require_free(folder: Path, overwrite: bool) -> None:
    """Raise CheckpointError if the command could not write to `folder` at its end."""
    from ligermodels.convert import saving

    if not overwrite:
        saving.require_free(folder)


def renaming(flags: Mapping[str, str], values: Mapping[tuple[str, str], str] | None = None) -> type[TyperCommand]:
    """A class of commands that accept old names of flags, and old values of flags, with a DeprecationWarning.

    Args:
        flags: old flag -> new flag.
        values: (new flag, old value) -> new value.
    """

    def current(args: Sequence[str]) -> Iterator[str]:
        name = ""
        for part in (part for arg in args for part in (arg.split("=", 1) if arg.startswith("--") else [arg])):
            new = flags.get(part) or (values or {}).get((name, part))
            if new is not None:
                warn(part if part in flags else f"{name} {part}", new)
            name = new or part
            yield name

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            return super().parse_args(ctx, list(current(args)))

    return Command
