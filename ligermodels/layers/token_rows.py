"""Trained rows of the embedding and the LM head, in place of rows of their frozen weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.layers.linear_parts import Update


class TokenRows(Update):
    """Rows of some tokens, trained in place of the rows of a frozen weight: PEFT's `trainable_token_indices`.

    Unlike the difference that LoRA trains, these are the values themselves. A tied embedding and LM head have one
    `TokenRows` as the `update` of both.

    Args:
        path: path of the embedding or the LM head in transformers, such as "model.embed_tokens".
        token_indices: ids of the tokens, each once, in any order.
        hidden_size: length of a row.
        padding_idx: a token whose row gets no gradient from the embedding, as in `torch.nn.Embedding`. Default: none.
        dtype: dtype of the rows. Default: float32.
        device: device of the rows. Default: the CPU.
    """

    unexportable: ClassVar[str | None] = (
        "the model has trained rows of tokens, which are no part of a checkpoint: save them by lm.save_adapter(model, "
        "folder), or put them into the weights by lm.merge_lora(model) first"
    )

    def __init__(
        self,
        path: str,
        token_indices: Sequence[int],
        hidden_size: int,
        *,
        padding_idx: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.path, self.token_indices = path, tuple(map(int, token_indices))
        self.padding_row = self.token_indices.index(padding_idx) if padding_idx in self.token_indices else None
        count = len(self.token_indices)
        self.rows = nn.Parameter(torch.empty(count, hidden_size, dtype=dtype, device=device))
        for name in ("ids", "order"):  # the ids in ascending order, and the row of each
            self.register_buffer(name, torch.empty(count, dtype=torch.int64, device=device), persistent=False)
        if not self.rows.is_meta:
            self.init_weights()

    ids: Tensor
    order: Tensor

    @torch.no_grad()
    def init_weights(self, std: float = 0.0) -> None:
        """Fill the buffers. The rows are copies of the weight's: see `adapt.token_rows.initialize_rows`."""
        order = sorted(range(len(self.token_indices)), key=self.token_indices.__getitem__)
        self.order.copy_(torch.tensor(order))
        self.ids.copy_(torch.tensor(sorted(self.token_indices)))

    def lora_parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameter, by name, as of LoRA."""
        return {"rows": self.rows}

    def weight_mappings(self, native: str) -> list[WeightMapping]:
        """Where PEFT's files have the rows of the update that the model calls `native`."""
        return [rename(f"{native}.rows", f"base_model.model.{self.path}.token_adapter.trainable_tokens_delta")]

    def extra_repr(self) -> str:
        return f"{self.path}, {len(self.token_indices)} tokens"

    def forward(self, x: Tensor, input_ids: Tensor) -> Tensor:  # type: ignore[override]  # replaces, and adds nothing
        """Embeddings x (..., H) of `input_ids`, long (...), with the trained rows in place."""
        place = torch.searchsorted(self.ids, input_ids.contiguous()).clamp(max=len(self.ids) - 1)
        is_trained = self.ids[place] == input_ids
        rows, none = self.rows.to(x.dtype), len(self.ids)
        if self.padding_row is not None:
            is_padding = torch.arange(none, device=rows.device) == self.padding_row
            rows = torch.where(is_padding[:, None], rows.detach(), rows)
        # The row of the other tokens is a padding row, which costs no gradient.
        table = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        trained = F.embedding(self.order[place].where(is_trained, none), table, padding_idx=none)
        return torch.where(is_trained[..., None], trained, x)

    def replace_rows(self, weight: Tensor) -> Tensor:
        """A copy of a weight (V, H) with the trained rows in place, with gradients of both."""
        return weight.index_copy(0, self.ids, self.rows[self.order].to(weight.dtype))

    def replace_logits(self, logits: Tensor, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """Logits (..., V) of `hidden` (..., H) with the logits of the trained rows in place; `bias` is (V,) or None."""
        rows = self.rows[self.order].to(hidden.dtype)
        trained = ops.linear(hidden, rows, None if bias is None else bias[self.ids])
        return logits.index_copy(-1, self.ids, trained.to(logits.dtype))

    @torch.no_grad()
    def add_to(self, weight: Tensor) -> None:
        """Put the rows into a weight (V, H), in place."""
        weight.index_copy_(0, self.ids, self.rows[self.order].to(weight.dtype))
