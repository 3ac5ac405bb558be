"""Modules that are trained whole beside LoRA, such as the embedding: PEFT's `modules_to_save`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.adapt.expert_files import PREFIX
from ligermodels.adapt.targets import container, leaf, transformers_layout
from ligermodels.convert.files import ADAPTER, ADAPTER_CONFIG
from ligermodels.convert.loading import Spec
from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import CheckpointError, InputError, short
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.untie import EMBEDDING, HEAD, untie
from ligermodels.models.vocabulary import token_parameters


def chosen_modules(
    model: CausalLM, names: Sequence[str] | None, adapted: Collection[str] = ()
) -> tuple[WeightMapping, ...]:
    """The parameters of the modules that are named, mapped to their tensors in PEFT's files.

    Args:
        model: the model.
        names: ends of paths in transformers, as in PEFT: "norm" names every norm, "mlp" all layers of every MLP. Either
            name of a tied weight stands for the weight. None for no modules. Buffers of the modules (the bias
            of a router) are saved with them, as in PEFT, and not trained.
        adapted: native names of modules with LoRA.

    Raises:
        InputError: a name matches no module; the native model fuses a module with others that are not named; or a
            module is quantised, or has LoRA.
    """
    _check_names(names)
    layout = transformers_layout(model)
    mappings = every_mapping(layout)
    chosen = {path for name in names or () for path in _named(mappings, name)}
    tied = {container(name) for pair in layout.aliases.items() for name in pair}
    if tied & chosen:
        chosen |= tied
    found = [mapping for mapping in mappings if not chosen.isdisjoint(_paths(mapping))]
    for mapping in found:
        _check_whole(mapping, chosen, adapted)
    check_unquantized(model, found, "they cannot be trained whole")
    return tuple(_in_file(mapping, {source: f"{PREFIX}{source}" for source in _sources(mapping)}) for mapping in found)


def token_modules(model: CausalLM) -> list[str]:
    """Names in transformers of the embedding and the LM head."""
    layout = transformers_layout(model)
    found = [mapping for mapping in every_mapping(layout) if mapping.target in (EMBEDDING, HEAD)]
    return [leaf(path) for mapping in found for path in _paths(mapping)]


def _check_names(names: Any) -> None:
    """Raise InputError unless these are names, or None."""
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names or ()):
        raise InputError(f"modules_to_save: must be a list of names, got {short(names)}")


def _check_whole(mapping: WeightMapping, chosen: Collection[str], adapted: Collection[str]) -> None:
    """Raise InputError for a parameter of which only some layers are `chosen`, or which is `adapted` by LoRA."""
    if left := [path for path in _paths(mapping) if path not in chosen]:
        fused = ", ".join(dict.fromkeys(map(leaf, _paths(mapping))))
        raise InputError(f"modules_to_save: {fused} are one fused weight; name all of them, or use LoRA for {left[0]}")
    if container(mapping.target) in adapted:
        raise InputError(f"modules_to_save: {_paths(mapping)[0]} has LoRA; leave it out of target_modules")


def _named(mappings: Iterable[WeightMapping], name: str) -> set[str]:
    """The paths of the modules with this name. InputError if there are none."""
    paths = {path for mapping in mappings for path in _paths(mapping)}
    if not (found := {path for path in paths if _is_named(path, name)}):
        known = ", ".join(sorted({leaf(path) for path in paths}))
        raise InputError(f"modules_to_save: {name!r} matches no module; there are {known}")
    return found


def _is_named(path: str, name: str) -> bool:
    """Whether a name is the end of a path, or of the path of a module around it, as in PEFT."""
    parts = path.split(".")
    return any(".".join(parts[:end]).endswith(name) for end in range(1, len(parts) + 1))


def check_unquantized(model: CausalLM, modules: Iterable[WeightMapping], advice: str) -> None:
    """Raise InputError, with this advice, if the model has quantised one of the modules."""
    tensors = whole_tensors(model)
    if quantized := [mapping for mapping in modules if mapping.target not in tensors]:
        paths = ", ".join(module_paths(quantized))
        raise InputError(f"modules_to_save: {paths} are quantised; {advice}")


def whole_tensors(model: CausalLM) -> dict[str, Tensor]:
    """The parameters and buffers of a model by native name; a tied weight has both its names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def stored_modules(
    layouts: Iterable[WeightMap], names: Collection[str], config: Mapping[str, Any]
) -> tuple[WeightMapping, ...]:
    """The parameters and buffers that an adapter's file has whole, mapped to its tensors.

    PEFT writes `modules_to_save` with their buffers (the bias of a router), and the embedding and head too if LoRA
    adapts them or the vocabulary has grown.

    Args:
        layouts: weight maps of the model.
        names: tensors of the file that are no A or B.
        config: the fields of adapter_config.json.

    Raises:
        CheckpointError: a tensor belongs to no parameter of the model, or a module of the config has no tensor.
    """
    stored = {_path(name): name for name in names}
    found: dict[str, WeightMapping] = {}
    for layout in layouts:
        for mapping in every_mapping(layout):
            if mapping.target not in found and all(source in stored for source in _sources(mapping)):
                found[mapping.target] = _in_file(mapping, stored)
    used = {source for mapping in found.values() for source in _sources(mapping)}
    if left := sorted(set(names) - used):
        raise CheckpointError(
            f"{ADAPTER}: has {len(left)} tensors that are no A or B of a linear layer and no whole parameter of this "
            f"model (it may fuse the weights of several layers), such as {left[0]}"
        )
    for name in config.get("modules_to_save") or ():
        if not any(_is_named(container(path), name) for path in stored):
            raise CheckpointError(f"{ADAPTER}: has no tensor of {name!r} in modules_to_save of {ADAPTER_CONFIG}")
    return tuple(found.values())


def saved_values(
    model: CausalLM, modules: Iterable[WeightMapping], vocab_size: int, device: str | None = None
) -> dict[str, Tensor]:
    """Memory for the parameters of modules, by native name, with their dtypes.

    Args:
        model: the model.
        modules: the parameters.
        vocab_size: rows of the parameters that have a row for each token.
        device: device of the memory; by default those of the parameters.
    """
    tensors, by_token = whole_tensors(model), token_parameters(model)
    values: dict[str, Tensor] = {}
    for name in (mapping.target for mapping in modules):
        old = tensors[name]
        shape = (vocab_size, *old.shape[1:]) if name in by_token else old.shape
        values[name] = torch.empty(shape, dtype=old.dtype, device=device or old.device)
    return values


def stored_vocab_size(model: CausalLM, modules: Iterable[WeightMapping], headers: Mapping[str, Spec]) -> int:
    """The vocabulary of an adapter: the model's, or a larger one if the adapter has all parameters with a row for each
    token whole, with more rows. Other shapes are for the loader to reject.

    Args:
        model: the model.
        modules: the parameters that the adapter's file has whole, mapped to its tensors.
        headers: name -> dtype and shape of the file's tensors.
    """
    size, by_token = model.config.vocab_size, token_parameters(model)
    shapes = {each.target: headers[each.views[0].source].shape for each in modules if each.target in by_token}
    rows = {shape[:1] for shape in shapes.values()}
    if shapes.keys() != by_token.keys() or len(rows) != 1 or model.config.per_layer_inputs is not None:
        return size
    return max(size, *rows.pop())


def set_modules(model: CausalLM, modules: Sequence[WeightMapping], values: Mapping[str, Tensor], trains: bool) -> None:
    """Give parameters of a model the values of an adapter.

    Args:
        model: the model, with LoRA, changed in place. If it ties its head to the embedding, and they differ now, it is
            untied.
        modules: the parameters, mapped to tensors of the adapter.
        values: their values, by native name.
        trains: whether they require gradients.
    """
    if model.config.head.tied and not {EMBEDDING, HEAD}.isdisjoint(values):
        tied = model.get_parameter(EMBEDDING)
        if not torch.equal(values.get(EMBEDDING, tied), values.get(HEAD, tied)):
            untie(model)
            model.head.weight = nn.Parameter(tied.detach().clone(), requires_grad=False)
    tensors = whole_tensors(model)
    for name, value in values.items():
        tensors[name].detach().copy_(value)
    train_modules(model, modules, trains)


def train_modules(model: CausalLM, modules: Sequence[WeightMapping], trains: bool = True) -> None:
    """Note the modules that are saved whole, and set whether their parameters require gradients."""
    model.modules_to_save = tuple(modules)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in (mapping.target for mapping in modules):
        if name in parameters:
            parameters[name].requires_grad_(trains)


def written_modules(modules: Iterable[WeightMapping]) -> list[WeightMapping]:
    """The parameters, mapped to the names that PEFT gives the tensors of whole modules."""
    return [
        _in_file(mapping, {source: f"{PREFIX}{_path(source)}" for source in _sources(mapping)}) for mapping in modules
    ]


def module_paths(modules: Iterable[WeightMapping]) -> list[str]:
    """The paths in transformers of the modules, in order."""
    return list(dict.fromkeys(container(_path(source)) for mapping in modules for source in _sources(mapping)))


def _path(name: str) -> str:
    """The name in transformers of a whole tensor in PEFT's file. The copy of a base weight is `base_layer` there."""
    return re.sub(r"(\.token_adapter)?\.base_layer(?=\.\w+$)", "", name.removeprefix(PREFIX))


def every_mapping(layout: WeightMap) -> list[WeightMapping]:
    """The mappings of a weight map, and of a tied head, which repeats the embedding."""
    return [*layout.mappings, *(rename(HEAD, alias) for alias in layout.aliases)]


def _paths(mapping: WeightMapping) -> list[str]:
    """The paths of the modules whose tensors make up a parameter."""
    return [container(source) for source in _sources(mapping)]


def _sources(mapping: WeightMapping) -> list[str]:
    return [view.source for view in mapping.views]


def _in_file(mapping: WeightMapping, names: Mapping[str, str]) -> WeightMapping:
    """The mapping with other names of its checkpoint tensors."""
    return replace(mapping, views=tuple(replace(view, source=names[view.source]) for view in mapping.views))
