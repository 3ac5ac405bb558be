"""The checkpoint that a model was loaded from: its config, and its tensors that the model does not hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ligermodels.convert.config_json import joined, nested_configs
from ligermodels.convert.dequantize import dequantized
from ligermodels.convert.loading import FileReader
from ligermodels.convert.quantization import Quantization
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.weight_map import LazyTensor, WeightMap
from ligermodels.errors import CheckpointError


@dataclass(frozen=True)
class SourceCheckpoint:
    """The checkpoint that a language model was loaded from.

    Args:
        folder: its folder.
        hf_config: its config.json, without `quantization_config`.
        weight_map: the map by which the model was loaded.
        loaded: the config of the language model as it was loaded. Fields that `ExportSpec.hf_config` has otherwise have
            been changed since, and replace the fields of `hf_config`.
        extra: names of tensors outside the language model, such as the tensors of a vision tower and of draft heads.
        heads: the names in `extra` that belong to draft heads.
        copies: names in `extra` -> tensor of the language model that the extra tensor may repeat. If it does, the
            written tensor repeats the model's tensor too.
        renamed: names of tensors that are written under other names, as from a base model's checkpoint without prefix
            -> these names.
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
    loaded: Mapping[str, Any]
    extra: Collection[str] = ()
    heads: Collection[str] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    nested: bool = False
    files: Mapping[str, Path] = field(default_factory=dict)
    repo_id: str | None = None
    quantization: Quantization | None = None
    unquantized: Collection[str] = ()

    def exported_config(
        self,
        export: Callable[[Mapping[str, Any]], dict[str, Any]],
        alone: Mapping[str, Any],
        head_fields: Mapping[str, int | None],
    ) -> dict[str, Any]:
        """`hf_config` with the language model's config replaced by its export.

        Args:
            export: function from a config to the config to write, such as `for_export`.
            alone: config of the language model as a checkpoint of its own.
            head_fields: see `ExportSpec`; empty if draft heads are written.
        """
        theta = {name: alone[name] for name in ("rope_theta",) if self.nested and name in alone}
        changed = {name: value for name, value in alone.items() if self.loaded.get(name, ...) != value}
        removed = self.loaded.keys() - alone.keys()
        configs = {
            level: {
                name: changed.get(name, value)
                for name, value in headless(config, head_fields).items()
                if name not in removed
            }
            for level, config in (nested_configs(self.hf_config) if self.nested else {"": self.hf_config}).items()
        }
        model = next(reversed(configs))
        exported = export({**theta, **configs[model], **changed})
        dtypes = {name: exported[name] for name in ("dtype", "torch_dtype")}
        return joined({**{name: {**config, **dtypes} for name, config in configs.items()}, model: exported})

    def extra_tensors(
        self, names: Collection[str], written: Sequence[LazyTensor], opened: ExitStack, dtype: torch.dtype
    ) -> list[LazyTensor]:
        """The extra tensors of these `names`, mapped from files that `opened` closes.

        Args:
            names: names in `extra`.
            written: the tensors of the language model that are written with them.
            opened: closes the files.
            dtype: dtype to which quantised tensors are dequantised.

        Raises:
            CheckpointError: the files or tensors are gone, or a tensor does not fit the language model any more.
        """
        if not names:
            return []
        try:
            files = opened.enter_context(Checkpoint(self.folder))
            stored = dequantized(files, self.quantization, dtype)
            # A save into this folder has written them under their other names.
            here = {name: name if name in stored.headers else self.written_name(name) for name in names}
            if lost := [name for name in names if here[name] not in stored.headers]:
                raise CheckpointError(f"{self.folder}: {len(lost)} of the tensors are gone, such as {lost[0]}")
        except CheckpointError as error:
            raise CheckpointError(
                f"keep='all' reads {len(names)} tensors outside the language model, such as {next(iter(names))}, from "
                f"the checkpoint that the model was loaded from: {error}; put that checkpoint back, or write the "
                "language model alone with keep='model'"
            ) from error
        model = {tensor.name: tensor for tensor in written}
        extra = []
        for name in names:
            original, written_name = self.copies.get(name, ""), self.written_name(name)
            own, originals = model.get(self.written_name(original)), {original, self.written_name(original)}
            if own is not None and any(_equal(stored, here[name], each) for each in originals):
                extra.append(own._replace(name=written_name))
            else:
                header, read = stored.headers[here[name]], partial(stored.read, here[name])
                extra.append(LazyTensor(written_name, tuple(header.shape), header.dtype, read))
        self._check_sizes(extra, model, stored)
        return extra

    def written_name(self, name: str) -> str:
        """The name under which the checkpoint tensor `name` is written."""
        return self.renamed.get(name, name)

    def _check_sizes(self, extra: Sequence[LazyTensor], model: Mapping[str, LazyTensor], stored: FileReader) -> None:
        """CheckpointError if an extra tensor has a size that the model had when it was loaded and has no longer, such
        as the size of its vocabulary."""
        resized: dict[int, tuple[str, int]] = {}
        headers = {self.written_name(name): header for name, header in stored.headers.items()}
        for name in (name for name in model if name in headers):
            shapes = zip(headers[name].shape, model[name].shape, strict=False)
            resized = {before: (name, now) for before, now in shapes if before != now} | resized
        for tensor in extra:
            for size in tensor.shape:
                if size in resized:
                    name, now = resized[size]
                    raise CheckpointError(
                        f"{tensor.name} {list(tensor.shape)}, outside the language model, does not fit it any more: "
                        f"{name} has {now} instead of {size}; leave draft heads out with keep='without-heads', or all "
                        "such tensors with keep='model'"
                    )


def _equal(stored: FileReader, name: str, other: str) -> bool:
    """Whether two tensors of a checkpoint have the same values."""
    return other in stored.headers and torch.equal(stored.read(name), stored.read(other))


def headless(config: Mapping[str, Any], head_fields: Mapping[str, int | None]) -> dict[str, Any]:
    """`config` with the values that `ExportSpec.head_fields` has for a checkpoint without draft heads."""
    dropped = {name for name, value in head_fields.items() if value is None}
    return {name: head_fields.get(name, value) for name, value in config.items() if name not in dropped}
