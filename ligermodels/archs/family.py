"""What a family of checkpoints is to the rest of the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ligermodels.archs.mtp import QWEN, MTPFormat
from ligermodels.convert.weight_map import WeightMap
from ligermodels.models.decoder import DecoderConfig


@dataclass(frozen=True)
class Family:
    """A `model_type` as in config.json, how its config composes, and how its tensors may be named.

    `layouts` has, for each way in which checkpoints of this type are stored, the usual one first, how it differs from
    Hugging Face's usual names: the arguments of `DecoderConfig.weight_map`.
    `default_theta` is the rotary base where a config names none, or that of each layer type, or all settings of the
    rope where a config has none: see `convert.config_json.rope_parameters`. `text`, for checkpoints
    that hold more than a language model, gives the config of that alone, under its own `model_type`: the model is
    written as this. `attribute_map` has fields that newer checkpoints may write under another name: older -> newer,
    or None for one that no release of transformers reads for this family. `mtp` is how checkpoints hold a layer of
    multi-token prediction.
    """

    model_type: str
    decoder_config: Callable[[Mapping[str, Any]], DecoderConfig]
    layouts: Sequence[Mapping[str, Any]] = ({},)
    default_theta: float | Mapping[str, Any] = 10_000.0
    text: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    attribute_map: Mapping[str, str | None] = field(default_factory=dict)
    mtp: MTPFormat = QWEN

    def weight_maps(self, config: DecoderConfig) -> list[WeightMap]:
        """The weight map of each layout."""
        return [config.weight_map(**layout) for layout in self.layouts]
