"""The two gates of each head of the gated delta rule, per token: the decay of the state, and how far it moves to the
token's value. In Kimi Delta Attention (https://arxiv.org/abs/2510.26692) each key channel of a head has a decay.

Forward and backward pass read each value once; plain torch would write the decays several times as fp32."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.runtime.checks import Signature, check_tensors
from ligermodels.ops.runtime.devices import num_sms, power_of_2_above
from ligermodels.ops.runtime.dispatch import tl, triton, use_kernels
from ligermodels.ops.runtime.launcher import kernel, wait_for_previous
from ligermodels.ops.runtime.library import custom_op, is_fake, mark_constants, once_differentiable
from ligermodels.ops.runtime.tensors import empty_gradient, rows_and_stride

MAX_BLOCK = 1024  # decays of a token per program
BLOCK_ELEMENTS = 2048  # decays of a tile of tokens, about
PROGRAMS_PER_SM = 4  # in the backward pass; each sums a part of the gradients of log_rate and bias

_TENSORS = Signature(a="B T R", b="B T R =a", log_rate="R", bias="R")
_BY_CHANNEL = Signature(a="B T R K", b="B T R =a", log_rate="R", bias="R K")


def delta_gates(
    a: Tensor, b: Tensor, log_rate: Tensor, bias: Tensor, lower_bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """The gates of `gated_delta_rule`: g = -exp(log_rate) softplus(a + bias), and beta = sigmoid(b).

    With a lower bound (Ling 3.0's `kda_lower_bound`) g = lower_bound sigmoid(exp(log_rate) (a + bias)).

    Differentiable in all arguments, by the kernels only once. The backward pass recomputes from the arguments; nothing
    else is saved. Equal bits in every run.

    Args:
        a: (B, T, R), any floating dtype and strides; or (B, T, R, K), for a decay for each key channel.
        b: (B, T, R), of a's dtype, any strides.
        log_rate: (R,), floating.
        bias: (R,), floating; with a decay for each key channel (R, K).
        lower_bound: a number below 0 that g stays above. Default: None, no bound.

    Returns:
        g, of a's shape, and beta (B, T, R), fp32 (fp64 for fp64).

    Raises:
        InputError: shapes, dtypes or devices do not fit, or the bound is not a number below 0.
    """
    if lower_bound is not None and not -math.inf < lower_bound < 0:
        raise InputError(f"delta_gates: lower_bound: must be a finite number below 0, got {lower_bound}")
    check_tensors("delta_gates", a=a)
    a, b, log_rate, bias = (_BY_CHANNEL if a.dim() == 4 else _TENSORS).check("delta_gates", a, b, log_rate, bias)
    operands = a, b, log_rate, bias
    if not use_kernels(*operands):
        return delta_gates_reference(*operands, lower_bound)
    g, beta = _DeltaGates.apply(*operands, None if lower_bound is None else float(lower_bound))
    return g, beta


def delta_gates_reference(
    a: Tensor, b: Tensor, log_rate: Tensor, bias: Tensor, lower_bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """The specification of `delta_gates`, in plain torch: the same a, b, log_rate, bias and lower_bound."""
    wide = torch.promote_types(a.dtype, torch.float32)
    rate = log_rate.to(wide).exp()
    rate = rate[:, None] if a.dim() == 4 else rate
    x = a.to(wide) + bias.to(wide)
    g = -rate * F.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
    return g, b.to(wide).sigmoid()


@triton.jit
def _sigmoid(x):
    """sigmoid(x), and its slope."""
    e = tl.exp(-tl.abs(x))  # no overflow
    r = 1.0 / (1.0 + e)
    return tl.where(x < 0, e * r, r), e * r * r


@triton.jit
def _decay(x, rate, bound, BOUNDED: tl.constexpr):
    """g of x = a + bias, its slope in x, and its slope in log_rate."""
    if BOUNDED:
        y = rate * x
        part, slope = _sigmoid(y)
        g = bound * part
        of_x = bound * slope * rate
        of_rate = bound * slope * y
    else:
        # log(1 + exp(x)), exact to the last digits for small values: z * log(1 + e) / (the e that was added) (Kahan).
        e = tl.exp(-tl.abs(x))
        more = 1.0 + e
        small = tl.where(more == 1.0, e, tl.log(more) * (e / tl.where(more == 1.0, 1.0, more - 1.0)))
        part, _ = _sigmoid(x)
        g = -rate * (tl.maximum(x, 0.0) + small)
        of_x = -rate * part
        of_rate = g
    return g, of_x, of_rate


@triton.jit
def _parameters(log_rate, bias, col, N, K):
    """The rate and the bias of columns `col`."""
    rate = tl.exp(tl.load(log_rate + col // K, mask=col < N, other=0.0).to(tl.float32))
    return rate, tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)


@kernel
def _forward_kernel(
    a, a_stride, b, b_stride, log_rate, bias, g, beta, bound, M, N, K, blocks,
    BOUNDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Each program takes BLOCK of the decays of ROWS tokens, and the beta of each head whose first decay is among them.

    Args:
        a, a_stride: (M, N), and its stride from token to token.
        b, b_stride: (M, N / K), and its stride from token to token.
        log_rate, bias: (N / K,) and (N,), contiguous.
        g, beta: (M, N) and (M, N / K), contiguous; written.
        bound: the lower bound; read with BOUNDED.
        M, N, K: numbers of tokens, of decays of a token, and of decays of a head.
        blocks: blocks of BLOCK decays of a token.
    """
    wait_for_previous(PDL)
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row = ((tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = (row < M) & (col < N)[None, :]
    rate, shift = _parameters(log_rate, bias, col, N, K)
    x = tl.load(a + row * a_stride + col[None, :], mask=inside, other=0.0).to(tl.float32) + shift[None, :]
    decay, _, _ = _decay(x, rate[None, :], bound, BOUNDED)
    tl.store(g + row * N + col[None, :], decay, mask=inside)
    head, first = (col // K)[None, :], inside & (col % K == 0)[None, :]
    part, _ = _sigmoid(tl.load(b + row * b_stride + head, mask=first, other=0.0).to(tl.float32))
    tl.store(beta + row * (N // K) + head, part, mask=first)


@kernel
def _backward_kernel(
    dg, dg_stride, dbeta, dbeta_stride, a, a_stride, b, b_stride, log_rate, bias, da, db, partial, bound, M, N, K,
    blocks, rows_per_program,
    BOUNDED: tl.constexpr, NEED_A: tl.constexpr, NEED_B: tl.constexpr, NEED_PARAMETERS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK of the decays of rows_per_program consecutive tokens, ROWS at a time, and sums its own
    part of the gradients of log_rate and bias for each decay into `partial`, (programs of a block, 2, N): no atomics,
    so equal bits in every run. The other arguments are as in the forward kernel."""
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    strip = (tl.program_id(0) // blocks).to(tl.int64)
    begin = strip * rows_per_program
    end = tl.minimum(begin + rows_per_program, M)
    rate, shift = _parameters(log_rate, bias, col, N, K)
    head = (col // K)[None, :]
    drate, dbias = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(begin, end, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        inside = (row < end) & (col < N)[None, :]
        if NEED_A or NEED_PARAMETERS:
            x = tl.load(a + row * a_stride + col[None, :], mask=inside, other=0.0).to(tl.float32) + shift[None, :]
            d = tl.load(dg + row * dg_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
            _, of_x, of_rate = _decay(x, rate[None, :], bound, BOUNDED)
            dx = d * of_x
            if NEED_A:
                tl.store(da + row * N + col[None, :], dx.to(da.dtype.element_ty), mask=inside)
            if NEED_PARAMETERS:
                drate += tl.where(inside, d * of_rate, 0.0)
                dbias += tl.where(inside, dx, 0.0)
        if NEED_B:
            first = inside & (col % K == 0)[None, :]
            _, slope = _sigmoid(tl.load(b + row * b_stride + head, mask=first, other=0.0).to(tl.float32))
            d = tl.load(dbeta + row * dbeta_stride + head, mask=first, other=0.0).to(tl.float32)
            tl.store(db + row * (N // K) + head, (d * slope).to(db.dtype.element_ty), mask=first)
    if NEED_PARAMETERS:
        place = partial + strip * 2 * N + col
        tl.store(place, tl.sum(drate, axis=0), mask=col < N)
        tl.store(place + N, tl.sum(dbias, axis=0), mask=col < N)


def _tiles(a: Tensor) -> tuple[tuple[int, int, int, int], dict[str, Any]]:
    """M, N, K and `blocks` of a kernel, and launch options."""
    M, N = a.shape[:2].numel(), a.shape[2:].numel()
    block = min(power_of_2_above(N), MAX_BLOCK)
    rows = min(BLOCK_ELEMENTS // block, power_of_2_above(M))
    num_warps = max(min(block * rows // 512, 4), 1)
    sizes = M, N, N // a.shape[2], -(-N // block)
    return sizes, {"ROWS": rows, "BLOCK": block, "num_warps": num_warps}


def _rows(x: Tensor) -> tuple[Tensor | None, int]:
    """x (B, T, ...) as (B, T, N), and its stride from token to token, as kernels take them."""
    return rows_and_stride(x.flatten(2))


@custom_op()
def _delta_gates_forward(
    a: Tensor, b: Tensor, log_rate: Tensor, bias: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    g, beta = (x.new_empty(x.shape, dtype=torch.float32) for x in (a, b))
    if is_fake(g):
        return g, beta
    if a.numel():
        sizes, options = _tiles(a)
        M, _, _, blocks = sizes
        _forward_kernel[(-(-M // options["ROWS"]) * blocks,)](
            *_rows(a), *_rows(b), log_rate.contiguous(), bias.contiguous(), g, beta, lower_bound or 0.0, *sizes,
            BOUNDED=lower_bound is not None, **options,
        )  # fmt: skip
    return g, beta


@custom_op()
def _delta_gates_backward(
    dg: Tensor, dbeta: Tensor, a: Tensor, b: Tensor, log_rate: Tensor, bias: Tensor, needs: list[bool],
    lower_bound: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of a, b, log_rate and bias; a gradient that `needs` does not ask for is empty."""
    operands = a, b, log_rate, bias
    da, db, drate, dbias = (empty_gradient(x, need, a) for x, need in zip(operands, needs, strict=True))
    if is_fake(da):
        return da, db, drate, dbias
    if not a.numel():
        return da, db, drate.zero_(), dbias.zero_()
    sizes, options = _tiles(a)
    M, N, _, blocks = sizes
    tiles, strips = -(-M // options["ROWS"]), max(PROGRAMS_PER_SM * num_sms(a.device) // blocks, 1)
    rows_per_program = -(-tiles // strips) * options["ROWS"]
    programs = -(-M // rows_per_program)
    need_parameters = needs[2] or needs[3]
    partial = a.new_empty(programs if need_parameters else 0, 2, N, dtype=torch.float32)
    _backward_kernel[(programs * blocks,)](
        *_rows(dg), *_rows(dbeta), *_rows(a), *_rows(b), log_rate.contiguous(), bias.contiguous(), da, db, partial,
        lower_bound or 0.0, *sizes, rows_per_program, BOUNDED=lower_bound is not None, NEED_A=needs[0], NEED_B=needs[1],
        NEED_PARAMETERS=need_parameters, **options,
    )  # fmt: skip
    if need_parameters:
        rates, biases = partial.sum(0).unbind()
        if needs[2]:
            drate.copy_(rates.view(len(log_rate), -1).sum(1))
        if needs[3]:
            dbias.copy_(biases.view_as(dbias))
    return da, db, drate, dbias


class _DeltaGates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, log_rate, bias, lower_bound):
        ctx.save_for_backward(a, b, log_rate, bias)
        ctx.lower_bound = lower_bound
        g, beta = _delta_gates_forward(a, b, log_rate, bias, lower_bound)
        mark_constants(ctx, (g, (0, 2, 3)), (beta, (1,)))
        return g, beta

    @staticmethod
    @once_differentiable
    def backward(ctx, dg, dbeta):
        return _delta_gates_backward(dg, dbeta, *ctx.saved_tensors, list(ctx.needs_input_grad[:4]), ctx.lower_bound)
