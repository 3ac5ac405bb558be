"""Token layouts: which tokens a pass computes, and where they lie.

A caller's tensors are (B, T, ...), one entry for each token of each sequence. Before the blocks, the steps below lay
the tokens out anew, always in this order:

1. Rows: `Unpadding` joins the tokens of all sequences, without padding, into one packed row (under torch.compile
   `KeptPadding` joins the rows with their padding); or `PackedRows` joins rows that hold packed documents.
2. Context parallelism: `ContextShard` takes this rank's part of each row.
3. Needed tokens: `SelectedTokens` takes the tokens whose states are needed, such as the tokens that have a target,
   after the last block that mixes tokens.

A `TokenLayout` holds steps 1 and 2 of a pass: `CausalLM.layout` makes it, and `Decoder.forward` lays the tokens out. A
pass with a decoding state keeps padding (`FilledPadding`). Within the blocks, sequence parallelism takes parts of these
tokens (`layers.sequence_parallel.SequenceParts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers.packing import document_bounds, packed_positions
from ligermodels.ops.loss.linear_head import RowSelection
from ligermodels.ops.runtime.checks import assert_async, check_not_complex
from ligermodels.ops.runtime.collectives import Ranks


class Tokens:
    """One step of a token layout. This base class keeps all tokens as they are.

    mask: bool, False on places that hold no token in this layout; None if all places hold tokens.
    padded: whether the tokens before this step include padding.
    """

    mask: Tensor | None = None
    padded: ClassVar[bool] = False

    def take(self, x: Tensor, fill: float = 0) -> Tensor:
        """Lay the tokens of x out anew.

        Args:
            x: (rows, length, ...), the tokens before this step.
            fill: value for places of the result that hold no token.

        Returns:
            The tokens after this step, (rows', length', ...).
        """
        return x

    def restore(self, x: Tensor, fill: float = 0) -> Tensor:
        """The inverse of `take`.

        Args:
            x: (rows', length', ...), the tokens after this step.
            fill: value for tokens that this step leaves out.

        Returns:
            The tokens before this step, (rows, length, ...); where ranks share them, the tokens of all ranks. Each rank
            may then use the result in its own way: in the backward pass gradients are summed over the ranks.
        """
        return x

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks that share the tokens of a value that each rank computed from its own tokens."""
        return x


class Unpadding(Tokens):
    """Takes the padding out of a batch: the tokens of all sequences become one packed row.

    Args:
        attention_mask: (B, T), 1 (or True) on tokens and 0 on padding, which may be anywhere in a row. Making the
            object waits for the GPU once.

    Attributes:
        cu_seqlens: int32 (B + 1,), bounds of the sequences in the packed row.

    Raises:
        InputError: the mask has other values, or no token at all.
    """

    padded = True

    def __init__(self, attention_mask: Tensor) -> None:
        mask = attention_mask.bool()
        assert_async(mask == attention_mask, "attention_mask: may hold only 1 (a token) and 0 (padding)")
        self._shape = mask.shape
        self._indices = mask.flatten().nonzero().flatten()
        if not len(self._indices):
            raise InputError("attention_mask: has no 1, so that there is no token at all")
        self.cu_seqlens = F.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all sequences."""
        return len(self._indices)

    @property
    def trivial(self) -> bool:
        """Whether there is no padding."""
        return self.num_tokens == self._shape[0] * self._shape[1]

    def take(self, x: Tensor, fill: float = 0) -> Tensor:
        """x (B, T, ...) -> (1, tokens, ...), the tokens of all sequences, one sequence after another."""
        return x.flatten(0, 1).index_select(0, self._indices)[None]

    def restore(self, x: Tensor, fill: float = 0) -> Tensor:
        """x (1, tokens, ...) -> (B, T, ...), with `fill` on padding."""
        filled = x.new_full((*self._shape, *x.shape[2:]), fill).flatten(0, 1).index_copy(0, self._indices, x[0])
        return reshaped(filled, (*self._shape, *x.shape[2:]))


class FilledPadding(Tokens):
    """Leaves padding where it is, as a prefill does, and fills it in results.

    Args:
        mask: bool (B, T), True on tokens and False on padding.
    """

    padded = True
    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def restore(self, x: Tensor, fill: float = 0) -> Tensor:
        """x (B, T, ...), with `fill` on padding."""
        return x.masked_fill(~self.mask.view(*self.mask.shape, *[1] * (x.ndim - 2)), fill)


class KeptPadding(FilledPadding):
    """Leaves padding where it is, as documents of their own, for torch.compile: shapes do not depend on values.

    Args:
        attention_mask: (B, T), 1 (or True) on tokens and 0 on padding, which is before or after a row's tokens.

    Attributes:
        cu_seqlens: int32 (3 B + 1,), bounds of the padding before, the tokens and the padding after them, of each row.
        mask: bool (B, T), True on tokens.

    Raises:
        InputError: the mask has other values, no token at all, or padding between tokens (on a GPU: device assertions).
    """

    trivial = False

    def __init__(self, attention_mask: Tensor) -> None:
        super().__init__(mask := attention_mask.bool())
        (rows, length), lengths, first = mask.shape, mask.sum(1), mask.int().argmax(1)
        index = torch.arange(length, device=mask.device)
        between = (index >= first[:, None]) & (index < (first + lengths)[:, None])
        assert_async(mask == attention_mask, "attention_mask: may hold only 1 (a token) and 0 (padding)")
        assert_async(mask.any(), "attention_mask: has no 1, so that there is no token at all")
        assert_async(mask == between, "attention_mask: torch.compile takes no padding between the tokens of a row")
        starts = torch.arange(rows, device=mask.device) * length
        bounds = torch.stack([starts + first, starts + first + lengths, starts + length], dim=1)
        self.cu_seqlens = F.pad(bounds.flatten(), (1, 0)).to(torch.int32)
        self.num_tokens = rows * length

    def take(self, x: Tensor, fill: float = 0) -> Tensor:
        """x (B, T, ...) -> (1, B * T, ...), with `fill` on padding."""
        return super().restore(x, fill).flatten(0, 1)[None]

    def restore(self, x: Tensor, fill: float = 0) -> Tensor:
        """x (1, B * T, ...) -> (B, T, ...), with `fill` on padding."""
        return super().restore(x[0].unflatten(0, self.mask.shape), fill)


@dataclass(frozen=True)
class PackedRows(Tokens):
    """Joins the `rows` rows of `length` tokens, each of packed documents, into one row."""

    rows: int
    length: int

    def take(self, x: Tensor, fill: float = 0) -> Tensor:
        """x (rows, length, ...) -> (1, rows * length, ...)."""
        return x.flatten(0, 1)[None]

    def restore(self, x: Tensor, fill: float = 0) -> Tensor:
        """x (1, rows * length, ...) -> (rows, length, ...)."""
        return reshaped(x, (self.rows, self.length, *x.shape[2:]))


@dataclass(frozen=True)
class ContextShard(Tokens):
    """This rank's part of the tokens under context parallelism.

    Each row is cut into 2 n chunks for n ranks. Rank i has the chunks i and 2 n - 1 - i, so that all ranks have as much
    causal attention to compute.

    Args:
        mesh: DeviceMesh of one dimension, the ranks that share each row.
        rows: number of rows.
        length: tokens in a row.
    """

    mesh: Any
    rows: int
    length: int

    @property
    def _ranks(self) -> Ranks:
        return Ranks.of(self.mesh)

    @property
    def chunk(self) -> int:
        """Tokens in each of the 2 n chunks. Beyond the end of the row they are padding."""
        return -(-self.length // (2 * self.mesh.size()))

    @property
    def chunks(self) -> tuple[int, int]:
        """Numbers of this rank's two chunks."""
        rank = self.mesh.get_local_rank()
        return rank, 2 * self.mesh.size() - 1 - rank

    def take(self, x: Tensor, fill: float = 0) -> Tensor:
        """x (rows or 1, length, ...) -> (rows or 1, 2 * chunk, ...), with `fill` for padding."""
        padding = 2 * self.mesh.size() * self.chunk - self.length
        x = F.pad(x, (*(0, 0) * (x.ndim - 2), 0, padding), value=fill) if padding else x
        return torch.cat([x.narrow(1, chunk * self.chunk, self.chunk) for chunk in self.chunks], dim=1)

    def restore(self, x: Tensor, fill: float = 0) -> Tensor:
        """x (rows, 2 * chunk, ...) of each rank -> (rows, length, ...)."""
        return self.all_tokens(x)[:, : self.length].clone()  # FSDP2 warns of models that return views

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks."""
        return self._ranks.all_reduce(x)

    def is_token(self, device: torch.device) -> Tensor:
        """Bool (rows, 2 * chunk), False for padding."""
        return self.take(torch.ones(self.rows, self.length, dtype=torch.bool, device=device), fill=False)

    def all_tokens(self, x: Tensor) -> Tensor:
        """x (rows, 2 * chunk, ...) of each rank -> (rows, 2 n * chunk, ...), the tokens of all ranks, with padding."""
        return self._in_order(self._ranks.gather(x))

    def share_of_channels(self, x: Tensor) -> Tensor:
        """x (rows, 2 * chunk, n, C), this rank's tokens with a share of the channels for each rank -> (rows, length,
        C), all tokens with this rank's share. `share_of_tokens` goes back."""
        return self._in_order(self._ranks.swap(x.movedim(2, 0).flatten(0, 1)))[:, : self.length]

    def share_of_tokens(self, x: Tensor) -> Tensor:
        """x (rows, length, C), all tokens with this rank's share of the channels -> (rows, 2 * chunk, n, C), this
        rank's tokens with the shares of all ranks; zeros for padding."""
        ranks = self.mesh.size()
        x = F.pad(x, (0, 0, 0, 2 * ranks * self.chunk - self.length))
        first, second = x.unflatten(1, (2 * ranks, -1)).transpose(0, 1).chunk(2)  # each (n, rows, chunk, C)
        shares = self._ranks.swap(torch.cat([first, second.flip(0)], dim=2).flatten(0, 1))
        return shares.unflatten(0, (ranks, -1)).movedim(0, 2)

    def _in_order(self, x: Tensor) -> Tensor:
        """x (n * rows, 2 * chunk, ...), the tokens of one rank after another -> (rows, 2 n * chunk, ...)."""
        ranks = x.unflatten(0, (self.mesh.size(), -1)).unflatten(2, (2, -1))
        chunks = torch.cat([ranks[:, :, 0], ranks[:, :, 1].flip(0)])  # each (n, rows, chunk, ...)
        return chunks.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class SelectedTokens(Tokens):
    """The tokens whose states are needed.

    Args:
        indices: long (n,), indices of the flattened `rows` * `length` tokens.
        rows: number of rows.
        length: tokens in a row.
        distinct: whether no index occurs twice, so that gradients are copied instead of summed. Default: True.
    """

    indices: Tensor
    rows: int
    length: int
    distinct: bool = True

    def take(self, x: Tensor, fill: float = 0) -> Tensor:
        """x (rows or 1, length, ...) -> (1, n, ...). A single row, such as of positions, stands for each of the
        rows."""
        if x.shape[0] != self.rows:
            return x[0].index_select(0, self.indices % self.length)[None]
        return take_tokens(x, self.indices) if self.distinct else x.flatten(0, 1)[self.indices][None]

    def restore(self, x: Tensor, fill: float = 0) -> Tensor:
        """x (1, n, ...) -> (rows, length, ...), with `fill` for the other tokens. Of a token that occurs several times
        the last occurrence is restored, and gets the gradient."""
        total, indices = self.rows * self.length, self.indices
        if not self.distinct:  # the earlier occurrences are copied to a row past the end
            order = torch.arange(len(indices), device=indices.device)
            last = order.new_zeros(total).scatter_reduce(0, indices, order, "amax")
            indices = indices.masked_fill(last[indices] != order, total)
        flat = x.new_full((total + (not self.distinct), *x.shape[2:]), fill).index_copy(0, indices, x[0])[:total]
        return reshaped(flat, (self.rows, self.length, *x.shape[2:]))


@dataclass(frozen=True)
class TokenLayout(Tokens):
    """The rows that a batch's tokens lie in, then this rank's part of them: steps 1 and 2.

    Args:
        shape: (B, T) of the caller's tensors.
        packing: step 1, which lays tokens (B, T) out in the rows of the pass: `Unpadding`, `KeptPadding`, `PackedRows`,
            or `Tokens`, which keeps the B rows.
        shard: this rank's part of the rows under context parallelism, or None.
        cu_seqlens: int32 (n + 1,), bounds of the documents packed into a single row; None for one document in each row.
    """

    shape: tuple[int, int]
    packing: Tokens
    shard: ContextShard | None = None
    cu_seqlens: Tensor | None = None

    def take(self, x: Tensor, fill: float = 0) -> Tensor:
        """x (B, T, ...) -> this rank's tokens of the pass."""
        x = self.packing.take(x, fill)
        return x if self.shard is None else self.shard.take(x, fill)

    def restore(self, x: Tensor, fill: float = 0) -> Tensor:
        """This rank's tokens of the pass -> x (B, T, ...), with `fill` on padding."""
        return self.packing.restore(x if self.shard is None else self.shard.restore(x, fill), fill)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks that share each sequence."""
        return x if self.shard is None else self.shard.sum(x)

    def positions(self, x: Tensor) -> Tensor:
        """Position of each token in its document, long (1, length), for this rank's tokens x (rows, n, ...): of all
        ranks, because rotary frequencies may depend on the highest position of a row."""
        length = x.shape[1] if self.shard is None else self.shard.length
        if self.cu_seqlens is None:
            return torch.arange(length, device=x.device)[None]
        return packed_positions(self.cu_seqlens, length)


def token_layout(
    shape: tuple[int, int],
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mesh: Any = None,
) -> TokenLayout:
    """The layout of a batch, with an `Unpadding` or a `KeptPadding` if it has padding.

    Args:
        shape: (B, T) of the batch.
        attention_mask: (B, T), 1 on tokens and 0 on padding. It excludes the next two arguments.
        position_ids: (B, T) long. Positions that do not rise by 1 mark packed documents; finding them
            waits for the GPU once.
        cu_seqlens: int32 (n + 1,), bounds of documents packed into a single row.
        mesh: DeviceMesh of the ranks that share each sequence under context parallelism, or None.

    Returns:
        The layout of the pass.

    Raises:
        InputError: an argument does not fit the shape or another argument, or the mask has no token.
    """
    if attention_mask is None and position_ids is None and cu_seqlens is None and mesh is None:
        return TokenLayout(shape, Tokens())
    if attention_mask is None:
        return layout_without_padding(shape, document_bounds(shape, position_ids, cu_seqlens), mesh)
    if position_ids is not None or cu_seqlens is not None:
        raise InputError("attention_mask: give no position_ids or cu_seqlens with it")
    check_not_complex(attention_mask)
    unpad = KeptPadding(attention_mask) if torch.compiler.is_compiling() else Unpadding(attention_mask)
    if unpad.trivial:
        return layout_without_padding(shape, None, mesh)
    shard = None if mesh is None else ContextShard(mesh, 1, unpad.num_tokens)
    return TokenLayout(shape, unpad, shard, unpad.cu_seqlens)


def layout_without_padding(shape: tuple[int, int], cu_seqlens: Tensor | None, mesh: Any = None) -> TokenLayout:
    """The layout of a batch without padding.

    Args:
        shape: (B, T) of the batch.
        cu_seqlens: int32 (n + 1,), bounds of packed documents over the flattened B * T tokens; None for rows of one
            document, which stay as they are.
        mesh: DeviceMesh of the ranks that share each sequence under context parallelism, or None.

    Returns:
        The layout of the pass.
    """
    packing = Tokens() if cu_seqlens is None else PackedRows(*shape)
    sizes = shape if cu_seqlens is None else (1, shape[0] * shape[1])
    return TokenLayout(shape, packing, None if mesh is None else ContextShard(mesh, *sizes), cu_seqlens)


def reshaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`x.reshape(shape)`, which is no view as far as autograd knows: FSDP2 warns of models that return views."""
    return torch.ops.aten._unsafe_view(x.contiguous(), shape)


def take_tokens(x: Tensor, indices: Tensor) -> Tensor:
    """x (rows, length, ...) -> (1, n, ...), the tokens `indices`, long (n,) and distinct, of the flattened ones."""
    return RowSelection(indices, x.shape[:2]).take(x)[None]
