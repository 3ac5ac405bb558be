"""State dicts with the names of transformers, read from and loaded into a model in memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ligermodels.convert.export_spec import ExportSpec
from ligermodels.convert.loading import Spec
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.shards import is_dtensor
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import CheckpointError, short
from ligermodels.layers.initialization import persistent_tensors
from ligermodels.models.families import family_of
from ligermodels.models.untie import HEAD, TIED

if TYPE_CHECKING:
    from ligermodels.models.decoder import DecoderConfig


class StateDict:
    """Lets `WeightMap.load` read the tensors of a state dict."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.headers = tensors

    def read(self, name: str) -> Tensor:
        """The tensor of this name."""
        return self.headers[name].detach()

    def read_together(self, names: Sequence[str]) -> Tensor | None:
        """None, because tensors of a state dict are not adjacent in one file."""
        return None


def layout_in_memory(spec: ExportSpec, config: DecoderConfig) -> WeightMap:
    """The weight map of a loaded transformers model (5 and later), where the experts of a layer are one tensor."""
    stacked = family_of(spec.hf_config).stacked_layouts
    return replace(config.weight_map(**stacked[0]), dtypes=spec.weight_map.dtypes) if stacked else spec.weight_map


def export_state_dict(model: nn.Module, weight_map: WeightMap) -> dict[str, Tensor]:
    """The tensors of `model`, detached and contiguous, by their names in `weight_map`.

    Parts of a fused parameter are copies. Only tied tensors, which appear under both names, share memory. If the model
    is sharded, all ranks call this, and an error on one rank is an error on all.
    """
    state = persistent_tensors(model)
    with Ranks.that_hold(state.values()).step("gathering the weights", ""):
        tensors = {tensor.name: tensor.read().detach() for tensor in weight_map.export(state)}
    for name, tensor in tensors.items():
        if tensor.nbytes != tensor.untyped_storage().nbytes() or not tensor.is_contiguous():
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    return tensors | {alias: tensors[original] for alias, original in weight_map.aliases.items()}


def known_layouts(spec: ExportSpec, config: DecoderConfig, stored: Collection[str] = ()) -> list[WeightMap]:
    """The weight maps by which the weights of a model may come: of the checkpoint that it was loaded from, then all of
    its family; and of the family of its language model, where the checkpoint holds more than that.

    Args:
        spec: how the model is written.
        config: the decoder's config.
        stored: names of the tensors, see `Family.layouts_for`.
    """
    configs, maps = [spec.hf_config], list[WeightMap]()
    if spec.source is not None:
        configs, maps = [spec.source.hf_config, spec.hf_config], [spec.source.weight_map]
    families = {family.model_type: family for family in map(family_of, configs)}
    return maps + [weight_map for family in families.values() for weight_map in family.weight_maps(config, stored)]


def load_state_dict(model: Any, state_dict: Mapping[str, Tensor]) -> None:
    """Fill `model` from a state dict in any of its `known_layouts`; see `CausalLM.load_hf_state_dict`."""
    state, spec = persistent_tensors(model), model.require_export_spec()
    check_state_dict(state_dict)
    weight_map = nearest_layout(known_layouts(spec, model.config, state_dict), state_dict, state)
    check_head(weight_map, state_dict, can_tie=partial(family_of(spec.hf_config).can_tie, spec.hf_config))
    weight_map.load(StateDict(state_dict), state)


def check_state_dict(state_dict: Any, where: str = "state_dict") -> Mapping[str, Tensor]:
    """Returns `state_dict`. CheckpointError, which begins with `where`, unless it maps names to whole, dense tensors
    with values."""
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(f"{where}: must map names to tensors, got a {type(state_dict).__name__}")
    for name, tensor in state_dict.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{where}: has the key {short(name)}, which is no name")
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{where}: {short(name)} is no tensor, but a {type(tensor).__name__}")
        if is_dtensor(tensor):
            raise CheckpointError(
                f"{where}: {name} is a DTensor; give whole tensors, as get_model_state_dict of "
                "torch.distributed.checkpoint.state_dict returns with full_state_dict=True"
            )
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"{where}: {name} has no dense values: {tensor.layout} on {tensor.device}; weights that accelerate "
                "offloads (device_map) are on the meta device: load the model without that"
            )
    return state_dict


def nearest_layout(layouts: Sequence[WeightMap], headers: Mapping[str, Spec], state: Mapping[str, Tensor]) -> WeightMap:
    """The layout that fits a checkpoint best: the fewest of its tensors are missing from `headers`.

    Args:
        layouts: weight maps, the usual one first. Of equally good layouts, the first one is returned with the fewest
            tensors of a shape that does not fit (experts may be stored transposed).
        headers: name -> dtype and shape of the checkpoint's tensors.
        state: native name -> tensor of the model.
    """
    missing = [len(layout.sources() - headers.keys()) for layout in layouts]
    nearest = [layout for layout, count in zip(layouts, missing, strict=True) if count == min(missing)]
    return nearest[0] if len(nearest) == 1 else min(nearest, key=lambda layout: layout.misshapen(headers, state))


def check_head(layout: WeightMap, headers: Mapping[str, Spec], *, can_tie: Callable[[], bool]) -> None:
    """CheckpointError for the checkpoint of a base model whose LM head is not its embedding, and is not stored.

    Args:
        layout: the layout that fits the checkpoint best.
        headers: name -> dtype and shape of the checkpoint's tensors.
        can_tie: returns whether the model's config may tie the head.
    """
    head = next((mapping.views[0].source for mapping in layout.mappings if mapping.target == HEAD), None)
    if head is not None and layout.sources() - headers.keys() == {head}:
        how = f"set {TIED} to true in config.json: the embedding then stands for the head"
        if not can_tie():
            how = f"write a copy of the embedding as {head} into the weights, as models of this type have no tied head"
        raise CheckpointError(
            f"the checkpoint holds a base model without an LM head, as AutoModel of transformers saves it: {head} is "
            f"missing, and by the config ({TIED}) the head is not the embedding. Load a checkpoint of the whole model; "
            f"or, for hidden states alone, {how}, and model(input_ids, return_last_hidden_state=True) does not compute "
            "the head"
        )


def move_state_dict(
    model: nn.Module,
    weight_map: WeightMap,
    tensors: Mapping[str, Tensor],
    empty: Callable[[Tensor], Tensor],
    *,
    consume: bool,
) -> None:
    """Fill a model on the meta device from a state dict, one parameter after another.

    A parameter is frozen if its tensors in `tensors` are.

    Args:
        model: the model, on the meta device.
        weight_map: maps native names to names in `tensors`.
        tensors: the state dict; made with `keep_vars=True`, if `consume` is to free the tensors of its model.
        empty: returns an uninitialised tensor with memory, like the meta tensor that it gets.
        consume: free each tensor of `tensors` once all its values have been copied.

    Raises:
        CheckpointError: tensors do not fit the model (all faults are listed), or only some of the tensors of one
            parameter are frozen. The model is then unchanged.
    """
    reader = StateDict(tensors)
    weight_map.plan(tensors, persistent_tensors(model))
    weight_map.check_aliases(reader)
    trained = _trained(weight_map, tensors)
    uses = Counter(view.source for mapping in weight_map.mappings for view in mapping.views)
    owners = _owners(model)
    state = persistent_tensors(model)
    for mapping in weight_map.mappings:
        old = state[mapping.target]
        new = empty(old)
        replace(weight_map, mappings=[mapping], ignored=[""], aliases={}).load(reader, {mapping.target: new})
        filled = nn.Parameter(new, trained[mapping.target]) if isinstance(old, nn.Parameter) else new
        for table, name in owners[id(old)]:
            table[name] = filled
        if consume:
            for view in mapping.views:
                uses[view.source] -= 1
                if not uses[view.source]:
                    tensors[view.source].data = new.new_empty(0)
    for module in model.modules():  # buffers that no state dict has
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            module._apply(lambda tensor: empty(tensor) if tensor.is_meta else tensor, recurse=False)


def _trained(weight_map: WeightMap, tensors: Mapping[str, Tensor]) -> dict[str, bool]:
    """Native name -> whether its tensors require gradients; CheckpointError if only some of them do."""
    trained = {}
    for mapping in weight_map.mappings:
        flags = [tensors[view.source].requires_grad for view in mapping.views]
        if any(flags) != all(flags):
            names = ", ".join(view.source for view in mapping.views)
            raise CheckpointError(f"{names}: are one parameter here, but only some require gradients; make them alike")
        trained[mapping.target] = all(flags)
    return trained


def _owners(model: nn.Module) -> defaultdict[int, list[tuple[dict[str, Any], str]]]:
    """id of each parameter and buffer -> the modules' dicts that hold it, and its name there; several if it is tied."""
    owners: defaultdict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                owners[id(tensor)].append((table, name))
    return owners
