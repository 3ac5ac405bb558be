"""The Hugging Face checkpoint that a model came from and goes back out as."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ligermodels.convert.config_json import for_export
from ligermodels.convert.safetensors_writer import save_checkpoint
from ligermodels.convert.weight_map import WeightMap


@dataclass(frozen=True)
class Origin:
    """`hf_config` as found; `weight_map` between native and Hugging Face names; `generation_config`, if there is one;
    `default_theta`, the rotary base of a config that names none (or that of each layer type); `files` (name -> path)
    that travel along, such as the tokenizer's."""

    hf_config: dict[str, Any]
    weight_map: WeightMap
    generation_config: dict[str, Any] | None = None
    default_theta: float | Mapping[str, float] = 10_000.0
    files: Mapping[str, Path] = field(default_factory=dict)

    def save(
        self,
        folder: str | os.PathLike[str],
        state: Mapping[str, Tensor],
        *,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
    ) -> None:
        """Write `state` (native name -> tensor) as a checkpoint folder; errors as `save_checkpoint`."""
        dtype = next(iter(state.values())).dtype
        files: dict[str, Any] = {"config.json": _json(for_export(self.hf_config, dtype, self.default_theta))}
        if self.generation_config is not None:
            files["generation_config.json"] = _json(self.generation_config)
        save_checkpoint(
            folder,
            self.weight_map.export(state),
            max_shard_size=max_shard_size,
            files={**self.files, **files},
            overwrite=overwrite,
        )


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
