"""The weight map of a model: plan, load and export by the mappings of all its tensors (see `mappings`)."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.convert import loading
from ligermodels.convert.loading import Reader, Spec
from ligermodels.convert.mappings import TensorView, WeightMapping
from ligermodels.convert.ranks import Gather, Ranks, stand_in
from ligermodels.convert.shards import Box, fill_shard, is_dtensor, local_box, within
from ligermodels.errors import CheckpointError

FLOATS = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))
"""Dtypes that loading casts to each other. Narrower dtypes need scales, and a cast does not apply them."""

FLOAT_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in sorted(FLOATS, key=str)}
"""Name in torch, such as "bfloat16" -> dtype of FLOATS."""

UNCASTABLE = "of a dtype that cannot be cast (quantised tensors load from files with a quantization_config)"
"""Fault of tensors with a dtype outside FLOATS."""

LISTED = 20
"""Faults of one kind that an error lists; it counts the others."""


class LazyTensor(NamedTuple):
    """A tensor to write: its name, shape and dtype, and the function `read` that fetches it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class WeightMap:
    """The mappings of all tensors of a model.

    Args:
        mappings: a mapping for each native tensor. Exports list tensors in this order.
        ignored: regular expressions. A checkpoint tensor is not loaded if one of them is found in its name.
        aliases: checkpoint tensor -> checkpoint tensor that it repeats (`lm_head.weight` of a tied model). Loading
            accepts either of them, or both if they are equal. Exports leave the alias out.
        dtypes: native tensor -> dtype that exports give it, unless the model's dtype is wider. For tensors that the
            model keeps in a wider dtype than its other tensors.

    Examples:
        >>> import ligermodels as lm
        >>> model = lm.from_config("config.json", device="meta")
        >>> weight_map = model.config.weight_map()
        >>> [tensor.name for tensor in weight_map.export(dict(model.named_parameters()))][:2]
        ['model.embed_tokens.weight', 'model.layers.0.self_attn.q_proj.weight']
    """

    mappings: Sequence[WeightMapping]
    ignored: Sequence[str] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def stored_dtypes(
        self, headers: Mapping[str, Spec], state: Mapping[str, Tensor], dtype: torch.dtype
    ) -> dict[str, torch.dtype]:
        """Native tensor -> dtype in the checkpoint, for tensors that a model keeps in another float dtype than `dtype`.

        Args:
            headers: name -> dtype and shape of the checkpoint's tensors.
            state: native name -> tensor of the model.
            dtype: dtype of the model.
        """
        return {
            mapping.target: headers[self._stored(mapping.views[0].source, headers)].dtype
            for mapping in self.mappings
            if (tensor := state.get(mapping.target)) is not None
            and tensor.is_floating_point()
            and tensor.dtype != dtype
        }

    def sources(self) -> set[str]:
        """Names of all checkpoint tensors that the mappings refer to."""
        return {view.source for mapping in self.mappings for view in mapping.views}

    def ignores(self, name: str) -> bool:
        """Whether `ignored` excludes the checkpoint tensor `name`."""
        return any(re.search(pattern, name) for pattern in self.ignored)

    def plan(self, headers: Mapping[str, Spec], state: Mapping[str, Tensor], what: str = "the checkpoint") -> None:
        """Check that a checkpoint fits a model, without reading tensors.

        Args:
            headers: name -> dtype and shape of the checkpoint's tensors.
            state: native name -> tensor of the model, which may be on the meta device.
            what: the checkpoint's name in the error.

        Raises:
            CheckpointError: lists all missing, unexpected and misshapen tensors, dtypes that cannot be cast, and
                mappings or native tensors without a counterpart.
        """
        views, faults = self._split(state)
        sources = {
            view.source: self._stored(view.source, headers) for mapping in self.mappings for view in mapping.views
        }
        faults["missing from the checkpoint"] = [source for source, name in sources.items() if name not in headers]
        known = {*sources, *self.aliases}
        faults["not expected in the checkpoint"] = [
            name for name in headers if name not in known and not self.ignores(name)
        ]
        for source, parts in _by_source(views).items():
            expected, native = _shape(parts), parts[0].tensor.dtype
            repeats = [alias for alias, original in self.aliases.items() if original == source]
            for name in (name for name in (source, *repeats) if name in headers):
                shape, dtype = tuple(headers[name].shape), headers[name].dtype
                if shape != expected:
                    faults["of the wrong shape"].append(f"{name} {list(shape)} instead of {list(expected)}")
                if dtype != native and not {dtype, native} <= FLOATS:
                    faults[UNCASTABLE].append(f"{name} {_short(dtype)} to {_short(native)} of {parts[-1].target}")
        raise_faults(f"{what} does not fit the model", faults)

    def misshapen(self, headers: Mapping[str, Spec], state: Mapping[str, Tensor]) -> int:
        """Number of checkpoint tensors in `headers` with a shape that does not fit the native tensors in `state`."""
        sources = _by_source(self._split(state)[0])
        return sum(tuple(headers[name].shape) != _shape(parts) for name, parts in sources.items() if name in headers)

    def check_aliases(self, reader: Reader) -> None:
        """CheckpointError if an alias differs from the tensor that it repeats."""
        for alias, original in self.aliases.items():
            if not {alias, original} <= reader.headers.keys():
                continue
            if not torch.equal(reader.read(alias), reader.read(original)):  # in any dtypes
                raise CheckpointError(
                    f"{alias}: differs from {original}, but the config ties the two; set tie_word_embeddings to false, "
                    f"or remove {alias}"
                )

    def load(
        self,
        reader: Reader,
        state: Mapping[str, Tensor],
        progress: Callable[[int, int], None] | None = None,
        *,
        mapped: bool = False,
        what: str = "the checkpoint",
    ) -> None:
        """Fill the tensors of a model from a checkpoint, casting as needed.

        The host holds a few buffers more than the model; and one whole tensor more for a DTensor that is sharded along
        another dimension than rows.

        Args:
            reader: reads the checkpoint tensors.
            state: native name -> tensor with memory, on any device. Float dtypes are cast; other dtypes must be equal.
                Of a DTensor, each rank reads its own shard.
            progress: called with the bytes done and the bytes in all that this rank reads.
            mapped: let a CPU tensor use the memory of the mapped file, if the file stores it in the same dtype and
                order. Writing to the tensor does not change the file.
            what: the checkpoint's name in the error.

        Raises:
            CheckpointError: the checkpoint does not fit (raised before anything is read, and lists all faults), or an
                alias differs from the tensor that it repeats.
        """
        headers = reader.headers
        self.plan(headers, state, what)
        if unplaced := [name for name, tensor in state.items() if tensor.is_meta]:
            raise CheckpointError(f"{unplaced[0]}: is on the meta device; give the model storage (to_empty) first")
        self.check_aliases(reader)
        plain, shards, others = self._planned(headers, state)
        whole = [piece for mapping, tensor in others for piece in self._pieces(mapping, stand_in(tensor), headers)]
        read = [*(piece for _, pieces in (*plain, *shards) for piece in pieces), *whole]
        done, total = 0, sum(piece.bytes for piece in read)
        for count in itertools.chain(
            loading.fill(reader, plain, mapped=mapped), loading.fill(reader, shards), self._fill_others(reader, others)
        ):
            done += count
            if progress is not None:
                progress(done, total)

    def _planned(
        self, headers: Mapping[str, Spec], state: Mapping[str, Tensor]
    ) -> tuple[list[_Filled], list[_Filled], list[tuple[WeightMapping, Tensor]]]:
        """Plain tensors with their pieces; this rank's rows of DTensors with their pieces; and DTensors that are not
        sharded by rows."""
        plain: list[_Filled] = []
        shards: list[_Filled] = []
        others: list[tuple[WeightMapping, Tensor]] = []
        for mapping in self.mappings:
            tensor = state[mapping.target]
            if not is_dtensor(tensor):
                plain.append((tensor, self._pieces(mapping, tensor, headers)))
                continue
            try:
                box = local_box(tensor)
            except CheckpointError as error:
                raise CheckpointError(f"{mapping.target}: {error}") from None
            local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
            if box is None:
                continue
            if box.sizes[1:] == tuple(tensor.shape[1:]) and local.is_contiguous():
                shards.append((local, self._pieces(mapping, stand_in(tensor), headers, box, local.detach())))
            else:
                others.append((mapping, tensor))
        return plain, shards, others

    def _fill_others(self, reader: Reader, tensors: Sequence[tuple[WeightMapping, Tensor]]) -> Iterator[int]:
        for mapping, tensor in tensors:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            yield from loading.fill(reader, [(whole, self._pieces(mapping, whole, reader.headers))], mapped=True)
            fill_shard(tensor, whole)

    def _pieces(
        self,
        mapping: WeightMapping,
        tensor: Tensor,
        headers: Mapping[str, Spec],
        box: Box | None = None,
        local: Tensor | None = None,
    ) -> list[loading.Piece]:
        """The pieces of `tensor`; with a `box`, only the pieces of its rows in the box, as parts of `local`."""
        pieces = []
        for view, part in mapping.split(tensor.detach()):
            name = self._stored(view.source, headers)
            size, row = math.prod(headers[name].shape), math.prod(headers[name].shape[1:])
            dtype, start = headers[name].dtype, view.start * row
            if box is None or local is None:
                pieces.append(loading.Piece(part, name, start, dtype, part.numel() == size))
                continue
            length = math.prod(tensor.shape[1:])
            first = box.starts[0] * length if box.starts else 0
            for inner, at in within(part, start, first, first + local.numel()):
                offset = inner.storage_offset() - first + local.storage_offset()
                inner = local.as_strided(inner.shape, inner.stride(), offset)
                pieces.append(loading.Piece(inner, name, at, dtype, inner.numel() == size))
        return pieces

    def renamed(self, other: WeightMap) -> dict[str, str]:
        """Checkpoint tensors of this map whose names differ in `other`, a map of the same model in the same layout ->
        their names there."""
        pairs = [
            (view.source, new.source)
            for mapping, named in zip(self.mappings, other.mappings, strict=False)
            for view, new in zip(mapping.views, named.views, strict=False)
        ]
        pairs += zip(self.aliases, other.aliases, strict=False)
        return {name: new for name, new in pairs if name != new}

    def export(self, state: Mapping[str, Tensor]) -> list[LazyTensor]:
        """The checkpoint tensors of a model, to be fetched one by one.

        Args:
            state: native name -> tensor.

        Returns:
            For each checkpoint tensor its name, shape, dtype, and a function that returns it: a view of a native
            tensor, or a copy if its order differs. For a DTensor the function gathers the whole tensor, so all ranks
            call the functions in the same order.

        Raises:
            CheckpointError: lists the mappings and native tensors without a counterpart.
        """
        views, faults = self._split(state)
        raise_faults("the model does not fit its weight map", faults)
        gather = Gather()
        model = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), None)
        tensors = []
        for source, parts in _by_source(views).items():
            dtype = parts[0].tensor.dtype
            if model is not None and parts[0].target in self.dtypes:
                dtype = torch.promote_types(self.dtypes[parts[0].target], model)
            tensors.append(LazyTensor(source, _shape(parts), dtype, partial(_read, parts, state, gather, dtype)))
        return tensors

    def _stored(self, source: str, names: Mapping[str, Spec]) -> str:
        """The name of `source` in the checkpoint: an alias, if only the alias was saved, otherwise `source`."""
        alias = (a for a, original in self.aliases.items() if original == source and a in names)
        return source if source in names else next(alias, source)

    def _split(self, state: Mapping[str, Tensor]) -> tuple[list[_Part], defaultdict[str, list[str]]]:
        """The views of all native tensors, and the faults of the map itself by kind."""
        parts: list[_Part] = []
        faults: defaultdict[str, list[str]] = defaultdict(list)
        for mapping in (mapping for mapping in self.mappings if mapping.target in state):
            tensor = stand_in(state[mapping.target])
            try:
                parts += [_Part(mapping.target, view, part) for view, part in mapping.split(tensor)]
            except (RuntimeError, IndexError) as error:
                fault = f"{mapping.target} {list(tensor.shape)} ({str(error).splitlines()[0]})"
                faults["of the model not split as the weight map says"].append(fault)
        targets = Counter(mapping.target for mapping in self.mappings)
        sources = Counter((view.source, view.start) for mapping in self.mappings for view in mapping.views)
        faults["of the model without a mapping in the weight map"] = [name for name in state if name not in targets]
        faults["in the weight map but not of the model"] = [name for name in targets if name not in state]
        twice = [name for name in targets if targets[name] > 1]
        faults["in the weight map twice"] = twice + [name for name, start in sources if sources[name, start] > 1]
        return parts, faults


def in_buckets(
    tensors: Iterable[LazyTensor], limit: int, dtype: torch.dtype | None, ranks: Ranks
) -> Iterator[list[tuple[str, Tensor]]]:
    """Names and contiguous tensors, in buckets.

    A bucket is fetched when it is asked for, and not kept here. If that fails on one rank, it fails on all.

    Args:
        tensors: the tensors.
        limit: largest bucket in bytes; a larger tensor has a bucket of its own.
        dtype: dtype of floating-point tensors; None for their own.
        ranks: the ranks that fetch together.
    """

    def of(tensor: LazyTensor) -> torch.dtype:
        return dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype

    buckets: list[list[LazyTensor]] = []
    room = 0
    for tensor in tensors:
        size = math.prod(tensor.shape) * of(tensor).itemsize
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(tensor)
        room -= size
    for bucket in buckets:
        with ranks.step("gathering the weights", ""):
            fetched = [(tensor.name, tensor.read().detach().to(of(tensor)).contiguous()) for tensor in bucket]
        yield fetched
        del fetched


_Filled = tuple[Tensor, list[loading.Piece]]
"""A tensor, and the pieces that cover it."""


class _Part(NamedTuple):
    """The part of the native tensor `target` that `view` selects."""

    target: str
    view: TensorView
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape(self.tensor)


def _by_source(parts: Sequence[_Part]) -> dict[str, list[_Part]]:
    """Checkpoint tensor -> its parts, ordered by row."""
    by_source: defaultdict[str, list[_Part]] = defaultdict(list)
    for part in parts:
        by_source[part.view.source].append(part)
    return {source: sorted(parts, key=lambda part: part.view.start) for source, parts in by_source.items()}


def _shape(parts: Sequence[_Part]) -> tuple[int, ...]:
    shapes = [part.shape for part in parts]
    return shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _read(parts: Sequence[_Part], state: Mapping[str, Tensor], gather: Gather, dtype: torch.dtype) -> Tensor:
    rows = [part.view.view(gather(state[part.target])).reshape(part.shape) for part in parts]
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).to(dtype)


def float_dtype(value: object) -> torch.dtype | None:
    """The dtype of FLOATS that `value` is, or names ("bfloat16"); None for anything else."""
    return FLOAT_NAMES.get(str(value).removeprefix("torch."))


def raise_faults(what: str, faults: Mapping[str, Sequence[str]]) -> None:
    """CheckpointError that begins with `what` and lists `faults` (kind -> tensors), if there are any."""
    lines = []
    for kind, names in faults.items():
        more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
        if names:
            lines.append(f"  {len(names)} {kind}: {', '.join(names[:LISTED])}{more}")
    if lines:
        raise CheckpointError("\n".join([f"{what}:", *lines]))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
