"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Embedding(nn.Embedding):
    """Rows of the weight, times `scale` rounded to their dtype (Gemma: 55.4256 is 55.5 in bfloat16).

    The row of `padding_idx` gets no gradient from the inputs, as in torch and transformers.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, scale: float | None = None, padding_idx: int | None = None
    ) -> None:
        super().__init__(vocab_size, hidden_size, padding_idx)
        self.scale = scale

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.scale is None else f", scale={self.scale}")

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids (...) long -> (..., H)."""
        x = super().forward(input_ids)
        return x if self.scale is None else x * torch.tensor(self.scale, dtype=x.dtype, device="cpu")
