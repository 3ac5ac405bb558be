"""The weight map: which part of which native tensor each tensor of a Hugging Face checkpoint is.

A map is written in one direction only, as *views* of native tensors. Loading copies every checkpoint tensor into its
view; export reads the same views. The inverse therefore needs no code, and is exact to the byte, because the views of
a tensor cover each of its elements once.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ligermodels.convert import loading
from ligermodels.errors import CheckpointError

FLOATS = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))
"""Dtypes that are cast to each other on loading. Narrower ones need scales that a cast knows nothing of."""

LISTED = 20
"""Faults of one kind that an error lists before it only counts."""


class Spec(Protocol):
    """What planning needs to know of a stored tensor."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> Sequence[int]: ...


class Reader(loading.Reader, Protocol):
    """Where tensors are loaded from: `safetensors_reader.Checkpoint`, or anything like it."""

    @property
    def headers(self) -> Mapping[str, Spec]: ...


class LazyTensor(NamedTuple):
    """A tensor of a checkpoint to be, of this `shape` and `dtype`, which `read` fetches."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Part:
    """A `view` of a native tensor that holds checkpoint tensor `source`, or the rows of it from `start` on.

    The first dimension of `source` is the product of the first `merged` ones of the view, all parts of it together.
    """

    source: str
    view: Callable[[Tensor], Tensor]
    merged: int = 1
    start: int = 0

    def shape(self, view: Tensor) -> tuple[int, ...]:
        """The shape of these rows of the checkpoint tensor, given their view."""
        shape = tuple(view.shape)
        return shape if self.merged < 2 else (math.prod(shape[: self.merged]), *shape[self.merged :])


@dataclass(frozen=True)
class Entry:
    """The native tensor `target`, whose elements `parts` cover once each."""

    target: str
    parts: tuple[Part, ...]

    def views(self, tensor: Tensor) -> list[tuple[Part, Tensor]]:
        """Each part with its view of `tensor`; RuntimeError or IndexError when they do not cover it."""
        views = [(part, part.view(tensor)) for part in self.parts]
        if sum(view.numel() for _, view in views) != tensor.numel():
            raise RuntimeError("its parts do not cover it")
        return views


# -- entries: views are partials of plain functions, so that a map can be copied and pickled ---------------------------


def rename(target: str, source: str) -> Entry:
    """`target` is `source` under another name."""
    return Entry(target, (Part(source, _whole),))


def concat(target: str, sources: Sequence[str], sizes: Sequence[int], dim: int = 0) -> Entry:
    """`target` is `sources`, of these `sizes` along `dim`, one after another."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = zip(sources, starts, sizes, strict=True)
    return Entry(target, tuple(Part(s, partial(_slice, dim=dim, start=start, size=n)) for s, start, n in parts))


def grouped_qkv(target: str, q: str, k: str, v: str, num_kv_heads: int, group_size: int, head_dim: int) -> Entry:
    """`target` (num_kv_heads * (group_size + 2) * head_dim, ...) is, for each kv head, its query heads, its k, its v.

    Works for weights and for biases. Query heads are in the checkpoint's order.
    """
    grouped = partial(_grouped, shape=(num_kv_heads, group_size + 2, head_dim))
    return Entry(
        target,
        (
            Part(q, partial(grouped, heads=slice(group_size)), merged=3),
            Part(k, partial(grouped, heads=group_size), merged=2),
            Part(v, partial(grouped, heads=group_size + 1), merged=2),
        ),
    )


def grouped_qkv_in_one(target: str, source: str, num_kv_heads: int, group_size: int, head_dim: int) -> Entry:
    """`target` as in `grouped_qkv`, where `source` holds all query heads, then all k, then all v (Phi 3)."""
    apart = grouped_qkv(target, source, source, source, num_kv_heads, group_size, head_dim)
    rows = num_kv_heads * head_dim
    starts = (0, group_size * rows, (group_size + 1) * rows)
    return Entry(target, tuple(replace(part, start=start) for part, start in zip(apart.parts, starts, strict=True)))


def stack(target: str, sources: Sequence[str]) -> Entry:
    """`target[i]` is `sources[i]`, as with the experts of a layer."""
    return Entry(target, tuple(Part(source, partial(_item, index=i)) for i, source in enumerate(sources)))


def experts_gate_up(target: str, gates: Sequence[str], ups: Sequence[str], size: int) -> Entry:
    """`target[i]` is expert i's gate, `size` rows, then its up, as many."""
    parts = []
    for i, (gate, up) in enumerate(zip(gates, ups, strict=True)):
        parts += [Part(gate, partial(_rows, index=i, start=0, size=size))]
        parts += [Part(up, partial(_rows, index=i, start=size, size=size))]
    return Entry(target, tuple(parts))


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _slice(tensor: Tensor, dim: int, start: int, size: int) -> Tensor:
    return tensor.narrow(dim, start, size)


def _grouped(tensor: Tensor, shape: tuple[int, int, int], heads: int | slice) -> Tensor:
    return tensor.unflatten(0, shape)[:, heads]


def _item(tensor: Tensor, index: int) -> Tensor:
    return tensor[index]


def _rows(tensor: Tensor, index: int, start: int, size: int) -> Tensor:
    return tensor[index].narrow(0, start, size)


# -- the map -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightMap:
    """All entries of a model.

    Args:
        entries: one for each native tensor; an export lists its tensors in their order.
        ignored: regular expressions; checkpoint tensors in whose names one is found are skipped without a word.
        aliases: checkpoint tensor -> the one it repeats (`lm_head.weight` of a tied model). Loading accepts either or
            both, when both are equal; export leaves the alias out.
    """

    entries: Sequence[Entry]
    ignored: Sequence[str] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def sources(self) -> set[str]:
        """Names of all checkpoint tensors that the entries are made of."""
        return {part.source for entry in self.entries for part in entry.parts}

    def plan(self, headers: Mapping[str, Spec], state: Mapping[str, Tensor]) -> None:
        """Check that a checkpoint with these `headers` loads into `state`, whose tensors may be on the meta device.

        Raises one CheckpointError that lists every fault: missing, unexpected and misshapen tensors, dtypes that
        cannot be cast, and entries or native tensors without their counterpart.
        """
        views, faults = self._split(state)
        sources = {part.source: self._stored(part.source, headers) for entry in self.entries for part in entry.parts}
        faults["missing from the checkpoint"] = [source for source, name in sources.items() if name not in headers]
        known = {*sources, *self.aliases}
        faults["not expected in the checkpoint"] = [
            name for name in headers if name not in known and not any(re.search(each, name) for each in self.ignored)
        ]
        targets = {part.source: target for target, part, _ in views}
        for source, parts in _by_source(views).items():
            wanted, native = _shape(parts), parts[0][1].dtype
            repeats = [alias for alias, original in self.aliases.items() if original == source]
            for name in (name for name in (source, *repeats) if name in headers):
                found, dtype = tuple(headers[name].shape), headers[name].dtype
                if found != wanted:
                    faults["of the wrong shape"].append(f"{name} {list(found)} instead of {list(wanted)}")
                if dtype != native and not {dtype, native} <= FLOATS:
                    faults["of a dtype that cannot be cast (quantised checkpoints are not supported)"].append(
                        f"{name} {_short(dtype)} to {_short(native)} of {targets[source]}"
                    )
        _raise("the checkpoint does not fit the model", faults)

    def load(
        self,
        reader: Reader,
        state: Mapping[str, Tensor],
        progress: Callable[[int, int], None] | None = None,
        *,
        mapped: bool = False,
    ) -> None:
        """Fill `state`, casting as needed. Beside it the host holds a few buffers at most.

        Args:
            reader: the checkpoint.
            state: native name -> tensor with storage, of any float dtype, on any device.
            progress: called with bytes done and bytes in all.
            mapped: give a tensor on the host the memory of its file (as its `data`) where that holds it in the right
                dtype and order: nothing is read before it is used, and writing to the tensor leaves the file alone.

        Raises CheckpointError as `plan`, before anything is read; or when an alias differs from what it repeats.
        """
        headers = reader.headers
        self.plan(headers, state)
        if unplaced := [name for name, tensor in state.items() if tensor.is_meta]:
            raise CheckpointError(f"{unplaced[0]}: is on the meta device; give the model storage (to_empty) first")
        for alias, original in self.aliases.items():
            if {alias, original} <= headers.keys() and not _equal(reader.read(alias), reader.read(original)):
                raise CheckpointError(
                    f"{alias}: differs from {original}, but the config ties the two; set tie_word_embeddings to false, "
                    f"or remove {alias}"
                )
        tensors = [(state[entry.target], self._pieces(entry, state[entry.target], headers)) for entry in self.entries]
        done, total = 0, sum(piece.bytes for _, pieces in tensors for piece in pieces)
        for count in loading.fill(reader, tensors, mapped=mapped):
            done += count
            if progress is not None:
                progress(done, total)

    def _pieces(self, entry: Entry, tensor: Tensor, headers: Mapping[str, Spec]) -> list[loading.Piece]:
        pieces = []
        for part, view in entry.views(tensor.detach()):
            name = self._stored(part.source, headers)
            size, row = math.prod(headers[name].shape), math.prod(headers[name].shape[1:])
            whole = view.numel() == size
            pieces.append(loading.Piece(view, name, part.start * row, headers[name].dtype, whole))
        return pieces

    def export(self, state: Mapping[str, Tensor]) -> list[LazyTensor]:
        """The checkpoint tensors of `state`; each is a view of it, or a copy made on `read` where its order differs.

        Raises one CheckpointError that lists entries or native tensors without their counterpart.
        """
        views, faults = self._split(state)
        _raise("the model does not fit its weight map", faults)
        return [
            LazyTensor(source, _shape(parts), parts[0][1].dtype, partial(_joined, parts))
            for source, parts in _by_source(views).items()
        ]

    def _stored(self, source: str, names: Mapping[str, Spec]) -> str:
        """The name that `source` has among `names`: its own, or that of an alias when only that one was saved."""
        alias = (a for a, original in self.aliases.items() if original == source and a in names)
        return source if source in names else next(alias, source)

    def _split(self, state: Mapping[str, Tensor]) -> tuple[list[tuple[str, Part, Tensor]], defaultdict[str, list[str]]]:
        """Name, part and view for each part of each native tensor; and, kind by kind, the faults of the map itself."""
        views: list[tuple[str, Part, Tensor]] = []
        faults: defaultdict[str, list[str]] = defaultdict(list)
        for entry in (entry for entry in self.entries if entry.target in state):
            tensor = state[entry.target].detach()
            try:
                views += [(entry.target, part, view) for part, view in entry.views(tensor)]
            except (RuntimeError, IndexError) as error:
                fault = f"{entry.target} {list(tensor.shape)} ({str(error).splitlines()[0]})"
                faults["of the model not split as the weight map says"].append(fault)
        targets = Counter(entry.target for entry in self.entries)
        sources = Counter((part.source, part.start) for entry in self.entries for part in entry.parts)
        faults["of the model without an entry in the weight map"] = [name for name in state if name not in targets]
        faults["in the weight map but not of the model"] = [name for name in targets if name not in state]
        twice = [name for name in targets if targets[name] > 1]
        faults["in the weight map twice"] = twice + [name for name, start in sources if sources[name, start] > 1]
        return views, faults


def _by_source(views: Sequence[tuple[str, Part, Tensor]]) -> dict[str, list[tuple[Part, Tensor]]]:
    """Checkpoint tensor -> its parts with their views, from its first row to its last."""
    found: defaultdict[str, list[tuple[Part, Tensor]]] = defaultdict(list)
    for _, part, view in views:
        found[part.source].append((part, view))
    return {source: sorted(parts, key=lambda each: each[0].start) for source, parts in found.items()}


def _shape(parts: Sequence[tuple[Part, Tensor]]) -> tuple[int, ...]:
    shapes = [part.shape(view) for part, view in parts]
    return shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _joined(parts: Sequence[tuple[Part, Tensor]]) -> Tensor:
    rows = [view.reshape(part.shape(view)) for part, view in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _raise(what: str, faults: Mapping[str, Sequence[str]]) -> None:
    """CheckpointError with every fault, if there is any."""
    lines = []
    for kind, names in faults.items():
        more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
        if names:
            lines.append(f"  {len(names)} {kind}: {', '.join(names[:LISTED])}{more}")
    if lines:
        raise CheckpointError("\n".join([f"{what}:", *lines]))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
