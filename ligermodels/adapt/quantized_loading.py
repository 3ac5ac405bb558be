"""Load a checkpoint into a model with quantised layers: their weights are rounded while the checkpoint is read."""

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
from ligermodels.layers.quantized import QuantizedCompute, quantized_layers
from ligermodels.models.untie import EMBEDDING, HEAD

CHUNK_BYTES = 2**30
"""Bytes of weights, in the model's dtype, that are read before they are rounded; at least one layer's weights."""

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
    """Fill all tensors of a model from a checkpoint, except LoRA's, as `WeightMap.load` does.

    Quantised weights are cast to `dtype` and then rounded.

    Args:
        model: the model, with memory on its device.
        weight_map: maps the model's names to the checkpoint's.
        reader: the checkpoint.
        dtype: dtype of weights before they are rounded.
        progress: called with the bytes read so far and the bytes in all. Default: None.
        mapped: whether plain tensors may stay mapped from the file, see `WeightMap.load`. Default: False.

    Raises:
        CheckpointError: `WeightMap.load` raises it, or weights to be rounded are not finite.
    """
    layers = {f"{name}.weight": layer.compute for name, layer in quantized_layers(model).items()}
    state = _without_codes(model, layers)
    # In a checkpoint with tied embeddings there is no head. Its weight in the model, now untied, is the embedding.
    no_head = all(mapping.target != HEAD for mapping in weight_map.mappings)
    tied = layers.pop(HEAD, None) if no_head and weight_map.aliases else None
    if not layers and tied is None:
        return weight_map.load(reader, state, progress, mapped=mapped)
    weights = {name: _weight(layer, dtype, "meta") for name, layer in layers.items()}
    weight_map.plan(reader.headers, {**state, **weights})
    quantized = [mapping for mapping in weight_map.mappings if mapping.target in layers]
    plain = [mapping for mapping in weight_map.mappings if mapping.target not in layers]
    count = _Counting(progress, sum(_stored_bytes(mapping, weights, reader) for mapping in quantized))
    replace(weight_map, mappings=plain, ignored=[""]).load(reader, state, count, mapped=mapped)
    for group in _groups(quantized, weights):
        count.next_part()
        read = {m.target: _weight(layers[m.target], dtype, layers[m.target].codes.device) for m in group}
        replace(weight_map, mappings=group, ignored=[""], aliases={}).load(reader, read, count, mapped=mapped)
        for name in list(read):
            _fill(layers[name], name, read.pop(name))
    if tied is not None:
        _fill(tied, EMBEDDING, state[EMBEDDING])


def _without_codes(model: torch.nn.Module, layers: Mapping[str, QuantizedCompute]) -> dict[str, Tensor]:
    """The tensors of the model's checkpoint, without LoRA and without codes and scales of the quantised layers."""
    codes = {f"{name.removesuffix('weight')}compute.{part}" for name in layers for part in ("codes", "scales")}
    return {name: tensor for name, tensor in without_lora(model).items() if name not in codes}


def _fill(layer: QuantizedCompute, name: str, weight: Tensor) -> None:
    """Round a weight of the checkpoint, called `name` in the model."""
    try:
        layer.fill(weight)
    except InputError as error:
        raise CheckpointError(f"{name}: {error}") from None


def _weight(layer: QuantizedCompute, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return torch.empty(layer.out_features, layer.in_features, dtype=dtype, device=device)


def _stored_bytes(mapping: WeightMapping, weights: Mapping[str, Tensor], reader: Reader) -> int:
    parts = mapping.split(weights[mapping.target])
    return sum(math.prod(view.shape) * reader.headers[source.source].dtype.itemsize for source, view in parts)


def _groups(mappings: list[WeightMapping], weights: Mapping[str, Tensor]) -> Iterator[list[WeightMapping]]:
    """Divide the mappings, in order, into groups with targets of at most CHUNK_BYTES bytes, or with one target."""
    group, size = list[WeightMapping](), 0
    for mapping in mappings:
        nbytes = weights[mapping.target].nbytes
        if group and size + nbytes > CHUNK_BYTES:
            yield group
            group, size = [], 0
        group, size = [*group, mapping], size + nbytes
    yield group


class _Counting:
    """Reports several loads as one. `later`: bytes of all loads after the first one."""

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
