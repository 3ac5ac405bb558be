"""The gated delta rule (Yang et al., 2024, https://arxiv.org/abs/2412.06464), over sequences and over trees of tokens.

A head keeps a state S (K, V), zero at first. q and k are normalised to length 1, and q divided by sqrt(K). Each token

    S = exp(g) S;    u = beta (v - S^T k);    S = S + k u^T;    o = S^T q

The rule can also be computed for all tokens at once, if no token comes before one of its ancestors. Let G_i be the sum
of g over token i and its ancestors, and decay_ij = exp(G_i - G_j) if j is i or an ancestor of i, else 0. With S the
state before the first token, and A_ij = beta_i (k_i . k_j) decay_ij for strict ancestors j of i,

    (1 + A) U = beta (V - exp(G) K S)                            unit triangular
    O = exp(G) Q S + ((Q K^T) * decay) U
    state after token a = exp(G_a) S + sum of decay_aj k_j u_j^T

In Kimi Delta Attention (2025, https://arxiv.org/abs/2510.26692) g has a number for each of the K rows of S, and G and
the decays too: (k_i . k_j) decay_ij is then the sum over channels c of k_ic k_jc exp(G_ic - G_jc).

A sequence is computed in chunks, and a tree is one chunk: see `scan`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligermodels.arguments import check_flags
from ligermodels.errors import BackendError, InputError
from ligermodels.ops.linear_attention import delta_chunks, fla
from ligermodels.ops.linear_attention.causal_conv import first_tokens
from ligermodels.ops.linear_attention.delta_channels import channel_delta_backward, channel_delta_forward
from ligermodels.ops.linear_attention.delta_chunks import EPS, gated_delta_chunks_backward, gated_delta_chunks_forward
from ligermodels.ops.linear_attention.scan import TreeUpdates, scan_sequence, scan_tree
from ligermodels.ops.runtime.checks import Signature, check_rising, check_tensor, check_tensors
from ligermodels.ops.runtime.dispatch import is_recording, refuse_batch_invariant, use_kernels
from ligermodels.ops.runtime.library import mark_constants, once_differentiable, reject_dtensors
from ligermodels.ops.runtime.tensors import without_autocast

BACKENDS = ("auto", "triton", "fla", "reference")


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
    "reference" give equal bits in every run, and do not wait for the device. "reference" computes in float32 or more;
    for bfloat16 operands "triton" and "fla" round states and updates to bfloat16 where they enter a product.

    Args:
        q: (B, T, G, K), any floating dtype; the op normalises it.
        k: (B, T, G, K), of q's dtype; the op normalises it.
        v: (B, T, R, V), of q's dtype, R a multiple of G. Value head j uses query and key head j // (R / G).
        g: (B, T, R), floating, logarithm of the decay of the state before each token, finite and at most 0; or
            (B, T, R, K), of a decay for each key channel, each row of S (Kimi Delta Attention), not by "fla".
        beta: (B, T, R), floating, how far each token moves the state to its value, within [0, 2].
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
    refuse_batch_invariant("gated_delta_rule")
    check_flags("gated_delta_rule", final_state=final_state)
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
        initial = None if initial_state is None else initial_state.float()
        found: tuple[Tensor, Tensor] = _GatedDeltaRule.apply(q, k, v, g, beta, initial, first, final_state)
        return found
    if chosen == "fla":
        return fla.run(*operands, cu_seqlens, final_state)
    o, state = gated_delta_rule_reference(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return o, state if final_state else o.new_empty(0)


class _GatedDeltaRule(torch.autograd.Function):
    """`gated_delta_rule` by kernels for one decay of a head, or for a decay of each key channel. `first`, int32 (T,):
    the first token of each token's packed document, or None. Only the operands are saved."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial, first, final_state):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, initial, first)
        ctx.final_state = final_state
        compute = gated_delta_chunks_forward if g.dim() == 3 else channel_delta_forward
        o, state = compute(q, k, v, g, beta, initial, first, final_state)
        mark_constants(ctx, (o, range(6)), (state, range(1, 6)))
        return o, state

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dfinal):
        q, k, v, g, beta, initial, first = ctx.saved_tensors
        dout = torch.zeros_like(v) if dout is None else dout
        dfinal = dfinal if ctx.final_state else None
        compute = gated_delta_chunks_backward if g.dim() == 3 else channel_delta_backward
        return compute(dout, dfinal, q, k, v, g, beta, initial, first, ctx.needs_input_grad[5])


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
        operands = q, k, v, g, beta, initial_state
        gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
        compiling = torch.compiler.is_compiling()
        packed, continued = cu_seqlens is not None, initial_state is not None
        request = fla.DeltaRequest(
            q.device.type, q.dtype, q.shape[3], packed, continued, compiling, gradient, is_recording(), g.dim() == 4
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
    o, state = scan_sequence(*_normalised(q, k), v, g, beta, initial_state, cu_seqlens, delta=True)
    return o.to(q.dtype), state


def gated_delta_rule_tree_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, ancestors: Tensor
) -> tuple[Tensor, TreeUpdates]:
    """The specification of `gated_delta_rule_tree`, in plain torch, with the same arguments q, k, v, g, beta and
    ancestors; initial_state is the state before the root."""
    o, updates = scan_tree(*_normalised(q, k), v, g, beta, initial_state, ancestors, delta=True)
    return o.to(q.dtype), updates


_TENSORS = Signature(q="B T G K", k="B T G K =q", v="B T R V =q", g="B T R", beta="B T R")
_BY_CHANNEL = Signature(q="B T G K", k="B T G K =q", v="B T R V =q", g="B T R K", beta="B T R")


def check_operands(
    op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, *dtypes: torch.dtype
) -> None:
    """Raises InputError, naming `op`, unless q, k, v, g, beta and `state` (the state before them, or None) fit
    together, and `state` has one of `dtypes`, if there are any."""
    check_tensors(op, g=g)
    reject_dtensors(op, state)
    (_BY_CHANNEL if g.dim() == 4 else _TENSORS).check(op, q, k, v, g, beta)
    (batch, tokens, groups, width), heads = q.shape, v.shape[2]
    if 0 in (tokens, groups, width, v.shape[3]) or heads % groups:
        raise InputError(
            f"{op}: needs at least one token and channel, and heads of v that are a multiple of the heads of q and k; "
            f"got q {tuple(q.shape)} and v {tuple(v.shape)}"
        )
    name = "state" if dtypes else "initial_state"
    check_tensor(op, name, state, (batch, heads, width, v.shape[3]), q.device, *dtypes, optional=True)


def _normalised(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k with length 1, and q divided by sqrt(K), at least fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q):
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in (q.to(wide), k.to(wide)))
        return q * q.shape[-1] ** -0.5, k
