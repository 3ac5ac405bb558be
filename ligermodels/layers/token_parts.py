"""Sequence parallelism: between the projections of a tensor-parallel block each rank has a part of the tokens
(Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198).

The tokens of all sequences, one after another, are cut into as many equal parts as there are ranks. Norms, residual
additions, routers and whatever else works on single tokens compute those of this rank, and keep those alone for the
backward pass. A projection by columns gathers its input, and one by rows sums its output over ranks, of which each gets
its part: together they send as many bytes as the sum of all tokens on all ranks, whose place they take.

`Decoder.forward` decides which blocks compute so. Their modules go by `current`, through `layers.sharding`: between
projections they are given (1, n, H), the part, in place of (B, T, H). A layer that can be given it says so by
`sequence_parallel = True`, or, where its result for a token depends on no other one, by `token_wise`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.ops.linear.parallel_linear import all_gather_linear, linear_reduce_scatter
from ligermodels.ops.runtime.collectives import all_gather_rows, reduce_scatter_rows
from ligermodels.ops.runtime.library import once_differentiable


class _Current:
    """Of a process, not a thread: ranks exchange in one order, so that no two passes of theirs compute at once."""

    parts: TokenParts | None = None


_current = _Current()


def current() -> TokenParts | None:
    """How the tokens of the block that computes now are divided; None where each rank has all of them."""
    return _current.parts


def divide_tokens(decoder: Any, mesh: Any) -> None:
    """Have a `Decoder` divide the tokens of its passes over the ranks of a mesh of one dimension, if all of its layers
    can be given a part."""
    layers = (getattr(block, name) for block in decoder.blocks for name in ("mixer", "mlp", "after"))
    able = all(
        layer is None or getattr(layer, "sequence_parallel", False) or getattr(layer, "token_wise", False)
        for layer in layers
    )
    decoder._token_mesh = mesh if able else None


def parts_of(decoder: Any, batch: int, length: int) -> TokenParts | None:
    """How a `Decoder` divides the tokens (B, T) of a pass; None where each rank has all, as it has of fewer tokens than
    ranks."""
    mesh: Any = getattr(decoder, "_token_mesh", None)
    if mesh is None or batch * length < mesh.size():
        return None
    return TokenParts(mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name, batch, length)


@dataclass
class TokenParts:
    """How the `batch` * `length` tokens of a pass are divided over the `ranks` of a group, of which this is `rank`.

    All tokens are (B, T, ...), or in two dimensions (B * T, ...); this rank's part is (1, n, ...), or (n, ...). Where
    the ranks do not divide them, the last parts end in zeros, which no projection that gathers its input is given.
    """

    ranks: int
    rank: int
    group: str
    batch: int
    length: int

    @property
    def size(self) -> int:
        """Tokens of a part."""
        return -(-self.batch * self.length // self.ranks)

    def take(self, x: Tensor) -> Tensor:
        """The part of x, which all ranks have alike; its gradient is gathered."""
        return self._part(x, "own", "gather")

    def sum(self, x: Tensor) -> Tensor:
        """The part of the sum of x over ranks; its gradient is gathered."""
        return self._part(x, "sum", "gather")

    def whole(self, part: Tensor) -> Tensor:
        """All tokens, for what all ranks compute alike: the gradient is the same on all."""
        return self._whole(part, "gather", "own")

    def gather(self, part: Tensor) -> Tensor:
        """All tokens, of which each rank makes its own use: the gradient is summed over ranks."""
        return self._whole(part, "gather", "sum")

    def gathered_linear(self, part: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """F.linear of `gather(part)`, and of this rank's output channels; what is kept is the part."""
        tokens = self.batch * self.length
        rows = all_gather_linear(_as_rows(part), weight, bias, rows=tokens, ranks=self.ranks, group=self.group)
        return self._as_tokens(rows, part)

    def summed_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`sum` of F.linear of x, this rank's input channels."""
        rows = linear_reduce_scatter(_as_rows(x), weight, ranks=self.ranks, group=self.group)
        return rows if x.ndim == 2 else rows[None]

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, whose modules compute parts of the tokens."""
        before, _current.parts = _current.parts, self
        try:
            return function(*args)
        finally:
            _current.parts = before

    def _part(self, x: Tensor, forward: _Move, backward: _Move) -> Tensor:
        rows = _as_rows(x)
        padding = self.size * self.ranks - rows.shape[0]
        rows = F.pad(rows, (*(0, 0) * (rows.ndim - 1), 0, padding)) if padding else rows
        found = cast(Tensor, _Moved.apply(rows, forward, backward, self.ranks, self.rank, self.group))
        return found if x.ndim == 2 else found[None]

    def _whole(self, part: Tensor, forward: _Move, backward: _Move) -> Tensor:
        found = cast(Tensor, _Moved.apply(_as_rows(part), forward, backward, self.ranks, self.rank, self.group))
        return self._as_tokens(found[: self.batch * self.length], part)

    def _as_tokens(self, rows: Tensor, part: Tensor) -> Tensor:
        return rows if part.ndim == 2 else rows.unflatten(0, (self.batch, self.length))


def _as_rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.flatten(0, 1)


_Move = Literal["own", "gather", "sum"]
"""This rank's rows of those of all; the rows of all ranks; this rank's rows of the sum over ranks."""


class _Moved(torch.autograd.Function):
    """Rows that are moved one way, and their gradient the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: _Move, backward: _Move, ranks: int, rank: int, group: str) -> Tensor:
        ctx.back = backward, ranks, rank, group
        return _moved(x, forward, ranks, rank, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor]:
        return (_moved(dy, *ctx.back),)


def _moved(x: Tensor, how: _Move, ranks: int, rank: int, group: str) -> Tensor:
    if how == "own":
        return x.unflatten(0, (ranks, -1))[rank].clone()
    return cast(Tensor, (all_gather_rows if how == "gather" else reduce_scatter_rows)(x, ranks, group))
