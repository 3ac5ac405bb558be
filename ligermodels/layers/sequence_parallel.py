"""Sequence parallelism: between the projections of a tensor-parallel block each rank has a part of the tokens
(Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198).

The tokens of all sequences, one after another, are cut into as many equal parts as there are ranks. Norms, residual
additions, routers and everything else that works on single tokens compute this rank's part, and keep only that part for
the backward pass. A projection by columns gathers its input. A projection by rows sums its output over ranks, and each
rank gets its part of the sum. Together they send as many bytes as the all-reduce of all tokens that they replace.

All blocks of a `Decoder` divide the tokens, or none does (`divide_tokens`); `Decoder.forward` runs them by
`_run_in_parts`. `layers.sharding` reads `current` for their modules: between projections they receive this rank's part,
(1, n, H), instead of (B, T, H). A layer supports this if it declares `sequence_parallel` or `token_wise`: see
`layers.layer.Layer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ligermodels.layers.tokens import Tokens, reshaped
from ligermodels.ops.linear.parallel_linear import all_gather_linear, linear_reduce_scatter
from ligermodels.ops.runtime.collectives import Ranks


class _Current:
    """Belongs to the process, not to a thread: ranks exchange in one order, so no two passes compute at once."""

    parts: SequenceParts | None = None


_current = _Current()


def current() -> SequenceParts | None:
    """How the tokens of the block that computes now are divided over ranks; None where each rank has all of them."""
    return _current.parts


def divide_tokens(decoder: Any, mesh: Any) -> None:
    """Let a `Decoder` divide the tokens of its passes over the ranks of a mesh of one dimension, if all of its layers
    support it."""
    layers = (layer for block in decoder.blocks for layer in block.declarations().values())
    able = all(layer.sequence_parallel or layer.token_wise for layer in layers)
    decoder._sequence_mesh = mesh if able else None


def parts_of(decoder: Any, batch: int, length: int) -> SequenceParts | None:
    """How a `Decoder` divides the tokens (B, T) of a pass.

    Args:
        decoder: the `Decoder`.
        batch: B.
        length: T.

    Returns:
        The parts; None if each rank has all tokens: the decoder is not divided, or there are fewer tokens than ranks.
    """
    mesh = decoder._sequence_mesh
    if mesh is None or batch * length < mesh.size():
        return None
    return SequenceParts(Ranks.of(mesh), batch, length)


@dataclass(frozen=True)
class SequenceParts(Tokens):
    """How the `batch` * `length` tokens of a pass are divided over `ranks`.

    All tokens are (B, T, ...), or in two dimensions (B * T, ...); this rank's part is (1, n, ...), or (n, ...). Where
    the ranks do not divide the tokens evenly, the last parts end in zeros. Projections that gather their input leave
    these out.
    """

    ranks: Ranks
    batch: int
    length: int

    @property
    def size(self) -> int:
        """Tokens in a part."""
        return -(-self.batch * self.length // self.ranks.size)

    def take(self, x: Tensor, fill: float = 0) -> Tensor:
        """This rank's part of x, the same on all ranks. The gradient is gathered. Padding is zero, whatever `fill`."""
        return self._like(self.ranks.take(self._padded(x)), x)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks of a value that each computed from its part."""
        return self.ranks.all_reduce(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part of the sum over ranks of x, all tokens. The gradient is gathered."""
        return self._like(self.ranks.reduce_scatter(self._padded(x)), x)

    def restore(self, x: Tensor, fill: float = 0) -> Tensor:
        """All tokens, for computations that are the same on all ranks. So is the gradient."""
        rows = self.ranks.whole(_as_rows(x))[: self.batch * self.length]
        return rows if x.ndim == 2 else reshaped(rows, (self.batch, self.length, *x.shape[2:]))

    def gather(self, part: Tensor) -> Tensor:
        """All tokens, for computations that differ between ranks. The gradient is summed over ranks."""
        return self._as_tokens(self.ranks.gather(_as_rows(part))[: self.batch * self.length], part)

    def gathered_linear(self, part: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear` on `gather(part)`, by a rank's shard of the output channels; the backward pass keeps the part.

        Args:
            part: (1, n, K) or (n, K), this rank's part of the tokens.
            weight: (M, K), this rank's output channels.
            bias: (M,), or None.

        Returns:
            (B, T, M), or (B * T, M).
        """
        tokens, (size, _, group) = self.batch * self.length, self.ranks
        rows = all_gather_linear(_as_rows(part), weight, bias, rows=tokens, ranks=size, group=group)
        return self._as_tokens(rows, part)

    def summed_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`reduce_scatter` of `F.linear` on x, this rank's input channels of all tokens."""
        return self._like(linear_reduce_scatter(_as_rows(x), weight, ranks=self.ranks.size, group=self.ranks.group), x)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)`. The modules that it calls compute parts of the tokens."""
        before, _current.parts = _current.parts, self
        try:
            return function(*args)
        finally:
            _current.parts = before

    def _padded(self, x: Tensor) -> Tensor:
        rows = _as_rows(x)
        padding = self.size * self.ranks.size - rows.shape[0]
        return F.pad(rows, (*(0, 0) * (rows.ndim - 1), 0, padding)) if padding else rows

    @staticmethod
    def _like(rows: Tensor, x: Tensor) -> Tensor:
        return rows if x.ndim == 2 else rows[None]

    def _as_tokens(self, rows: Tensor, part: Tensor) -> Tensor:
        return rows if part.ndim == 2 else rows.unflatten(0, (self.batch, self.length))


def _as_rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.flatten(0, 1)
