"""The gated delta rule (Yang et al., 2024, https://arxiv.org/abs/2412.06464), over sequences and over trees of tokens.

A head keeps a state S (K, V), zero at first. q and k are normalised to length 1, and q divided by sqrt(K). Each token

    S = exp(g) S;    u = beta (v - S^T k);    S = S + k u^T;    o = S^T q

The rule can also be computed for all tokens at once, if no token comes before one of its ancestors. Let G_i be the sum
of g over token i and its ancestors, and decay_ij = exp(G_i - G_j) if j is i or an ancestor of i, else 0. With S the
state before the first token, and A_ij = beta_i (k_i . k_j) decay_ij for strict ancestors j of i,

    (1 + A) U = beta (V - exp(G) K S)                            unit triangular
    O = exp(G) Q S + ((Q K^T) * decay) U
    state after token a = exp(G_a) S + sum of decay_aj k_j u_j^T

A sequence is computed in chunks; the ancestors of a token are all tokens before it, or, with packed documents, the
tokens before it in its document. A tree is one chunk with its own ancestors.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import BackendError, InputError
from ligermodels.ops.linear_attention import delta_chunks, fla
from ligermodels.ops.linear_attention.causal_conv import first_tokens
from ligermodels.ops.linear_attention.delta_chunks import EPS
from ligermodels.ops.runtime.checks import check_rising
from ligermodels.ops.runtime.devices import is_recording
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import reject_dtensors
from ligermodels.ops.runtime.signature import Signature
from ligermodels.ops.runtime.tensors import check_tensor, without_autocast

CHUNK = 64
"""Tokens that the reference computes at once: for T tokens it takes T * CHUNK numbers and T / CHUNK states per head."""

BACKENDS = ("auto", "triton", "fla", "reference")


class TreeUpdates(NamedTuple):
    """The updates that the N nodes of a tree make to the state; `tree_state` computes the state after a node.

    decay: (B, N, R) fp64, the sum of g over each node's path.
    keys: (B, N, G, K), normalised, fp32 (fp64 for fp64).
    values: (B, N, R, V), the vector added along each key, fp32 (fp64 for fp64).
    """

    decay: Tensor
    keys: Tensor
    values: Tensor


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    final_state: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over sequences of tokens, for each of R value heads:

        S = exp(g) S;    u = beta (v - S^T k);    S = S + k u^T;    o = S^T q

    with q and k normalised to length 1, q divided by sqrt(K), and S (K, V). A token with g = 0 and beta = 0 leaves the
    state as it is. Differentiable in all tensors but cu_seqlens, by "triton" and "fla" only once. "triton" and
    "reference" give equal bits in every run, and do not wait for the device.

    Args:
        q: (B, T, G, K), any floating dtype; the op normalises it.
        k: (B, T, G, K), of q's dtype; the op normalises it.
        v: (B, T, R, V), of q's dtype, R a multiple of G. Value head j uses query and key head j // (R / G).
        g: (B, T, R), floating, logarithm of the decay of the state before each token, finite and at most 0.
        beta: (B, T, R), floating, how far each token moves the state to its value, within [0, 1].
        initial_state: (B, R, K, V), floating, the state before the first token; zero when None.
        cu_seqlens: int32 (n + 1,), bounds of documents that are packed into one row (B = 1), from 0 to T. The first
            document starts from `initial_state`, the others from a state of zero.
        final_state: whether to return the state after the last token.
        backend: "reference"; "triton", this project's kernels, for CUDA tensors on GPUs of compute capability 8, 9 or
            12, q and k of up to 128 channels (a multiple of 16 in 16-bit dtypes), no float64; "fla",
            flash-linear-attention's kernels, for 16-bit operands; or "auto": the first of triton, fla and reference
            that can serve the call, and reference while `set_backend("reference")` is on.

    Returns:
        o (B, T, R, V) of q's dtype, and the state after the last token, (B, R, K, V), fp32 (fp64 for fp64), empty
        without `final_state`.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or, on the CPU, cu_seqlens do not rise from 0 to T.
        BackendError: the named backend is unknown or cannot serve the call.
    """
    check_operands("gated_delta_rule", q, k, v, g, beta, initial_state)
    check_tensor("gated_delta_rule", "cu_seqlens", cu_seqlens, ("n",), q.device, torch.int32, optional=True)
    if cu_seqlens is not None and q.shape[0] != 1:
        raise InputError(
            f"gated_delta_rule: documents are packed into one row, but q has {q.shape[0]}; give q (1, T, G, K)"
        )
    operands = q, k, v, g, beta, initial_state
    check_rising("gated_delta_rule", cu_seqlens, q.shape[1])
    chosen = _choose(*operands, cu_seqlens, backend)
    if chosen == "triton":
        first = None if cu_seqlens is None else first_tokens(q, cu_seqlens)
        return delta_chunks.run(*operands, first, final_state)
    if chosen == "fla":
        return fla.run(*operands, cu_seqlens, final_state)
    o, state = gated_delta_rule_reference(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return o, state if final_state else o.new_empty(0)


def _choose(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    backend: str,
) -> str:  # fmt: skip
    """Name of the backend that serves the call."""
    if backend not in BACKENDS:
        raise BackendError(f"gated_delta_rule: backend {backend!r} is unknown; there are: {', '.join(BACKENDS)}")
    kernels = backend in ("auto", "triton") and use_kernels(q, g, beta, initial_state)
    if backend == "reference" or (backend == "auto" and not kernels):
        return "reference"
    refusals = {}
    if backend != "fla":
        missing = 'it needs Triton, CUDA tensors, none of them float64, and no set_backend("reference")'
        refusals["triton"] = delta_chunks.refuses(q) if kernels else missing
    if backend != "triton":
        gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, g, beta))
        compiling = torch.compiler.is_compiling()
        packed, continued = cu_seqlens is not None, initial_state is not None
        request = fla.DeltaRequest(
            q.device.type, q.dtype, q.shape[3], packed, continued, compiling, gradient, is_recording()
        )  # fmt: skip
        refusals["fla"] = fla.refuses(request)
    for name, refusal in refusals.items():
        if not refusal:
            return name
    if backend != "auto":
        raise BackendError(f"gated_delta_rule: backend {backend!r} cannot serve this call: {refusals[backend]}")
    return "reference"


def gated_delta_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The specification of `gated_delta_rule`, in plain torch, with the same arguments q, k, v, g, beta, initial_state
    and cu_seqlens."""
    tokens = q.shape[1]
    wide, state = _wide_state(q, v, initial_state)
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
        chunked = partial(_chunked, dtype=wide, count=count, size=size)
        queries, keys = _normalised(chunked(q), chunked(k))
        chunks = _Chunk(queries, keys, chunked(v), chunked(g), chunked(beta), ancestors, document == before)
        outputs = []
        for i in range(count):
            o, state = chunks.run(i, state)
            outputs.append(o)
        o = torch.stack(outputs, dim=3).flatten(3, 4)[:, :, :, :tokens]
    return o.flatten(1, 2).transpose(1, 2).to(q.dtype), state.flatten(1, 2)


def gated_delta_rule_tree_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, ancestors: Tensor
) -> tuple[Tensor, TreeUpdates]:
    """The specification of `gated_delta_rule_tree`, in plain torch, with the same arguments q, k, v, g, beta and
    ancestors; initial_state is the state before the root."""
    nodes = q.shape[1]
    wide, state = _wide_state(q, v, initial_state)
    with without_autocast(q):
        chunked = partial(_chunked, dtype=wide, count=1, size=nodes)
        queries, keys = _normalised(chunked(q), chunked(k))
        follows = ancestors.new_ones(1, nodes)
        chunk = _Chunk(
            queries, keys, chunked(v), chunked(g), chunked(beta), ancestors.reshape(-1, 1, 1, 1, nodes, nodes), follows
        )
        o, u = chunk.outputs(0, state)
    keys = chunk.k[:, :, 0, 0].transpose(1, 2)
    decay, values = (t.flatten(1, 2).transpose(1, 2) for t in (chunk.path_decay[:, :, :, 0], u))
    return o.flatten(1, 2).transpose(1, 2).to(q.dtype), TreeUpdates(decay, keys, values)


def tree_state(initial_state: Tensor, updates: TreeUpdates, node: Tensor, ancestors: Tensor) -> Tensor:
    """The state after one node of each tree.

    Args:
        initial_state: (B, R, K, V), floating, the state before the root.
        updates: the updates that `gated_delta_rule_tree` returned.
        node: long (B,), a node of each tree.
        ancestors: bool (N, N) or (B, N, N), True at [i, j] if node j is node i or one of its ancestors.

    Returns:
        (B, R, K, V), of the dtype of `initial_state`.
    """
    decay, keys, values = updates
    repeats = values.shape[2] // keys.shape[2]
    with without_autocast(values):
        reached = decay.gather(1, node[:, None, None].expand(-1, 1, decay.shape[2]))
        path = ancestors.expand(len(node), *ancestors.shape[-2:])[torch.arange(len(node), device=node.device), node]
        kept = (reached - decay).masked_fill(~path[:, :, None], -torch.inf).to(values.dtype).exp()
        keys = keys.repeat_interleave(repeats, dim=2).permute(0, 2, 3, 1)
        added = keys @ (kept[..., None] * values).transpose(1, 2)
        return reached.to(values.dtype).exp().mT[..., None] * initial_state + added.to(initial_state.dtype)


_TENSORS = Signature(q="B T G K", k="B T G K =q", v="B T R V =q", g="B T R", beta="B T R")


def check_operands(
    op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, *dtypes: torch.dtype
) -> None:
    """Raises InputError, naming `op`, unless q, k, v, g, beta and `state` (the state before them, or None) fit
    together, and `state` has one of `dtypes`, if there are any."""
    reject_dtensors(op, state)
    _TENSORS.check(op, q, k, v, g, beta)
    (batch, tokens, groups, width), heads = q.shape, v.shape[2]
    if 0 in (tokens, groups, width, v.shape[3]) or heads % groups:
        raise InputError(
            f"{op}: needs at least one token and channel, and heads of v that are a multiple of the heads of q and k; "
            f"got q {tuple(q.shape)} and v {tuple(v.shape)}"
        )
    name = "state" if dtypes else "initial_state"
    check_tensor(op, name, state, (batch, heads, width, v.shape[3]), q.device, *dtypes, optional=True)


def _wide_state(q: Tensor, v: Tensor, initial_state: Tensor | None) -> tuple[torch.dtype, Tensor]:
    """The dtype in which to compute, and the initial state in it, (B, G, R / G, K, V)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    if initial_state is None:
        initial_state = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=wide)
    return wide, initial_state.to(wide).unflatten(1, (q.shape[2], -1))


def _chunked(x: Tensor, dtype: torch.dtype, count: int, size: int) -> Tensor:
    """x (B, T, heads, ...) -> (B, heads, count, size, ...) of `dtype`, zeros after the last token."""
    after, x = count * size - x.shape[1], x.to(dtype)
    x = F.pad(x, (*[0] * (2 * x.dim() - 4), 0, after)) if after else x
    return x.unflatten(1, (count, size)).movedim(3, 1)


def _normalised(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k with length 1, and q divided by sqrt(K): (B, G, n, C, K) -> (B, G, 1, n, C, K)."""
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in (q, k))
    return (q * q.shape[-1] ** -0.5)[:, :, None], k[:, :, None]


class _Chunk:
    """n chunks of C tokens, and all values that do not depend on the state before each chunk.

    q, k: (B, G, 1, n, C, K), normalised. v: (B, R, n, C, V). g, beta: (B, R, n, C). ancestors: bool (n, C, C). follows:
    bool (n, C), whether the state before the chunk reaches the token (no document begins in between).
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ancestors: Tensor, follows: Tensor
    ) -> None:
        v, g, beta = (x.unflatten(1, (k.shape[1], -1)) for x in (v, g, beta))
        self.k, weights = k, beta[..., None]
        # In fp64, because differences are small compared to the sums.
        self.path_decay = (ancestors * g.double()[..., None, :]).sum(-1)
        difference = (self.path_decay[..., :, None] - self.path_decay[..., None, :]).to(g.dtype)
        decay = difference.masked_fill(~ancestors, -torch.inf).exp()  # other differences may overflow
        kept = (self.path_decay.to(g.dtype).exp() * follows)[..., None]
        self.q_kept, self.attending = kept * q, q @ k.transpose(-1, -2) * decay
        self.u, self.k_kept = weights * v, weights * kept * k
        if k.shape[-2] > 1:
            a = weights * (k @ k.transpose(-1, -2)) * decay.tril(-1)
            right_sides = torch.cat([self.u, self.k_kept], dim=-1)
            solved = torch.linalg.solve_triangular(a, right_sides, upper=False, unitriangular=True)
            self.u, self.k_kept = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
        self.k_last, self.kept_last = k * decay[..., -1, :, None], kept[..., -1:, :]

    def outputs(self, i: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """o and u (B, G, R / G, C, V) of chunk i, with the state (B, G, R / G, K, V) before it."""
        u = self.u[:, :, :, i] - self.k_kept[:, :, :, i] @ state
        return self.q_kept[:, :, :, i] @ state + self.attending[:, :, :, i] @ u, u

    def run(self, i: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """o of chunk i, and the state after it."""
        o, u = self.outputs(i, state)
        return o, self.kept_last[:, :, :, i] * state + self.k_last[:, :, :, i].transpose(-1, -2) @ u
