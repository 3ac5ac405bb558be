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
"""What to write: the language model alone, or the whole checkpoint that it was loaded from."""


@dataclass(frozen=True)
class SourceCheckpoint:
    """The checkpoint that a language model was loaded from.

    Args:
        folder: its folder.
        hf_config: its config.json, without `quantization_config`.
        weight_map: the map by which the model was loaded.
        extra: names of tensors outside the language model, such as the tensors of a vision tower.
        nested: whether the checkpoint holds more than a language model. The language model's config is then the last of
            `nested_configs(hf_config)`.
        files: name -> path of the files that belong to the extra tensors.
        repo_id: its name on the hub, or None if it is a local folder.
        quantization: how its quantised tensors are stored, or None.
        unquantized: native names of tensors that are not quantised, or only in part, in a checkpoint of bitsandbytes.
    """

    folder: Path
    hf_config: dict[str, Any]
    weight_map: WeightMap
    extra: Collection[str] = ()
    nested: bool = False
    files: Mapping[str, Path] = field(default_factory=dict)
    repo_id: str | None = None
    quantization: Quantization | None = None
    unquantized: Collection[str] = ()

    def exported_config(
        self, export: Callable[[Mapping[str, Any]], dict[str, Any]], alone: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`hf_config` with the language model's config replaced by its export.

        Args:
            export: function from a config to the config to write, such as `for_export`.
            alone: config of the language model as a checkpoint of its own.
        """
        theta = {name: alone[name] for name in ("rope_theta",) if self.nested and name in alone}
        configs = nested_configs(self.hf_config) if self.nested else {"": self.hf_config}
        model = next(reversed(configs))
        exported = export({**theta, **configs[model]})
        dtypes = {name: exported[name] for name in ("dtype", "torch_dtype")}
        return joined({**{name: {**config, **dtypes} for name, config in configs.items()}, model: exported})

    def extra_tensors(self, opened: ExitStack, dtype: torch.dtype) -> list[LazyTensor]:
        """The extra tensors, mapped from files that `opened` closes. Quantised tensors are dequantised to `dtype`."""
        try:
            files = opened.enter_context(Checkpoint(self.folder))
            checkpoint = dequantized(files, self.quantization, dtype)
            if lost := [name for name in self.extra if name not in checkpoint.headers]:
                raise CheckpointError(f"{self.folder}: {len(lost)} of the tensors are gone, such as {lost[0]}")
        except CheckpointError as error:
            raise CheckpointError(
                f"keep='all' reads the extra tensors from the checkpoint that the model was loaded from: {error}; "
                "put that checkpoint back, or write the model alone"
            ) from error
        headers = {name: checkpoint.headers[name] for name in self.extra}
        return [LazyTensor(n, tuple(h.shape), h.dtype, partial(checkpoint.read, n)) for n, h in headers.items()]


@dataclass(frozen=True)
class ExportSpec:
    """How a model is written as a Hugging Face checkpoint.

    Args:
        hf_config: config.json. Exports keep all its fields.
        weight_map: maps native tensors to checkpoint tensors.
        generation_config: content of generation_config.json, or None to write no such file.
        default_theta: rotary base of a config that names none, or a dict as in `rope_settings.rope_parameters`.
        files: name -> path of files to copy, such as the tokenizer's files.
        attribute_map: field name in transformers 4 -> name in transformers 5, or None to drop the field.
        source: the checkpoint that the model was loaded from, or None.

    Raises:
        ConfigError: a token id in `generation_config` is none.

    Examples:
        >>> import ligermodels as lm
        >>> model = lm.from_config("config.json", device="meta")
        >>> spec = model.export_spec
        >>> spec.hf_config["model_type"], sorted(spec.weight_map.sources())[0]
        ('llama', 'lm_head.weight')
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
        """Write a checkpoint folder. With DTensors all ranks call this, rank 0 writes, and all succeed or none.

        Args:
            folder: folder to write; it is created if it does not exist.
            state: native name -> tensor.
            max_shard_size: largest file in bytes, or text such as "5GB" (10^9) or "5GiB" (2^30).
            overwrite: replace a checkpoint in `folder`; other files there stay.
            check: called with the temporary folder before its files replace the files of `folder`. If it raises,
                nothing is written.
            keep: "model" writes the language model alone. "all" writes the whole checkpoint that the model was loaded
                from, with `state` as its language model.

        Raises:
            CheckpointError: `folder` is a file, is not empty, or cannot be written; another rank failed; or `keep` is
                "all" and the source checkpoint is gone or never existed.
            InputError: `keep`, `max_shard_size` or `overwrite` is not usable.
        """
        if keep not in get_args(Keep):
            raise InputError(f"keep: must be 'model' or 'all', got {keep!r}")
        folder = folder_to_write(folder)
        dtype = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32)
        export = partial(for_export, dtype=dtype, default_theta=self.default_theta, attribute_map=self.attribute_map)
        config, weight_map, files, extra = export(self.hf_config), self.weight_map, self.files, []
        ranks = Ranks(state.values())
        with ExitStack() as opened:
            if keep == "all":
                with ranks.step(os.fspath(folder)):
                    if (source := self.source) is None:
                        raise CheckpointError(
                            "keep='all': the model was not loaded from a checkpoint, so it has no other tensors to keep"
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
    """The files of an adapter, if `folder` has no checkpoint. They have to be replaced: given both, transformers would
    open the adapter's base model instead of the checkpoint."""
    return () if (folder / "config.json").is_file() else (ADAPTER, ADAPTER_CONFIG)


def as_json(content: Mapping[str, Any]) -> str:
    """`content` as the text of a JSON file."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
