"""Indices of the k largest elements of each row.

torch's top-k launches a dozen kernels, and its argmax runs one program per row: for few long rows, such as the logits
of a decoding step, both take longer than reading the rows.
"""

import torch
from torch import Tensor

from ligermodels.arguments import is_whole
from ligermodels.errors import InputError, short
from ligermodels.ops.runtime.checks import check_tensors
from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake, reject_dtensors
from ligermodels.ops.runtime.tensors import as_rows

CHUNK = 4096  # elements of a row per program
MAX_K = 64  # the reference serves larger k


def topk_indices(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest elements of each row, the largest first; equal elements are ordered by index. No
    gradient.

    Args:
        x: (..., V), any floating dtype and strides. NaN counts as larger than any number, and equal to NaN.
        k: number of indices per row, 0 to V.

    Returns:
        long (..., k).

    Raises:
        InputError: x is not floating, or k is out of range.
    """
    check_tensors("topk_indices", x=x)
    reject_dtensors("topk_indices", x)
    if x.dim() == 0 or not x.is_floating_point():
        raise InputError(
            f"topk_indices: x must be floating with at least one dimension, got {x.dtype} {tuple(x.shape)}"
        )
    if not (torch.compiler.is_compiling() or is_whole(k)) or not 0 <= k <= x.shape[-1]:
        raise InputError(f"topk_indices: k must be from 0 to {x.shape[-1]}, the elements of a row; got {short(k)}")
    if not use_kernels(x) or k > MAX_K:
        return topk_indices_reference(x, k)
    return _topk_indices(x, k)


def topk_indices_reference(x: Tensor, k: int) -> Tensor:
    """The specification of `topk_indices`, in plain torch."""
    if k == 1:
        return x.argmax(-1, keepdim=True)
    if x.dtype == torch.float64:
        return x.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()
    bits = (x.float() + 0.0).view(torch.int32)  # the kernel's keys: sorting would take much longer
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill_(x.isnan(), 0x7FFFFFFF).long()
    return (order * 2**32 - torch.arange(x.shape[-1], device=x.device)).topk(k).indices


@kernel
def _topk_indices_kernel(
    x, out, V, k, chunks, x_row, GIVEN: tl.constexpr, FINAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Each program finds the k largest elements of a chunk of a row, and writes keys for the next launch, or with FINAL
    indices.

    A key is an int64 that orders by element, then by falling index, so that one maximum gives both. With GIVEN, the
    input already consists of keys."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    lowest = tl.full((BLOCK,), -9223372036854775807, dtype=tl.int64)
    if GIVEN:
        keys = tl.load(x + row * x_row + i, mask=i < V, other=-9223372036854775807)
    else:
        value = tl.load(x + row * x_row + i, mask=i < V, other=0.0).to(tl.float32)
        value = tl.where(value == 0.0, 0.0, value)  # -0 is equal to it
        bits = value.to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # floats order like their bits, except for the sign
        order = tl.where(value != value, 0x7FFFFFFF, order)
        keys = tl.where(i < V, order.to(tl.int64) * 4294967296 + (0x7FFFFFFF - i), lowest)
    out += (row * chunks + chunk) * k
    for place in range(0, k):
        best = tl.max(keys, axis=0)
        keys = tl.where(keys == best, lowest, keys)
        tl.store(out + place, 0x7FFFFFFF - (best & 0xFFFFFFFF) if FINAL else best)


@custom_op()
def _topk_indices(x: Tensor, k: int) -> Tensor:
    out = x.new_empty((*x.shape[:-1], k), dtype=torch.long)
    if is_fake(out) or not out.numel():
        return out
    rows = as_rows(x)
    count, V = rows.shape
    chunks = -(-V // CHUNK)
    keys = out if chunks == 1 else out.new_empty(count, chunks * k)
    block = min(power_of_2_above(V), CHUNK)
    _topk_indices_kernel[(count * chunks,)](
        rows, keys, V, k, chunks, rows.stride(0), GIVEN=False, FINAL=chunks == 1, BLOCK=block, num_warps=8
    )
    if chunks > 1:
        block = power_of_2_above(chunks * k)
        _topk_indices_kernel[(count,)](
            keys, out, chunks * k, k, 1, chunks * k, GIVEN=True, FINAL=True, BLOCK=block, num_warps=4
        )
    return out
