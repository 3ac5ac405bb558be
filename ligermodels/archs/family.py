"""What a family of checkpoints is to the rest of the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ligermodels.convert.weight_map import WeightMap
from ligermodels.model import DecoderConfig


@dataclass(frozen=True)
class Family:
    """A `model_type` as in config.json, how its config composes, and how its tensors may be named.

    `layouts` gives the weight maps of all ways in which checkpoints of this type lie on disk, the usual one first.
    `default_theta` is the rotary base where a config names none, or that of each layer type. `text`, for checkpoints
    that hold more than a language model, gives the config of that alone, under its own `model_type`: the model goes
    back out as this. `synonyms` has fields that newer checkpoints may write under another name: older name -> newer.
    """

    model_type: str
    decoder_config: Callable[[Mapping[str, Any]], DecoderConfig]
    layouts: Callable[[DecoderConfig], Sequence[WeightMap]]
    default_theta: float | Mapping[str, float] = 10_000.0
    text: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    synonyms: Mapping[str, str] = field(default_factory=dict)
