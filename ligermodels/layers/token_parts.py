"""Sequence parallelism: between the projections of a tensor-parallel block each rank has a part of the tokens
(Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198).

The tokens of all sequences, one after another, are cut into as many equal parts as there are ranks. Norms, residual
additions, routers and whatever else works on single tokens compute those of this rank, and keep those alone for the
backward pass. A projection by columns gathers its input, and one by rows sums its output over ranks, of which each gets
its part: together they send as many bytes as the sum of all tokens on all ranks, whose place they take.

`Decoder.forward` decides which blocks compute so. Their modules go by `current`, through `layers.sharding`: between
projections they are given (1, n, H), the part, in place of (B, T, H).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.ops.runtime.library import once_differentiable

_current: ContextVar[TokenParts | None] = ContextVar("token_parts", default=None)
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def current() -> TokenParts | None:
    """How the tokens of the block that computes now are divided; None where each rank has all of them."""
    return _current.get()


def parts_of(decoder: nn.Module, batch: int, length: int) -> TokenParts | None:
    """How a `Decoder` divides the tokens (B, T) of a pass; None where each rank has all: without tensor parallelism, and
    of fewer tokens than ranks."""
    mesh = getattr(decoder, "_tensor_mesh", None)
    return None if mesh is None or batch * length < mesh.size() else TokenParts(mesh, batch, length)


@dataclass(frozen=True)
class TokenParts:
    """How the `batch` * `length` tokens of a pass are divided over the ranks of a mesh of one dimension.

    All tokens are (B, T, ...), or in two dimensions (B * T, ...); this rank's part is (1, n, ...), or (n, ...). Where
    the ranks do not divide them, the last parts end in zeros, which no projection is given.
    """

    mesh: Any
    batch: int
    length: int

    @property
    def size(self) -> int:
        """Tokens of a part."""
        return -(-self.batch * self.length // self.mesh.size())

    def take(self, x: Tensor) -> Tensor:
        """The part of x, which all ranks have alike; its gradient is gathered."""
        return self._part(x, _own_rows, _gathered_rows)

    def sum(self, x: Tensor) -> Tensor:
        """The part of the sum of x over ranks; its gradient is gathered."""
        return self._part(x, _summed_rows, _gathered_rows)

    def whole(self, part: Tensor) -> Tensor:
        """All tokens, for what all ranks compute alike: the gradient is the same on all."""
        return self._whole(part, _gathered_rows, _own_rows)

    def gather(self, part: Tensor) -> Tensor:
        """All tokens, of which each rank makes its own use: the gradient is summed over ranks."""
        return self._whole(part, _gathered_rows, _summed_rows)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, whose modules compute parts of the tokens."""
        token = _current.set(self)
        try:
            return function(*args)
        finally:
            _current.reset(token)

    def _part(self, x: Tensor, forward: _Move, backward: _Move) -> Tensor:
        rows = x if x.ndim == 2 else x.flatten(0, 1)
        padding = self.size * self.mesh.size() - len(rows)
        rows = F.pad(rows, (*(0, 0) * (rows.ndim - 1), 0, padding)) if padding else rows
        found = cast(Tensor, _Moved.apply(rows, self.mesh, forward, backward))
        return found if x.ndim == 2 else found[None]

    def _whole(self, part: Tensor, forward: _Move, backward: _Move) -> Tensor:
        found = cast(Tensor, _Moved.apply(part if part.ndim == 2 else part[0], self.mesh, forward, backward))
        found = found[: self.batch * self.length]
        return found if part.ndim == 2 else found.unflatten(0, (self.batch, self.length))


_Move = Callable[[Tensor, Any], Tensor]
"""Of rows on each rank of a mesh to rows on each."""


def _own_rows(x: Tensor, mesh: Any) -> Tensor:
    return x.unflatten(0, (mesh.size(), -1))[mesh.get_local_rank()].clone()


def _gathered_rows(x: Tensor, mesh: Any) -> Tensor:
    found = x.new_empty(mesh.size() * len(x), *x.shape[1:])
    if not x.is_meta:
        _all_gather(found, x.contiguous(), group=mesh.get_group())
    return found


def _summed_rows(x: Tensor, mesh: Any) -> Tensor:
    found = x.new_empty(len(x) // mesh.size(), *x.shape[1:])
    if not x.is_meta:
        _reduce_scatter(found, x.contiguous(), group=mesh.get_group())
    return found


class _Moved(torch.autograd.Function):
    """Two moves of which each is the other's transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Any, forward: _Move, backward: _Move) -> Tensor:
        ctx.mesh, ctx.backward_move = mesh, backward
        return forward(x, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor]:
        return (ctx.backward_move(dy, ctx.mesh),)
