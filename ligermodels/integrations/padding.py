"""The tokens of a pass as transformers gives them, and their padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers import IGNORE_INDEX
from ligermodels.layers.tokens import TokenLayout, Unpadding

Inputs = dict[str, Any]
"""input_ids, inputs_embeds and position_ids of a batch, each a tensor or None."""


def shape_of(inputs: Inputs) -> tuple[int, int]:
    """(B, T)."""
    tokens: Tensor = inputs["input_ids"] if inputs["inputs_embeds"] is None else inputs["inputs_embeds"]
    return tokens.shape[0], tokens.shape[1]


class Padding:
    """The padding of a batch, by its attention mask. Only masks (B, T) are read; this waits for the GPU once.

    Args:
        attention_mask: mask in any form of transformers, or None.
        inputs: the tokens.
        labels: (B, T), or None.

    Attributes:
        mask: the mask, or None.
        positions: the positions of the inputs, or None.
        at_ends: whether the mask is None or (B, T), and no row has padding between tokens. transformers counts such
            padding for positions and windows.
        exists: whether there is padding.
        is_labelled: whether a label lies on padding, or is predicted from padding: the label of the first token after
            padding on the left. transformers counts these labels, by states that depend on its attention backend.

    Raises:
        InputError: a mask (B, T) has other values than 0 and 1.
    """

    def __init__(self, attention_mask: Any, inputs: Inputs, labels: Tensor | None = None) -> None:
        self.mask: Tensor | None = attention_mask
        self._layout: TokenLayout | None = None
        self.positions: Tensor | None = inputs["position_ids"]
        self.at_ends, self.exists, self.is_labelled = attention_mask is None, False, False
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != shape_of(inputs):
            return
        real = attention_mask != 0
        starts = real[:, :1].sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)
        labelled = real.new_zeros(())
        if isinstance(labels, Tensor) and labels.shape == real.shape:
            counts = labels != IGNORE_INDEX
            labelled = (counts & ~real).any() | (counts[:, 1:] & ~real[:, :-1]).any()
        is_mask = (~real | (attention_mask == 1)).all()
        answers = torch.stack([(starts <= 1).all(), ~real.all(), labelled, is_mask])
        self.at_ends, self.exists, self.is_labelled, is_mask = answers.tolist()
        if not is_mask:
            raise InputError("attention_mask: may hold only 1 (a token) and 0 (padding)")

    @property
    def layout(self) -> TokenLayout | None:
        """The layout of the tokens without padding; None if there is no padding. Making it, at the first call, waits
        for the GPU."""
        if self._layout is None and self.exists and self.mask is not None:
            unpadding = Unpadding(self.mask)
            shape = self.mask.shape[0], self.mask.shape[1]
            self._layout = TokenLayout(shape, unpadding, None, unpadding.cu_seqlens)
        return self._layout
