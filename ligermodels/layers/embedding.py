"""Token embedding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import ops


class Embedding(nn.Embedding):
    """Rows of the weight, times `scale` rounded to their dtype (Gemma: 55.4256 is 55.5 in bfloat16)."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float | None = None) -> None:
        super().__init__(vocab_size, hidden_size)
        self.scale = scale

    def forward(self, input_ids: Tensor, by_rows: Tensor | None = None) -> Tensor:
        """input_ids (...) long -> (..., H). by_rows: the weight as `shared` gives it, which is asked for otherwise."""
        by_rows = self.shared()[0] if by_rows is None else by_rows
        x = super().forward(input_ids) if by_rows is None else F.embedding(input_ids, by_rows, sparse=True)
        return x if self.scale is None else x * torch.tensor(self.scale, dtype=x.dtype, device="cpu")

    def shared(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """In training on the kernels, the weight as the embedding takes it, by rows, and as whatever else takes it.

        The rows' gradient is then added to the other one, or to zeros, by `ops.add_rows`. Torch makes a matrix of it,
        and adds that.
        """
        weight, options = self.weight, (self.padding_idx, self.max_norm, self.scale_grad_by_freq, self.sparse)
        trained = torch.is_grad_enabled() and weight.requires_grad and type(weight) is nn.Parameter
        if not trained or options != (None, None, False, False) or torch.compiler.is_compiling():
            return None, None
        if not ops.use_kernels(weight):
            return None, None
        by_rows, whole = _Shared.apply(weight)
        return by_rows, whole


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.shape = weight.shape
        return weight.view_as(weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, rows: Tensor | None, whole: Tensor | None) -> Tensor | None:
        if rows is None:
            return whole
        if torch.is_grad_enabled() or not rows.is_sparse:
            return rows.to_dense() if whole is None else whole + rows.to_dense()
        # The other gradient is changed: autograd has no more use for it, but a hook that kept it would see that.
        whole = rows.new_zeros(ctx.shape, layout=torch.strided) if whole is None else whole.contiguous()
        ops.add_rows(whole, rows._indices()[0], rows._values())
        return whole
