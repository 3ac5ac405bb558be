"""Typed reading of a Hugging Face config: every error names the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from ligermodels.archs.rope import read_rope
from ligermodels.archs.unread import DROPOUT, check_unread
from ligermodels.convert.config_json import are_token_ids
from ligermodels.convert.json_values import is_int, is_list_of, is_number
from ligermodels.convert.rope_settings import LAYER_THETAS, rope_fields, rope_parameters
from ligermodels.errors import ConfigError, short
from ligermodels.layers import RopeConfig

_REQUIRED = object()
SLIDING, FULL = "sliding_attention", "full_attention"
UNREAD_ROPE = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
"""Fields of rope that transformers does not read for newer families: `rope_parameters` has all settings."""
ONLY_NEW_ROPE = dict.fromkeys(UNREAD_ROPE[:3], None)
"""Older fields of rope. Exports leave them out: transformers would read them in place of settings by layer type."""
DENSE, SPARSE = "dense", "sparse"

MOST = {"num_hidden_layers": 1024, "num_local_experts": 4096, "num_experts": 4096, "head_dim": 65536}
MOST |= {"num_attention_heads": 65536, "qk_rope_head_dim": 65536}
MOST |= {"num_layers": 1024, **dict.fromkeys(("n_routed_experts", "num_nextn_predict_layers", "num_mtp_layers"), 4096)}
"""Field -> largest value, far above real models. These sizes determine how many objects are built before any weight is
read, so a bad value would take all memory."""
MOST_EXPERTS = 2**17
"""Largest number of experts of all layers together; each has tensors of its own in checkpoints."""


def renamed(config: Mapping[str, Any], name: str, other: str) -> Mapping[str, Any]:
    """`config` with the value of field `other` under `name`, a second name of the same field.

    ConfigError if the config has both names with different values.
    """
    value, alias = config.get(name), config.get(other)
    if alias is not None and value is not None and alias != value:
        raise ConfigError(f"config.json: {name} = {short(value)} contradicts {other} = {short(alias)}; remove one")
    rest = {key: entry for key, entry in config.items() if key != other}
    return rest if alias is None else {**rest, name: alias}


def name_of(config: Mapping[str, Any], name: str, *others: str) -> str:
    """The name of a field in `config`: `name`, or one of its other names. ConfigError if two exist and contradict."""
    for other in others:
        renamed(config, name, other)
        name = other if config.get(name) is None and config.get(other) is not None else name
    return name


ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings")
"""Fields that `Fields.rope` reads."""


class Fields:
    """Reads fields of a config, and checks their types.

    A field that is missing or null gets the default of the call; without a default this is an error. All methods raise
    ConfigError, naming the field, for a value of another type or out of range.

    Args:
        config: the config.
        defaults: values of fields that are missing in `config`. Null in `config` is not replaced.
        where: name of the config in messages.
    """

    def __init__(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, *, where: str = "config.json"
    ) -> None:
        self.config: Mapping[str, Any] = {**(defaults or {}), **config}
        self.where = where
        self._read = {*(defaults or {}), *ROPE}

    def replaced(self, **fields: Any) -> Fields:
        """A copy with other values of some `fields`. A field that is read from either counts as read in both."""
        other = Fields({**self.config, **fields}, where=self.where)
        other._read = self._read
        return other

    def ignore(self, *names: str) -> None:
        """Count the fields `names` as read: configs of the family have them, and they change nothing."""
        self._read.update(names)

    def dropout(self) -> tuple[str, ...]:
        """The fields that ask for dropout in training, such as "attention_dropout = 0.1"."""
        probabilities = {name: self.number(name, 0.0, negative=False) for name in DROPOUT}
        return tuple(f"{name} = {value}" for name, value in probabilities.items() if value)

    def check_unread(self) -> None:
        """Warn about, or refuse, fields that were not read and have no default: see `unread.check_unread`.

        Also refuse rotary settings that an export cannot write, of models without positions too.
        """
        check_unread(self.config, self._read, self.where)
        rope_fields(self.config)

    def _raw(self, name: str) -> Any:
        """The field's value, unchecked; None if it is missing."""
        self._read.add(name)
        return self.config.get(name)

    def _get(self, name: str, default: Any) -> Any:
        value = self._raw(name)
        if value is None:
            if default is _REQUIRED:
                raise ConfigError(f"{self.where}: field {name!r} is missing")
            return default
        return value

    def _fail(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}: field {name!r} must be {expected}, got {short(self.config.get(name))}")

    def size(self, name: str, default: Any = _REQUIRED, *, zero: bool = False) -> int:
        """The whole number in field `name`.

        Args:
            name: the field.
            default: value if it is missing or null; by default this is an error.
            zero: whether 0 is allowed.
        """
        value = self._get(name, default)
        if not is_int(value) or value < (not zero):
            raise self._fail(name, f"a whole number {'from 0 on' if zero else 'above 0'}")
        if value > (most := MOST.get(name, 2**31 - 1)):
            raise ConfigError(f"{self.where}: {name} must be at most {most}, got {short(value)}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, positive: bool = False, negative: bool = True) -> float:
        """The number in field `name`.

        Args:
            name: the field.
            default: value if it is missing or null; by default this is an error.
            positive: whether it must be above 0.
            negative: whether it may be below 0.
        """
        value = self._get(name, default)
        if not is_number(value) or not abs(value) < 1e38:  # False for NaN too; fp32 can hold numbers within the bound
            raise self._fail(name, "a finite number")
        if positive and value <= 0:
            raise self._fail(name, "above 0")
        if not negative and value < 0:
            raise self._fail(name, "0 or above")
        return float(value)

    def optional_size(self, name: str) -> int | None:
        """The whole number above 0 in field `name`; None if it is missing or null."""
        return None if self._raw(name) is None else self.size(name)

    def optional_number(self, name: str) -> float | None:
        """The number above 0 in field `name`; None if it is missing or null."""
        return None if self._raw(name) is None else self.number(name, positive=True)

    def kinds(self, name: str, known: tuple[str, ...], otherwise: Callable[[int], str]) -> list[str]:
        """The kind of each layer.

        Args:
            name: field with a list of kinds.
            known: the possible kinds.
            otherwise: function (layer number) -> kind, if the field is missing or null.
        """
        count, kinds = self.size("num_hidden_layers"), self._raw(name)
        if kinds is None:
            return [otherwise(layer) for layer in range(count)]
        if not is_list_of(kinds, lambda kind: kind in known) or len(kinds) != count:
            raise self._fail(name, f"a list of num_hidden_layers = {count} times {' or '.join(map(repr, known))}")
        return list(kinds)

    def windows(self, slides: Callable[[int], bool]) -> list[int | None]:
        """Each layer's sliding window, or None: by `layer_types`, or without it by the function `slides(layer)`."""
        types = self.kinds("layer_types", (SLIDING, FULL), lambda layer: SLIDING if slides(layer) else FULL)
        if SLIDING in types and self._raw("sliding_window") is None:
            raise ConfigError(
                f"{self.where}: layer_types has {SLIDING!r}, but sliding_window is missing or switched off"
            )
        return [self.size("sliding_window") if layer_type == SLIDING else None for layer_type in types]

    def flags(self, name: str, otherwise: Callable[[int], bool]) -> list[bool]:
        """The list of 0 and 1, one per layer, in field `name`; without it, the function `otherwise` (layer number)."""
        count, flags = self.size("num_hidden_layers"), self._raw(name)
        if flags is None:
            return [otherwise(layer) for layer in range(count)]
        if not is_list_of(flags, lambda flag: flag in (0, 1)) or len(flags) != count:
            raise self._fail(name, f"a list of num_hidden_layers = {count} times 0 or 1")
        return [bool(flag) for flag in flags]

    def same(self, name: str, default: int) -> int:
        """The whole number above 0 in field `name`, or the only one in its list of one number for each layer."""
        value, count = self._raw(name), self.size("num_hidden_layers")
        if not isinstance(value, list):
            return self.size(name, default)
        if len(value) != count or any(number != value[0] for number in value):
            raise self._fail(name, f"a number, or a list of num_hidden_layers = {count} equal numbers")
        return Fields({name: value[0]}, where=self.where).size(name)

    def per_layer(self, name: str, otherwise: Callable[[int], float]) -> list[float]:
        """The list of numbers from 0 on, one per layer, in field `name`; without it, `otherwise` (layer number)."""
        count = self.size("num_hidden_layers")
        if self._raw(name) is None:
            return [otherwise(layer) for layer in range(count)]
        values = self.numbers(name, count, reason=", one for each of num_hidden_layers")
        if min(values) < 0:
            raise self._fail(name, "a list of numbers from 0 on")
        return list(values)

    def layers(self, name: str) -> frozenset[int]:
        """The layer numbers, counted from 0, in field `name`; empty if it is missing or null."""
        layers = self._get(name, [])
        if not is_list_of(layers, lambda layer: is_int(layer) and layer >= 0):
            raise self._fail(name, "a list of whole numbers, from 0 on")
        return frozenset(layers)

    def check_token(self, name: str, *, several: bool = False) -> None:
        """Check that field `name` is missing, null, a token id or, if `several`, a list of token ids.

        Ids outside the vocabulary pass; published checkpoints have them, and use negative ids for "no token".
        """
        if not are_token_ids(self._raw(name), several=several):
            raise self._fail(name, "a token's id" + " or a list of them" * several)

    def experts(self, name: str, per_token: str = "num_experts_per_tok") -> tuple[int, int]:
        """Number of experts and number of experts per token, from the fields `name` and `per_token`."""
        experts, chosen, layers = self.size(name), self.size(per_token), self.size("num_hidden_layers")
        if chosen > experts:
            raise ConfigError(f"{self.where}: {per_token} {chosen} is above {name} {experts}")
        if experts * layers > MOST_EXPERTS:
            raise ConfigError(
                f"{self.where}: {name} = {experts:,} in num_hidden_layers = {layers:,} are more experts than the "
                f"{MOST_EXPERTS:,} that are supported"
            )
        return experts, chosen

    def router_aux_loss_coef(self) -> float:
        """Weight of the load-balancing loss; 0 without `output_router_logits`."""
        return self.number("router_aux_loss_coef") if self.flag("output_router_logits", False) else 0.0

    def flag(self, name: str, default: bool) -> bool:
        """The boolean in field `name`. Null is false, as in transformers, which asks for the truth of its value."""
        value = self._get(name, default and name not in self.config)
        if not isinstance(value, bool):
            raise self._fail(name, "true or false")
        return value

    def choices(self, name: str, *implemented: Any, default: Any) -> Any:
        """The value of field `name`; ConfigError if it is not one of the `implemented` values."""
        value = self._get(name, default)
        is_flag = isinstance(value, bool) and not any(isinstance(each, bool) for each in implemented)
        if is_flag or value not in implemented:  # True equals 1
            known = ", ".join(map(repr, implemented))
            raise ConfigError(f"{self.where}: {name} = {short(value)} is not implemented; implemented: {known}")
        return value

    def reject_tied(self) -> None:
        """ConfigError if the config ties the LM head: for families in which transformers never does."""
        if self.flag("tie_word_embeddings", False):
            family = self.config.get("model_type", "this family")
            raise ConfigError(
                f"{self.where}: tie_word_embeddings = true is not implemented: transformers never ties the LM head of "
                f"{family}; set it to false, and keep lm_head.weight in the weights"
            )

    def repeats(self, name: str, other: str) -> None:
        """ConfigError if the config has a value in field `name` that is not the size in field `other`."""
        size = self.size(other)
        if (value := self._get(name, size)) != size:
            raise ConfigError(f"{self.where}: {name} = {short(value)} must equal {other} = {size}")

    def numbers(self, name: str, count: int, *, positive: bool = False, reason: str = "") -> tuple[float, ...]:
        """The list of finite numbers in field `name`.

        Args:
            name: the field.
            count: required length.
            positive: whether the numbers must be above 0.
            reason: reason for the length, for the message.
        """
        values = self._get(name, _REQUIRED)
        if not isinstance(values, list | tuple) or len(values) != count:
            length = f" of {len(values)}" if isinstance(values, list | tuple) else f": {short(values)}"
            raise ConfigError(
                f"{self.where}: field {name!r} must be a list of {count} numbers, got one{length}{reason}"
            )
        items = Fields({f"{name}[{i}]": value for i, value in enumerate(values)}, where=self.where)
        return tuple(items.number(key, positive=positive) for key in items.config)

    def rope(
        self,
        head_dim: int,
        max_position_embeddings: int,
        default_theta: float | Mapping[str, Any] = 10_000.0,
        layer_type: str | None = None,
        *,
        partial: bool = False,
    ) -> RopeConfig:
        """The rotary embedding described by `rope_parameters`, or by `rope_theta` and `rope_scaling`.

        Args:
            head_dim: channels of a head.
            max_position_embeddings: context length; also the original context length if the config names no other.
            default_theta: rotary base of a config that names none, or a dict as in `rope_settings.rope_parameters`.
            layer_type: layers of the rope, such as "full_attention", in families with a rope for each layer type.
            partial: whether the family can rotate a part of each head only.
        """
        self.ignore(*ROPE, LAYER_THETAS.get(layer_type or "full_attention", "rope_theta"))
        settings = rope_parameters(self.config, default_theta, layer_type)
        where = "rope_parameters" if layer_type is None else f"rope_parameters.{layer_type}"
        return read_rope(Fields(settings, where=f"{self.where}: {where}"), head_dim, max_position_embeddings, partial)

    def ropes(
        self,
        head_dim: int | Mapping[str, int],
        thetas: Mapping[str, Any],
        windows: Sequence[int | None],
        unread: Sequence[str] = (),
        *,
        partial: bool = False,
    ) -> list[RopeConfig]:
        """Each layer's rope, in families with one rope for sliding-window layers and one for full-attention layers.

        Args:
            head_dim: channels of a head, or layer type -> channels of a head.
            thetas: layer type -> rotary base, or settings, of a config that names none.
            windows: each layer's sliding window, or None.
            unread: fields that releases of transformers read differently for this family. It is an error if one of
                them makes a difference.
            partial: whether the family can rotate a part of each head only.
        """
        context = self.size("max_position_embeddings")
        dims = dict.fromkeys((SLIDING, FULL), head_dim) if is_int(head_dim) else cast(Mapping[str, int], head_dim)
        sliding, full = (
            self.rope(dims[layer_type], context, thetas, layer_type, partial=partial) for layer_type in (SLIDING, FULL)
        )
        ropes = [full if window is None else sliding for window in windows]
        self.refuse_unread(unread, lambda fields: fields.ropes(head_dim, thetas, windows, partial=partial))
        return ropes

    def refuse_unread(self, names: Sequence[str], compose: Callable[[Fields], Any]) -> None:
        """ConfigError if a field of the rope that releases of transformers read differently makes a difference.

        Args:
            names: the fields.
            compose: function from fields to what they describe, such as each layer's rope.
        """
        for name in filter(self.config.get, names):
            if compose(self.replaced(**{name: None})) != compose(self):
                raise ConfigError(
                    f"{self.where}: {name} = {short(self.config[name])} does not mean the same to all readers of this "
                    f"model_type; write rope_parameters instead, in families with a rope for each layer type with an "
                    "object for each"
                )
