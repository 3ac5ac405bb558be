"""Flags of commands that are made from data: from the settings of a recipe, and from groups of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ligermodels.training.recipe import TrainingRecipe
from ligermodels.training.renamed import flag
from ligermodels.training.settings import SHORT


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
    return lambda command: _with_flags(command, {name: recipe.model_fields[name] for name in names})


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for each field of its groups of options: of parameters annotated with a dataclass."""
    own = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {name: p.annotation for name, p in own.items() if is_dataclass(p.annotation)}
    shown: list[inspect.Parameter] = []
    for name, parameter in own.items():
        kinds = get_type_hints(groups[name], include_extras=True) if name in groups else {}
        members = fields(groups[name]) if name in groups else ()
        each = [parameter.replace(name=m.name, default=m.default, annotation=kinds[m.name]) for m in members]
        shown += each or [parameter]

    def wrapped(**arguments: Any) -> None:
        for name, group in groups.items():
            given = {member.name for member in fields(group)} & arguments.keys()
            arguments[name] = group(**{member: arguments.pop(member) for member in given})
        command(**arguments)

    return _presented(wrapped, command, shown)


def _presented(wrapped: Any, command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Any:
    """`wrapped`, with the name and help of `command`, and these parameters, all by name."""
    by_name = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__signature__ = inspect.Signature(by_name)
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in by_name}
    return wrapped


def _with_flags(command: Callable[..., None], settings_of: Mapping[str, FieldInfo]) -> Callable[..., None]:
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "settings"]
    names = {p.name for p in own} | settings_of.keys()
    flags, sections = [], dict[str, str]()
    for name, field in settings_of.items():
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
                element = _element(settings_of[name]) if name in settings_of else None
                value = _numbers(name, value, element) if element in (int, float) else value
                (settings.setdefault(sections[name], {}) if name in sections else settings)[name] = value
        command(**arguments, settings=settings)

    return _presented(wrapped, command, [*own, *flags])


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
    names = [flag(name) + (f"/--no-{name.replace('_', '-')}" if kind is bool else "")]
    names += [flag(SHORT[name])] if name in SHORT else []
    if get_origin(kind) in (tuple, dict):  # KEY=VALUE for a dict
        kind = list[str]
    annotation = Annotated[kind | None, typer.Option(*names, help=text, **limits)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
