"""Mamba2 (`ssd`) over sequences by the kernels of the gated delta rule, without the delta rule: C are the queries, B
the keys, x the values, dt the weights.

The forward pass saves only the operands. The backward pass recomputes the state before each chunk: to keep the states
would take 4 N P / 64 bytes per token and head, four times the bytes of x at N = 128 in 16 bits. While it runs, the
backward pass takes twice as many in float32, and as many in bfloat16, for states and their gradients. The forward pass
takes 8 bytes per token and head; both take 4 N P bytes per segment and head, see `states_kernel`.
With the notation of `delta_chunks_backward` and U = dt x, the gradients are

    dS before the chunk = kept_last dS + C^T (kept dY)              `states_backward_kernel`, the last chunk first
    dx = dt (M^T dY + decay_last B dS) + D dY                       `_values_kernel`
    dM = dY U^T * decay, summed over the heads of a group           `_group_pairs_kernel`
    dC = dM B + kept dY S^T                                         `within_chunks_kernel`, `with_states_kernel`
    dB = dM^T C + decay_last U dS^T

The products of dM with B and C are computed once for all its heads. M stays in registers.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ligermodels.ops.linear_attention.delta_chunks import MAX_KEY_DIM, Launch
from ligermodels.ops.linear_attention.delta_chunks_forward import (
    CHUNK,
    ancestors_of_chunk,
    decays_of_chunk,
    descendants_of_chunk,
    product,
)
from ligermodels.ops.runtime.dispatch import tl
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake, mark_constants, once_differentiable
from ligermodels.ops.runtime.tensors import contiguous, empty_gradient, heads_and_strides

HEADS = 16
"""Most heads of a program of `_group_pairs_kernel`: fewer make more programs, and more sums of dM."""


def run(
    x: Tensor, dt: Tensor, g: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor | None,
    first: Tensor | None, final_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ssd` with the same x, B, C, D, initial_state and final_state; dt and g = dt A are fp32, and `first`, int32 (T,),
    is the first token of each token's packed document, or None."""
    initial_state = None if initial_state is None else initial_state.float()
    y, state = SSDChunks.apply(x, dt, g, B, C, D, initial_state, first, final_state)
    return y, state


@kernel
def _values_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, dout, dout_batch, dout_token, dout_head, beta, skip,
    first, path, dstates, dv, T, K, V, heads, repeats, chunks,
    SKIP: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes a chunk of a head. SKIP: `skip` dout is added to dv."""
    chunk, row = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    batch, head = row // heads, row % heads
    start = tl.cast(chunk, tl.int64) * CHUNK
    n, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    there = n < T - start
    of_keys = there[:, None] & (i < K)[None, :]
    q += batch * q_batch + head // repeats * q_head + start * q_token
    k += batch * k_batch + head // repeats * k_head + start * k_token
    dout += batch * dout_batch + head * dout_head + start * dout_token
    ours = (batch * T + start) * heads + head
    key = tl.load(k + n[:, None] * k_token + i[None, :], mask=of_keys, other=0.0)
    query = tl.load(q + n[:, None] * q_token + i[None, :], mask=of_keys, other=0.0)
    here = tl.load(path + (row * chunks + chunk) * CHUNK + n)
    weight = tl.load(beta + ours + n * heads, mask=there, other=0.0).to(tl.float32)
    _, to_last, _ = decays_of_chunk(path + row * chunks * CHUNK, first, start, n, T, PACKED)
    after = descendants_of_chunk(first, start, n, T, PACKED)
    decay = tl.where(after, tl.exp((here[None, :] - here[:, None]).to(tl.float32)), 0.0)
    m = product(key, tl.trans(query), tl.zeros([CHUNK, CHUNK], tl.float32), OPERAND) * decay
    dstates += (row * chunks + chunk) * K * V
    for at in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        j = at + tl.arange(0, BLOCK_V)
        of_values, of_state = there[:, None] & (j < V)[None, :], (i < K)[:, None] & (j < V)[None, :]
        do = tl.load(dout + n[:, None] * dout_token + j[None, :], mask=of_values, other=0.0)
        dstate = tl.load(dstates + i[:, None] * V + j[None, :], mask=of_state, other=0.0)
        d = product(key, dstate, tl.zeros([CHUNK, BLOCK_V], tl.float32), OPERAND) * to_last[:, None]
        d = product(m, do, d, OPERAND) * weight[:, None]
        if SKIP:
            d += tl.load(skip + head).to(tl.float32) * do.to(tl.float32)
        dv_block = dv + ours * V + n[:, None] * (heads * V) + j[None, :]
        tl.store(dv_block, d.to(dv.dtype.element_ty), mask=of_values)


@kernel
def _group_pairs_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head, dout, dout_batch,
    dout_token, dout_head, beta, first, path, dm, dpath, dbeta, dskip, T, K, V, heads, repeats, chunks, slices,
    GROUPS: tl.constexpr, DSKIP: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr,
    CHUNK: tl.constexpr, HEADS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes a chunk of up to HEADS heads of a group, a slice. GROUPS: it writes the sum of dM over its
    heads, and the parts of dG and dbeta from products of pairs. DSKIP: it writes the gradient of each head's factor
    D, the part of this chunk."""
    chunk, of_slice = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    groups = heads // repeats
    of_group, begin = of_slice // slices, of_slice % slices * HEADS
    batch, group = of_group // groups, of_group % groups
    start = tl.cast(chunk, tl.int64) * CHUNK
    n, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    there = n < T - start
    q += batch * q_batch + group * q_head + start * q_token
    k += batch * k_batch + group * k_head + start * k_token
    v += batch * v_batch + start * v_token
    dout += batch * dout_batch + start * dout_token
    total = tl.zeros([CHUNK, CHUNK], tl.float32)
    if GROUPS:
        of_keys = there[:, None] & (i < K)[None, :]
        key = tl.load(k + n[:, None] * k_token + i[None, :], mask=of_keys, other=0.0)
        query = tl.load(q + n[:, None] * q_token + i[None, :], mask=of_keys, other=0.0)
        above = ancestors_of_chunk(first, start, n, T, PACKED)
        alike = product(query, tl.trans(key), total, OPERAND)
        alike_alone = tl.sum(tl.where(n[:, None] == n[None, :], alike, 0.0), axis=0)
        alike = tl.where(n[:, None] > n[None, :], alike, 0.0)
    value_blocks, count = tl.cdiv(V, BLOCK_V), tl.minimum(HEADS, repeats - begin)
    none = tl.zeros([CHUNK], tl.float32)
    alone, later, along = none, none, none
    for step in tl.range(0, count * value_blocks, num_stages=STAGES):  # see `with_states_kernel`
        at = step % value_blocks * BLOCK_V
        head = group * repeats + begin + step // value_blocks
        row = batch * heads + head
        j = at + tl.arange(0, BLOCK_V)
        of_values = there[:, None] & (j < V)[None, :]
        do = tl.load(dout + head * dout_head + n[:, None] * dout_token + j[None, :], mask=of_values, other=0.0)
        value = tl.load(v + head * v_head + n[:, None] * v_token + j[None, :], mask=of_values, other=0.0)
        alone = tl.where(at == 0, none, alone) + tl.sum(do.to(tl.float32) * value.to(tl.float32), axis=1)
        if DSKIP:
            tl.store(dskip + row * chunks + chunk, tl.sum(alone, axis=0))
        if GROUPS:
            of_row = (row * chunks + chunk) * CHUNK + n
            here = tl.load(path + of_row)
            weight = tl.load(beta + (batch * T + start + n) * heads + head, mask=there, other=0.0).to(tl.float32)
            decay = tl.where(above, tl.exp((here[:, None] - here[None, :]).to(tl.float32)), 0.0)
            attends = product(do, tl.trans(value), tl.zeros([CHUNK, CHUNK], tl.float32), OPERAND) * decay
            total += attends * weight[None, :]
            of_decay = attends * alike
            of_later = tl.sum(of_decay, axis=0)
            later = tl.where(at == 0, none, later) + of_later
            along = tl.where(at == 0, none, along) + tl.sum(of_decay * weight[None, :], axis=1) - of_later * weight
            tl.store(dbeta + of_row, later + alone * alike_alone)
            tl.store(dpath + of_row, along)
    if GROUPS:
        square = (of_slice * chunks + chunk) * CHUNK * CHUNK
        tl.store(dm + square + n[:, None] * CHUNK + n[None, :], total.to(OPERAND))


def _values(launch: Launch, dout: Any, dstates: Tensor, dv: Tensor) -> None:
    _values_kernel[(launch.rows * launch.chunks,)](
        *launch.keys, *dout, launch.beta, launch.skip, launch.first, launch.path, dstates, dv, launch.tokens,
        launch.key_dim, launch.value_dim, launch.heads, launch.repeats, launch.chunks,
        **launch.tiles("values", "DELTA"), SKIP=launch.skip is not None,
    )  # fmt: skip


def _groups(
    launch: Launch, dout: Any, dstates: Tensor | None, dskip: Tensor | None, of_groups: tuple[Tensor, ...] | None
) -> None:
    """Writes `dskip`, the gradient of D, and `of_groups`, the gradients of C, B, g and dt, unless they are None."""
    slices, empty = -(-launch.repeats // HEADS), launch.path.new_empty
    of_heads: Tensor | None = None
    of_pairs: list[Tensor | None] = [None] * 3
    if dskip is not None:
        of_heads = empty(launch.batch, launch.heads, launch.chunks, dtype=torch.float32)
    if of_groups is not None:
        dpath, dweight, dquery, dkey = launch.gradients()
        squares = launch.batch * launch.groups * slices, launch.chunks, CHUNK, CHUNK
        dm = empty(squares, dtype=launch.dtype)
        of_pairs = [dm, dpath[-1], dweight[-1]]
    _group_pairs_kernel[(launch.batch * launch.groups * slices * launch.chunks,)](
        *launch.keys, *launch.v, *dout, launch.beta, launch.first, launch.path, *of_pairs, of_heads, launch.tokens,
        launch.key_dim, launch.value_dim, launch.heads, launch.repeats, launch.chunks, slices,
        **launch.tiles("group_pairs", "DELTA"), GROUPS=of_groups is not None, DSKIP=of_heads is not None, HEADS=HEADS,
    )  # fmt: skip
    if dskip is not None and of_heads is not None:
        dskip.copy_(of_heads.sum((0, 2)))
    if of_groups is not None:
        states = launch.of_chunks(launch.key_dim, launch.value_dim)
        launch.states(None, None, states)
        launch.within_chunks(slices, None, dm, dquery, dkey)
        launch.with_states(dout, states, dstates, None, None, dquery, dkey, dpath, dweight)
        launch.finish(dquery, dkey, dpath, dweight, *of_groups)


@custom_op()
def _ssd_chunks_forward(
    x: Tensor, dt: Tensor, g: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial: Tensor | None,
    first: Tensor | None, final_state: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y of `dtype`, and the state after the last token, empty without final_state."""
    out = x.new_empty(x.shape, dtype=dtype)
    shape = (x.shape[0], x.shape[2], B.shape[3], x.shape[3]) if final_state else (0,)
    final = x.new_empty(shape, dtype=torch.float32)
    if is_fake(out) or not x.shape[0]:
        return out, final
    launch = Launch(C, B, x, g, dt, initial, first, delta=False, skip=D)
    launch.prepare()
    launch.states(out, final if final_state else None)
    return out, final


@custom_op()
def _ssd_chunks_backward(
    dout: Tensor, dfinal: Tensor | None, x: Tensor, dt: Tensor, g: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    initial: Tensor | None, first: Tensor | None, need_x: bool, need_groups: bool, need_skip: bool, need_initial: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, in `dtype`, with need_x; of dt, g, B and C with need_groups; of D with need_skip; of the
    initial state with need_initial. The others are empty."""
    dx = x.new_empty(x.shape if need_x else (0,), dtype=dtype)
    dskip, dinitial = (
        empty_gradient(tensor, needed, x) for tensor, needed in ((D, need_skip), (initial, need_initial))
    )
    ddt, dg, dB, dC = (empty_gradient(tensor, need_groups, x) for tensor in (dt, g, B, C))
    gradients = dx, ddt, dg, dB, dC, dskip, dinitial
    if is_fake(dx):
        return gradients
    if not x.shape[0]:
        dskip.zero_()
        return gradients
    launch = Launch(C, B, x, g, dt, initial, first, delta=False, skip=D)
    launch.prepare()
    of_out, dstates = heads_and_strides(dout), None
    if need_x or need_groups or need_initial:
        dstates = launch.of_chunks(launch.key_dim, launch.value_dim)
        launch.states_backward(of_out, contiguous(dfinal), dstates, dinitial if need_initial else None)
        if need_x:
            _values(launch, of_out, dstates, dx)
    if need_groups or need_skip:
        of_groups = (dC, dB, dg, ddt) if need_groups else None
        _groups(launch, of_out, dstates, dskip if need_skip else None, of_groups)
    return gradients


class SSDChunks(torch.autograd.Function):
    """`ssd` by the kernels; see `run`. Channels of the state do not mix, and y is a sum over them: a wide state is
    computed in parts, with sums in fp32."""

    @staticmethod
    def forward(ctx, x, dt, g, B, C, D, initial, first, final_state):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, dt, g, B, C, D, initial, first)
        ctx.final_state = final_state
        parts = _parts_of(B)
        dtype = x.dtype if len(parts) == 1 else torch.float32
        outputs = [
            _ssd_chunks_forward(
                x, dt, g, B[..., part], C[..., part], None if i else D, _rows(initial, part), first, final_state, dtype
            )
            for i, part in enumerate(parts)
        ]  # fmt: skip
        ys, states = zip(*outputs, strict=True)
        y, state = _sum(ys, x.dtype), _joined(states, 2)
        mark_constants(ctx, (y, range(7)), (state, (0, 1, 2, 3, 6)))
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dfinal):
        x, dt, g, B, C, D, initial, first = ctx.saved_tensors
        dout = torch.zeros_like(x) if dout is None else dout
        dfinal = dfinal if ctx.final_state else None
        need_x, *of_groups, need_skip, need_initial = ctx.needs_input_grad[:7]
        parts = _parts_of(B)
        dtype = x.dtype if len(parts) == 1 else torch.float32
        gradients = [
            _ssd_chunks_backward(
                dout, _rows(dfinal, part), x, dt, g, B[..., part], C[..., part], None if i else D,
                _rows(initial, part), first, need_x, any(of_groups), need_skip and not i, need_initial, dtype,
            )
            for i, part in enumerate(parts)
        ]  # fmt: skip
        dx, ddt, dg, dB, dC, dskip, dinitial = zip(*gradients, strict=True)
        sums = _sum(dx, x.dtype), _sum(ddt, dt.dtype), _sum(dg, g.dtype)
        return *sums, _joined(dB, 3), _joined(dC, 3), dskip[0], _joined(dinitial, 2), None, None


def _parts_of(B: Tensor) -> list[slice]:
    """The channels of the state that each launch takes."""
    return [slice(start, start + MAX_KEY_DIM) for start in range(0, B.shape[3], MAX_KEY_DIM)]


def _rows(state: Tensor | None, part: slice) -> Tensor | None:
    """The channels `part` of a state (b, R, N, P), or None."""
    return None if state is None else state[:, :, part]


def _sum(parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """The sum in `dtype`. Without a cast to the same dtype: under torch.compile of 2.11 the backward pass of an
    autograd.Function gets no gradient of an output that such a cast returns from its forward pass."""
    total = reduce(torch.add, parts)
    return total if total.dtype == dtype else total.to(dtype)


def _joined(parts: tuple[Tensor, ...], dim: int) -> Tensor:
    """The parts side by side; outputs that are not needed have the shape (0,), and stay so."""
    return torch.cat(parts, dim) if parts[0].dim() > 1 else parts[0]
