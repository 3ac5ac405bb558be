"""Which views of a native tensor are which tensors of a Hugging Face checkpoint.

Loading copies every checkpoint tensor into its view and export reads the same views, so both directions are exact to
the byte. Views are partials of functions, so that mappings can be copied and pickled. Layers build the mappings
of their own parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorView:
    """A `view` of a native tensor that holds checkpoint tensor `source`.

    Args:
        source: name of the checkpoint tensor.
        view: from the native tensor to the view.
        flatten: first and last of the consecutive dimensions of the view that are one dimension of `source`, as in
            `torch.flatten`; None where both have the same dimensions.
        start: the view holds the rows of `source` from this one on; other views hold the rest.
    """

    source: str
    view: Callable[[Tensor], Tensor]
    flatten: tuple[int, int] | None = None
    start: int = 0

    def shape(self, view: Tensor) -> tuple[int, ...]:
        """The shape that these rows have in the checkpoint, given their view."""
        shape = tuple(view.shape)
        if self.flatten is None:
            return shape
        first, last = self.flatten
        return (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])


@dataclass(frozen=True)
class WeightMapping:
    """The native tensor `target`, of whose elements `views` cover each exactly once."""

    target: str
    views: tuple[TensorView, ...]

    def split(self, tensor: Tensor) -> list[tuple[TensorView, Tensor]]:
        """Each view with what it is of `tensor`; RuntimeError or IndexError when the views do not cover `tensor`."""
        views = [(each, each.view(tensor)) for each in self.views]
        if sum(view.numel() for _, view in views) != tensor.numel():
            raise RuntimeError("its views do not cover it")
        return views


def rename(target: str, source: str) -> WeightMapping:
    """`target` is `source` under another name."""
    return WeightMapping(target, (TensorView(source, _whole),))


def concat(target: str, sources: Sequence[str], sizes: Sequence[int], dim: int = 0) -> WeightMapping:
    """`target` is the concatenation of `sources`, which have these `sizes` along `dim`."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    each = zip(sources, starts, sizes, strict=True)
    return WeightMapping(
        target, tuple(TensorView(s, partial(torch.narrow, dim=dim, start=start, length=n)) for s, start, n in each)
    )


def rows(target: str, pieces: Iterable[tuple[str, int, int, int]]) -> WeightMapping:
    """`target` consists of `pieces` (source, first row of the source, first row of the target, rows)."""
    return WeightMapping(
        target,
        tuple(
            TensorView(s, partial(torch.narrow, dim=0, start=at, length=n), start=first) for s, first, at, n in pieces
        ),
    )


def stack(target: str, sources: Sequence[str]) -> WeightMapping:
    """`target[i]` is `sources[i]`, as with the experts of a layer."""
    return WeightMapping(target, tuple(TensorView(source, itemgetter(i)) for i, source in enumerate(sources)))


def grouped_qkv(
    target: str, q: str, k: str, v: str | None, num_kv_heads: int, group_size: int, head_dim: int, pairs: int = 0
) -> WeightMapping:
    """`target` (num_kv_heads * (group_size + 2) * head_dim, ...) has, for each kv head, its query heads, its k, its v.

    For weights and for biases. Query heads are in the checkpoint's order. `pairs` as of `heads`, for q and k. Without
    `v` the target has (group_size + 1) heads for each kv head: keys are values too.
    """
    rows = group_size + (1 if v is None else 2)
    grouped = partial(_grouped, shape=(num_kv_heads, rows, head_dim))
    v_view = () if v is None else (TensorView(v, partial(grouped, heads=group_size + 1), flatten=(0, 1)),)
    if pairs:
        q_heads = [kv * rows + head for kv in range(num_kv_heads) for head in range(group_size)]
        k_heads = [kv * rows + group_size for kv in range(num_kv_heads)]
        q_views, k_views = (_heads(name, each, head_dim, pairs) for name, each in ((q, q_heads), (k, k_heads)))
        return WeightMapping(target, (*q_views, *k_views, *v_view))
    q_view = TensorView(q, partial(grouped, heads=slice(group_size)), flatten=(0, 2))
    return WeightMapping(target, (q_view, TensorView(k, partial(grouped, heads=group_size), flatten=(0, 1)), *v_view))


def grouped_qkv_in_one(
    target: str, source: str, num_kv_heads: int, group_size: int, head_dim: int, pairs: int = 0
) -> WeightMapping:
    """`target` as in `grouped_qkv`, where `source` has all query heads, then all k, then all v (Phi 3)."""
    apart = grouped_qkv(target, "q", "k", "v", num_kv_heads, group_size, head_dim, pairs)
    rows = num_kv_heads * head_dim
    starts = {"q": 0, "k": group_size * rows, "v": (group_size + 1) * rows}
    return WeightMapping(
        target, tuple(replace(each, source=source, start=starts[each.source] + each.start) for each in apart.views)
    )


def heads(target: str, source: str, num_heads: int, head_dim: int, pairs: int = 0) -> WeightMapping:
    """`target` (num_heads * head_dim, ...) is `source`, but for the first `pairs` rows of each head.

    The checkpoint rotates neighbours of these together, rows 2 i and 2 i + 1, and the model rows i and pairs / 2 + i.
    Where the rows of queries and keys, of their biases and norms, are all in this order, scores are the same.
    """
    return WeightMapping(target, _heads(source, range(num_heads), head_dim, pairs)) if pairs else rename(target, source)


def _heads(source: str, places: Sequence[int], head_dim: int, pairs: int) -> tuple[TensorView, ...]:
    """The views for `heads`: head i of the checkpoint is the native one `places[i]`."""
    found = []
    for head, place in enumerate(places):
        start, there = place * head_dim, head * head_dim
        found.append(TensorView(source, partial(_interleaved, start=start, length=pairs), flatten=(0, 1), start=there))
        if pairs < head_dim:
            rest = partial(torch.narrow, dim=0, start=start + pairs, length=head_dim - pairs)
            found.append(TensorView(source, rest, start=there + pairs))
    return tuple(found)


def rotated_first(target: str, source: str, num_heads: int, head_dim: int, rotated: int, pairs: bool) -> WeightMapping:
    """`target` (num_heads * head_dim, ...) has the last `rotated` rows of each head of `source` first, then its others.

    With `pairs` the checkpoint rotates neighbours of these together: see `heads`.
    """
    rest, found = head_dim - rotated, []
    for start in range(0, num_heads * head_dim, head_dim):
        turned = (
            TensorView(source, partial(_interleaved, start=start, length=rotated), flatten=(0, 1), start=start + rest)
            if pairs
            else TensorView(source, partial(torch.narrow, dim=0, start=start, length=rotated), start=start + rest)
        )
        others = TensorView(source, partial(torch.narrow, dim=0, start=start + rotated, length=rest), start=start)
        found += [others, turned]
    return WeightMapping(target, tuple(found))


def interleaved_gate_up(target: str, gate: str, up: str) -> WeightMapping:
    """`target` (2 I, ...) has in row 2 i row i of `gate`, and in row 2 i + 1 row i of `up`.

    A contiguous shard of an even number of its rows is a gate_up weight itself: that of tensor parallelism. For weights
    and for biases.
    """
    pair = (TensorView(name, partial(_pair, index=i)) for i, name in enumerate((gate, up)))
    return WeightMapping(target, tuple(pair))


def interleaved_gate_up_in_one(target: str, source: str) -> WeightMapping:
    """`target` as in `interleaved_gate_up`, where `source` (2 I, ...) is gate, then up (Phi 3)."""
    return WeightMapping(target, (TensorView(source, partial(_pairs, dim=0), flatten=(0, 1)),))


def experts_gate_up(target: str, gates: Sequence[str], ups: Sequence[str]) -> WeightMapping:
    """`target[i]` (2 I, ...) has the rows of `gates[i]` and `ups[i]` interleaved as in `interleaved_gate_up`."""
    names = [name for pair in zip(gates, ups, strict=True) for name in pair]
    return WeightMapping(
        target, tuple(TensorView(s, partial(_expert_pair, expert=i // 2, index=i % 2)) for i, s in enumerate(names))
    )


def experts_gate_up_in_one(target: str, source: str) -> WeightMapping:
    """`target` (E, 2 I, ...) as in `experts_gate_up`; `source[i]` (2 I, ...) is gate, then up (transformers 5)."""
    return WeightMapping(target, (TensorView(source, partial(_pairs, dim=1), flatten=(1, 2)),))


def experts_gate_up_transposed(target: str, source: str) -> WeightMapping:
    """`target` (E, 2 I, H) as in `experts_gate_up`; `source[i]` (H, 2 I) has the columns of gate, then those of up."""
    return WeightMapping(target, (TensorView(source, _pairs_transposed, flatten=(2, 3)),))


def transposed(target: str, source: str) -> WeightMapping:
    """`source` is `target` with its last two dimensions exchanged."""
    return WeightMapping(target, (TensorView(source, partial(torch.transpose, dim0=-2, dim1=-1)),))


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _grouped(tensor: Tensor, shape: tuple[int, int, int], heads: int | slice) -> Tensor:
    return tensor.unflatten(0, shape)[:, heads]


def _interleaved(tensor: Tensor, start: int, length: int) -> Tensor:
    """Rows i and length / 2 + i from `start` on as neighbours: (n, ...) -> (length / 2, 2, ...)."""
    return tensor.narrow(0, start, length).unflatten(0, (2, -1)).transpose(0, 1)


def _pair(tensor: Tensor, index: int) -> Tensor:
    """Rows 2 i + index: (2 I, ...) -> (I, ...)."""
    return tensor.unflatten(0, (-1, 2))[:, index]


def _pairs(tensor: Tensor, dim: int) -> Tensor:
    """The even rows, then the odd ones: (..., 2 I, ...) -> (..., 2, I, ...)."""
    return tensor.unflatten(dim, (-1, 2)).transpose(dim, dim + 1)


def _pairs_transposed(tensor: Tensor) -> Tensor:
    """(E, 2 I, H) -> (E, H, 2, I)."""
    return _pairs(tensor, dim=1).movedim(-1, 1)


def _expert_pair(tensor: Tensor, expert: int, index: int) -> Tensor:
    return _pair(tensor[expert], index)
