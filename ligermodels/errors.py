"""Exceptions of ligermodels. Their messages name the field, tensor or file that is wrong, and say how to fix it."""

import contextlib
import functools
import os
import reprlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

OWN_FILES = (os.path.join(os.path.dirname(__file__), ""), contextlib.__file__, functools.__file__)
"""Files of frames between a user's line and a warning: the package, and what calls its contexts and decorators."""


class LigerModelsError(Exception):
    """Base class of every error that ligermodels raises on bad input."""


class ConfigError(LigerModelsError, ValueError):
    """A model configuration has a missing, contradictory or unsupported field."""


class ConfigWarning(UserWarning):
    """A field of a model configuration is not used, because it is unknown or because the weights contradict it."""


class CheckpointError(LigerModelsError, ValueError):
    """A checkpoint's files or tensors are missing, damaged or do not fit the model."""


class CheckpointWarning(UserWarning):
    """The newest checkpoint of a run is damaged, and an older one is used."""


class AdapterWarning(UserWarning):
    """LoRA leaves out layers that a user may expect it to adapt, a file cannot hold all of its settings, its config and
    its tensors name different layers, or an adapter is for a model with other weights."""


class SequenceLengthWarning(UserWarning):
    """A sequence is longer than the model's `max_position_embeddings`."""


class GraphWarning(UserWarning):
    """Training steps run without the CUDA graph that was asked for."""


class Float8Warning(UserWarning):
    """A large part of a model's weights has no rule for float8 and stays in the model's dtype."""


class EngineWarning(UserWarning):
    """New weights reach an inference engine by a slower way than its GPU has."""


class HubError(LigerModelsError, OSError):
    """A repository could not be found, reached or read on the Hugging Face hub."""


class InputError(LigerModelsError, ValueError):
    """A tensor or argument given to a model, an op or a generation call is not usable."""


class BackendError(LigerModelsError, RuntimeError):
    """A requested backend is not installed, or does not support the request."""


class TrainingError(LigerModelsError, RuntimeError):
    """Training cannot continue: the loss or the gradient is not finite, there is no target, or a rank has ended."""


YAML_WORDS = {"a valid tuple": "a list", "a valid boolean": "true or false", "a valid dictionary": "a mapping"}
"""Types in messages of pydantic, which are Python's -> the words of YAML and JSON."""


def validation_message(error: Any) -> str:
    """One entry of a pydantic error's `errors()` in one line. Messages of our own validators are not changed."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    text = error["msg"].replace("Input should be", "must be")
    for theirs, ours in YAML_WORDS.items():
        text = text.replace(theirs, ours)
    return f"{'.'.join(map(str, error['loc']))}: {text}, got {short(error['input'])}"


@contextlib.contextmanager
def arguments_named(**names: str) -> Iterator[None]:
    """Replace the name of an argument at the beginning of an error message: name in the called function -> the caller's
    name for the same value."""
    try:
        yield
    except LigerModelsError as error:
        name, colon, rest = str(error).partition(": ")
        if not colon or name not in names:
            raise
        raise type(error)(f"{names[name]}: {rest}") from None


def short(value: Any) -> str:
    """`value` for a message: one short line, for values of any length and depth."""
    try:
        return " ".join(_SHORT.repr(value).splitlines())  # a tensor has several lines
    except (ValueError, RecursionError):  # Python does not print integers of thousands of digits
        return f"a {type(value).__name__} too long to show"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlist = _SHORT.maxdict = 8


def warn_caller(message: str, category: type[Warning]) -> None:
    """`warnings.warn(message, category)` with the line that called the package, however many frames lie between."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OWN_FILES):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
