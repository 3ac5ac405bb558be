"""Context parallelism: each rank of a group has a part of the tokens of every row.

A row is cut into 2 n chunks for n ranks, of which rank i has the chunks i and 2 n - 1 - i: so all have as much causal
attention to compute. Keys and values are gathered from all ranks, and each chunk of queries attends to the keys up to
its end, as Llama 3 was trained (2024, https://arxiv.org/abs/2407.21783, section 3.3.2). That is exact for all that
`ops.attention` does (windows, packed documents, sinks, softcap), by any backend; keys and values, of few heads, are
small beside the scores that are computed with them.

The backward pass of each exchange is its transpose: a gather's is the sum of what all ranks have as its gradient. So
results that all ranks have alike, such as a loss, may be differentiated on each, and the mean of the gradients over
ranks, as FSDP2 takes it, is the gradient.

A module that can be given a part of the tokens says so by `context_parallel = True`, or, where its result for a token
depends on no other one, by `token_wise`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.errors import ConfigError
from ligermodels.ops.runtime.library import once_differentiable


@dataclass(frozen=True)
class SequenceShard:
    """This rank's part of the tokens of one forward pass.

    mesh: a DeviceMesh of one dimension, the ranks that divide the tokens.
    batch, length: B and T of the whole.
    packed: all B * T tokens are one row.
    """

    mesh: Any
    batch: int
    length: int
    packed: bool

    @property
    def row(self) -> int:
        """Tokens of a row."""
        return self.batch * self.length if self.packed else self.length

    @property
    def chunk(self) -> int:
        """Tokens of each of the 2 n chunks; beyond the row's end they are padding."""
        return -(-self.row // (2 * self.mesh.size()))

    @property
    def chunks(self) -> tuple[int, int]:
        """The two that this rank has."""
        rank = self.mesh.get_local_rank()
        return rank, 2 * self.mesh.size() - 1 - rank

    def take(self, x: Tensor, fill: float = 0) -> Tensor:
        """Of x (B or 1, T, ...) this rank's tokens, (rows, 2 * chunk, ...), with `fill` for padding."""
        x = x.flatten(0, 1)[None] if self.packed else x
        padding = 2 * self.mesh.size() * self.chunk - self.row
        x = F.pad(x, (*(0, 0) * (x.ndim - 2), 0, padding), value=fill) if padding else x
        return torch.cat([x.narrow(1, chunk * self.chunk, self.chunk) for chunk in self.chunks], dim=1)

    def is_token(self, device: torch.device) -> Tensor:
        """Bool (rows, 2 * chunk): False for padding."""
        return self.take(torch.ones(self.batch, self.length, dtype=torch.bool, device=device), fill=False)

    def gather(self, x: Tensor) -> Tensor:
        """The inverse of `take`: from the x (rows, 2 * chunk, ...) of all ranks to (B, T, ...)."""
        whole = self.all_tokens(x)[:, : self.row].reshape(self.batch, self.length, *x.shape[2:])
        return whole.clone()  # FSDP2 warns of models that return views

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks."""
        return cast(Tensor, _Sum.apply(x, self.mesh))

    def all_tokens(self, x: Tensor) -> Tensor:
        """From the x (rows, 2 * chunk, ...) of all ranks to all tokens, (rows, 2 n * chunk, ...), with padding."""
        ranks = _Gather.apply(x.unflatten(1, (2, -1)), self.mesh)  # (n, rows, 2, chunk, ...)
        chunks = torch.cat([ranks[:, :, 0], ranks[:, :, 1].flip(0)])
        return chunks.transpose(0, 1).flatten(1, 2)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, **options: Any) -> Tensor:
        """`ops.attention` of this rank's queries (rows, 2 * chunk, Hq, D) over keys and values of `all_tokens`.

        cu_seqlens: bounds of the documents of the whole row. `options` are those of the op.
        """
        found, window = [], options.get("window")
        for chunk, queries in zip(self.chunks, q.split(self.chunk, dim=1), strict=True):
            end = (chunk + 1) * self.chunk
            # The first of its queries sees no further.
            start = 0 if window is None else max(0, end - self.chunk - window + 1)
            bounds = None
            if cu_seqlens is not None:  # those of the keys, with padding as a document of its own
                bounds = F.pad(cu_seqlens, (0, 1), value=end).clamp(start, end) - start
            found.append(ops.attention(queries, k[:, start:end], v[:, start:end], cu_seqlens=bounds, **options))
        return torch.cat(found, dim=1)


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, shard: SequenceShard | None, **options: Any
) -> Tensor:
    """`ops.attention` of a layer: q, k and v are of all tokens, or of those of the `shard`."""
    if shard is None:
        return ops.attention(q, k, v, cu_seqlens=cu_seqlens, **options)
    return shard.attention(q, shard.all_tokens(k), shard.all_tokens(v), cu_seqlens, **options)


def check_context_parallel(decoder: nn.Module) -> None:
    """Raises ConfigError, naming it, for a layer of a `Decoder` that cannot be given a part of a sequence."""
    for i, block in enumerate(decoder.blocks):  # type: ignore[arg-type]
        for name in ("mixer", "mlp", "after"):
            layer = getattr(block, name)
            if layer is None or getattr(layer, "context_parallel", False):
                continue
            if not getattr(layer, "token_wise", False) or name == "mixer":
                raise ConfigError(
                    f"context: blocks[{i}].{name} ({type(layer).__name__}) cannot be given a part of a sequence; its "
                    "class has no `context_parallel`, see ligermodels.layers.context_parallel. Spread the model by "
                    "shard and replicate"
                )


def shard_of(decoder: nn.Module, batch: int, length: int, *, packed: bool) -> SequenceShard | None:
    """This rank's part of the tokens (B, T) of a forward pass of a `Decoder`; None where it has all.

    packed: documents come with bounds.
    """
    mesh = getattr(decoder, "_context_mesh", None)
    return None if mesh is None else SequenceShard(mesh, batch, length, packed)


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather(torch.autograd.Function):
    """x of each rank -> (n, ...)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Any) -> Tensor:
        ctx.mesh = mesh
        found = x.new_empty(mesh.size() * x.shape[0], *x.shape[1:])
        if not x.is_meta:
            _all_gather(found, x.contiguous(), group=mesh.get_group())
        return found.unflatten(0, (-1, x.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dx = dy.new_empty(dy.shape[1:])
        if not dy.is_meta:
            _reduce_scatter(dx, dy.flatten(0, 1).contiguous(), group=ctx.mesh.get_group())
        return dx, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Any) -> Tensor:
        ctx.mesh = mesh
        return _summed(x, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _summed(dy, ctx.mesh), None


def _summed(x: Tensor, mesh: Any) -> Tensor:
    found = x.detach().clone(memory_format=torch.contiguous_format)
    if not found.is_meta:
        dist.all_reduce(found, group=mesh.get_group())
    return found
