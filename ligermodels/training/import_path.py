"""Objects of users, by their import paths."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from ligermodels.errors import ConfigError


def imported(path: str, setting: str) -> Any:
    """The object at an import path such as "package.module:Class". Modules in the current folder are found too.
    Messages name the `setting` that holds the path.

    Raises:
        ConfigError: another form, a module that cannot be imported, or no such name in it.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{setting}: must be module:name, such as my_code:name; got {path!r}")
    folder = os.getcwd()
    sys.path.insert(0, folder)  # like `python -m`
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        where = "" if error.name != module_name else f", neither installed nor in {folder}"
        raise ConfigError(f"{setting}: {path}: there is no module {error.name!r}{where}") from error
    except Exception as error:  # the module is the user's
        message = f"importing {module_name} failed: {type(error).__name__}: {error}"
        raise ConfigError(f"{setting}: {path}: {message}") from error
    finally:
        sys.path.remove(folder)
    if not hasattr(module, name):
        raise ConfigError(f"{setting}: {path}: {name} does not exist in {module.__file__ or module_name}")
    return getattr(module, name)
