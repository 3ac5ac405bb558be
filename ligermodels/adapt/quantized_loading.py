"""Load a checkpoint into a model with quantised layers: their weights are rounded while the checkpoint is read.

Weights that are stored in nf4 of bitsandbytes or in mxfp4 are not rounded again: layers in that format take over their
codes and scales. In nf4 they cannot if blocks cross rows or have another size than 64, or if a layer is not made of
whole rows of stored tensors.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.adapt.lora import without_lora
from ligermodels.convert.dequantize import names_in_4_bits, names_in_mxfp4, stored_4_bits, stored_mxfp4
from ligermodels.convert.loading import Reader
from ligermodels.convert.mappings import WeightMapping
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import CheckpointError, CheckpointWarning, InputError
from ligermodels.layers.quantized import Codes, quantized_weights
from ligermodels.models.untie import EMBEDDING, HEAD
from ligermodels.ops.quantized.weights import BLOCK, FP4_BLOCK, NF4_LEVELS

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
    layers = quantized_weights(model)
    state = _without_codes(model, layers)
    # In a checkpoint with tied embeddings there is no head. Its weight in the model, now untied, is the embedding.
    no_head = all(mapping.target != HEAD for mapping in weight_map.mappings)
    tied = layers.pop(HEAD, None) if no_head and weight_map.aliases else None
    if not layers and tied is None:
        return weight_map.load(reader, state, progress, mapped=mapped)
    dense = _Part(reader, dtype)
    weight_map.plan(reader.headers, {**state, **{name: dense.empty(layer, "meta") for name, layer in layers.items()}})
    quantized = [mapping for mapping in weight_map.mappings if mapping.target in layers]
    plain = [mapping for mapping in weight_map.mappings if mapping.target not in layers]
    ways = _ways(_Reading((dense,), _fill), quantized, layers, reader)
    count = _Counting(progress, sum(way.stored_bytes(mappings, layers) for way, mappings in ways))
    replace(weight_map, mappings=plain, ignored=[""]).load(reader, state, count, mapped=mapped)
    for way, mappings in ways:
        for group in _groups(mappings, layers, dtype):
            way.load(group, layers, count, mapped)
    if tied is not None:
        _fill(tied, EMBEDDING, state[EMBEDDING])


class _Part(NamedTuple):
    """Data of a weight (N, K) that a reader returns as a tensor (N, K / block) of `dtype`."""

    reader: Reader
    dtype: torch.dtype
    block: int = 1

    def empty(self, layer: Codes, device: torch.device | str | None = None) -> Tensor:
        """The tensor, not filled; on the layer's device by default."""
        *rows, in_features = layer.shape
        shape = *rows, in_features // self.block
        return torch.empty(shape, dtype=self.dtype, device=device or layer.codes.device)

    def stored_bytes(self, mapping: WeightMapping, layer: Codes) -> int:
        parts = mapping.split(self.empty(layer, "meta"))
        return sum(math.prod(view.shape) * self.reader.headers[source.source].dtype.itemsize for source, view in parts)

    def fits(self, mapping: WeightMapping, layer: Codes) -> bool:
        """Whether the reader has the part for each row of the weight."""
        try:
            WeightMap([mapping], ignored=[""]).plan(self.reader.headers, {mapping.target: self.empty(layer, "meta")})
        except CheckpointError:
            return False
        return True


class _Reading(NamedTuple):
    """A way to read weights: the parts, and the function that fills a layer, called (layer, name, *parts)."""

    parts: tuple[_Part, ...]
    fill: Callable[..., None]

    def stored_bytes(self, mappings: Sequence[WeightMapping], layers: Mapping[str, Codes]) -> int:
        return sum(part.stored_bytes(m, layers[m.target]) for part in self.parts for m in mappings)

    def load(self, mappings: list[WeightMapping], layers: Mapping[str, Codes], count: _Counting, mapped: bool) -> None:
        """Fill the layers of the mappings.

        Args:
            mappings: mappings of their weights.
            layers: native name of the weight -> its layer.
            count: told about progress.
            mapped: whether tensors are mapped from the files, not read.
        """
        tensors = [{m.target: part.empty(layers[m.target]) for m in mappings} for part in self.parts]
        for part, read in zip(self.parts, tensors, strict=True):
            count.next_part()
            WeightMap(mappings, ignored=[""]).load(part.reader, read, count, mapped=mapped)
        for mapping in mappings:
            self.fill(layers[mapping.target], mapping.target, *(read.pop(mapping.target) for read in tensors))


def _ways(
    rounded: _Reading, mappings: Sequence[WeightMapping], layers: Mapping[str, Codes], reader: Reader
) -> list[tuple[_Reading, list[WeightMapping]]]:
    """Divide the mappings of quantised layers by the way to read them. Warns of weights that are rounded twice."""
    fitting: list[WeightMapping] = []
    exact = rounded
    if (nf4 := stored_4_bits(reader, NF4_LEVELS, BLOCK)) is not None:
        parts = _Part(nf4.codes, torch.uint8), _Part(nf4.scales, torch.float32, BLOCK)
        kind, exact = "nf4", _Reading(parts, lambda layer, name, *read: layer.fill_nf4(*read))
    elif (mxfp4 := stored_mxfp4(reader)) is not None:
        parts = _Part(mxfp4.codes, torch.uint8), _Part(mxfp4.scales, torch.uint8, FP4_BLOCK)
        kind, exact = "mxfp4", _Reading(parts, lambda layer, name, *read: layer.fill_mxfp4(*read))
    if exact is not rounded:
        own = [m for m in mappings if layers[m.target].kind == kind]
        fitting = [m for m in own if all(part.fits(m, layers[m.target]) for part in exact.parts)]
    others = [m for m in mappings if m not in fitting]
    for names, warn in ((names_in_4_bits, _warn_of_second_rounding), (names_in_mxfp4, _warn_of_mxfp4)):
        stored = names(reader)
        warn([m for m in others if stored >= {v.source for v in m.views}], layers)
    return [(rounded, others), (exact, fitting)] if fitting else [(rounded, others)]


def _warn_of_second_rounding(mappings: Sequence[WeightMapping], layers: Mapping[str, Codes]) -> None:
    if not mappings:
        return
    first, kind = mappings[0].target, layers[mappings[0].target].kind
    advice = (
        f"nf4 keeps only nf4 with blocks of {BLOCK} inputs of a row; exclude layers (quantize_exclude, "
        "--quantize-exclude) to leave them in the model's dtype"
        if kind == "nf4"
        else 'quantize="nf4" (--quantize nf4) keeps stored nf4 weights as they are'
    )
    message = (
        f"{len(mappings)} weights, such as {first}, are stored in 4 bits, dequantised and rounded to {kind}: {advice}"
    )
    warnings.warn(message, CheckpointWarning, stacklevel=5)


def _warn_of_mxfp4(mappings: Sequence[WeightMapping], layers: Mapping[str, Codes]) -> None:
    if mappings:
        first = mappings[0].target
        kind, advice = layers[first].kind, 'quantize="mxfp4" (--quantize mxfp4) keeps their values; '
        advice = "the stored blocks are not those of this layer; " if kind == "mxfp4" else advice
        message = (
            f"{len(mappings)} weights, such as {first}, are stored in MXFP4, dequantised and rounded to {kind}, which "
            f"is less exact: {advice}excluding them (quantize_exclude, --quantize-exclude) keeps them in the model's "
            "dtype"
        )
        warnings.warn(message, CheckpointWarning, stacklevel=5)


def _without_codes(model: torch.nn.Module, layers: Mapping[str, Codes]) -> dict[str, Tensor]:
    """The tensors of the model's checkpoint, without LoRA and without codes and scales of the quantised layers."""
    codes = {id(tensor) for layer in layers.values() for tensor in (layer.codes, layer.scales)}
    return {name: tensor for name, tensor in without_lora(model).items() if id(tensor) not in codes}


def _fill(layer: Codes, name: str, weight: Tensor) -> None:
    """Round a weight of the checkpoint, called `name` in the model."""
    try:
        layer.fill(weight)
    except InputError as error:
        raise CheckpointError(f"{name}: {error}") from None


def _groups(
    mappings: list[WeightMapping], layers: Mapping[str, Codes], dtype: torch.dtype
) -> Iterator[list[WeightMapping]]:
    """Divide the mappings, in order, into groups with targets of at most CHUNK_BYTES bytes, or with one target."""
    group, size = list[WeightMapping](), 0
    for mapping in mappings:
        layer = layers[mapping.target]
        nbytes = layer.in_features * layer.out_features * dtype.itemsize
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
