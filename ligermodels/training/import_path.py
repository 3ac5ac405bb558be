"""Objects of users, by their import paths."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ligermodels.errors import ConfigError


def absolute_import(path: str) -> str:
    """The import path that finds the same object from every folder: FOLDER/MODULE:NAME for a module in the current
    folder; `path` itself for a module that is installed."""
    folder, module, _ = _parts(path)
    if not module:
        return path  # `imported` refuses it
    code = Path(folder, *module.split("."))
    if folder or any(file.is_file() for file in (code.with_name(f"{code.name}.py"), code / "__init__.py")):
        return str(Path(folder).expanduser().absolute() / os.path.basename(path))
    return path


def short_import(path: str) -> str:
    """An import path without its folder, MODULE:NAME."""
    return os.path.basename(path)


def _parts(path: str) -> tuple[str, str, str]:
    """The folder ("" for the current one), module and name of an import path."""
    module, _, name = path.rpartition(":")
    return os.path.dirname(module), os.path.basename(module), name


def imported(path: str, setting: str) -> Any:
    """The object at an import path such as "package.module:Class". Modules in the current folder are found too, and
    modules in the folder of "folder/module:Class". Messages name the `setting` that holds the path.

    Raises:
        ConfigError: another form, a file, a module that cannot be imported, or no such name in it.
    """
    folder, module_name, name = _parts(path)
    if not (module_name and name):
        raise ConfigError(f"{setting}: must be module:name, such as my_code:name; got {path!r}")
    if module_name.endswith(".py"):
        instead = os.path.join(folder, module_name.removesuffix(".py"))
        raise ConfigError(f"{setting}: {path}: names a file; give its module, {instead}:{name}")
    place = str(Path(folder).expanduser().absolute())
    sys.path.insert(0, place)  # like `python -m`
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        where = "" if error.name != module_name else f", neither installed nor in {place}"
        raise ConfigError(f"{setting}: {path}: there is no module {error.name!r}{where}") from error
    except Exception as error:  # the module is the user's
        message = f"importing {module_name} failed: {type(error).__name__}: {error}"
        raise ConfigError(f"{setting}: {path}: {message}") from error
    finally:
        sys.path.remove(place)
        if place not in sys.path:
            sys.path.append(place)  # the code may import modules beside it when it is called
    file = getattr(module, "__file__", None) or module_name  # modules within the interpreter have none
    if folder and not Path(file).resolve().is_relative_to(Path(place).resolve()):
        raise ConfigError(f"{setting}: {path}: another module with this name has been imported, {file}; rename one")
    if not hasattr(module, name):
        raise ConfigError(f"{setting}: {path}: {name} does not exist in {file}")
    return getattr(module, name)


class NamedFunction(NamedTuple):
    """A function of a user, which is called by name.

    call: the function.
    parameters: its parameters by name -> whether they have a default.
    takes_all: whether it has **kwargs.
    """

    call: Callable[..., Any]
    parameters: Mapping[str, bool]
    takes_all: bool


def function_at(path: str, setting: str) -> NamedFunction:
    """The function at an import path: see `imported`.

    Raises:
        ConfigError: it cannot be imported, is not a function, is asynchronous, or has a parameter without a name.
    """
    function = imported(path, setting)
    if inspect.isclass(function) or not callable(function):
        raise ConfigError(f"{setting}: {path}: is not a function")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{setting}: {path}: is asynchronous; give a plain function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(f"{setting}: {path} has no signature; give a Python function") from None
    if unnamed := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise ConfigError(f"{setting}: {path} has a parameter {unnamed[0]!r} that cannot be given by name")
    named = {p.name: p.default is not p.empty for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return NamedFunction(function, named, any(p.kind is p.VAR_KEYWORD for p in parameters))
