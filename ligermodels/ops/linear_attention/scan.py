"""The reference of recurrences with a state per head, over sequences and over trees of tokens: the gated delta rule
(`gated_delta_rule`) and the state-space duality of Mamba2 (`ssd`).

A head keeps a state S (K, V), zero at first. Each token

    S = exp(g) S;    S = S + k u^T;    o = S^T q

g is one number, or has one for each of the K rows of S (Kimi Delta Attention, 2025,
https://arxiv.org/abs/2510.26692); u = weight v, or, by the delta rule, u = weight (v - S^T k). The recurrence can also
be computed for all tokens at once, if no token comes before one of its ancestors: see `gated_delta_rule`; without the
delta rule U = weight V.

A sequence is computed in chunks; the ancestors of a token are all tokens before it, or, with packed documents, the
tokens before it in its document. A tree is one chunk with its own ancestors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.ops.runtime.tensors import without_autocast

CHUNK = 64
"""Tokens that the reference computes at once: for T tokens it takes T * CHUNK numbers and T / CHUNK states per head."""
PAIRS = 16
"""With a decay for each key channel: tokens in a row of which each pair has K factors of its own. This takes
T * PAIRS * K numbers more."""


class TreeUpdates(NamedTuple):
    """The updates that the N nodes of a tree make to the state; `tree_state` computes the state after a node.

    decay: (B, N, R), or (B, N, R, K) of a decay for each key channel, fp64, the sum of g over each node's path.
    keys: (B, N, G, K), normalised, fp32 (fp64 for fp64).
    values: (B, N, R, V), the vector added along each key, fp32 (fp64 for fp64).
    """

    decay: Tensor
    keys: Tensor
    values: Tensor


def scan_sequence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, weight: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, *, delta: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The recurrence over sequences.

    Args:
        q: (B, T, G, K), fp32 or fp64; all is computed in its dtype.
        k: (B, T, G, K).
        v: (B, T, R, V), R a multiple of G.
        g: (B, T, R) or (B, T, R, K), logarithm of the decay of the state before each token.
        weight: (B, T, R), factor of each token's update.
        initial_state: (B, R, K, V), or None for zero.
        cu_seqlens: int32 (n + 1,), bounds of packed documents, or None.
        delta: whether updates follow the delta rule.

    Returns:
        o (B, T, R, V) and the state after the last token (B, R, K, V), of q's dtype.
    """
    tokens = q.shape[1]
    state = _initial_state(q, v, initial_state)
    size = CHUNK if tokens > CHUNK else tokens
    count = -(-tokens // size)
    token = torch.arange(count * size, device=q.device)
    document = torch.zeros_like(token)
    if cu_seqlens is not None:  # the padding of the last chunk belongs to the last document
        document = torch.bucketize(token.clamp(max=tokens - 1), cu_seqlens[1:], right=True)
    document = document.view(count, size)
    ancestors = (document[:, :, None] == document[:, None, :]).tril()
    before = torch.cat([document[:1, :1], document[:-1, -1:]])  # the document of the token before each chunk
    with without_autocast(q):
        chunked = partial(_chunked, dtype=q.dtype, count=count, size=size)
        chunks = _kind(g)(
            chunked(q), chunked(k), chunked(v), chunked(g), chunked(weight), ancestors, document == before, delta
        )
        outputs = []
        for i in range(count):
            o, state = chunks.run(i, state)
            outputs.append(o)
        o = torch.stack(outputs, dim=3).flatten(3, 4)[:, :, :, :tokens]
    return o.flatten(1, 2).transpose(1, 2), state.flatten(1, 2)


def scan_tree(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, weight: Tensor, initial_state: Tensor, ancestors: Tensor, *,
    delta: bool,
) -> tuple[Tensor, TreeUpdates]:  # fmt: skip
    """The recurrence over trees.

    Args:
        q, k, v, g, weight: operands of `scan_sequence`, with N nodes in place of T tokens.
        initial_state: (B, R, K, V), the state before the root.
        ancestors: bool (N, N) or (B, N, N), True at [i, j] if node j is node i or one of its ancestors.
        delta: whether the delta rule is used; else Mamba2's sum.

    Returns:
        o (B, N, R, V) of q's dtype, and the updates of the state before the root.
    """
    nodes = q.shape[1]
    with without_autocast(q):
        chunked = partial(_chunked, dtype=q.dtype, count=1, size=nodes)
        above = ancestors.reshape(-1, 1, 1, 1, nodes, nodes)
        follows = ancestors.new_ones(1, nodes)
        chunk = _kind(g)(chunked(q), chunked(k), chunked(v), chunked(g), chunked(weight), above, follows, delta)
        o, u = chunk.outputs(0, _initial_state(q, v, initial_state))
    decay, values = (t.flatten(1, 2).transpose(1, 2) for t in (chunk.path_decay[:, :, :, 0], u))  # (B, N, R, ...)
    return o.flatten(1, 2).transpose(1, 2), TreeUpdates(decay, k.to(q.dtype), values)


def tree_state(initial_state: Tensor, updates: TreeUpdates, node: Tensor, ancestors: Tensor) -> Tensor:
    """The state after one node of each tree.

    Args:
        initial_state: (B, R, K, V), floating, the state before the root.
        updates: the updates that the op over the tree returned.
        node: long (B,), a node of each tree.
        ancestors: bool (N, N) or (B, N, N), True at [i, j] if node j is node i or one of its ancestors.

    Returns:
        (B, R, K, V), of the dtype of `initial_state`.
    """
    decay, keys, values = updates
    decay = decay if decay.dim() == 4 else decay[..., None]
    repeats = values.shape[2] // keys.shape[2]
    with without_autocast(values):
        reached = decay.gather(1, node[:, None, None, None].expand(-1, 1, *decay.shape[2:]))
        path = ancestors.expand(len(node), *ancestors.shape[-2:])[torch.arange(len(node), device=node.device), node]
        kept = (reached - decay).masked_fill(~path[:, :, None, None], -torch.inf).to(values.dtype).exp()
        keys = (kept * keys.repeat_interleave(repeats, dim=2)).permute(0, 2, 3, 1)
        added = keys @ values.transpose(1, 2)
        return reached.to(values.dtype).exp()[:, 0, :, :, None] * initial_state + added.to(initial_state.dtype)


def _initial_state(q: Tensor, v: Tensor, initial_state: Tensor | None) -> Tensor:
    """The initial state in q's dtype, (B, G, R / G, K, V)."""
    if initial_state is None:
        initial_state = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    return initial_state.to(q.dtype).unflatten(1, (q.shape[2], -1))


def _chunked(x: Tensor, dtype: torch.dtype, count: int, size: int) -> Tensor:
    """x (B, T, heads, ...) -> (B, heads, count, size, ...) of `dtype`, zeros after the last token."""
    after, x = count * size - x.shape[1], x.to(dtype)
    x = F.pad(x, (*[0] * (2 * x.dim() - 4), 0, after)) if after else x
    return x.unflatten(1, (count, size)).movedim(3, 1)


def _kind(g: Tensor) -> type[_Chunks]:
    """The class for decays g (B, T, R), or (B, T, R, K)."""
    return _Chunks if g.dim() == 3 else _ChannelChunks


class _Chunks:
    """n chunks of C tokens, and all values that do not depend on the state before each chunk.

    q, k: (B, G, n, C, K). v: (B, R, n, C, V). g, weight: (B, R, n, C). ancestors: bool (n, C, C). follows: bool (n, C),
    whether the state before the chunk reaches the token (no document begins in between).
    """

    kept: Tensor
    """Decay from before the chunk to after each token, (B, G, R / G, n, C, 1); for each key channel, (..., C, K)."""
    path_decay: Tensor
    """Its logarithm in fp64, because differences are small compared to the sums; without the last dimension of 1."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, weight: Tensor, ancestors: Tensor, follows: Tensor,
        delta: bool,
    ) -> None:  # fmt: skip
        v, g, weight = (x.unflatten(1, (k.shape[1], -1)) for x in (v, g, weight[..., None]))
        self.q, self.k = q, k = q[:, :, None], k[:, :, None]
        products = self._decayed(g, ancestors, follows)
        self.attending = products(q, k)
        self.u = weight * v
        self.k_kept: Tensor | None = weight * self.kept * k if delta else None
        if self.k_kept is not None and k.shape[-2] > 1:
            a = products(k, k, weight).tril(-1)
            right_sides = torch.cat([self.u, self.k_kept], dim=-1)
            solved = torch.linalg.solve_triangular(a, right_sides, upper=False, unitriangular=True)
            self.u, self.k_kept = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    def _decayed(self, g: Tensor, ancestors: Tensor, follows: Tensor) -> Callable[..., Tensor]:
        """Set all decays. Returns the function of x and y (..., n, C, K), and factors (..., n, C, 1) or None, to their
        products (..., n, C, C), where the product of a token with an ancestor decays from the ancestor to the token,
        and other products are 0."""
        self.path_decay = (ancestors * g.double()[..., None, :]).sum(-1)
        difference = (self.path_decay[..., :, None] - self.path_decay[..., None, :]).to(g.dtype)
        decay = difference.masked_fill(~ancestors, -torch.inf).exp()  # other differences may overflow
        self.kept = (self.path_decay.to(g.dtype).exp() * follows)[..., None]
        self.to_last = decay[..., -1, :, None]

        def products(x: Tensor, y: Tensor, factors: Tensor | None = None) -> Tensor:
            found = x @ y.transpose(-1, -2)
            return (found if factors is None else factors * found) * decay

        return products

    def outputs(self, i: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """o and u (B, G, R / G, C, V) of chunk i, with the state (B, G, R / G, K, V) before it."""
        u = self.u[:, :, :, i]
        if self.k_kept is not None:
            u = u - self.k_kept[:, :, :, i] @ state
        return self._read(i, state) + self.attending[:, :, :, i] @ u, u

    def _read(self, i: int, state: Tensor) -> Tensor:
        """The part of the outputs of chunk i that comes from the state before it."""
        return self.kept[:, :, :, i] * (self.q[:, :, :, i] @ state)

    def run(self, i: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """o of chunk i, and the state after it."""
        o, u = self.outputs(i, state)
        return o, self.kept[:, :, :, i, -1, :, None] * state + self._added(i, u)

    def _added(self, i: int, u: Tensor) -> Tensor:
        """What the updates u of chunk i add to the state after it."""
        return self.k[:, :, :, i].transpose(-1, -2) @ (self.to_last[:, :, :, i] * u)


class _ChannelChunks(_Chunks):
    """The same with a decay for each key channel: g is (B, R, n, C, K).

    Decays are then part of the sums over key channels, and cannot be applied to the products.
    """

    def _decayed(self, g: Tensor, ancestors: Tensor, follows: Tensor) -> Callable[..., Tensor]:
        is_tree, wide = ancestors.dim() > 3, g.double()
        # Sums over earlier documents of the chunk only lead to factors that `follows` and `ancestors` mask.
        self.path_decay = ancestors.double() @ wide if is_tree else wide.cumsum(-2)
        self.kept = self.path_decay.to(g.dtype).exp() * follows[..., None]
        to_last = (self.path_decay[..., -1:, :] - self.path_decay).to(g.dtype)
        self.to_last = to_last.masked_fill(~ancestors[..., -1, :, None], -torch.inf).exp()
        block = g.shape[-2] if is_tree else PAIRS
        return partial(_products, path_decay=self.path_decay, ancestors=ancestors, block=block)

    def _read(self, i: int, state: Tensor) -> Tensor:
        return (self.kept[:, :, :, i] * self.q[:, :, :, i]) @ state

    def _added(self, i: int, u: Tensor) -> Tensor:
        return (self.to_last[:, :, :, i] * self.k[:, :, :, i]).transpose(-1, -2) @ u


def _products(
    x: Tensor, y: Tensor, factors: Tensor | None = None, *, path_decay: Tensor, ancestors: Tensor, block: int
) -> Tensor:
    """The sums over channels c of x_ic y_jc exp(G_ic - G_jc), where j is i or one of its ancestors, else 0.

    No factor is above 1, so none overflows. With the sum G before a block of tokens in between, exp(G_i - G_j) is the
    product of a factor of token i in the block and a factor of an earlier token j: the sums are a matrix product. This
    needs sums that fall from token to token, so a tree is one block. Within a block each pair has a factor of its own.

    Args:
        x: (..., n, C, K).
        y: (..., n, C, K).
        factors: of the rows, (..., n, C, 1), or None.
        path_decay: G, fp64 (..., n, C, K).
        ancestors: bool (..., C, C).
        block: tokens in a block. Memory: block * K numbers per token.

    Returns:
        (..., n, C, C).
    """
    size, rows = x.shape[-2], []
    for start in range(0, size, block):
        end = min(start + block, size)
        tokens, related = slice(start, end), ancestors[..., start:end, start:end, None]
        g = path_decay[..., tokens, :]
        within = (g[..., :, None, :] - g[..., None, :, :]).to(x.dtype).masked_fill(~related, -torch.inf).exp()
        parts = [(x[..., tokens, None, :] * y[..., None, tokens, :] * within).sum(-1)]
        if start:
            before = path_decay[..., start - 1 : start, :]
            left = x[..., tokens, :] * (g - before).to(x.dtype).exp()
            right = y[..., :start, :] * (before - path_decay[..., :start, :]).to(x.dtype).exp()
            parts.insert(0, left @ right.transpose(-1, -2) * ancestors[..., tokens, :start])
        if end < size:
            parts.append(parts[-1].new_zeros(*parts[-1].shape[:-1], size - end))
        rows.append(torch.cat(parts, dim=-1))
    products = torch.cat(rows, dim=-2)
    return products if factors is None else factors * products
