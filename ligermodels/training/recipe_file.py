"""Recipes as YAML: files of a user's, those that come with the package, and single settings."""

from __future__ import annotations

import os
import re
from importlib import resources
from typing import Any, ClassVar

import yaml

from ligermodels.convert.input_files import as_path, read_text
from ligermodels.errors import ConfigError

SHIPPED = resources.files("ligermodels.training") / "recipes"
"""A folder for each kind of recipe."""


def shipped_recipes(kind: str = "medusa") -> list[str]:
    """Names of the recipes of a kind, "medusa" or "train", that come with the package."""
    return sorted(file.name.removesuffix(".yaml") for file in (SHIPPED / kind).iterdir() if file.name.endswith(".yaml"))


def recipe_text(name_or_path: str | os.PathLike[str], kind: str = "medusa") -> str:
    """The content of a recipe's file, or of a shipped one of this kind. Raises ConfigError when it cannot be read."""
    path = as_path(name_or_path, ConfigError, "the recipe's file")
    if str(name_or_path) in shipped_recipes(kind) and not os.path.isfile(path):
        return (SHIPPED / kind / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    return read_text(path, ConfigError, hint=f"; the shipped recipes are {', '.join(shipped_recipes(kind))}")


def recipe_settings(name_or_path: str | os.PathLike[str], kind: str = "medusa") -> dict[str, Any]:
    """The settings in a recipe's file. Raises ConfigError, which names it, when it cannot be read or is not YAML."""
    content = _parse(recipe_text(name_or_path, kind), str(name_or_path))
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{name_or_path}: must hold 'key: value' lines")
    return content or {}


def parse_setting(text: str, source: str) -> tuple[str, Any]:
    """Name and value of a setting written as KEY=VALUE, the value as in a recipe's file.

    Raises ConfigError, which names `source`, for text that is neither.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"{source}: must be KEY=VALUE, got {text!r}")
    return name.strip(), _parse(value, f"{source} {name.strip()}")


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ConfigError(f"{source}: not YAML of a recipe: nested too deep") from None
    except Exception as error:  # Of values that a tag does not fit, PyYAML raises anything.
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())[:500]}") from None


class _Loader(yaml.SafeLoader):
    """YAML 1.1, except that dates are text, 1e-3 is a number, and a repeated key or an alias is an error."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {
        start: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
        for start, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # A few lines of them can stand for more than any memory holds.
            event = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, f"*{event.anchor}: recipes take no aliases; write the value", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[Any]()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is repeated", key_node.start_mark)
            seen.add(key)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
