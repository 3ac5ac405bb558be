"""Mappings between native tensors and tensors of a Hugging Face checkpoint.

A mapping describes each checkpoint tensor as a view of a native tensor. Loading copies the checkpoint tensor into the
view, and export reads the same view, so both directions are exact to the byte. Views are partials of functions, so that
mappings can be copied and pickled. Layers build the mappings of their own parameters.
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
    """A view of a native tensor that holds a checkpoint tensor, or rows of it.

    Args:
        source: name of the checkpoint tensor.
        view: function from the native tensor to the view.
        flatten: first and last dimension of the view that together are one dimension of `source`, as in
            `torch.flatten`; None if both have the same dimensions.
        start: first row of `source` that the view holds. Other views hold its other rows.
    """

    source: str
    view: Callable[[Tensor], Tensor]
    flatten: tuple[int, int] | None = None
    start: int = 0

    def shape(self, view: Tensor) -> tuple[int, ...]:
        """The shape in the checkpoint of the rows that `view` holds."""
        shape = tuple(view.shape)
        if self.flatten is None:
            return shape
        first, last = self.flatten
        return (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])


@dataclass(frozen=True)
class WeightMapping:
    """Views that together cover each element of the native tensor `target` exactly once."""

    target: str
    views: tuple[TensorView, ...]

    def split(self, tensor: Tensor) -> list[tuple[TensorView, Tensor]]:
        """Each view, and its part of `tensor`. RuntimeError or IndexError if the views do not cover `tensor`."""
        parts = [(view, view.view(tensor)) for view in self.views]
        if sum(part.numel() for _, part in parts) != tensor.numel():
            raise RuntimeError("its views do not cover it")
        return parts


def rename(target: str, source: str) -> WeightMapping:
    """`target` is `source` under another name."""
    return WeightMapping(target, (TensorView(source, _whole),))


def row(target: str, source: str) -> WeightMapping:
    """`source` (1, n) is the only row of a matrix, `target` (n,) that row."""
    return WeightMapping(target, (TensorView(source, partial(torch.unsqueeze, dim=0)),))


def concat(target: str, sources: Sequence[str], sizes: Sequence[int], dim: int = 0) -> WeightMapping:
    """`target` is the concatenation of `sources` along `dim`.

    Args:
        target: native tensor.
        sources: checkpoint tensors.
        sizes: size of each source along `dim`.
        dim: the dimension.
    """
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    views = (
        TensorView(source, partial(torch.narrow, dim=dim, start=start, length=size))
        for source, start, size in zip(sources, starts, sizes, strict=True)
    )
    return WeightMapping(target, tuple(views))


def rows(target: str, pieces: Iterable[tuple[str, int, int, int]]) -> WeightMapping:
    """`target` consists of rows of sources: `pieces` has (source, its first row, first row in `target`, rows)."""
    return WeightMapping(
        target,
        tuple(
            TensorView(s, partial(torch.narrow, dim=0, start=at, length=n), start=first) for s, first, at, n in pieces
        ),
    )


def stack(target: str, sources: Sequence[str]) -> WeightMapping:
    """`target[i]` is `sources[i]`: the experts of a layer, for example."""
    return WeightMapping(target, tuple(TensorView(source, itemgetter(i)) for i, source in enumerate(sources)))


def grouped_qkv(
    target: str,
    q: str,
    k: str,
    v: str | None,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    pairs: int = 0,
    value_dim: int | None = None,
) -> WeightMapping:
    """A fused q/k/v weight or bias: each key/value head follows its query heads.

    Args:
        target: native tensor (num_kv_heads * ((group_size + 1) * head_dim + value_dim), ...): for each key/value head
            its query heads in the checkpoint's order, its key and its value.
        q: checkpoint tensor of the queries.
        k: checkpoint tensor of the keys.
        v: checkpoint tensor of the values. None if keys are also the values; the target then has (group_size + 1)
            heads for each key/value head.
        num_kv_heads: key/value heads.
        group_size: query heads per key/value head.
        head_dim: channels of a head.
        pairs: leading channels of each query and key head that the checkpoint rotates as neighbours: see `heads`. Only
            for values as wide as keys.
        value_dim: channels of a value. Default: `head_dim`.
    """
    rows, queries = group_size + (1 if v is None else 2), group_size * head_dim
    value_dim = 0 if v is None else value_dim or head_dim
    grouped = partial(_grouped, groups=num_kv_heads)
    v_rows = partial(grouped, start=queries + head_dim, length=value_dim)
    v_view = () if v is None else (TensorView(v, v_rows, flatten=(0, 1)),)
    if pairs:
        q_heads = [kv * rows + head for kv in range(num_kv_heads) for head in range(group_size)]
        k_heads = [kv * rows + group_size for kv in range(num_kv_heads)]
        q_views, k_views = _heads(q, q_heads, head_dim, pairs), _heads(k, k_heads, head_dim, pairs)
        return WeightMapping(target, (*q_views, *k_views, *v_view))
    q_view = TensorView(q, partial(grouped, start=0, length=queries), flatten=(0, 1))
    k_view = TensorView(k, partial(grouped, start=queries, length=head_dim), flatten=(0, 1))
    return WeightMapping(target, (q_view, k_view, *v_view))


def grouped_qkv_in_one(
    target: str,
    source: str,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    pairs: int = 0,
    value_dim: int | None = None,
) -> WeightMapping:
    """The weight of `grouped_qkv` from a single checkpoint tensor (Phi 3).

    Args:
        target: native tensor, as in `grouped_qkv`.
        source: checkpoint tensor: all query heads, then all key heads, then all value heads.
        num_kv_heads: key/value heads.
        group_size: query heads per key/value head.
        head_dim: channels of a head.
        pairs: leading channels of each query and key head that the checkpoint rotates as neighbours: see `heads`.
        value_dim: channels of a value. Default: `head_dim`.
    """
    apart = grouped_qkv(target, "q", "k", "v", num_kv_heads, group_size, head_dim, pairs, value_dim)
    rows = num_kv_heads * head_dim
    starts = {"q": 0, "k": group_size * rows, "v": (group_size + 1) * rows}
    return WeightMapping(
        target, tuple(replace(view, source=source, start=starts[view.source] + view.start) for view in apart.views)
    )


def heads(target: str, source: str, num_heads: int, head_dim: int, pairs: int = 0) -> WeightMapping:
    """The weight of heads, with rotated rows in the model's order.

    The checkpoint rotates rows 2 i and 2 i + 1 of a head together, the model rows i and pairs / 2 + i. Attention scores
    are the same if queries, keys, their biases and norms are all reordered.

    Args:
        target: native tensor (num_heads * head_dim, ...).
        source: checkpoint tensor of the same shape.
        num_heads: heads.
        head_dim: rows of a head.
        pairs: leading rows of each head that are rotated as neighbours; 0 for none.
    """
    return WeightMapping(target, _heads(source, range(num_heads), head_dim, pairs)) if pairs else rename(target, source)


def _heads(source: str, positions: Sequence[int], head_dim: int, pairs: int) -> tuple[TensorView, ...]:
    """The views of `heads`, where head i of the checkpoint is native head `positions[i]`."""
    views = []
    for head, position in enumerate(positions):
        start, first = position * head_dim, head * head_dim
        views.append(TensorView(source, partial(_interleaved, start=start, length=pairs), flatten=(0, 1), start=first))
        if pairs < head_dim:
            others = partial(torch.narrow, dim=0, start=start + pairs, length=head_dim - pairs)
            views.append(TensorView(source, others, start=first + pairs))
    return tuple(views)


def rotated_first(target: str, source: str, num_heads: int, head_dim: int, rotated: int, pairs: bool) -> WeightMapping:
    """The weight of heads, with the rotated rows of each head first instead of last.

    Args:
        target: native tensor (num_heads * head_dim, ...).
        source: checkpoint tensor of the same shape.
        num_heads: heads.
        head_dim: rows of a head.
        rotated: rotated rows of a head; the last rows in `source`, and the first rows in `target`.
        pairs: whether the checkpoint rotates neighbours of these together: see `heads`.
    """
    rest, views = head_dim - rotated, []
    for start in range(0, num_heads * head_dim, head_dim):
        turned = (
            TensorView(source, partial(_interleaved, start=start, length=rotated), flatten=(0, 1), start=start + rest)
            if pairs
            else TensorView(source, partial(torch.narrow, dim=0, start=start, length=rotated), start=start + rest)
        )
        others = TensorView(source, partial(torch.narrow, dim=0, start=start + rotated, length=rest), start=start)
        views += [others, turned]
    return WeightMapping(target, tuple(views))


def interleaved_gate_up(target: str, gate: str, up: str) -> WeightMapping:
    """A fused weight or bias `target` (2 I, ...): row 2 i is row i of `gate`, and row 2 i + 1 is row i of `up`.

    Contiguous shards with an even number of rows are gate_up weights themselves, as tensor parallelism needs them.
    """
    pair = (TensorView(name, partial(_pair, index=i)) for i, name in enumerate((gate, up)))
    return WeightMapping(target, tuple(pair))


def interleaved_gate_up_in_one(target: str, source: str) -> WeightMapping:
    """The weight of `interleaved_gate_up` from one tensor `source` (2 I, ...): gate, then up (Phi 3)."""
    return WeightMapping(target, (TensorView(source, partial(_pairs, dim=0), flatten=(0, 1)),))


def experts_gate_up(target: str, gates: Sequence[str], ups: Sequence[str]) -> WeightMapping:
    """`target[i]` (2 I, ...) interleaves the rows of `gates[i]` and `ups[i]`: see `interleaved_gate_up`."""
    names = [name for pair in zip(gates, ups, strict=True) for name in pair]
    return WeightMapping(
        target, tuple(TensorView(s, partial(_expert_pair, expert=i // 2, index=i % 2)) for i, s in enumerate(names))
    )


def experts_gate_up_in_one(target: str, source: str) -> WeightMapping:
    """The weight of `experts_gate_up`; expert `source[i]` (2 I, ...) is gate, then up (transformers 5)."""
    return WeightMapping(target, (TensorView(source, partial(_pairs, dim=1), flatten=(1, 2)),))


def experts_gate_up_transposed(target: str, source: str) -> WeightMapping:
    """The weight of `experts_gate_up`, (E, 2 I, H); `source[i]` (H, 2 I) has the gate columns, then the up columns."""
    return WeightMapping(target, (TensorView(source, _pairs_transposed, flatten=(2, 3)),))


def transposed(target: str, source: str) -> WeightMapping:
    """`source` is `target` with its last two dimensions transposed."""
    return WeightMapping(target, (TensorView(source, partial(torch.transpose, dim0=-2, dim1=-1)),))


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _grouped(tensor: Tensor, groups: int, start: int, length: int) -> Tensor:
    """Some of the rows of each group: (groups * n, ...) -> (groups, length, ...)."""
    return tensor.unflatten(0, (groups, -1)).narrow(1, start, length)


def _interleaved(tensor: Tensor, start: int, length: int) -> Tensor:
    """Rows i and length / 2 + i, counted from `start`, as neighbours: (n, ...) -> (length / 2, 2, ...)."""
    return tensor.narrow(0, start, length).unflatten(0, (2, -1)).transpose(0, 1)


def _pair(tensor: Tensor, index: int) -> Tensor:
    """Rows 2 i + index: (2 I, ...) -> (I, ...)."""
    return tensor.unflatten(0, (-1, 2))[:, index]


def _pairs(tensor: Tensor, dim: int) -> Tensor:
    """The even rows, then the odd rows: (..., 2 I, ...) -> (..., 2, I, ...)."""
    return tensor.unflatten(dim, (-1, 2)).transpose(dim, dim + 1)


def _pairs_transposed(tensor: Tensor) -> Tensor:
    """(E, 2 I, H) -> (E, H, 2, I)."""
    return _pairs(tensor, dim=1).movedim(-1, 1)


def _expert_pair(tensor: Tensor, expert: int, index: int) -> Tensor:
    return _pair(tensor[expert], index)
