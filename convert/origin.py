"""The Hugging Face checkpoint that a model came from and goes back out as."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from ligermodels.convert.config_json import check_generation, for_export
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.safetensors_writer import save_checkpoint
from ligermodels.convert.weight_map import LazyTensor, WeightMap
from ligermodels.errors import CheckpointError, InputError

Keep = Literal["model", "all"]
"""What of a checkpoint is written again: the language model, or all that was found beside it too."""


@dataclass(frozen=True)
class Whole:
    """A checkpoint as found in `folder`, of which a language model was loaded: its `hf_config`, which has the model's
    own as `text_config` if it is `nested`; the `weight_map` by which it was loaded; names of the tensors `beside` the
    model's; and the `files` (name -> path) that go with those."""

    folder: Path
    hf_config: dict[str, Any]
    weight_map: WeightMap
    beside: Collection[str] = ()
    nested: bool = False
    files: Mapping[str, Path] = field(default_factory=dict)

    def exported(self, export: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        """Its config, in which that of the language model is what `export` makes of it."""
        if not self.nested:
            return export(self.hf_config)
        text = export(self.hf_config.get("text_config") or {})
        dtypes = {name: text[name] for name in ("dtype", "torch_dtype")}
        return {**self.hf_config, **dtypes, "text_config": text}

    def tensors_beside(self, opened: ExitStack) -> list[LazyTensor]:
        """The tensors beside the model's, mapped from their files, which `opened` will close."""
        try:
            checkpoint = opened.enter_context(Checkpoint(self.folder))
            if lost := [name for name in self.beside if name not in checkpoint.headers]:
                raise CheckpointError(f"{self.folder}: no longer holds {len(lost)} of them, such as {lost[0]}")
        except CheckpointError as error:
            raise CheckpointError(
                f"keep='all' reads the tensors beside the model from where it was loaded: {error}; "
                "put that checkpoint back, or write the model alone"
            ) from error
        found = {name: checkpoint.headers[name] for name in self.beside}
        return [
            LazyTensor(name, each.shape, each.dtype, partial(checkpoint.read, name)) for name, each in found.items()
        ]


@dataclass(frozen=True)
class Origin:
    """`hf_config` as found; `weight_map` between native and Hugging Face names; `generation_config`, if there is one;
    `default_theta`, the rotary base of a config that names none (or that of each layer type); `files` (name -> path)
    that travel along, such as the tokenizer's; `synonyms` of the config's fields, as `for_export` takes them; `whole`,
    the checkpoint that the model was loaded from, if it was.

    Raises ConfigError when a token's id in `generation_config` is none."""

    hf_config: dict[str, Any]
    weight_map: WeightMap
    generation_config: dict[str, Any] | None = None
    default_theta: float | Mapping[str, float] = 10_000.0
    files: Mapping[str, Path] = field(default_factory=dict)
    synonyms: Mapping[str, str] = field(default_factory=dict)
    whole: Whole | None = None

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
        """Write `state` (native name -> tensor) as a checkpoint folder; `check` and errors as `save_checkpoint`.

        With `keep` "all", the checkpoint that the model was loaded from, with `state` in place of its part of it, and
        all else to the byte. CheckpointError if there is none, or if it is not there any more.
        """
        if keep not in get_args(Keep):
            raise InputError(f"keep: must be 'model' or 'all', got {keep!r}")
        dtype = next(iter(state.values())).dtype
        export = partial(for_export, dtype=dtype, default_theta=self.default_theta, synonyms=self.synonyms)
        config, weight_map, files, beside = export(self.hf_config), self.weight_map, self.files, []
        with ExitStack() as opened:
            if keep == "all":
                whole = self._require_whole()
                config, weight_map = whole.exported(export), whole.weight_map
                files, beside = {**files, **whole.files}, whole.tensors_beside(opened)
            written: dict[str, Any] = {"config.json": as_json(config)}
            if self.generation_config is not None:
                written["generation_config.json"] = as_json(self.generation_config)
            save_checkpoint(
                folder,
                [*weight_map.export(state), *beside],
                max_shard_size=max_shard_size,
                files={**files, **written},
                overwrite=overwrite,
                check=check,
            )

    def _require_whole(self) -> Whole:
        if self.whole is None:
            raise CheckpointError("keep='all': the model was not loaded from a checkpoint, so there is no more to keep")
        return self.whole


def as_json(content: Mapping[str, Any]) -> str:
    """The text of a JSON file that holds `content`."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
