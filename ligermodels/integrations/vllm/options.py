"""Settings of native models in vLLM's `additional_config`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ligermodels.arguments import QuantizedFormat
from ligermodels.errors import ConfigError


@dataclass(frozen=True)
class EngineOptions:
    """Arguments of `from_pretrained` in vLLM's settings: `vllm serve MODEL ... --additional-config '{"ligermodels":
    {"quantize": "int4"}}'`.

    Args:
        quantize: "float8", "int4", "nf4" or "mxfp4": format of the weights of the blocks' linear layers. Default: None,
            they keep the dtype of the engine.
        quantize_exclude: patterns of layers that are not quantised. Default: none.
        quantize_head: format of the LM head, as `quantize`. Default: None.
    """

    KEY: ClassVar[str] = "ligermodels"
    NAME: ClassVar[str] = f"additional_config.{KEY}"

    quantize: QuantizedFormat | None = None
    quantize_exclude: tuple[str, ...] = ()
    quantize_head: QuantizedFormat | None = None

    @classmethod
    def of(cls, vllm_config: Any) -> EngineOptions:
        """The settings in vLLM's config. ConfigError for an unknown one; the message names it."""
        others = vllm_config.additional_config
        given = others.get(cls.KEY, {}) if isinstance(others, dict) else {}
        known = [field.name for field in fields(cls)]
        if not isinstance(given, dict) or (unknown := sorted(given.keys() - {*known})):
            wrong = f"{unknown[0]} is unknown" if isinstance(given, dict) else f"must be an object, got {given!r}"
            raise ConfigError(f"{cls.NAME}: {wrong}; it may have {', '.join(known)}")
        settings: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in given.items()}
        return cls(**settings)
