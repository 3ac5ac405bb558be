"""How a model is written as a Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ligermodels.convert.config_json import check_generation, for_export, joined, nested_configs
from ligermodels.convert.dequantize import dequantized
from ligermodels.convert.files import ADAPTER, ADAPTER_CONFIG, CHECKPOINT
from ligermodels.convert.input_files import folder_to_write
from ligermodels.convert.quantization import Quantization
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.safetensors_writer import save_checkpoint
from ligermodels.convert.weight_map import LazyTensor, WeightMap
from ligermodels.errors import CheckpointError, InputError

Keep = Literal["model", "all"]
"""What is written: the language model, or the whole checkpoint that it was loaded from."""


@dataclass(frozen=True)
class SourceCheckpoint:
    """The checkpoint that a language model was loaded from.

    Args:
        folder: where it is.
        hf_config: its config.json.
        weight_map: the one by which the model was loaded.
        extra: names of the tensors that are not the language model's, such as a vision tower's.
        nested: whether it holds more than a language model, whose config is the last of `nested_configs(hf_config)`.
        files: name -> path of further files that belong to the extra tensors.
        repo_id: its name on the hub, if it came from there.
        quantization: how its quantised tensors are stored, which its `hf_config` does not say any more.
    """

    folder: Path
    hf_config: dict[str, Any]
    weight_map: WeightMap
    extra: Collection[str] = ()
    nested: bool = False
    files: Mapping[str, Path] = field(default_factory=dict)
    repo_id: str | None = None
    quantization: Quantization | None = None

    def exported_config(
        self, export: Callable[[Mapping[str, Any]], dict[str, Any]], alone: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`hf_config` with `export` applied to the language model's config, which is `alone` by itself."""
        theta = {name: alone[name] for name in ("rope_theta",) if self.nested and name in alone}
        configs = nested_configs(self.hf_config) if self.nested else {"": self.hf_config}
        model = next(reversed(configs))
        exported = export({**theta, **configs[model]})
        dtypes = {name: exported[name] for name in ("dtype", "torch_dtype")}
        return joined({**{name: {**each, **dtypes} for name, each in configs.items()}, model: exported})

    def extra_tensors(self, opened: ExitStack, dtype: torch.dtype) -> list[LazyTensor]:
        """The extra tensors, mapped from their files, which `opened` closes; quantised ones dequantised to `dtype`."""
        try:
            files = opened.enter_context(Checkpoint(self.folder))
            checkpoint = dequantized(files, self.quantization, dtype)
            if lost := [name for name in self.extra if name not in checkpoint.headers]:
                raise CheckpointError(f"{self.folder}: no longer holds {len(lost)} of them, such as {lost[0]}")
        except CheckpointError as error:
            raise CheckpointError(
                f"keep='all' reads the extra tensors from the checkpoint that the model was loaded from: {error}; "
                "put that checkpoint back, or write the model alone"
            ) from error
        found = [(name, checkpoint.headers[name]) for name in self.extra]
        return [LazyTensor(name, tuple(each.shape), each.dtype, partial(checkpoint.read, name)) for name, each in found]


@dataclass(frozen=True)
class ExportSpec:
    """The Hugging Face checkpoint that a model is written as.

    Args:
        hf_config: config.json as found.
        weight_map: native names to those of the checkpoint.
        generation_config: generation_config.json, if there is one.
        default_theta: as of `for_export`.
        files: name -> path of files to copy, such as the tokenizer's.
        attribute_map: other names of the config's fields, see `for_export`.
        source: the checkpoint that the model was loaded from, if it was.

    Raises ConfigError when a token id in `generation_config` is not one.
    """

    hf_config: dict[str, Any]
    weight_map: WeightMap
    generation_config: dict[str, Any] | None = None
    default_theta: float | Mapping[str, Any] = 10_000.0
    files: Mapping[str, Path] = field(default_factory=dict)
    attribute_map: Mapping[str, str | None] = field(default_factory=dict)
    source: SourceCheckpoint | None = None

    def __post_init__(self) -> None:
        check_generation(self.generation_config or {})

    def save(
        self,
        folder: str | os.PathLike[str],
        state: Mapping[str, Tensor],
        *,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
        check: Callable[[Path], object] | None = None,
        keep: Keep = "model",
    ) -> None:
        """Write `state` (native name -> tensor) as a checkpoint folder; `check` and errors as in `save_checkpoint`.

        With DTensors all ranks call this with the same arguments; rank 0 writes, and all succeed or none. With `keep`
        "all", the whole checkpoint that the model was loaded from is written, `state` in place of the language model;
        CheckpointError if it is not there any more, or never was.
        """
        if keep not in get_args(Keep):
            raise InputError(f"keep: must be 'model' or 'all', got {keep!r}")
        folder = folder_to_write(folder)
        dtype = next((each.dtype for each in state.values() if each.is_floating_point()), torch.float32)
        export = partial(for_export, dtype=dtype, default_theta=self.default_theta, attribute_map=self.attribute_map)
        config, weight_map, files, extra = export(self.hf_config), self.weight_map, self.files, []
        ranks = Ranks(state.values())
        with ExitStack() as opened:
            if keep == "all":
                with ranks.step(os.fspath(folder)):
                    if (source := self.source) is None:
                        raise CheckpointError(
                            "keep='all': the model was not loaded from a checkpoint, so there is no more to keep"
                        )
                    config, weight_map = source.exported_config(export, self.hf_config), source.weight_map
                    files, extra = {**files, **source.files}, source.extra_tensors(opened, dtype)
            written: dict[str, Any] = {"config.json": as_json(config)}
            if self.generation_config is not None:
                written["generation_config.json"] = as_json(self.generation_config)
            save_checkpoint(
                folder,
                [*weight_map.export(state), *extra],
                max_shard_size=max_shard_size,
                files={**files, **written},
                overwrite=overwrite,
                replaced=(*CHECKPOINT, *_adapter_in(folder)),
                check=check,
                ranks=ranks,
            )


def _adapter_in(folder: Path) -> tuple[str, ...]:
    """The files of an adapter that is in `folder` without a checkpoint. Beside one, transformers would open the
    adapter's base model in its place."""
    return () if (folder / "config.json").is_file() else (ADAPTER, ADAPTER_CONFIG)


def as_json(content: Mapping[str, Any]) -> str:
    """The text of a JSON file that holds `content`."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
