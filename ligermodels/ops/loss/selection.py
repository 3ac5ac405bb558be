"""Selection of the rows that have a target, so that a head's matrix products skip the others."""

from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from ligermodels.ops.runtime.library import once_differentiable

SKIP_BELOW = 0.97  # rows without targets are skipped if the fraction of rows with targets is below this


class RowSelection(NamedTuple):
    """Some of the rows of tensors (..., N) or (...) with `shape` (...)."""

    indices: Tensor  # int64 (n,), rising
    shape: torch.Size

    def take(self, x: Tensor) -> Tensor:
        """(..., N) -> (n, N), or (...) -> (n,); differentiable."""
        return _Take.apply(x, self.indices, len(self.shape))

    @overload
    def restore(self, values: Tensor, fill: float) -> Tensor: ...
    @overload
    def restore(self, values: None, fill: float) -> None: ...
    def restore(self, values: Tensor | None, fill: float) -> Tensor | None:
        """(n,) -> (...), with `fill` in the other rows; differentiable. None and scalars are returned as they are."""
        if values is None or not values.dim():
            return values
        return values.new_full((self.shape.numel(),), fill).index_copy(0, self.indices, values).view(self.shape)


def select_rows(valid: Tensor, num_valid: int | None, name: str) -> RowSelection | None:
    """The selection of the valid rows; None if nearly all rows are valid, or if their number is not known.

    Args:
        valid: bool (...).
        num_valid: the number of valid rows. None: counted on the CPU; unknown on CUDA, where counting would wait for
            the device, and in a compiled graph, which has to serve any number.
        name: the name of `num_valid`, for the assertion that it is right.
    """
    if num_valid is None:
        if valid.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        num_valid = int(valid.sum())
    if num_valid >= SKIP_BELOW * valid.numel():
        return None
    torch._assert_async(valid.sum() == num_valid, f"{name} is not the number of rows that count")
    return RowSelection(valid.flatten().argsort(descending=True, stable=True)[:num_valid], valid.shape)


class _Take(torch.autograd.Function):
    """Its backward pass copies, because no index occurs twice; that of torch's indexing sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, dims: int) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.shape, ctx.dims = x.shape, dims
        return x.reshape(-1, *x.shape[dims:]).index_select(0, indices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
        (indices,) = ctx.saved_tensors
        gradient = grad.new_zeros(ctx.shape)
        gradient.view(-1, *ctx.shape[ctx.dims :]).index_copy_(0, indices, grad)
        return (gradient,)
