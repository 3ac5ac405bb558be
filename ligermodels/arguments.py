"""Checks of arguments: integers within bounds, finite numbers within fp32, names of formats."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, cast, get_args

from ligermodels.errors import ConfigError, InputError, short

IGNORE_INDEX = -100
"""Label of tokens that are not trained on."""

Function = TypeVar("Function", bound=Callable[..., Any])

LARGEST = 1e38
"""Bound of numbers that are stored in fp32."""

QuantizedFormat = Literal["float8", "int4", "nf4", "mxfp4"]
"""Formats of quantised weights: see `ops.quantize_weight`."""
ExpertFormat = Literal["target_parameters", "per_expert", "shared_outer"]
"""How files name the LoRA of experts; see `ligermodels.adapt.expert_files`."""
OptimizerName = Literal["adamw", "adafactor", "muon", "adamw8bit", "muon8bit"]
ActivationCheckpointing = Literal["none", "selective", "full", "offload"]
"""What the backward pass computes again, the least memory on the GPU last: see `CausalLM.activation_checkpointing`."""
Divergence = Literal["forward_kl", "reverse_kl", "jsd", "tv", "l1", "nla", "lk"]
"""Losses of a distribution against another: see `ops.linear_distillation`."""

MOST_HEADS = 1000
"""Largest number of draft heads, of steps of a head, and of its layers: file formats use three digits for them."""

MTP_STEPS = 3
"""Default number of tokens beyond the next one that a head of multi-token prediction predicts."""
EAGLE_STEPS, EAGLE_DECAY = 7, 0.8
"""Defaults of EAGLE-3: how often the head is applied in training, and of step k the weight EAGLE_DECAY ** k."""
EAGLE_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Names of published EAGLE-3 heads' fields for variants of the head; see `Eagle3Config`."""

Condition = tuple[tuple[str, ...], Callable[[Mapping[str, Any]], bool], str]
"""Names of settings; a function of all settings: whether these have an effect; the reason if they have none."""

BLOCK_LOSS: tuple[Condition, ...] = (
    (("gamma",), lambda settings: settings["dpace_alpha"] is None, "is for weights that dpace_alpha replaces"),
    (("divergence",), lambda settings: settings["divergence_weight"] != 0, "has the weight 0 (divergence_weight)"),
)
"""Conditions on the loss of DFlash and DSpark heads."""
CONFIDENCE: tuple[Condition, ...] = (
    (("confidence_weight",), lambda settings: settings["confidence"], "is for confidence, which is false"),
)
MARKOV: tuple[Condition, ...] = (
    (
        ("markov_head_type",),
        lambda settings: settings["markov_rank"] != 0,
        "is for a Markov head, and markov_rank is 0",
    ),
    (
        ("confidence_with_markov",),
        lambda settings: settings["confidence"] and settings["markov_rank"] != 0,
        "is for confidence and a Markov head, and confidence is false or markov_rank 0",
    ),
)
"""Conditions on the parts of DSpark heads."""


def is_whole(value: object) -> bool:
    """Whether `value` is a whole number, of numpy too; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether `value` is a real number, of numpy too; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_sequence(value: object) -> bool:
    """Whether `value` is a list, a tuple or another sequence; text and bytes are not."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?" with the name of `known` that is nearest to `name`; empty if none is near."""
    matches = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def check_names(function: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Check the names of a call's options.

    Args:
        function: name of the function, for the message.
        options: the given names.
        known: the names that the function has.

    Raises:
        TypeError: a name is unknown. The message has the nearest known name.
    """
    known = list(known)
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"{function}: unknown option {unknown[0]!r}{nearest(unknown[0], known)}")


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters of a function that can be given by name."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind not in (2, 4)]  # not *args, **options


def without_effect(
    conditions: Sequence[Condition], settings: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Settings that differ from their default but have no effect.

    A generator, so that the caller can reset a setting before the next is checked.

    Args:
        conditions: when settings have an effect.
        settings: name -> value of all settings.
        defaults: name -> default of all settings.

    Yields:
        (name, reason) of a setting.
    """
    for names, has_effect, reason in conditions:
        for name in names:
            if settings[name] != defaults[name] and not has_effect(settings):
                yield name, reason


def no_effect(name: str, reason: str) -> str:
    """The message about a setting without effect: its `reason`, which may say what to give too, and what to do."""
    return f"{name}: {reason}; otherwise leave it out"


def check_effect(conditions: Sequence[Condition], values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise InputError for the first argument that has no effect: see `without_effect` for the arguments."""
    for name, reason in without_effect(conditions, values, defaults):
        raise InputError(no_effect(name, reason))


def names_checked(function: Function) -> Function:
    """`function`, which checks the names of its options (`check_names`) before it runs."""
    known = parameter_names(function)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        check_names(function.__qualname__, options, known)
        return function(*args, **options)

    return cast(Function, call)


def check_count(name: str, value: Any, *, least: int = 1, most: int = 2**31 - 1) -> int:
    """`value` as an int.

    Args:
        name: name of the argument, for the message.
        value: the value to check.
        least: smallest allowed value.
        most: largest allowed value.

    Raises:
        InputError: it is no whole number from `least` to `most`.
    """
    if not is_whole(value) or value < least:
        raise InputError(f"{name}: must be a whole number of at least {least}, got {short(value)}")
    if value > most:
        raise InputError(f"{name}: must be at most {most:,}, got {short(value)}")
    return int(value)


def check_optimizer(optimizer: OptimizerName, *, in_backward: bool, is_sharded: bool) -> None:
    """Raise ConfigError for an optimizer that does not support sharded parameters, or updates in the backward pass.

    Args:
        optimizer: name of the optimizer.
        in_backward: whether the backward pass updates each parameter (optimizer_in_bwd).
        is_sharded: whether parameters are sharded over several ranks.
    """
    if optimizer == "adafactor" and is_sharded:
        raise ConfigError("optimizer: adafactor does not work on sharded parameters; use adamw")
    if in_backward and (optimizer == "adafactor" or (is_sharded and optimizer.startswith("muon"))):
        where = "" if optimizer == "adafactor" else " of sharded parameters"
        raise ConfigError(
            f"optimizer: {optimizer} has no updates{where} in the backward pass (optimizer_in_bwd); use adamw or "
            "adamw8bit, or leave optimizer_in_bwd out"
        )


def check_number(name: str, value: Any, *, positive: bool = False, most: float = LARGEST) -> Any:
    """Returns `value`.

    Args:
        name: name of the argument, for the message.
        value: the value to check.
        positive: whether 0 is not allowed.
        most: largest allowed value.

    Raises:
        InputError: it is no finite number of at least 0, or above 0 if `positive`; or it is above `most`.
    """
    if not is_number(value) or not 0 <= value < LARGEST or (positive and value == 0):
        raise InputError(f"{name}: must be a number {'above' if positive else 'of at least'} 0, got {short(value)}")
    if value > most:
        raise InputError(f"{name}: must be at most {most:g}, got {short(value)}")
    return value


def check_flag(name: str, value: Any) -> bool:
    """Returns `value`. Raises InputError unless it is True or False: another object, such as "no", counts as True."""
    if not isinstance(value, bool):
        raise InputError(f"{name}: must be True or False, got {short(value)}")
    return value


def check_flags(owner: str, **flags: Any) -> None:
    """`check_flag` of several arguments, by name, of the function `owner`."""
    for name, value in flags.items():
        check_flag(f"{owner}: {name}", value)


def check_function(name: str, value: Any) -> None:
    """Raise InputError unless `value` is None or callable."""
    if value is not None and not callable(value):
        raise InputError(f"{name}: must be a function, got {short(value)}")


def check_token_id(name: str, value: Any) -> int:
    """`value` as an int. Raises InputError unless it is a whole number within int64."""
    if not is_whole(value) or not -(2**63) <= value < 2**63:
        raise InputError(f"{name} must be a token's id or a list of them, got {short(value)}")
    return int(value)


def check_format(name: str, value: object) -> None:
    """Raise InputError unless `value` is a format of quantised weights."""
    if not isinstance(value, str) or value not in get_args(QuantizedFormat):
        raise InputError(f"{name}: must be one of {', '.join(get_args(QuantizedFormat))}, got {short(value)}")
