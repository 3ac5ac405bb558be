"""Options that several commands share; flags made from the settings of a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
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
Quantize = Annotated[
    QuantizedFormat | None,
    typer.Option("--quantize", help="Round the weights of the blocks' linear layers while they are loaded."),
]
QuantizeExclude = Annotated[
    list[str] | None,
    typer.Option(help="Patterns of layers that are not rounded, such as mlp.experts. May be repeated."),
]
QuantizeHead = Annotated[
    QuantizedFormat | None,
    typer.Option(
        help="With --quantize: round the LM head too. A head that is tied to the embedding gets a weight of its own."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is in the output folder.")]


def device_named(name: str | None) -> str:
    """The device `name`; if it is None, cuda if there is a GPU, else cpu.

    Raises typer.BadParameter for a name that is no device, BackendError for a CUDA device that is not there.
    """
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
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


Prepare = Callable[["CausalLM"], object] | None
"""Changes a model before its weights are loaded: see `from_pretrained`."""


def quantizing(weights: QuantizedFormat | None, exclude: Sequence[str] | None, head: QuantizedFormat | None) -> Prepare:
    """A function that rounds the weights of a model (`lm.quantize`); None if `weights` is None.

    Args:
        weights: format of the weights of the blocks' linear layers.
        exclude: patterns of layers that are not rounded.
        head: format of the LM head; None: it is not rounded.
    """
    if weights is None:
        for name, value in (("--quantize-exclude", exclude), ("--quantize-head", head)):
            if value:
                raise typer.BadParameter("is for --quantize", param_hint=name)
        return None

    def quantized(model: CausalLM) -> object:
        from ligermodels.adapt.quantize import quantize

        with arguments_named(exclude="--quantize-exclude", head="--quantize-head"):
            return quantize(model, weights, exclude=exclude or (), head=head)

    return quantized


def load(
    path: str | Path, dtype: Dtype | None, device: str, attention: str = "auto", prepare: Prepare = None
) -> CausalLM:
    """Load a model with a progress bar.

    Args:
        path: checkpoint folder or hub id.
        dtype: dtype of the parameters; None for the dtype of the checkpoint.
        device: device of the model.
        attention: attention backend, or "auto".
        prepare: changes the model before its weights are loaded.
    """
    import torch

    from ligermodels.pretrained import from_pretrained

    torch_dtype = None if dtype is None else getattr(torch, dtype)
    with progress(f"loading {path}", in_bytes=True) as update:
        return from_pretrained(
            path, dtype=torch_dtype, device=device, attention=attention, progress=update, prepare=prepare
        )


def require_heads(heads: str, command: str | None = None) -> None:
    """Check heads before their base model is loaded.

    Args:
        heads: folder or hub id of the heads.
        command: a command for heads of one kind, such as "eagle"; None: heads of any kind.

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


def require_free(folder: Path, overwrite: bool) -> None:
    """Raise CheckpointError if the command could not write to `folder` at its end.

    Args:
        folder: the output folder.
        overwrite: whether its content may be replaced.
    """
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


SHORT = {"learning_rate": ["--lr"]}
"""Second names of flags."""


def with_recipe_flags(
    recipe: type[TrainingRecipe], only: Sequence[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that adds a flag to a command for each setting of a recipe and of its sections.

    Args:
        recipe: class of the recipe.
        only: names of the settings that get a flag; None for all.

    A parameter of the command takes the place of a flag with the same name. The command gets the flags on the command
    line as `settings`, by name.
    """
    parts = cast("tuple[type[BaseModel], ...]", TrainingRecipe.__bases__)
    later = {name for part in parts for name in part.model_fields}  # a recipe's own settings are listed first
    names = sorted((name for name in recipe.model_fields if only is None or name in only), key=later.__contains__)
    fields = {name: recipe.model_fields[name] for name in names}
    return lambda command: _with_flags(command, fields)


def _with_flags(command: Callable[..., None], fields: Mapping[str, FieldInfo]) -> Callable[..., None]:
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "settings"]
    names = {p.name for p in own} | fields.keys()
    flags, sections = [], dict[str, str]()
    for name, field in fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            for inner, inner_field in field.annotation.model_fields.items():
                if inner not in names:
                    flags.append(_flag(inner, inner_field))
                    sections[inner] = name
        elif name not in {p.name for p in own}:
            flags.append(_flag(name, field))

    def wrapped(**arguments: Any) -> None:
        settings: dict[str, Any] = {}
        for name in (parameter.name for parameter in flags):
            if (value := arguments.pop(name)) not in (None, []):
                element = _element(fields[name]) if name in fields else None
                value = _numbers(name, value, element) if element in (int, float) else value
                (settings.setdefault(sections[name], {}) if name in sections else settings)[name] = value
        command(**arguments, settings=settings)

    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in [*own, *flags]}
    return wrapped


def _element(field: FieldInfo) -> Any:
    """Type of the elements of a setting that is a tuple; None for other settings."""
    kinds = (field.annotation, *get_args(field.annotation))  # the setting may be None
    return next((get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple), None)


def _numbers(name: str, texts: Sequence[str], kind: Callable[[str], float]) -> list[float]:
    """The numbers of a flag that may be repeated, or have several numbers with commas between them."""
    try:
        return [kind(part) for text in texts for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"must be numbers, got {', '.join(texts)}", param_hint=flag(name)) from None


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    kind: Any = field.annotation
    if type(None) in get_args(kind):
        (kind,) = (each for each in get_args(kind) if each is not type(None))
    limits = {
        short: kind(limit)
        for short, long in (("min", "ge"), ("max", "le"))
        for limit in (getattr(each, long, None) for each in field.metadata)
        if limit is not None
    }
    text = field.description or ""
    if field.default not in (None, (), {}) and "[default" not in text:
        text += f"  [default: {field.default}]"
    names = [flag(name) + (f"/--no-{name.replace('_', '-')}" if kind is bool else ""), *SHORT.get(name, ())]
    if get_origin(kind) in (tuple, dict):  # KEY=VALUE for a dict
        kind = list[str]
    annotation = Annotated[kind | None, typer.Option(*names, help=text, **limits)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
