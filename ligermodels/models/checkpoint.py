"""A Hugging Face checkpoint as a model: opening the folder, choosing its layout, and how the model is written again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.convert.config_json import TEXT, THINKER, named_dtype, nested_configs, read_json
from ligermodels.convert.dequantize import dequantized, names_in_4_bits, names_in_mxfp4, unquantized_dtype
from ligermodels.convert.export_spec import ExportSpec
from ligermodels.convert.files import Companions
from ligermodels.convert.json_values import first_value
from ligermodels.convert.loading import FileReader, Reader, Spec
from ligermodels.convert.quantization import Quantization, without_quantization
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.source_checkpoint import SourceCheckpoint
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import ConfigWarning, warn_caller
from ligermodels.generation.options import CHECKPOINT_FIELDS
from ligermodels.layers.initialization import persistent_tensors
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.decoder import DecoderConfig
from ligermodels.models.extra_heads import MEDUSA_COUNTS, MEDUSA_PREFIX, without_heads
from ligermodels.models.families import Family, family_of, warn_of_other_family
from ligermodels.models.state_dict import check_head, nearest_layout
from ligermodels.models.untie import TIED, untied, with_own_head


class OpenCheckpoint(NamedTuple):
    """A checkpoint folder with its files open.

    Args:
        folder: the folder.
        stored_config: config.json without `quantization_config`.
        hf_config: `stored_config` without fields of draft heads, and with `tie_word_embeddings` as the weights are.
        config: the decoder that `hf_config` composes to.
        reader: reads the tensors; quantised ones are dequantised to `dtype`.
        dtype: dtype of the model to load.
        quantization: how tensors are quantised in the files, or None.
        companions: the files beside the weights.
    """

    folder: Path
    stored_config: dict[str, Any]
    hf_config: dict[str, Any]
    config: DecoderConfig
    reader: FileReader
    dtype: torch.dtype
    quantization: Quantization | None
    companions: Companions

    def export_spec(self, weight_map: WeightMap, repo_id: str | None) -> ExportSpec:
        """How a model that was loaded by `weight_map` is written again; `repo_id` names the checkpoint on the hub."""
        family = family_of(self.hf_config)
        written = family.written_map(self.config, weight_map)
        spec = export_spec(self.hf_config, self.config, written, self.companions)
        extra = sorted(self.reader.headers.keys() - weight_map.sources() - weight_map.aliases.keys())
        layouts = family.layouts_for(self.reader.headers)
        mtp = [(layout, family.mtp.layers_in(self.config, layout, extra)) for layout in layouts]
        stored_as = {mapping.target: mapping.views[0].source for mapping in weight_map.mappings}
        renamed = weight_map.renamed(written)
        if renamed:  # a base model's names
            for usual, (bare, count) in zip(cycle(family.layouts), mtp[len(family.layouts) :], strict=False):
                named = ((name, family.mtp.renamed(name, self.config, bare, usual, count)) for name in extra)
                renamed |= {name: new for name, new in named if name != new}
        source = SourceCheckpoint(
            self.folder.absolute(),
            self.stored_config,
            weight_map,
            loaded=copy.deepcopy(spec.hf_config),  # users change the fields of hf_config in place
            extra=extra,
            heads=[
                name
                for name in extra
                if name.startswith(MEDUSA_PREFIX)
                or any(family.mtp.holds(name, self.config, layout, count) for layout, count in mtp)
            ],
            copies={
                name: stored_as[native]
                for layout, count in mtp
                for name, native in family.mtp.copied(self.config, layout, count).items()
            },
            renamed=renamed,
            nested=family.text is not None,
            files=self.companions.processors,
            repo_id=repo_id,
            quantization=self.quantization,
            unquantized=self._unquantized(weight_map),
        )
        return replace(spec, source=source)

    def _unquantized(self, weight_map: WeightMap) -> frozenset[str]:
        """Native tensors that are not, or only in part, in 4 bits in a checkpoint of bitsandbytes or in MXFP4."""
        in_4_bits = names_in_4_bits(self.reader) or names_in_mxfp4(self.reader)
        parts = [(mapping.target, {view.source for view in mapping.views}) for mapping in weight_map.mappings]
        return frozenset(target for target, sources in parts if in_4_bits and not sources <= in_4_bits)


def open_checkpoint(folder: Path, dtype: torch.dtype | None, opened: ExitStack) -> OpenCheckpoint:
    """Open a checkpoint folder, compose its config and check its files.

    Args:
        folder: the folder.
        dtype: dtype of the model to load; by default the dtype that config.json names, or else `unquantized_dtype`.
        opened: closes the files when it is closed.

    Raises:
        ConfigError: a field of config.json is missing, bad or not supported. Raised before errors of the weights,
            except where the config leaves open whether the head is tied.
        CheckpointError: files are missing or damaged.
    """
    stored_config, quantization = without_quantization(read_json(folder / "config.json"))
    hf_config, _ = without_heads(stored_config)
    family, dtype = family_of(hf_config), dtype or named_dtype(hf_config)
    warn_of_other_family(hf_config)
    config = family.decoder_config(hf_config) if family.text is None else None
    files = opened.enter_context(Checkpoint(folder))
    reader = dequantized(files, quantization, dtype)
    dtype = dtype or unquantized_dtype(reader)
    if config is None:
        hf_config = tied_as_stored(hf_config, family, reader)
        config = family.decoder_config(hf_config)
    if has_own_head(config, family, reader.headers, reader.read):
        nested, config = family.text is not None, with_own_head(config)
        stored_config, hf_config = (untied(each, nested=nested) for each in (stored_config, hf_config))
    return OpenCheckpoint(folder, stored_config, hf_config, config, reader, dtype, quantization, Companions.of(folder))


def tied_as_stored(config: dict[str, Any], family: Family, reader: Reader) -> dict[str, Any]:
    """The config of a multimodal checkpoint with `tie_word_embeddings` as the weights have it.

    Files have `tie_word_embeddings` beside `text_config`, in it, in both or in neither, and the defaults of
    transformers' config classes do not fit all checkpoints. Two equal flags decide. Otherwise the head is tied if it is
    not stored, or if its values equal the embedding's.

    Args:
        config: config.json.
        family: the family of `config`. Without a `text` config of its own, `config` is returned unchanged.
        reader: reads the checkpoint's tensors.
    """
    levels = nested_configs(config)
    if THINKER in levels:
        return {**config, THINKER: tied_as_stored(dict(levels[THINKER]), family, reader)}
    flags = [config.get(TIED), levels.get(TEXT, config).get(TIED)]
    decided = flags[0] is not None and flags[0] == flags[1]
    if family.text is None or decided or not all(flag in (None, True, False) for flag in flags):
        return config
    pairs = [(layout["head"], f"{layout['prefix']}.embed_tokens.weight") for layout in family.layouts]
    stored = [[reader.read(name) for name in pair] for pair in pairs if reader.headers.keys() >= set(pair)]
    return {**config, TIED: all(torch.equal(head, embedding) for head, embedding in stored)}


def has_own_head(config: DecoderConfig, family: Family, names: Collection[str], read: Callable[[str], Tensor]) -> bool:
    """Whether an LM head that the config ties is stored with other values than the embedding's. Warns, as transformers
    5 does: the head is then not tied.

    Args:
        config: the decoder.
        family: its family.
        names: names of the tensors.
        read: reads the tensor of a name.
    """
    for weight_map in family.weight_maps(config, names):
        for head, embedding in weight_map.aliases.items():
            if head in names and embedding in names and not torch.equal(read(head), read(embedding)):
                warn_caller(
                    f"{TIED}: is true, but {head} is stored and differs from {embedding}: the two are not tied. Set it "
                    "to false in config.json; or remove the tensor, to tie them",
                    ConfigWarning,
                )
                return True
    return False


def choose_layout(
    hf_config: Mapping[str, Any], config: DecoderConfig, headers: Mapping[str, Spec], state: Mapping[str, Tensor]
) -> WeightMap:
    """The weight map of the layout of this family that fits a checkpoint best: see `nearest_layout`.

    Args:
        hf_config: config.json.
        config: the decoder that it composes to.
        headers: name -> dtype and shape of the checkpoint's tensors.
        state: native name -> tensor of the model.

    Raises:
        CheckpointError: the checkpoint holds a base model without an LM head.
    """
    _, heads = without_heads(hf_config)
    family = family_of(hf_config)
    layout = nearest_layout(family.weight_maps(config, headers), headers, state)
    check_head(layout, headers, can_tie=partial(family.can_tie, hf_config))
    return replace(layout, ignored=[*layout.ignored, *heads, *family.mtp.ignored(hf_config)])


def export_spec(
    hf_config: dict[str, Any],
    config: DecoderConfig,
    weight_map: WeightMap | None = None,
    companions: Companions = Companions(),  # noqa: B008 - immutable
) -> ExportSpec:
    """How a language model is written alone: in the layout it was loaded in, or from a multimodal checkpoint in the
    usual layout.

    Args:
        hf_config: config.json.
        config: the decoder that it composes to.
        weight_map: the map by which the model was loaded; by default the family's usual one.
        companions: files beside the weights.
    """
    family, generation_config = family_of(hf_config), companions.generation_config
    if family.text is not None:
        whole, hf_config, weight_map = hf_config, family.text(hf_config), None
        family = family_of(hf_config)
        generation_config = _with_padding(whole, hf_config) if generation_config is None else generation_config
    return ExportSpec(
        hf_config=hf_config,
        weight_map=family.weight_maps(config)[0] if weight_map is None else weight_map,
        generation_config=generation_config,
        default_theta=family.default_theta,
        attribute_map=family.attribute_map,
        added_fields={"architectures": [family.causal_lm], **family.added_fields},
        head_fields={**dict.fromkeys(MEDUSA_COUNTS), **dict.fromkeys(family.mtp.fields, 0)},
        files=companions.tokenizer,
        code=companions.code,
    )


def _with_padding(whole: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any] | None:
    """The generation config of a multimodal checkpoint without one whose padding token its `text` config does not have:
    there it would be the token whose embedding gets no gradient. It has the options of `text` too, which are not looked
    for where there is a generation config. None if there is no such token.

    Args:
        whole: config.json.
        text: config of the language model as a checkpoint of its own.
    """
    options = {name: value for name, value in text.items() if name in CHECKPOINT_FIELDS and value is not None}
    pad = first_value(*(level.get("pad_token_id") for level in nested_configs(whole).values()))
    return None if pad in (None, text.get("pad_token_id")) else {**options, "pad_token_id": pad}


def keep_stored_dtypes(model: CausalLM, weight_map: WeightMap, headers: Mapping[str, Spec], dtype: torch.dtype) -> None:
    """Record in the model's export spec the stored dtypes of tensors that a model in `dtype` keeps in a wider dtype, so
    that exports write them as they were.

    Args:
        model: the model; its `export_spec` is replaced.
        weight_map: the map by which it was loaded.
        headers: name -> dtype and shape of the checkpoint's tensors.
        dtype: dtype in which the model was loaded.
    """
    spec, dtypes = model.require_export_spec(), weight_map.stored_dtypes(headers, persistent_tensors(model), dtype)
    source = spec.source
    if source is not None:
        source = replace(source, weight_map=replace(source.weight_map, dtypes=dtypes))
    model.export_spec = replace(spec, weight_map=replace(spec.weight_map, dtypes=dtypes), source=source)
