"""The weight map of a model: planning, loading and exporting by the mappings of all its tensors (see `mappings`)."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.convert import loading
from ligermodels.convert.loading import Reader, Spec
from ligermodels.convert.mappings import TensorView, WeightMapping
from ligermodels.convert.ranks import Gather, stand_in
from ligermodels.convert.shards import Box, fill_shard, is_dtensor, local_box, within
from ligermodels.errors import CheckpointError

FLOATS = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))
"""Dtypes that are cast to each other on loading. Narrower ones need scales, which a cast does not apply."""

UNCASTABLE = "of a dtype that cannot be cast (quantised tensors load from files with a quantization_config)"
"""Of tensors outside FLOATS: what is wrong, and what to do."""

LISTED = 20
"""Faults of one kind that an error lists before it only counts."""


class LazyTensor(NamedTuple):
    """A tensor to be written, of this `shape` and `dtype`, which `read` fetches."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class WeightMap:
    """The mappings of all tensors of a model.

    Args:
        mappings: one for each native tensor; an export lists its tensors in their order.
        ignored: regular expressions; checkpoint tensors in whose names one is found are not loaded.
        aliases: checkpoint tensor -> the one it repeats (`lm_head.weight` of a tied model). Loading accepts either or
            both, when both are equal; export leaves the alias out.
        dtypes: native tensor -> the dtype that an export gives it, unless the model's own is wider: of tensors that
            are kept in a wider dtype than the rest of the model.
    """

    mappings: Sequence[WeightMapping]
    ignored: Sequence[str] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def stored_dtypes(
        self, headers: Mapping[str, Spec], state: Mapping[str, Tensor], dtype: torch.dtype
    ) -> dict[str, torch.dtype]:
        """For `dtypes`: how a checkpoint stores those tensors of `state` that a model of `dtype` keeps in another float
        dtype."""
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
        """Whether a checkpoint tensor of this name is not loaded, by `ignored`."""
        return any(re.search(each, name) for each in self.ignored)

    def plan(self, headers: Mapping[str, Spec], state: Mapping[str, Tensor]) -> None:
        """Check that a checkpoint with these `headers` loads into `state`, whose tensors may be on the meta device.

        Raises one CheckpointError that lists every fault: missing, unexpected and misshapen tensors, dtypes that
        cannot be cast, and mappings or native tensors without their counterpart.
        """
        views, faults = self._split(state)
        sources = {view.source: self._stored(view.source, headers) for each in self.mappings for view in each.views}
        faults["missing from the checkpoint"] = [source for source, name in sources.items() if name not in headers]
        known = {*sources, *self.aliases}
        faults["not expected in the checkpoint"] = [
            name for name in headers if name not in known and not self.ignores(name)
        ]
        for source, parts in _by_source(views).items():
            wanted, native = _shape(parts), parts[0].tensor.dtype
            repeats = [alias for alias, original in self.aliases.items() if original == source]
            for name in (name for name in (source, *repeats) if name in headers):
                found, dtype = tuple(headers[name].shape), headers[name].dtype
                if found != wanted:
                    faults["of the wrong shape"].append(f"{name} {list(found)} instead of {list(wanted)}")
                if dtype != native and not {dtype, native} <= FLOATS:
                    faults[UNCASTABLE].append(f"{name} {_short(dtype)} to {_short(native)} of {parts[-1].target}")
        raise_faults("the checkpoint does not fit the model", faults)

    def misshapen(self, headers: Mapping[str, Spec], state: Mapping[str, Tensor]) -> int:
        """How many tensors of a checkpoint with these `headers` have another shape than those of `state` need."""
        sources = _by_source(self._split(state)[0])
        return sum(tuple(headers[name].shape) != _shape(parts) for name, parts in sources.items() if name in headers)

    def check_aliases(self, reader: Reader) -> None:
        """CheckpointError when an alias differs from what it repeats."""
        for alias, original in self.aliases.items():
            if not {alias, original} <= reader.headers.keys():
                continue
            both = reader.read(alias), reader.read(original)
            if both[0].dtype != both[1].dtype or not torch.equal(*both):
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
    ) -> None:
        """Fill `state`, casting as needed. The host holds a few buffers more; one whole tensor more with a DTensor that
        is a shard of other than rows.

        Args:
            state: native name -> tensor with storage, of any float dtype, on any device; buffers of other dtypes too,
                which must be those of the checkpoint. Of a DTensor each rank reads its own part.
            progress: called with bytes done and bytes in all, those that this rank reads.
            mapped: as of `loading.fill`; writing to a mapped tensor leaves the file alone.

        Raises CheckpointError as `plan`, before anything is read; or when an alias differs from what it repeats.
        """
        headers = reader.headers
        self.plan(headers, state)
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
        """What is read into plain tensors, and into the rows that this rank has of DTensors; and the DTensors of which
        it has something else."""
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
        """The pieces of `tensor`; with a `box` those of its rows in there, which are the tensor `local`."""
        pieces = []
        for each, view in mapping.split(tensor.detach()):
            name = self._stored(each.source, headers)
            size, row = math.prod(headers[name].shape), math.prod(headers[name].shape[1:])
            dtype, start = headers[name].dtype, each.start * row
            if box is None or local is None:
                pieces.append(loading.Piece(view, name, start, dtype, view.numel() == size))
                continue
            length = math.prod(tensor.shape[1:])
            first = box.starts[0] * length if box.starts else 0
            for part, at in within(view, start, first, first + local.numel()):
                offset = part.storage_offset() - first + local.storage_offset()
                part = local.as_strided(part.shape, part.stride(), offset)
                pieces.append(loading.Piece(part, name, at, dtype, part.numel() == size))
        return pieces

    def export(self, state: Mapping[str, Tensor]) -> list[LazyTensor]:
        """The checkpoint tensors of `state`; each is a view of it, or a copy made on `read` where its order differs.

        Of a DTensor, `read` gathers the whole on every rank: all ranks read the same tensors in the same order.

        Raises one CheckpointError that lists mappings or native tensors without their counterpart.
        """
        views, faults = self._split(state)
        raise_faults("the model does not fit its weight map", faults)
        gather = Gather()
        model = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), None)
        found = []
        for source, parts in _by_source(views).items():
            dtype = parts[0].tensor.dtype
            if model is not None and parts[0].target in self.dtypes:
                dtype = torch.promote_types(self.dtypes[parts[0].target], model)
            found.append(LazyTensor(source, _shape(parts), dtype, partial(_read, parts, state, gather, dtype)))
        return found

    def _stored(self, source: str, names: Mapping[str, Spec]) -> str:
        """The name that `source` has among `names`: its own, or that of an alias when only that one was saved."""
        alias = (a for a, original in self.aliases.items() if original == source and a in names)
        return source if source in names else next(alias, source)

    def _split(self, state: Mapping[str, Tensor]) -> tuple[list[_Part], defaultdict[str, list[str]]]:
        """The views of all native tensors; and the faults of the map itself by kind."""
        parts: list[_Part] = []
        faults: defaultdict[str, list[str]] = defaultdict(list)
        for mapping in (mapping for mapping in self.mappings if mapping.target in state):
            tensor = stand_in(state[mapping.target])
            try:
                parts += [_Part(mapping.target, each, view) for each, view in mapping.split(tensor)]
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


_Filled = tuple[Tensor, list[loading.Piece]]
"""A tensor, and the pieces that cover it."""


class _Part(NamedTuple):
    """What `view` is of the native tensor `target`."""

    target: str
    view: TensorView
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape(self.tensor)


def _by_source(parts: Sequence[_Part]) -> dict[str, list[_Part]]:
    """Checkpoint tensor -> its parts, from its first row to its last."""
    found: defaultdict[str, list[_Part]] = defaultdict(list)
    for part in parts:
        found[part.view.source].append(part)
    return {source: sorted(parts, key=lambda part: part.view.start) for source, parts in found.items()}


def _shape(parts: Sequence[_Part]) -> tuple[int, ...]:
    shapes = [part.shape for part in parts]
    return shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _read(parts: Sequence[_Part], state: Mapping[str, Tensor], gather: Gather, dtype: torch.dtype) -> Tensor:
    rows = [part.view.view(gather(state[part.target])).reshape(part.shape) for part in parts]
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).to(dtype)


def raise_faults(what: str, faults: Mapping[str, Sequence[str]]) -> None:
    """CheckpointError with every fault, if there is any."""
    lines = []
    for kind, names in faults.items():
        more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
        if names:
            lines.append(f"  {len(names)} {kind}: {', '.join(names[:LISTED])}{more}")
    if lines:
        raise CheckpointError("\n".join([f"{what}:", *lines]))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
