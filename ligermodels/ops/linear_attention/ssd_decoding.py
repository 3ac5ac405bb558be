"""Decoding by Mamba2 (`ssd`): one token, on a state that is updated in place, and trees of candidate tokens. The
kernels are those of the gated delta rule, without the delta rule."""

from __future__ import annotations

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.linear_attention.delta_step import MAX_KEY_DIM, block_of_values, step_kernel
from ligermodels.ops.linear_attention.delta_tree import (
    BLOCK_K,
    MAX_NODES,
    check_ancestors,
    tree_and_stride,
    tree_kernel,
    tree_precision,
)
from ligermodels.ops.linear_attention.scan import TreeUpdates, scan_tree
from ligermodels.ops.linear_attention.ssd import check_ssd, scan_operands, ssd_reference, with_skip
from ligermodels.ops.runtime.checks import check_tensor, check_tensors
from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import refuse_batch_invariant, use_kernels
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import contiguous, heads_and_strides


def ssd_step(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor) -> Tensor:
    """`ssd` of one token per sequence. A CUDA graph can capture the call. Equal
    bits in every run. No gradient.

    Args:
        x: (b, 1, R, P), any floating dtype.
        dt: (b, 1, R), floating, step size, finite and at least 0.
        A: (R,), floating, rate of each head, at most 0.
        B: (b, 1, G, N), of x's dtype, R a multiple of G.
        C: (b, 1, G, N), of x's dtype.
        D: (R,), floating, factor of x in the output, or None.
        state: contiguous (b, R, N, P), fp32 (fp64 for fp64), the state before the token; updated in place to the state
            after the token.

    Returns:
        Contiguous (b, 1, R, P) of x's dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or autograd would need a gradient.
    """
    refuse_batch_invariant("ssd_step")
    _check_decoding("ssd_step", x, dt, A, B, C, D, state)
    check_tensor("ssd_step", "x", x, (x.shape[0], 1, *x.shape[2:]), x.device)
    if not use_kernels(x, state) or B.shape[3] > MAX_KEY_DIM:
        return ssd_step_reference(x, dt, A, B, C, D, state)
    return _ssd_step(x, dt.float(), dt.float() * A.float(), B, C, D, state)


def ssd_step_reference(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor
) -> Tensor:
    """The specification of `ssd_step`, in plain torch, with the same arguments x, dt, A, B, C, D and state."""
    y, last = ssd_reference(x, dt, A, B, C, D, initial_state=state)
    state.copy_(last)
    return y.contiguous()


def ssd_tree(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, TreeUpdates]:
    """`ssd` over trees of tokens: each node follows its ancestors, and no other node. A CUDA graph can
    capture the call. Equal bits in every run. No gradient.

    Args:
        x: (b, n, R, P) for n nodes, any floating dtype.
        dt: (b, n, R), floating, step size of each node, finite and at least 0.
        A: (R,), floating, rate of each head, at most 0.
        B: (b, n, G, N), of x's dtype, R a multiple of G.
        C: (b, n, G, N), of x's dtype.
        D: (R,), floating, factor of x in the output, or None.
        state: contiguous (b, R, N, P), fp32 (fp64 for fp64), the state before the root; it is not changed.
        ancestors: bool (n, n), or (b, n, n) where each sequence has a tree of its own: True at [i, j] if node j is
            node i or one of its ancestors; j <= i.

    Returns:
        y (b, n, R, P) of x's dtype, and the updates for `commit_tree`.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or autograd would need a gradient.
    """
    _check_decoding("ssd_tree", x, dt, A, B, C, D, state)
    check_ancestors("ssd_tree", ancestors, x.shape[0], x.shape[1], x.device)
    if not use_kernels(x, state) or x.shape[1] > MAX_NODES:
        return ssd_tree_reference(x, dt, A, B, C, D, state, ancestors)
    y, *updates = _ssd_tree(x, dt.float(), dt.float() * A.float(), B, C, D, state, ancestors)
    return y, TreeUpdates(*updates)


def ssd_tree_reference(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor, ancestors: Tensor
) -> tuple[Tensor, TreeUpdates]:
    """The specification of `ssd_tree`, in plain torch, with the same arguments x, dt, A, B, C, D and ancestors;
    initial_state is the state before the root."""
    o, updates = scan_tree(*scan_operands(x, dt, A, B, C), initial_state, ancestors, delta=False)
    return with_skip(o, x, D), updates


def _check_decoding(
    op: str, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor
) -> None:
    """`_check`, and raises InputError unless `state` is contiguous and autograd needs no gradient."""
    check_tensors(op, x=x, state=state)
    check_ssd(op, x, dt, A, B, C, D, state, torch.promote_types(x.dtype, torch.float32))
    if not state.is_contiguous():
        raise InputError(f"{op}: state must be contiguous, it is changed in place: call .contiguous()")
    operands = (x, dt, A, B, C, D, state)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        raise InputError(f"{op} has no gradient: call it under torch.no_grad(), or use ops.ssd")


@custom_op(mutates_args=("state",))
def _ssd_step(x: Tensor, dt: Tensor, g: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor) -> Tensor:
    """y; g is dt A."""
    out = x.new_empty(x.shape)
    if is_fake(out):
        return out
    (batch, _, heads, width), size = x.shape, B.shape[3]
    block = block_of_values(B, x, least=8)
    blocks = -(-width // block)
    if batch:
        step_kernel[(batch * heads * blocks,)](
            *heads_and_strides(C), *heads_and_strides(B), *heads_and_strides(x), g.contiguous(), dt.contiguous(),
            contiguous(D), state, out, heads, heads // B.shape[2], blocks, 1.0, size, width,
            DELTA=False, BY_CHANNEL=False, SKIP=D is not None, EPS=0.0, BLOCK_K=power_of_2_above(size), BLOCK_V=block,
            num_warps=4,
        )  # fmt: skip
    return out


@custom_op()
def _ssd_tree(
    x: Tensor, dt: Tensor, g: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, and the three tensors of `TreeUpdates`; g is dt A."""
    out, decay = x.new_empty(x.shape), x.new_empty(x.shape[:3], dtype=torch.float64)
    keys, values = B.new_empty(B.shape, dtype=torch.float32), x.new_empty(x.shape, dtype=torch.float32)
    if is_fake(out):
        return out, decay, keys, values
    (batch, nodes, heads, width), size = x.shape, B.shape[3]
    block = block_of_values(B, x, least=16)
    blocks, block_nodes = -(-width // block), max(power_of_2_above(nodes), 16)
    if batch:
        tree_kernel[(batch * heads * blocks,)](
            *heads_and_strides(C), *heads_and_strides(B), *heads_and_strides(x), g.contiguous(), dt.contiguous(),
            contiguous(D), state, *tree_and_stride(ancestors), None, 0, out, decay, keys, values,
            nodes, size, width, heads, heads // B.shape[2], blocks, 1.0,
            DELTA=False, BY_CHANNEL=False, SKIP=D is not None, EPS=0.0, PRECISION=tree_precision(x),
            BLOCK_N=block_nodes, BLOCK_K=BLOCK_K, BLOCK_V=block, STAGES=3, num_warps=8 if block_nodes > 32 else 4,
        )  # fmt: skip
    return out, decay, keys, values
