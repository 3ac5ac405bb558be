"""The layers that an adapter's file adapts, and the empty LoRA updates that take its tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ligermodels.adapt.adapter_base import check_base
from ligermodels.adapt.adapter_config import PATTERNS, check_config, values_by_part, values_by_path
from ligermodels.adapt.expert_files import PREFIX, file_names, find_experts
from ligermodels.adapt.lora import AnyLoRA, Model, new_updates
from ligermodels.adapt.named_layers import warn_of_other_layers
from ligermodels.adapt.saved_modules import check_unquantized, module_paths, stored_modules
from ligermodels.adapt.targets import Target, container, ends_with, expert_targets, leaf, targets, transformers_layout
from ligermodels.adapt.token_rows import NAME as TOKEN_ROWS
from ligermodels.adapt.token_rows import rows_of_file
from ligermodels.arguments import ExpertFormat
from ligermodels.convert.files import ADAPTER, ADAPTER_CONFIG
from ligermodels.convert.loading import Spec
from ligermodels.convert.mappings import WeightMapping
from ligermodels.convert.placement import DtypeLike
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.models.families import family_of
from ligermodels.models.state_dict import layout_in_memory


class Adapter(NamedTuple):
    """The contents of an adapter's file, for a model."""

    updates: dict[str, AnyLoRA]  # LoRA and rows of tokens, empty, not yet in the model
    expert_format: ExpertFormat
    modules: tuple[WeightMapping, ...]  # parameters that the file has whole: see `stored_modules`


def adapter_of_file(
    model: Model, config: Mapping[str, Any], checkpoint: Checkpoint, dtype: DtypeLike | None
) -> Adapter:
    """Empty LoRA updates for the tensors of an adapter, the format of its experts, and its whole parameters.

    Args:
        model: the model to adapt.
        config: the fields of adapter_config.json.
        checkpoint: the tensors.
        dtype: dtype of A and B; None for the dtype of the weights.

    Raises the errors of `load_adapter`.
    """
    check_config(config)
    check_base(model, config)
    paths, of_tokens, whole = adapted_paths(checkpoint.headers)
    layouts = _layouts(model)
    linear, experts = _targets(model, layouts, paths)
    modules = stored_modules(layouts, whole, config)
    check_unquantized(model, modules, "load the model unquantised, or exclude these layers")
    try:
        found = find_experts(paths, experts, config.get("target_parameters"))
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.folder / ADAPTER}: {error}") from None
    for target in config.get("target_parameters") or ():
        if not any(ends_with(path, target) for path in found.names):
            raise ConfigError(f"{ADAPTER_CONFIG}: target_parameters: {target!r} names no experts that {ADAPTER} adapts")
    rest = paths - file_names(found)
    if unknown := [path for path in sorted(rest) if path not in linear]:
        names = ", ".join(dict.fromkeys(map(leaf, (*linear, *experts))))
        raise CheckpointError(
            f"{checkpoint.folder / ADAPTER}: adapts {len(unknown)} layers that are no linear layers of this model's "
            f"blocks, such as {unknown[0]}; native LoRA adapts {names}"
        )
    if not found.names:  # files name single experts in several ways
        warn_of_other_layers(config, rest, linear.keys() - set(module_paths(modules)))
    named = {path: (path,) for path in linear if path in rest} | found.names
    known = {**linear, **experts}
    ranks, alphas = (values_by_part(pattern, config, named) for pattern in PATTERNS)
    rslora = bool(config.get("use_rslora"))
    parts = {path: known[path].part(path, ranks[path], alphas[path], rslora) for path in named}
    shared = found.form == "shared_outer" and _is_shared(checkpoint, found.names)
    options: dict[str, Any] = {"dropout": config.get("lora_dropout") or 0.0, "dtype": dtype, "shared_outer": shared}
    rows = rows_of_file(model, layouts, of_tokens, config, dtype)
    return Adapter({**new_updates(model, known, parts, **options), **rows}, found.form, modules)


def adapted_paths(names: Collection[str]) -> tuple[set[str], list[str], list[str]]:
    """Paths of the layers that a file with tensors of these `names` adapts, and the names of its rows of tokens and of
    its tensors of whole modules.

    Raises CheckpointError if the file contains other tensors of LoRA than A and B, or no A and B.
    """
    matches = {name: re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", name) for name in names}
    rows = [name for name in names if TOKEN_ROWS.fullmatch(name)]
    whole = [name for name, match in matches.items() if match is None and name not in rows]
    if other := [name for name in whole if not name.startswith(PREFIX) or ".lora_" in name]:
        raise CheckpointError(
            f"{ADAPTER}: has {len(other)} tensors that are no A or B of a linear layer, such as {other[0]}"
        )
    if not any(matches.values()):
        raise CheckpointError(f"{ADAPTER}: has no tensors A and B of LoRA")
    return {match[1] for match in matches.values() if match is not None}, rows, whole


def layers_of_file(config: Mapping[str, Any], headers: Mapping[str, Spec]) -> dict[str, tuple[int, float]]:
    """Path in transformers of each adapted layer -> its rank and lora_alpha, from the config and the headers of an
    adapter, without its model.

    Raises ConfigError or CheckpointError, naming the field or tensor, if native LoRA does not support the adapter.
    """
    check_config(config)
    named = _named_paths(adapted_paths(headers)[0], config.get("target_parameters") or ())
    ranks, alphas = (values_by_path(pattern, config, list(named)) for pattern in PATTERNS)
    shapes = {name: headers[f"{PREFIX}{path}.lora_A.weight"].shape for name, path in named.items()}
    # The tensor of stacked experts has the rank of all experts.
    return {name: (shapes[name][-2] if path == name else ranks[name], alphas[name]) for name, path in named.items()}


def _named_paths(paths: Collection[str], target_parameters: Collection[str]) -> dict[str, str]:
    """Path in transformers of each adapted layer or parameter -> its path in the file.

    PEFT names a parameter of stacked experts by its module: the second one of a module as `base_layer` of the first.
    """
    parameters = {container(name): leaf(name) for name in target_parameters}
    first = "up_proj" if any(leaf(name) == "up_proj" for name in target_parameters) else "gate_up_proj"
    named: dict[str, str] = {}
    for path in sorted(paths):
        alone = next((name for owner, name in parameters.items() if owner and path.endswith(owner)), "")
        if leaf(path) == "base_layer":
            named[f"{container(path)}.{first}"] = path
        elif name := "down_proj" if f"{path}.base_layer" in paths else alone:
            named[f"{path}.{name}"] = path
        else:
            named[path] = path
    return named


def _is_shared(checkpoint: Checkpoint, names: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether all experts share A of gate and up, and B of down, in a file of the format "shared_outer"."""
    side = {path: "B" if leaf(path) == "down_proj" else "A" for path in names}
    tensors = (f"{PREFIX}{layers[0]}.lora_{side[path]}.weight" for path, layers in names.items())
    return all(name in checkpoint.headers and checkpoint.headers[name].shape[0] == 1 for name in tensors)


def _layouts(model: Model) -> tuple[WeightMap, ...]:
    """The layouts of checkpoints whose names an adapter may have, that of transformers' model first.

    An adapter may belong to the model with its vision tower, or to the text model alone.
    """
    spec = model.require_export_spec()
    hf_config = spec.hf_config if spec.source is None else spec.source.hf_config
    of_family = family_of(hf_config).weight_maps(model.config)
    return transformers_layout(model), layout_in_memory(spec, model.config), *of_family


def _targets(
    model: Model, every: Sequence[WeightMap], paths: Collection[str]
) -> tuple[dict[str, Target], dict[str, Target]]:
    """The linear layers and the experts by their names in the layout that contains the most `paths`; linear layers also
    by names that `paths` have from another layout: files with layers of single experts name the other layers as
    transformers' modules.
    """
    layouts = every[2:]  # of the family
    modules = {*paths, *map(container, paths), *(container(container(path)) for path in paths)}

    def hits(known: tuple[dict[str, Target], dict[str, Target]]) -> int:
        return len(known[0].keys() & set(paths)) + sum(container(path) in modules for path in known[1])

    known = [(targets(model, own, layouts), expert_targets(model, own, layouts)) for own in every]
    linear, experts = max(known, key=hits)
    elsewhere = {path: target for other, _ in known for path, target in other.items() if path in paths}
    return {**elsewhere, **linear}, experts
