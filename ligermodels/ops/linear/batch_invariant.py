"""Matrix products that sum each element in the same order, whatever the number of rows: `set_batch_invariant`.

On a GPU one Triton kernel computes tiles whose sizes depend on N, K, dtype and device alone. Each program adds the
products of a tile in steps of BLOCK_K, from the first to the last, in float32: there is no split of K. On a CPU torch
multiplies the weight by blocks of ROWS rows as columns, the last block padded, so that its library is always called
with the same shapes.

The backward pass is torch's: gradients of a weight are sums over the batch in any case.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.ops.runtime.checks import Signature
from ligermodels.ops.runtime.devices import num_sms, pipeline_stages
from ligermodels.ops.runtime.dispatch import refuse_batch_invariant, tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_dtensor, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import contiguous, count_rows, under_autocast

ROWS = 48
"""Rows of a block on the CPU. In MKL 2024.2, and on processors without AVX-512, the bits of a row may depend on its
place among the rows of the left operand, and not on its place among columns of the right one, if their number is a
multiple of the tiles' (4, 6, 12 or 16)."""
_TENSORS = Signature(x="... K", weight="N K =x", bias="N =x ?")
_ALIGNED = 16  # bytes: where x begins; then every launch loads it alike


def batch_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`dense_linear` under `set_batch_invariant`.

    Args:
        x: (..., K).
        weight: (N, K).
        bias: (N,), or None.

    Raises:
        InputError: shapes, dtypes or devices do not fit.
        BackendError: an operand is a DTensor.
    """
    if any(is_dtensor(t) for t in (x, weight, bias) if t is not None):
        refuse_batch_invariant("a linear layer with DTensors")
    x, weight, bias = _TENSORS.check("linear", *under_autocast(x, weight, bias))
    y: Tensor = _BatchInvariantLinear.apply(x.reshape(count_rows(x), x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


class _BatchInvariantLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        need_x, need_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        return _batch_invariant_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx, dw = None if weight is None else dy @ weight, None if x is None else dy.t() @ x
        return dx, dw, dy.sum(0) if ctx.needs_input_grad[2] else None


@custom_op(keep=lambda x, weight, _: weight.shape[0] >= weight.shape[1])
def _batch_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (M, K) -> (M, N)."""
    y = x.new_empty(x.shape[0], weight.shape[0])
    return y if is_fake(x) else batch_invariant_into(y, x, weight, bias)


def batch_invariant_into(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias in given memory.

    Args:
        y: (M, N), its last dimension contiguous.
        x: (M, K), of the dtype of y.
        weight: (N, K), of the dtype of y.
        bias: (N,), of the dtype of y; or None.

    Returns:
        y.
    """
    if not y.numel():
        return y
    if use_kernels(x, weight, bias):
        x = x if x.is_contiguous() and x.data_ptr() % _ALIGNED == 0 else x.clone(memory_format=torch.contiguous_format)
        _launch(y, x, weight.contiguous(), contiguous(bias))
        return y
    for start in range(0, len(x), ROWS):
        rows = x[start : start + ROWS]
        block = F.pad(rows, (0, 0, 0, ROWS - len(rows)))
        columns = block.t().contiguous()
        product = torch.mm(weight, columns) if bias is None else torch.addmm(bias[:, None], weight, columns)
        y[start : start + ROWS] = product.t()[: len(rows)]
    return y


def _launch(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The kernel, with tiles that the number of rows does not change: other instructions may round otherwise."""
    (M, K), N = x.shape, len(weight)
    if x.dtype == torch.float32:  # without tensor cores: operands need registers too
        block_m, block_n, block_k, warps = 32, 64, 32, 4
    else:  # a decoding step needs a program for each multiprocessor, to read the weight
        block_m, block_n, block_k = 64, 128 if 128 * num_sms(x.device) <= N else 64, 64
        warps = 4
    stages = pipeline_stages(x.device, 4, (block_m + block_n) * block_k * x.element_size())
    tiles = -(-M // block_m)
    _linear_kernel[(tiles * -(-N // block_n),)](
        x, weight, bias, y, y.stride(0), M, N, K, tiles, EVEN_K=K % block_k == 0,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip


@partial(kernel, do_not_specialize=("M", "tiles"))
def _linear_kernel(
    x, weight, bias, y, y_stride, M, N, K, tiles,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program computes a tile of y. Programs of the same columns follow one another, so that the L2 cache has the
    columns' rows of the weight."""
    row = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x += row[:, None] * K + k[None, :]
    weight += col[:, None] * K + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        of_x, of_weight = (row < M)[:, None], (col < N)[:, None]
        if not EVEN_K:
            within = (start + k < K)[None, :]
            of_x, of_weight = of_x & within, of_weight & within
        a = tl.load(x + start, mask=of_x, other=0.0)
        b = tl.load(weight + start, mask=of_weight, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + row[:, None] * y_stride + col[None, :], acc.to(y.dtype.element_ty),
             mask=(row < M)[:, None] & (col < N)[None, :])  # fmt: skip
