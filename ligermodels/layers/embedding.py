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

    def forward(self, input_ids: Tensor, weight: Tensor | None = None) -> Tensor:
        """input_ids (...) long -> (..., H). weight: the first of `shared`, which otherwise is asked for here."""
        weight = shared(self.weight)[0] if weight is None else weight
        sparse = self.sparse or weight is not self.weight
        options = self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, sparse
        x = F.embedding(input_ids, weight, *options)
        return x if self.scale is None else x * torch.tensor(self.scale, dtype=x.dtype, device="cpu")


def shared(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weight of an embedding as the embedding takes it, by rows, and as whatever else takes it.

    In training on the kernels the rows' gradient is then added to the other one, or to zeros, by `ops.add_rows`. Torch
    makes a matrix of it first, for which it waits for the device, and adds that.
    """
    trained = torch.is_grad_enabled() and weight.requires_grad and type(weight) is nn.Parameter
    if not trained or torch.compiler.is_compiling() or not ops.use_kernels(weight):
        return weight, weight
    by_rows, whole = _Shared.apply(weight)
    return by_rows, whole


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.weight = weight.shape
        return weight.view_as(weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, rows: Tensor | None, whole: Tensor | None) -> Tensor | None:
        if rows is None:
            return whole
        if torch.is_grad_enabled() or not rows.is_sparse:
            return rows.to_dense() if whole is None else whole + rows.to_dense()
        # Gradients that come here are new: no op returns one that it, or anybody else, keeps.
        whole = rows.new_zeros(ctx.weight, layout=torch.strided) if whole is None else whole.contiguous()
        ops.add_rows(whole, rows._indices()[0], rows._values())
        return whole
