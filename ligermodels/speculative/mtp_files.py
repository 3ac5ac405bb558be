"""Files of MTP heads: in the checkpoint of the base model, or alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ligermodels.archs import family_of
from ligermodels.convert.config_json import read_json
from ligermodels.convert.dequantize import dequantized
from ligermodels.convert.loading import Reader
from ligermodels.convert.quantization import without_quantization
from ligermodels.convert.reading import reading
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import CheckpointError, ConfigError, ConfigWarning, short, warn_caller
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.extra_heads import MTP_TYPE
from ligermodels.models.mtp_format import MTPFormat
from ligermodels.models.state_dict import nearest_layout
from ligermodels.speculative.head_files import CONFIG, copies, head_state
from ligermodels.speculative.mtp_head import MTPHead


@dataclass(frozen=True)
class MTPLayout:
    """How an MTP head is stored.

    format: the format of the base model's family.
    weight_map: the head's tensors, with the native names "mtp.*".
    copies: checkpoint tensors that repeat one of the base model's tensors -> native name of that tensor.
    num_layers: number of layers of the head.
    """

    format: MTPFormat
    weight_map: WeightMap
    copies: Mapping[str, str]
    num_layers: int = 1

    @classmethod
    def all_of(cls, base: CausalLM, num_layers: int = 1, stored: Collection[str] = ()) -> list[MTPLayout]:
        """All layouts of heads with `num_layers` layers in checkpoints of the base model's family, with tensors of the
        names `stored` (see `Family.layouts_for`); for a model built from a `DecoderConfig`, the layout of Qwen3.5."""
        mtp_format, family_layouts = _format_of(base, stored)
        config = base.config
        return [
            cls(
                mtp_format,
                mtp_format.weight_map(config, family_layout, num_layers),
                mtp_format.copied(config, family_layout, num_layers),
                num_layers,
            )
            for family_layout in family_layouts
        ]

    @classmethod
    def of(cls, base: CausalLM, num_layers: int = 1) -> MTPLayout:
        """The layout for a head on `base`: the family's layout in which the base model itself is stored."""
        layouts, spec = cls.all_of(base, num_layers), base.export_spec
        if spec is None:
            return layouts[0]
        maps = family_of(spec.hf_config).weight_maps(base.config)
        same = (
            layout
            for layout, weight_map in zip(layouts, maps, strict=True)
            if weight_map.sources() == spec.weight_map.sources()
        )
        return next(same, layouts[0])

    def holds(self, name: str) -> bool:
        """Whether a checkpoint tensor belongs to the head, in this layout or another layout of this format."""
        return name in self.copies or name in self.weight_map.sources() or not self.weight_map.ignores(name)


def _format_of(base: CausalLM, stored: Collection[str] = ()) -> tuple[MTPFormat, Sequence[Mapping[str, Any]]]:
    """The MTP format of the model's family, and the family's layouts for tensors of the names `stored`."""
    family = None if base.export_spec is None else family_of(base.export_spec.hf_config)
    return (MTPFormat(), [{}]) if family is None else (family.mtp, family.layouts_for(stored))


def stored_layers(base: CausalLM, folder: Path) -> int:
    """Number of layers of the MTP head in `folder`, a checkpoint or a head alone; 0 without a head.

    Raises CheckpointError if config.json gives another number than the tensors.
    """
    with reading(folder, partial(_open_head, folder)) as (config, files):
        num_layers = _layers_among(base, files.headers)
    mtp_format, _ = _format_of(base)
    if num_layers and (in_config := mtp_format.count(config)) and in_config != num_layers:
        raise CheckpointError(
            f"{folder}: config.json says {in_config} layers of multi-token prediction "
            f"({' or '.join(mtp_format.fields)}), and the files have tensors of {num_layers}"
        )
    return num_layers


def configured_layers(base: CausalLM, config: Mapping[str, Any]) -> int:
    """Number of layers of the MTP head that a config.json names; 0 if it names none."""
    return _format_of(base)[0].count(config) or 0


def _open_head(folder: Path, opened: ExitStack) -> tuple[dict[str, Any], Checkpoint]:
    return read_json(folder / CONFIG), opened.enter_context(Checkpoint(folder))


def _layers_among(base: CausalLM, names: Iterable[str]) -> int:
    known = set(names)
    mtp_format, family_layouts = _format_of(base, known)
    return max(mtp_format.layers_in(base.config, family_layout, known) for family_layout in family_layouts)


def load_head(
    base: CausalLM, head: MTPHead, folder: Path, progress: Callable[[int, int], None] | None = None
) -> MTPLayout:
    """Load the weights of an MTP head. On the meta device only names and shapes are checked.

    Args:
        base: the base model; on the meta device, copies of its tensors are not compared.
        head: a new head on `base`, filled in place.
        folder: a checkpoint with a head, or a head alone.
        progress: called with (bytes loaded, bytes in total).

    Returns:
        How the head is written: as it is stored in the folder; of a base model's checkpoint with the usual names.

    Raises:
        CheckpointError: tensors are missing, damaged, or made for another base model.
    """
    state, usual = head_state(head, "mtp"), MTPLayout.all_of(base, head.num_layers)
    with reading(folder, partial(_open_head, folder)) as (config, files):
        _check_sizes(base, config, folder)
        _, quantization = without_quantization(config)
        reader = dequantized(files, quantization, base.dtype)
        layouts = MTPLayout.all_of(base, head.num_layers, reader.headers)
        nearest = nearest_layout([layout.weight_map for layout in layouts], reader.headers, state)
        place = next(i for i, layout in enumerate(layouts) if layout.weight_map is nearest)
        if not nearest.sources() & reader.headers.keys():
            name = nearest.mappings[0].views[0].source
            raise CheckpointError(
                f"{folder}: holds no head of multi-token prediction for this model: no tensor is named like {name!r}; "
                "make a new head with MTPModel.from_base"
            )
        if (count := _layers_among(base, reader.headers)) > head.num_layers:
            raise CheckpointError(
                f"{folder}: holds {count} layers of multi-token prediction, where {head.num_layers} were expected"
            )
        if head.fc.weight.is_meta:
            nearest.plan(reader.headers, state, f"{folder}: the head")
        else:
            nearest.load(reader, state, progress, what=f"{folder}: the head")
            if base.device.type != "meta":
                _compare_copies(folder, layouts[place], reader, base)
        dtypes = nearest.stored_dtypes(reader.headers, state, base.dtype)
    written = usual[place % len(usual)]
    return replace(written, weight_map=replace(written.weight_map, dtypes=dtypes))


def _check_sizes(base: CausalLM, config: Mapping[str, Any], folder: Path) -> None:
    """CheckpointError if `config` is of a head alone, for a base model of other sizes."""
    for name in ("hidden_size", "vocab_size") if config.get("model_type") == MTP_TYPE else ():
        ours, theirs = config.get(name), getattr(base.config, name)
        if ours not in (None, theirs):
            raise CheckpointError(
                f"{folder}: {name}: of the head is {short(ours)}, and of the model {theirs}; give the base model of "
                "this head"
            )


def _compare_copies(folder: Path, layout: MTPLayout, reader: Reader, base: CausalLM) -> None:
    """ConfigWarning for each tensor in `layout.copies` that differs from the base model's tensor."""
    for name, native in layout.copies.items():
        if name in reader.headers and not copies(base, native)(reader.read(name)):
            warn_caller(
                f"{folder}: {name} is not the model's own tensor; the model's is used, as transformers does",
                ConfigWarning,
            )


def holds_head(base: CausalLM, folder: Path) -> bool:
    """Whether a checkpoint holds tensors of an MTP head for `base`, complete or not."""
    with Checkpoint(folder) as files:
        return bool(head_tensors(base, files.headers))


def head_tensors(base: CausalLM, names: Iterable[str]) -> set[str]:
    """Names of the tensors of an MTP head for `base` among checkpoint tensors `names`."""
    try:
        known = set(names)
        layouts = MTPLayout.all_of(base, _layers_among(base, known) or 1, known)
        sources = set[str]().union(*(layout.weight_map.sources() for layout in layouts))
    except ConfigError:  # MTP is not implemented for this model
        return set()
    return sources & known
