"""What a family of checkpoints is to the rest of the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ligermodels.convert.weight_map import WeightMap
from ligermodels.model import DecoderConfig


@dataclass(frozen=True)
class Family:
    """`model_type` as in config.json; how its config composes; how its tensors are named."""

    model_type: str
    decoder_config: Callable[[Mapping[str, Any]], DecoderConfig]
    weight_map: Callable[[DecoderConfig], WeightMap]
