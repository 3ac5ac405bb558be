"""How a model is written as a Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ligermodels.convert.config_json import check_generation, for_export
from ligermodels.convert.files import ADAPTER, ADAPTER_CONFIG, CHECKPOINT
from ligermodels.convert.input_files import folder_to_write
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.safetensors_writer import save_checkpoint
from ligermodels.convert.source_checkpoint import SourceCheckpoint, headless
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import ConfigError, InputError, short

Keep = Literal["all", "without-heads", "model"]
"""What to write: the whole checkpoint that a language model was loaded from, with its other tensors unchanged; the same
without draft heads; or the language model alone."""


@dataclass(frozen=True)
class ExportSpec:
    """How a model is written as a Hugging Face checkpoint.

    Args:
        hf_config: config.json. Exports keep all its fields.
        weight_map: maps native tensors to checkpoint tensors.
        generation_config: content of generation_config.json, or None to write no such file.
        default_theta: rotary base of a config that names none, or a dict as in `rope_settings.rope_parameters`.
        files: name -> path of files to copy, such as the tokenizer's files.
        code: name -> path of Python modules that `auto_map` of `hf_config` names, to copy.
        attribute_map: field name in transformers 4 -> name in transformers 5, or None to drop the field.
        added_fields: fields that exports of a language model add to a config.json without them, or with an empty value:
            `architectures`, and fields that servers need.
        head_fields: fields of config.json that tell the number of draft heads -> value without heads, or None to drop
            the field. They are written with this value if no draft heads are written.
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
    code: Mapping[str, Path] = field(default_factory=dict)
    attribute_map: Mapping[str, str | None] = field(default_factory=dict)
    added_fields: Mapping[str, Any] = field(default_factory=dict)
    head_fields: Mapping[str, int | None] = field(default_factory=dict)
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
        keep: Keep = "all",
    ) -> None:
        """Write a checkpoint folder. With DTensors all ranks call this, rank 0 writes, and all succeed or none.

        Args:
            folder: folder to write; it is created if it does not exist.
            state: native name -> tensor.
            max_shard_size: largest file in bytes, or text such as "5GB" (10^9) or "5GiB" (2^30).
            overwrite: replace a checkpoint in `folder`; other files there stay.
            keep: "all" writes the whole checkpoint that the model was loaded from, with `state` as its language model.
                "without-heads" leaves out draft heads. "model" writes the language model alone.

        Raises:
            CheckpointError: `folder` is a file, is not empty, or cannot be written; another rank failed; or `keep` is
                not "model" and the source checkpoint with tensors outside the language model is gone.
            InputError: `keep`, `max_shard_size` or `overwrite` is not usable, or the model is on the meta device.
        """
        if keep not in get_args(Keep):
            raise InputError(f"keep: must be one of {', '.join(map(repr, get_args(Keep)))}, got {short(keep)}")
        folder = folder_to_write(folder)
        dtype = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32)
        ranks, source = Ranks(state.values()), None if keep == "model" else self.source
        tensors = (self.weight_map if source is None else self.whole_map).export(state)
        files = {**self.code, **self.files}
        with ExitStack() as opened:
            if source is not None:
                names = [name for name in source.extra if keep == "all" or name not in source.heads]
                with ranks.step(os.fspath(folder)):
                    tensors += source.extra_tensors(names, tensors, opened, dtype)
                files |= source.files
            config = self._exported_config(source, dtype, has_heads=keep == "all")
            written: dict[str, Any] = {"config.json": as_json(config)}
            if self.generation_config is not None:
                written["generation_config.json"] = as_json(self.generation_config)
            save_checkpoint(
                folder,
                tensors,
                max_shard_size=max_shard_size,
                files={**files, **written},
                overwrite=overwrite,
                replaced=(*CHECKPOINT, *_adapter_in(folder)),
                ranks=ranks,
            )

    @property
    def base_name(self) -> str | None:
        """The model's name for files that refer to it: its name on the hub, or the absolute path of its folder."""
        if self.source is None:
            return self.hf_config.get("_name_or_path") or None
        return self.source.repo_id or str(self.source.folder)

    @property
    def whole_map(self) -> WeightMap:
        """The weight map of the language model in the whole checkpoint that it was loaded from."""
        return self.source.weight_map if self.source is not None and self.source.nested else self.weight_map

    def _exported_config(
        self, source: SourceCheckpoint | None, dtype: torch.dtype, *, has_heads: bool
    ) -> dict[str, Any]:
        """The config.json to write: of the whole `source`, or of the language model alone if that is None.

        Args:
            source: the source checkpoint, or None.
            dtype: dtype of the weights.
            has_heads: whether the draft heads of `source`, if it has any, are written.
        """
        head_fields = {} if source is not None and source.heads and has_heads else self.head_fields
        export = partial(for_export, dtype=dtype, default_theta=self.default_theta, attribute_map=self.attribute_map)
        alone = headless(self.hf_config, head_fields)
        config = export(alone) if source is None else source.exported_config(export, alone, head_fields)
        if source is None or not source.nested:
            config |= {name: value for name, value in self.added_fields.items() if not config.get(name)}
        return config

    def with_heads(
        self,
        heads: WeightMap,
        written: Callable[[Mapping[str, Any]], dict[str, Any]],
        fields: Collection[str],
        is_replaced: Callable[[str], bool],
    ) -> ExportSpec:
        """The export of the model with draft heads in its checkpoint.

        Args:
            heads: maps the heads' tensors.
            written: function from a config to the config with the fields of the heads.
            fields: the names of these fields.
            is_replaced: whether an extra tensor of the source checkpoint, by its name in exports, belongs
                to heads that these heads replace.
        """

        def joint(weights: WeightMap) -> WeightMap:
            mappings = [*weights.mappings, *heads.mappings]
            return replace(weights, mappings=mappings, dtypes={**weights.dtypes, **heads.dtypes})

        source = self.source
        if source is not None:
            source = replace(
                source,
                hf_config=written(source.hf_config),
                loaded=written(source.loaded),
                weight_map=joint(source.weight_map),
                extra=[name for name in source.extra if not is_replaced(source.written_name(name))],
                heads=[name for name in source.heads if not is_replaced(source.written_name(name))],
            )
        return replace(
            self,
            hf_config=written(self.hf_config),
            weight_map=joint(self.weight_map),
            head_fields={name: value for name, value in self.head_fields.items() if name not in fields},
            source=source,
        )


def _adapter_in(folder: Path) -> tuple[str, ...]:
    """The files of an adapter, if `folder` has no checkpoint. They have to be replaced: given both, transformers would
    open the adapter's base model instead of the checkpoint."""
    return () if (folder / "config.json").is_file() else (ADAPTER, ADAPTER_CONFIG)


def as_json(content: Mapping[str, Any]) -> str:
    """`content` as the text of a JSON file. ConfigError, naming the field, for a value that JSON cannot hold."""
    for name, value in content.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
            raise ConfigError(
                f"field {short(name)}: {short(value)} cannot be written as JSON in UTF-8: {error}; correct it"
            ) from None
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
