"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, under transformers' names."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.adapt.lora import (
    Model,
    Target,
    check_adaptable,
    insert,
    leaf,
    new_updates,
    require_lora,
    targets,
    transformers_layout,
)
from ligermodels.adapt.patterns import full_matches
from ligermodels.arguments import LARGEST, check_flag
from ligermodels.convert import hub
from ligermodels.convert.config_json import read_json, short
from ligermodels.convert.export_spec import as_json
from ligermodels.convert.files import ADAPTER, ADAPTER_CONFIG, COMPANIONS
from ligermodels.convert.input_files import folder_to_write, is_present
from ligermodels.convert.placement import DtypeLike
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.reading import reading
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.safetensors_writer import save_checkpoint
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.layers.lora import MOST_RANKS, LoRA, LoRAPart
from ligermodels.layers.sharding import reshard
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.families import family_of
from ligermodels.models.state_dict import layout_in_memory

ONE_FILE = 2**63 - 1
"""PEFT looks for one file."""
TOKENIZER = tuple(name for name in COMPANIONS if name not in ("config.json", "generation_config.json"))
"""Names of the files of a tokenizer and its chat template, which may lie beside an adapter."""

NO_BEARING = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_ga_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
))  # fmt: skip
"""Fields that do not change what the tensors of the file mean: which there are, the names of the tensors say."""
READ = frozenset((
    "alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "lora_dropout", "peft_type", "r", "rank_pattern",
    "use_rslora",
))  # fmt: skip
INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Initialisations that leave the base weights as they are."""

PATTERNS = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}
"""Field of values by regular expression -> that of the value of all other layers, 8 where it has none, as in PEFT."""


def save_adapter(model: Model, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write the LoRA of a model in PEFT's format, which `peft.PeftModel.from_pretrained` opens on transformers' model.

    Tensors are written in their dtype, exactly; beside them the tokenizer and chat template, if `model.export_spec` has
    other ones than the checkpoint that the model was loaded from. Of a sharded model all ranks call this, and the first
    one writes.

    Args:
        model: one with LoRA, from `add_lora` or `load_adapter`.
        folder: created if need be.
        overwrite: replace an adapter in `folder`; other files there stay.

    Raises:
        InputError: the model has no LoRA.
        CheckpointError: the folder is in use, or the disk is full; nothing is left half-written.
    """
    updates = require_lora(model, "save_adapter")
    reshard(model)
    write_adapter(model, updates, lora_tensors(updates), folder, overwrite=overwrite)


def write_adapter(
    model: CausalLM,
    updates: Mapping[str, LoRA],
    tensors: Mapping[str, Tensor],
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> None:
    """Write an adapter in PEFT's format.

    Args:
        model: the adapted model.
        updates: the LoRA of its layers, which may be on the meta device.
        tensors: A and B to write, under the names of `lora_tensors`.
        folder: created if need be.
        overwrite: replace an adapter in `folder`.
    """
    spec = model.require_export_spec()
    source = spec.source
    base = None if source is None else source.repo_id or str(source.folder)
    # Layers of a vision tower have the same names.
    known = None if source is not None and source.nested else targets(model, transformers_layout(model))
    own = {name: path for name, path in spec.files.items() if source and path.parent.absolute() != source.folder}
    # Beside a checkpoint, the tokenizer is that checkpoint's.
    folder = folder_to_write(folder)
    replaced = () if (folder / "config.json").is_file() else TOKENIZER
    save_checkpoint(
        folder,
        adapter_map(updates).export(tensors),
        name=ADAPTER.removesuffix(".safetensors"),
        max_shard_size=ONE_FILE,
        files={**own, ADAPTER_CONFIG: as_json(adapter_config(updates, known, base))},
        overwrite=overwrite,
        replaced=(ADAPTER, ADAPTER_CONFIG, "adapter_model.bin", *replaced),
        ranks=Ranks(tensors.values()),
    )


def load_adapter(
    model: Model,
    name_or_path: str | os.PathLike[str],
    *,
    is_trainable: bool = False,
    dtype: DtypeLike | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Model:
    """Freeze a model and add the LoRA of an adapter in PEFT's format, in place; returns `model`.

    Args:
        model: one without LoRA, not sharded.
        name_or_path: a local folder or a hub repo id.
        is_trainable: whether A and B are trained on; otherwise they are frozen too, as in PEFT.
        dtype: of A and B, by default that of the weights that they adapt; what is stored is cast.
        revision, token, cache_dir, local_files_only: as of `from_pretrained`.

    Raises, before the model is changed:
        HubError: the repository cannot be found or reached.
        ConfigError: adapter_config.json is missing, or a field asks for what native LoRA does not do (named): another
            `peft_type`, DoRA, biases, `modules_to_save`, ...
        CheckpointError: tensors are missing, damaged, of other layers or of the wrong shape (all are named).
        InputError: as `add_lora`.
    """
    check_adaptable(model, "load_adapter")
    check_flag("is_trainable", is_trainable)
    options: dict[str, Any] = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
    folder = hub.resolve_adapter(name_or_path, revision=revision, **options)
    with open_adapter(folder) as (config, checkpoint):
        updates = _updates(model, config, checkpoint, dtype)
        adapter_map(updates).load(checkpoint, lora_tensors(updates))
    return insert(model, updates, trainable=is_trainable)


def rewrite_adapter(
    model: CausalLM,
    adapter: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    dtype: DtypeLike | None = None,
    overwrite: bool = False,
) -> None:
    """Check that an adapter in PEFT's format opens on a model, and write it as `save_adapter` does.

    Args:
        model: one without LoRA; it may be on the meta device, and stays as it is.
        adapter: a local folder or a hub repo id.
        folder, overwrite: as of `save_adapter`.
        dtype: of what is written; by default the stored one, and then all tensors keep their bits.

    Raises as `load_adapter` and `save_adapter`.
    """
    check_adaptable(model, "rewrite_adapter")
    with open_adapter(hub.resolve_adapter(adapter)) as (config, checkpoint):
        stored = functools.reduce(torch.promote_types, (header.dtype for header in checkpoint.headers.values()))
        updates = _updates(model, config, checkpoint, dtype or stored)
        tensors = {name: torch.empty_like(each, device="cpu") for name, each in lora_tensors(updates).items()}
        adapter_map(updates).load(checkpoint, tensors)
    write_adapter(model, updates, tensors, folder, overwrite=overwrite)


@contextmanager
def open_adapter(folder: Path) -> Iterator[tuple[dict[str, Any], Checkpoint]]:
    """adapter_config.json and the tensors of an adapter in PEFT's format.

    Raises ConfigError when there is no config, CheckpointError when there are no safetensors or they are damaged.
    """

    def open_both(opened: ExitStack) -> tuple[dict[str, Any], Checkpoint]:
        config = read_json(folder / ADAPTER_CONFIG)
        if not is_present(folder / ADAPTER, CheckpointError):
            raise CheckpointError(
                f"{folder}: no {ADAPTER}; pickles (adapter_model.bin) are not loaded: save it by PEFT anew"
            )
        return config, opened.enter_context(Checkpoint(folder, single=ADAPTER))

    with reading(folder, open_both) as found:
        yield found


def adapted_paths(config: Mapping[str, Any], names: Collection[str]) -> dict[str, float]:
    """Path in transformers of each adapted layer -> its lora_alpha, of an adapter with tensors of these `names`.

    Raises ConfigError and CheckpointError, naming the field or tensor, for one that native LoRA opens on no model.
    """
    check_config(config)
    return _by_pattern("alpha_pattern", config, sorted(_paths(names)))


def adapter_map(updates: Mapping[str, LoRA]) -> WeightMap:
    """Native names of A and B to their names in PEFT's files."""
    return WeightMap([each for name, update in updates.items() for each in update.weight_mappings(f"{name}.update")])


def lora_tensors(updates: Mapping[str, LoRA]) -> dict[str, Tensor]:
    """A and B by the names of the model's parameters."""
    return {
        f"{name}.update.{own}": tensor
        for name, update in updates.items()
        for own, tensor in update.lora_parameters().items()
    }


def adapter_config(
    updates: Mapping[str, LoRA], known: Collection[str] | None, base_model: str | None = None
) -> dict[str, Any]:
    """adapter_config.json.

    Args:
        updates: the LoRA of each layer.
        known: the paths of all layers that could be adapted; None where the adapter may have more than the model has.
        base_model: name of the base model.

    Ranks and scalings that few layers have are patterns.
    """
    parts = {part.name: part for update in updates.values() for part in update.parts}
    r = Counter(part.r for part in parts.values()).most_common(1)[0][0]
    alpha = Counter(part.lora_alpha for part in parts.values()).most_common(1)[0][0]
    # PEFT adapts all layers whose path ends in a name: the short ones only if that is all of them.
    names = dict.fromkeys(map(leaf, parts))
    short_do = known is not None and all(path in parts for path in known if leaf(path) in names)
    first = next(iter(updates.values()))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": first.dropout,
        "use_rslora": first.parts[0].use_rslora,
        "target_modules": list(names if short_do else parts),
        "rank_pattern": {name: part.r for name, part in parts.items() if part.r != r},
        "alpha_pattern": {name: part.lora_alpha for name, part in parts.items() if part.lora_alpha != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
    }


def check_config(config: Mapping[str, Any]) -> None:
    """ConfigError, naming the field, unless an adapter_config.json is of a LoRA that native layers compute."""

    def refuse(field: str, what: str) -> ConfigError:
        return ConfigError(f"{ADAPTER_CONFIG}: field {field!r} {what}, got {short(config.get(field))}")

    if config.get("peft_type") != "LORA":
        raise refuse("peft_type", "must be 'LORA': other adapters are not implemented")
    if config.get("bias", "none") != "none":
        raise refuse("bias", "must be 'none': trained biases are not implemented")
    if config.get("init_lora_weights", True) not in INITS:
        raise refuse(
            "init_lora_weights", "changes the base weights too; save the adapter as a plain LoRA (PEFT has ways)"
        )
    for name, value in config.items():
        if name not in NO_BEARING | READ and value not in (None, False, [], {}):
            raise refuse(name, "is not implemented by native LoRA")
    for name in PATTERNS:
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(
            _positive(value, name == "rank_pattern") for value in pattern.values()
        ):
            raise refuse(name, f"must be an object of numbers above 0 (ranks: whole ones of at most {MOST_RANKS})")
        for key in pattern:
            try:
                full_matches(key, [])
            except ValueError as error:
                raise refuse(name, f"must have regular expressions as keys, and {short(key)} {error}") from None
    if not isinstance(config.get("use_rslora") or False, bool):
        raise refuse("use_rslora", "must be true or false")
    for name in ("r", "lora_alpha"):
        if not _positive(config.get(name, 8), name == "r"):
            raise refuse(name, f"must be a number above 0 (a rank: a whole one of at most {MOST_RANKS})")


def _updates(
    model: CausalLM, config: Mapping[str, Any], checkpoint: Checkpoint, dtype: DtypeLike | None
) -> dict[str, LoRA]:
    """The LoRA updates of an adapter, not yet in the model and not filled; errors: see `load_adapter`."""
    check_config(config)
    found = _targets(model, paths := _paths(checkpoint.headers))
    if unknown := [path for path in paths if path not in found]:
        known = ", ".join(dict.fromkeys(map(leaf, found)))
        raise CheckpointError(
            f"{checkpoint.folder / ADAPTER}: adapts {len(unknown)} layers that are no linear layers of this model's "
            f"blocks, such as {unknown[0]}; native LoRA adapts {known}"
        )
    adapted = [path for path in found if path in paths]
    ranks, alphas = (_by_pattern(name, config, adapted) for name in PATTERNS)
    rslora = bool(config.get("use_rslora"))
    parts = {path: LoRAPart(path, found[path].views, ranks[path], alphas[path], rslora) for path in adapted}
    return new_updates(model, found, parts, config.get("lora_dropout") or 0.0, dtype)


def _positive(value: Any, whole: bool) -> bool:
    kinds, most = (int, MOST_RANKS) if whole else (int | float, LARGEST)
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value <= most


def _by_pattern(name: str, config: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """For each path the value of the first regular expression that matches its end, from a dot on, as in PEFT."""
    values = dict.fromkeys(paths, config.get(PATTERNS[name], 8))
    for key, value in reversed((config.get(name) or {}).items()):
        try:
            matching = full_matches(rf"(.*\.)?({key})", paths)
        except ValueError as error:
            raise ConfigError(f"{ADAPTER_CONFIG}: field {name!r}: {short(key)} {error}") from None
        values |= dict.fromkeys(compress(paths, matching), value)
    return values


def _paths(names: Collection[str]) -> set[str]:
    """The layers of which the file has tensors; CheckpointError when it has any but A and B."""
    found = {name: re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", name) for name in names}
    if other := [name for name, match in found.items() if match is None]:
        raise CheckpointError(
            f"{ADAPTER}: has {len(other)} tensors that are no A or B of a linear layer, such as {other[0]}"
        )
    if not found:
        raise CheckpointError(f"{ADAPTER}: has no tensors")
    return {match[1] for match in found.values() if match is not None}


def _targets(model: Model, paths: Collection[str]) -> dict[str, Target]:
    """The linear layers under the names of the layout that has the most of `paths`: an adapter may be of the model with
    its vision tower, or of the text model alone."""
    spec = model.require_export_spec()
    whole = spec.hf_config if spec.source is None else spec.source.hf_config
    layouts = (
        transformers_layout(model),
        layout_in_memory(spec, model.config),
        *family_of(whole).weight_maps(model.config),
    )
    return max((targets(model, layout) for layout in layouts), key=lambda found: len(found.keys() & set(paths)))
