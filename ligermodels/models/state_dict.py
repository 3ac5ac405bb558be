"""State dicts under transformers' names, of a model in memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ligermodels.convert.export_spec import ExportSpec
from ligermodels.convert.loading import Spec
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import CheckpointError, short
from ligermodels.layers.initialization import persistent_tensors
from ligermodels.models.families import family_of

if TYPE_CHECKING:
    from ligermodels.models.decoder import DecoderConfig


class StateDict:
    """A state dict as a reader of checkpoints (`WeightMap.load`)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.headers = tensors

    def read(self, name: str) -> Tensor:
        """The tensor of this name."""
        return self.headers[name].detach()

    def read_together(self, names: Sequence[str]) -> Tensor | None:
        """None: every tensor has memory of its own."""
        return None


def layout_in_memory(spec: ExportSpec, config: DecoderConfig) -> WeightMap:
    """The weight map of a loaded transformers model (5 and later): the experts of a layer are one tensor."""
    family = family_of(spec.hf_config)
    stacked = [layout for layout in family.layouts if "experts.gate_up" in layout.get("names", {})]
    return replace(config.weight_map(**stacked[0]), dtypes=spec.weight_map.dtypes) if stacked else spec.weight_map


def export_state_dict(model: nn.Module, weight_map: WeightMap) -> dict[str, Tensor]:
    """The tensors of `model`, detached, under the names of `weight_map`, tied ones under both names.

    Parts of a native tensor are copies: all are contiguous, and no two but tied ones share memory.
    """
    found = {tensor.name: tensor.read().detach() for tensor in weight_map.export(persistent_tensors(model))}
    for name, tensor in found.items():
        if tensor.nbytes != tensor.untyped_storage().nbytes() or not tensor.is_contiguous():
            found[name] = tensor.clone(memory_format=torch.contiguous_format)
    return found | {alias: found[original] for alias, original in weight_map.aliases.items()}


def load_state_dict(model: Any, state_dict: Mapping[str, Tensor]) -> None:
    """Fill `model` from a state dict in one of the layouts of its family; see `CausalLM.load_hf_state_dict`."""
    state = persistent_tensors(model)
    _check(state_dict)
    weight_map = nearest_layout(family_of(model.hf_config).weight_maps(model.config), state_dict, state)
    weight_map.load(StateDict(state_dict), state)


def _check(state_dict: Any) -> None:
    """CheckpointError unless it maps names to dense tensors with values."""
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(f"state_dict: must map names to tensors, got a {type(state_dict).__name__}")
    for name, tensor in state_dict.items():
        if not isinstance(name, str):
            raise CheckpointError(f"state_dict: has the key {short(name)}, which is no name")
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"state_dict: {short(name)} is no tensor, but a {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise CheckpointError(f"state_dict: {name} has no dense values: {tensor.layout} on {tensor.device}")


def nearest_layout(layouts: Sequence[WeightMap], headers: Mapping[str, Spec], state: Mapping[str, Tensor]) -> WeightMap:
    """The layout that lacks the fewest of its tensors among `headers`; of several, the first of those with the fewest
    of another shape than the native tensors of `state` say (experts, transposed or not)."""
    lacking = [len(layout.sources() - headers.keys()) for layout in layouts]
    nearest = [layout for layout, count in zip(layouts, lacking, strict=True) if count == min(lacking)]
    return nearest[0] if len(nearest) == 1 else min(nearest, key=lambda layout: layout.misshapen(headers, state))


def move_state_dict(
    model: nn.Module,
    weight_map: WeightMap,
    tensors: Mapping[str, Tensor],
    empty: Callable[[Tensor], Tensor],
    *,
    consume: bool,
) -> None:
    """Fill a model on the meta device, one parameter after another.

    Args:
        tensors: a state dict under the names of `weight_map`, with `keep_vars` if they are to be freed.
        empty: gives a tensor its memory.
        consume: free each of `tensors` once it has been copied.

    A parameter is frozen if its tensors are. Raises CheckpointError that lists every fault when they do not fit the
    model, or where some of a parameter's tensors are frozen and others are not; then nothing has changed.
    """
    reader = StateDict(tensors)
    weight_map.plan(tensors, persistent_tensors(model))
    weight_map.check_aliases(reader)
    trained = {one.target: [tensors[view.source].requires_grad for view in one.views] for one in weight_map.mappings}
    for mapping in weight_map.mappings:
        if any(trained[mapping.target]) != all(trained[mapping.target]):
            names = ", ".join(view.source for view in mapping.views)
            raise CheckpointError(f"{names}: are one parameter here, but only some require gradients; make them alike")
    uses = Counter(view.source for mapping in weight_map.mappings for view in mapping.views)
    places: defaultdict[int, list[Any]] = defaultdict(list)  # of each tensor, two where weights are tied
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                places[id(tensor)].append((table, name))
    state = persistent_tensors(model)
    for mapping in weight_map.mappings:
        old = state[mapping.target]
        new = empty(old)
        one = replace(weight_map, mappings=[mapping], ignored=[""], aliases={})
        one.load(reader, {mapping.target: new})
        held = nn.Parameter(new, all(trained[mapping.target])) if isinstance(old, nn.Parameter) else new
        for table, name in places[id(old)]:
            table[name] = held
        for view in mapping.views if consume else ():
            uses[view.source] -= 1
            if not uses[view.source]:
                tensors[view.source].data = new.new_empty(0)
    for module in model.modules():  # buffers that no state dict holds
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            module._apply(lambda tensor: empty(tensor) if tensor.is_meta else tensor, recurse=False)
