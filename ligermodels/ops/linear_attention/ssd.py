"""State-space duality, the recurrence of Mamba2 (Dao and Gu, 2024, https://arxiv.org/abs/2405.21060), over sequences.

It is the recurrence of `scan` without the delta rule: C are the queries, B the keys, x the values, dt the weights of
the updates, and dt A the logarithms of the decays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligermodels.arguments import check_flags
from ligermodels.errors import InputError
from ligermodels.ops.linear_attention import delta_chunks, ssd_chunks
from ligermodels.ops.linear_attention.causal_conv import first_tokens
from ligermodels.ops.linear_attention.scan import scan_sequence
from ligermodels.ops.runtime.checks import Signature, check_rising, check_tensor
from ligermodels.ops.runtime.dispatch import refuse_batch_invariant, use_kernels
from ligermodels.ops.runtime.library import reject_dtensors

_TENSORS = Signature(x="B T R P", dt="B T R", A="R", B="B T G N =x", C="B T G N =x", D="R ?")


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    final_state: bool = True,
) -> tuple[Tensor, Tensor]:
    """The recurrence of Mamba2 over sequences of tokens, for each of R heads:

        S = exp(dt A) S + B (dt x)^T;    y = S^T C + D x

    with S (N, P). A token with dt = 0 leaves the state as it is. Differentiable in all tensors but cu_seqlens. Equal
    bits in every run, in chunks of tokens, without waiting for the device. Kernels compute it (in 16 bits for N that
    is a multiple of 16) on GPUs of compute capability 8, 9 or 12, but not float64, and have no second derivatives; else
    plain torch does. They take up to 128 of the N channels at once, so a wider state takes several passes, and for
    bfloat16 operands they round states and dt x to bfloat16 where they enter a product. With few heads they divide the
    tokens into segments, by the number of heads and of the GPU's multiprocessors, so that sums are in another order.

    Args:
        x: (b, T, R, P), any floating dtype, P channels of each head.
        dt: (b, T, R), floating, the step size of each token, finite and at least 0: after softplus and limits.
        A: (R,), floating, rate of each head, at most 0: -exp(A_log).
        B: (b, T, G, N), of x's dtype, how each token enters the state. R is a multiple of G; head j uses group
            j // (R / G).
        C: (b, T, G, N), of x's dtype, how the state is read.
        D: (R,), floating, factor of x in the output, or None.
        initial_state: (b, R, N, P), floating, the state before the first token; zero when None. `mamba_ssm` has it as
            (b, R, P, N).
        cu_seqlens: int32 (n + 1,), bounds of documents that are packed into one row (b = 1), from 0 to T. The first
            document starts from `initial_state`, the others from a state of zero.
        final_state: whether to return the state after the last token.

    Returns:
        y (b, T, R, P) of x's dtype, and the state after the last token, (b, R, N, P), fp32 (fp64 for fp64), empty
        without `final_state`.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or, on the CPU, cu_seqlens do not rise from 0 to T.
    """
    refuse_batch_invariant("ssd")
    check_flags("ssd", final_state=final_state)
    check_ssd("ssd", x, dt, A, B, C, D, initial_state)
    check_tensor("ssd", "cu_seqlens", cu_seqlens, ("n",), x.device, torch.int32, optional=True)
    if cu_seqlens is not None and x.shape[0] != 1:
        raise InputError(f"ssd: documents are packed into one row, but x has {x.shape[0]}; give x (1, T, R, P)")
    check_rising("ssd", cu_seqlens, x.shape[1])
    if use_kernels(x, dt, A, B, C, D, initial_state) and delta_chunks.refuses(C, in_parts=True) is None:
        first = None if cu_seqlens is None else first_tokens(x, cu_seqlens)
        return ssd_chunks.run(x, dt.float(), dt.float() * A.float(), B, C, D, initial_state, first, final_state)
    y, state = ssd_reference(x, dt, A, B, C, D, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return y, state if final_state else y.new_empty(0)


def ssd_reference(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The specification of `ssd`, in plain torch, with the same arguments x, dt, A, B, C, D, initial_state and
    cu_seqlens."""
    o, state = scan_sequence(*scan_operands(x, dt, A, B, C), initial_state, cu_seqlens, delta=False)
    return with_skip(o, x, D), state


def scan_operands(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operands q, k, v, g and weight of `scan`, at least fp32, from x, dt, A, B and C of `ssd`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return C.to(wide), B.to(wide), x.to(wide), dt.to(wide) * A.to(wide), dt.to(wide)


def with_skip(o: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    """o + D x, of x's dtype."""
    return (o if D is None else o + D.to(o.dtype)[:, None] * x).to(x.dtype)


def check_ssd(
    op: str, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor | None,
    *dtypes: torch.dtype,
) -> None:  # fmt: skip
    """Raises InputError unless the operands of `ssd` fit together.

    Args:
        op: name of the op, for messages.
        x, dt, A, B, C, D: see `ssd`.
        state: (B, R, N, P), the state before the operands, or None.
        dtypes: allowed dtypes of `state`; none given: any.
    """
    reject_dtensors(op, state)
    _TENSORS.check(op, x, dt, A, B, C, D)
    (batch, tokens, heads, width), (groups, size) = x.shape, B.shape[2:]
    if 0 in (tokens, groups, size, width) or heads % groups:
        raise InputError(
            f"{op}: needs at least one token and channel, and heads of x that are a multiple of the groups of B and C; "
            f"got x {tuple(x.shape)} and B {tuple(B.shape)}"
        )
    name = "state" if dtypes else "initial_state"
    check_tensor(op, name, state, (batch, heads, size, width), x.device, *dtypes, optional=True)
