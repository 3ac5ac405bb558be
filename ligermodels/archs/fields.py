"""Typed reading of a Hugging Face config dict: every error names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ligermodels.convert.config_json import rope_parameters
from ligermodels.errors import ConfigError
from ligermodels.layers import LinearScaling, Llama3Scaling, RopeConfig

_REQUIRED = object()


class Fields:
    """Reads fields of `config`; a field that is absent or null takes the default, or is an error without one."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self.config, self.where = config, where

    def _get(self, name: str, default: Any) -> Any:
        value = self.config.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ConfigError(f"{self.where}: field {name!r} is missing")
            return default
        return value

    def _fail(self, name: str, wanted: str) -> ConfigError:
        return ConfigError(f"{self.where}: field {name!r} must be {wanted}, got {self.config.get(name)!r}")

    def size(self, name: str, default: Any = _REQUIRED) -> int:
        """A whole number above zero."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._fail(name, "a whole number above 0")
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, positive: bool = False) -> float:
        """A finite number, above zero when `positive`."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._fail(name, "a finite number")
        if positive and value <= 0:
            raise self._fail(name, "above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._fail(name, "true or false")
        return value

    def only(self, name: str, *implemented: Any, default: Any) -> Any:
        """A value for which there is an implementation; anything else is refused by name."""
        value = self._get(name, default)
        if value not in implemented:
            known = ", ".join(map(repr, implemented))
            raise ConfigError(f"{self.where}: {name} = {value!r} is not implemented; implemented: {known}")
        return value

    def rope(self, head_dim: int, max_position_embeddings: int, default_theta: float = 10_000.0) -> RopeConfig:
        """The rotary embedding described by `rope_parameters`, or by `rope_theta` and `rope_scaling`."""
        settings = rope_parameters(self.config, default_theta)
        inner = Fields(settings, f"{self.where}: rope_parameters")
        inner.only("partial_rotary_factor", 1, 1.0, default=1.0)
        kind = inner.only("rope_type", "default", "linear", "llama3", default="default")
        scaling: LinearScaling | Llama3Scaling | None = None
        if kind == "linear":
            scaling = LinearScaling(inner.number("factor", positive=True))
        elif kind == "llama3":
            scaling = Llama3Scaling(
                factor=inner.number("factor", positive=True),
                low_freq_factor=inner.number("low_freq_factor", positive=True),
                high_freq_factor=inner.number("high_freq_factor", positive=True),
                original_context=inner.size("original_max_position_embeddings", max_position_embeddings),
            )
            if scaling.high_freq_factor <= scaling.low_freq_factor:
                raise ConfigError(f"{inner.where}: high_freq_factor must be above low_freq_factor")
        return RopeConfig(head_dim, inner.number("rope_theta", positive=True), scaling)
