"""Typed reading of a Hugging Face config dict: every error names the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ligermodels.archs.rope import read_rope
from ligermodels.archs.unread import check_unread
from ligermodels.convert.config_json import LAYER_THETAS, are_token_ids, rope_parameters, short
from ligermodels.errors import ConfigError
from ligermodels.layers import RopeConfig

_REQUIRED = object()
SLIDING, FULL = "sliding_attention", "full_attention"

MOST = {"num_hidden_layers": 4096, "num_local_experts": 4096, "num_experts": 4096, "head_dim": 65536}
MOST |= {"num_attention_heads": 65536, "qk_rope_head_dim": 65536}
MOST |= dict.fromkeys(("n_routed_experts", "num_nextn_predict_layers", "num_mtp_layers"), 4096)
"""Bounds on sizes by which objects or tables are made before any weight is looked for, far above those in use."""


def renamed(config: Mapping[str, Any], name: str, other: str) -> Mapping[str, Any]:
    """`config` with field `name` in place of `other`, its other name; ConfigError where the two contradict."""
    value, theirs = config.get(name), config.get(other)
    if theirs is not None and value is not None and theirs != value:
        raise ConfigError(f"config.json: {name} = {short(value)} contradicts {other} = {short(theirs)}; remove one")
    rest = {key: each for key, each in config.items() if key != other}
    return rest if theirs is None else {**rest, name: theirs}


ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings")
"""Fields that `Fields.rope` reads."""


class Fields:
    """Reads fields of a config; a field that is absent or null takes the default, or is an error without one.

    Args:
        config: the config.
        defaults: fields that `config` has if it does not name them; a null in `config` stays a null.
        where: what `config` is called in messages.
    """

    def __init__(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, *, where: str = "config.json"
    ) -> None:
        self.config: Mapping[str, Any] = {**(defaults or {}), **config}
        self.where = where
        self._read = {*(defaults or {}), *ROPE}

    def replaced(self, **fields: Any) -> Fields:
        """These with other values of some `fields`. What is read of either counts as read of both."""
        other = Fields({**self.config, **fields}, where=self.where)
        other._read = self._read
        return other

    def ignore(self, *names: str) -> None:
        """Count fields as read: those that configs of a family have, and that change nothing there."""
        self._read.update(names)

    def check_unread(self) -> None:
        """Check the fields that were not read and have no default: see `unread.check_unread`."""
        check_unread(self.config, self._read, self.where)

    def _found(self, name: str) -> Any:
        """The field as found, None where it is absent."""
        self._read.add(name)
        return self.config.get(name)

    def _get(self, name: str, default: Any) -> Any:
        value = self._found(name)
        if value is None:
            if default is _REQUIRED:
                raise ConfigError(f"{self.where}: field {name!r} is missing")
            return default
        return value

    def _fail(self, name: str, wanted: str) -> ConfigError:
        return ConfigError(f"{self.where}: field {name!r} must be {wanted}, got {short(self.config.get(name))}")

    def size(self, name: str, default: Any = _REQUIRED, *, zero: bool = False) -> int:
        """A whole number above zero, or zero where that is allowed."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < (not zero):
            raise self._fail(name, f"a whole number{'' if zero else ' above 0'}")
        if value > (most := MOST.get(name, 2**31 - 1)):
            raise ConfigError(f"{self.where}: {name} must be at most {most}, got {short(value)}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, positive: bool = False, negative: bool = True) -> float:
        """A finite number, above zero when `positive`, and not below it unless `negative`."""
        value = self._get(name, default)
        # The bound, within fp32's range, also turns NaN away.
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e38:
            raise self._fail(name, "a finite number")
        if positive and value <= 0:
            raise self._fail(name, "above 0")
        if not negative and value < 0:
            raise self._fail(name, "0 or above")
        return float(value)

    def optional_size(self, name: str) -> int | None:
        """A whole number above zero, or None for null or nothing."""
        return None if self._found(name) is None else self.size(name)

    def optional_number(self, name: str) -> float | None:
        """A number above zero, or None for null or nothing."""
        return None if self._found(name) is None else self.number(name, positive=True)

    def kinds(self, name: str, known: tuple[str, str], otherwise: Callable[[int], str]) -> list[str]:
        """One of the two `known` kinds for each layer; without that field, `otherwise` of the layer."""
        count, found = self.size("num_hidden_layers"), self._found(name)
        if found is None:
            return [otherwise(layer) for layer in range(count)]
        if not isinstance(found, list) or len(found) != count or any(each not in known for each in found):
            raise self._fail(name, f"a list of num_hidden_layers = {count} times {known[0]!r} or {known[1]!r}")
        return found

    def windows(self, slides: Callable[[int], bool]) -> list[int | None]:
        """Each layer's sliding window, by `layer_types`; without that field, `slides` says which layers have one."""
        types = self.kinds("layer_types", (SLIDING, FULL), lambda layer: SLIDING if slides(layer) else FULL)
        if SLIDING in types and self._found("sliding_window") is None:
            raise ConfigError(
                f"{self.where}: layer_types has {SLIDING!r}, but sliding_window is missing or switched off"
            )
        return [self.size("sliding_window") if each == SLIDING else None for each in types]

    def flags(self, name: str, otherwise: Callable[[int], bool]) -> list[bool]:
        """A 0 or 1 for each layer; without that field, `otherwise` of the layer."""
        count = self.size("num_hidden_layers")
        found = self._found(name)
        if found is None:
            return [otherwise(layer) for layer in range(count)]
        if not isinstance(found, list) or len(found) != count or not all(each in (0, 1) for each in found):
            raise self._fail(name, f"a list of num_hidden_layers = {count} times 0 or 1")
        return [bool(each) for each in found]

    def layers(self, name: str) -> frozenset[int]:
        """A list of layers' numbers, from 0 on; null or nothing is an empty one."""
        found = self._get(name, [])
        if not isinstance(found, list) or not all(type(each) is int and each >= 0 for each in found):
            raise self._fail(name, "a list of whole numbers, from 0 on")
        return frozenset(found)

    def check_token(self, name: str, *, several: bool = False) -> None:
        """See that there is a token's id, or with `several` a list of them, or null or nothing.

        Ids outside the vocabulary pass: published checkpoints have them, and negative ones that stand for none.
        """
        if not are_token_ids(self._found(name), several=several):
            raise self._fail(name, "a token's id" + " or a list of them" * several)

    def experts(self, name: str) -> tuple[int, int]:
        """How many experts there are, which field `name` says, and how many of them a token meets."""
        experts, chosen = self.size(name), self.size("num_experts_per_tok")
        if chosen > experts:
            raise ConfigError(f"{self.where}: num_experts_per_tok {chosen} is above {name} {experts}")
        return experts, chosen

    def router_aux_loss_coef(self) -> float:
        """Weight of the load-balancing loss, which counts only with `output_router_logits`."""
        return self.number("router_aux_loss_coef") if self.flag("output_router_logits", False) else 0.0

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._fail(name, "true or false")
        return value

    def choices(self, name: str, *implemented: Any, default: Any) -> Any:
        """A value for which there is an implementation; anything else is refused by name."""
        value = self._get(name, default)
        if value not in implemented:
            known = ", ".join(map(repr, implemented))
            raise ConfigError(f"{self.where}: {name} = {short(value)} is not implemented; implemented: {known}")
        return value

    def numbers(self, name: str, count: int, *, positive: bool = False, reason: str = "") -> tuple[float, ...]:
        """A list of `count` finite numbers, above zero when `positive`; an error adds the `reason` for the count."""
        values = self._get(name, _REQUIRED)
        if not isinstance(values, list | tuple) or len(values) != count:
            length = f" of {len(values)}" if isinstance(values, list | tuple) else f": {short(values)}"
            raise ConfigError(
                f"{self.where}: field {name!r} must be a list of {count} numbers, got one{length}{reason}"
            )
        each = Fields({f"{name}[{i}]": value for i, value in enumerate(values)}, where=self.where)
        return tuple(each.number(key, positive=positive) for key in each.config)

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
            max_position_embeddings: the context, and the original one where the config names no other.
            default_theta: the base, or that of each layer type, where the config names none.
            layer_type: the layers it is for, such as "full_attention", in a family with one rope for each type.
            partial: whether the family can rotate only a part of each head.

        Raises ConfigError naming the field that is missing, bad or not implemented.
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
    ) -> list[RopeConfig]:
        """Each layer's rope, in a family with one for layers with a window and one for the others.

        Args:
            head_dim, thetas: as of `rope`; `head_dim` may be one for each layer type.
            windows: each layer's.
            unread: fields that releases of transformers read differently, or not at all, for this family.

        Raises ConfigError as `rope`, and where a field of `unread` makes a difference.
        """
        context = self.size("max_position_embeddings")
        dims = dict.fromkeys((SLIDING, FULL), head_dim) if isinstance(head_dim, int) else head_dim
        sliding, full = (self.rope(dims[layer_type], context, thetas, layer_type) for layer_type in (SLIDING, FULL))
        found = [full if window is None else sliding for window in windows]
        for name in unread:
            if self.config.get(name) and self.replaced(**{name: None}).ropes(head_dim, thetas, windows) != found:
                raise ConfigError(
                    f"{self.where}: {name} = {short(self.config[name])} does not mean the same to all readers of this "
                    f"model_type; write rope_parameters, with an object for each layer type, instead"
                )
        return found
