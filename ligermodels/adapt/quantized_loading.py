"""Weights of a checkpoint read into a model, some of whose layers are quantised: those are rounded as they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ligermodels.adapt.lora import without_lora
from ligermodels.convert.loading import Reader
from ligermodels.convert.mappings import WeightMapping
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import CheckpointError, InputError
from ligermodels.layers.quantized import QuantizedWeight, quantized_layers
from ligermodels.models.untie import EMBEDDING, HEAD

AT_A_TIME = 2**30
"""Bytes of weights in the model's dtype, those of one layer at least, that are read before they are rounded."""

Progress = Callable[[int, int], None]


def load_weights(
    model: torch.nn.Module,
    weight_map: WeightMap,
    reader: Reader,
    dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    mapped: bool = False,
) -> None:
    """Fill the model, but for LoRA's tensors, as `WeightMap.load` does.

    A layer whose weight is quantised gets what `dtype` makes of the checkpoint's, rounded. Raises CheckpointError as
    `WeightMap.load`, and for weights to be rounded that are not finite.
    """
    targets = {mapping.target for mapping in weight_map.mappings}
    layers = {f"{name}.weight": layer.compute for name, layer in quantized_layers(model).items()}
    rounded = {f"{name.removesuffix('weight')}compute.{part}" for name in layers for part in ("codes", "scales")}
    state = {name: tensor for name, tensor in without_lora(model).items() if name not in rounded}
    # Of a checkpoint that ties the two, a head that has been untied is the rounded embedding.
    tied = layers.pop(HEAD) if HEAD in layers.keys() - targets and weight_map.aliases else None
    if not layers and tied is None:
        return weight_map.load(reader, state, progress, mapped=mapped)
    weights = {name: _weight(layer, dtype, "meta") for name, layer in layers.items()}
    weight_map.plan(reader.headers, {**state, **weights})
    later = [mapping for mapping in weight_map.mappings if mapping.target in layers]
    rest = [mapping for mapping in weight_map.mappings if mapping.target not in layers]
    count = _Counting(progress, sum(_stored_bytes(each, weights, reader) for each in later))
    replace(weight_map, mappings=rest, ignored=[""]).load(reader, state, count, mapped=mapped)
    for group in _groups(later, weights):
        count.next_part()
        read = {each.target: _weight(layers[each.target], dtype, layers[each.target].codes.device) for each in group}
        replace(weight_map, mappings=group, ignored=[""], aliases={}).load(reader, read, count, mapped=mapped)
        for name in list(read):
            try:
                layers[name].fill(read.pop(name))
            except InputError as error:
                raise CheckpointError(f"{name}: {error}") from None
    if tied is not None:
        try:
            tied.fill(state[EMBEDDING])
        except InputError as error:
            raise CheckpointError(f"{EMBEDDING}: {error}") from None


def _weight(layer: QuantizedWeight, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return torch.empty(layer.out_features, layer.in_features, dtype=dtype, device=device)


def _stored_bytes(mapping: WeightMapping, weights: Mapping[str, Tensor], reader: Reader) -> int:
    parts = mapping.split(weights[mapping.target])
    return sum(math.prod(view.shape) * reader.headers[each.source].dtype.itemsize for each, view in parts)


def _groups(mappings: list[WeightMapping], weights: Mapping[str, Tensor]) -> Iterator[list[WeightMapping]]:
    """The mappings, in order, in lists of targets of at most AT_A_TIME bytes together, or one."""
    group, size = list[WeightMapping](), 0
    for each in mappings:
        nbytes = weights[each.target].nbytes
        if group and size + nbytes > AT_A_TIME:
            yield group
            group, size = [], 0
        group, size = [*group, each], size + nbytes
    yield group


class _Counting:
    """The progress of several loads as that of one, of which `later` bytes follow the first load."""

    def __init__(self, progress: Progress | None, later: int) -> None:
        self._progress, self._later = progress, later
        self._before = self._done = 0
        self._total: int | None = None

    def next_part(self) -> None:
        self._before = self._done

    def __call__(self, done: int, total: int) -> None:
        self._total = total + self._later if self._total is None else self._total
        self._done = self._before + done
        if self._progress is not None:
            self._progress(self._done, self._total)
