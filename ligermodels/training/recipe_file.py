"""Recipes in YAML: a user's files, the files that come with the package, and single settings."""

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
    """Names of the recipes that come with the package, for "medusa", "mtp" or "train"."""
    return sorted(file.name.removesuffix(".yaml") for file in (SHIPPED / kind).iterdir() if file.name.endswith(".yaml"))


def recipe_text(name_or_path: str | os.PathLike[str], kind: str = "medusa") -> str:
    """The content of a recipe's file or of a shipped recipe. Raises ConfigError if it cannot be read."""
    path = as_path(name_or_path, ConfigError, "the recipe's file")
    if str(name_or_path) in shipped_recipes(kind) and not os.path.isfile(path):
        return (SHIPPED / kind / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    return read_text(path, ConfigError, hint=f"; the shipped recipes are {', '.join(shipped_recipes(kind))}")


def recipe_settings(name_or_path: str | os.PathLike[str], kind: str = "medusa") -> dict[str, Any]:
    """The settings in a recipe's file. Raises ConfigError that names the file if it cannot be read or is not YAML."""
    content = _parse(recipe_text(name_or_path, kind), str(name_or_path))
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{name_or_path}: must hold 'key: value' lines")
    return content or {}


def parse_setting(text: str, source: str) -> tuple[str, Any]:
    """Name and value of a setting written as KEY=VALUE, with the value in YAML.

    Raises ConfigError for other text; the message names `source`.
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
    except Exception as error:  # PyYAML raises many types for values that do not fit their tag
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())[:500]}") from None


class _Loader(yaml.SafeLoader):
    """YAML 1.1, except that dates are text, 1e-3 is a number, and a repeated key or an alias is an error."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {
        start: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for start, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # a few lines of aliases can expand to more than the memory holds
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
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
