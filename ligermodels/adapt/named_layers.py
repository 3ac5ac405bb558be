"""The layers that adapter_config.json names, compared with the layers that the adapter's file has tensors for."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from typing import Any

from ligermodels.adapt.patterns import full_matches
from ligermodels.adapt.targets import ends_with
from ligermodels.convert.files import ADAPTER, ADAPTER_CONFIG
from ligermodels.convert.json_values import is_int, is_list_of
from ligermodels.errors import AdapterWarning, short, warn_caller


def warn_of_other_layers(config: Mapping[str, Any], adapted: Collection[str], known: Collection[str]) -> None:
    """AdapterWarning if `target_modules` and the tensors name different layers.

    The tensors decide here. PEFT leaves out the tensors of layers that the config does not name, without a word, and
    warns of layers without tensors.

    Args:
        config: the fields of adapter_config.json.
        adapted: paths in transformers of the linear layers that have tensors.
        known: paths of the linear layers that the config may name.
    """
    named = named_layers(config, sorted({*adapted, *known}))
    if named is None:
        return
    differences = {
        f"has tensors of {{}} layers that it does not name, such as {{}}, which PEFT would leave out ({ADAPTER})": (
            set(adapted) - named
        ),
        f"names {{}} layers that {ADAPTER} has no tensors for, such as {{}}": named - set(adapted),
    }
    for text, layers in differences.items():
        if layers:
            warn_caller(
                f"{ADAPTER_CONFIG}: target_modules = {short(config['target_modules'])}: "
                f"{text.format(len(layers), min(layers))}; the layers with tensors are adapted",
                AdapterWarning,
            )


def named_layers(config: Mapping[str, Any], paths: Sequence[str]) -> set[str] | None:
    """The `paths` that a config names by `target_modules`, `exclude_modules` and `layers_to_transform`, as in PEFT.

    None if the fields do not tell: "all-linear", values that PEFT does not write, or `layers_pattern`.
    """
    targets, indices = config.get("target_modules"), config.get("layers_to_transform")
    if not targets or str(targets).lower() == "all-linear" or config.get("layers_pattern"):
        return None
    try:
        named = _matching(targets, paths) - _matching(config.get("exclude_modules") or [], paths)
    except (ValueError, TypeError, OSError, subprocess.SubprocessError):  # it could not be matched
        return None
    if indices is None or indices == [] or isinstance(targets, str):
        return named
    indices = [indices] if is_int(indices) else indices
    if not is_list_of(indices, is_int):
        return None
    numbers = {path: re.search(r"\.(\d+)\.", path) for path in named}
    return {path for path, number in numbers.items() if path in targets or (number and int(number[1]) in indices)}


def _matching(names: Any, paths: Sequence[str]) -> set[str]:
    """The paths that a regular expression matches, or that end with a name. ValueError for another value."""
    if isinstance(names, str):
        return set(compress(paths, full_matches(names, paths)))
    if not is_list_of(names, lambda name: isinstance(name, str)):
        raise ValueError("is neither an expression nor a list of names")
    return {path for path in paths if any(ends_with(path, name) for name in names)}
