"""Exceptions of ligermodels: each names the field, tensor or file at fault and says what to do."""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class LigerModelsError(Exception):
    """Base class of every error that ligermodels raises on bad input."""


class ConfigError(LigerModelsError, ValueError):
    """A model configuration has a missing, contradictory or unsupported field."""


class ConfigWarning(UserWarning):
    """A model configuration has a field that is not known and not used."""


class CheckpointError(LigerModelsError, ValueError):
    """A checkpoint's files or tensors are missing, damaged or do not fit the model."""


class CheckpointWarning(UserWarning):
    """The newest checkpoint of a run is damaged, and an older one is used."""


class SequenceLengthWarning(UserWarning):
    """A sequence is longer than the model's `max_position_embeddings`."""


class Float8Warning(UserWarning):
    """A large part of a model's weights has no rule for float8, and stays in the model's dtype."""


class HubError(LigerModelsError, OSError):
    """A repository could not be found, reached or read on the Hugging Face hub."""


class InputError(LigerModelsError, ValueError):
    """A tensor or argument given to a model, an op or a generation call is not usable."""


class BackendError(LigerModelsError, RuntimeError):
    """A requested backend is not installed, or cannot do what was asked of it."""


class TrainingError(LigerModelsError, RuntimeError):
    """Training cannot go on: the loss or the gradient is not finite."""


def validation_message(error: Any) -> str:
    """One of a pydantic error's `errors()` in one line. Those of our own validators say all themselves."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    text = error["msg"].replace("Input should be", "must be")
    return f"{'.'.join(map(str, error['loc']))}: {text}, got {short(error['input'])}"


@contextmanager
def arguments_named(**names: str) -> Iterator[None]:
    """Errors about arguments that are passed on begin with the caller's names of them: `names` maps those of the
    function called to these."""
    try:
        yield
    except LigerModelsError as error:
        name, colon, rest = str(error).partition(": ")
        if not colon or name not in names:
            raise
        raise type(error)(f"{names[name]}: {rest}") from None


def short(value: Any) -> str:
    """`value` for a message: one line of bearable length, however long or deep it is."""
    try:
        return " ".join(_SHORT.repr(value).splitlines())  # a tensor has several
    except (ValueError, RecursionError):  # Python writes no whole numbers of thousands of digits.
        return f"a {type(value).__name__} too long to show"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlist = _SHORT.maxdict = 8
