"""Settings that name files or code: a run keeps the names that hold in every folder, so that it resumes anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Located:
    """Marks a setting that names files or code, in the annotation of its field.

    absolute: function from a value to the value with the same meaning in every folder.
    compared: function from such a value to the part of it that must stay when a run resumes.
    """

    absolute: Callable[[str], str]
    compared: Callable[[str], str] = str


def absolute_path(name: str) -> str:
    """The absolute path of `name` in the current folder. Links in it stay."""
    return str(Path(name).expanduser().absolute())


def local_path(name: str, words: tuple[str, ...] = ()) -> str:
    """The absolute path of the file or folder `name`, if there is one; else the name itself, such as a hub id.

    Args:
        name: a name that a local file takes precedence for.
        words: values with a meaning of their own, for which it does not.
    """
    return name if name in words or not os.path.exists(os.path.expanduser(name)) else absolute_path(name)


def absolute_data(name: str) -> str:
    """See `data.files.absolute_name`."""
    from ligermodels.data.files import absolute_name  # the command line shows its help without huggingface_hub

    return absolute_name(name)


LOCAL = Located(local_path)
"""A file, a folder or a hub id."""


def local_except(*words: str) -> Located:
    """A file, a folder, a hub id, or one of `words`."""
    return Located(partial(local_path, words=words))


def absolute_settings(fields: Mapping[str, FieldInfo], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose files and code are named so that they are found from every folder.

    Args:
        fields: the fields of the recipe by name.
        settings: name -> value, as JSON types.
    """
    return _mapped(fields, settings, lambda located: located.absolute)


def comparable_settings(fields: Mapping[str, FieldInfo], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose values are equal if they name the same files and code: see `absolute_settings`."""
    return _mapped(fields, absolute_settings(fields, settings), lambda located: located.compared)


def _mapped(
    fields: Mapping[str, FieldInfo], settings: Mapping[str, Any], of: Callable[[Located], Callable[[str], str]]
) -> dict[str, Any]:
    values = dict(settings)
    for name, value in settings.items():
        marks = fields[name].metadata if name in fields else ()  # earlier releases had further settings
        for one in (of(mark) for mark in marks if isinstance(mark, Located)):
            values[name] = list(map(one, value)) if isinstance(value, list) else value and one(value)
    return values
