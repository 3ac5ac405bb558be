"""Token embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.layers.linear import Composed
from ligermodels.layers.linear_parts import Compute
from ligermodels.layers.sharding import TensorSharding, is_tensor_parallel, sum_over_ranks
from ligermodels.layers.token_rows import TokenRows


class Embedding(Composed[Compute, TokenRows], nn.Embedding):
    """Token embedding: rows of the weight, multiplied by a scale. Its `update` may replace rows (`TokenRows`).

    Args:
        vocab_size: number of rows.
        hidden_size: channels.
        scale: factor of the embeddings, rounded to their dtype (Gemma: 55.4256 is 55.5 in bfloat16); None for 1.
        padding_idx: row that gets no gradient from the inputs, as in torch and transformers.
        norm_eps: eps of an RMSNorm without weight of the embeddings (Muse Glimmer); None for no norm.
    """

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"weight": 0}
    part_classes: ClassVar[Mapping[str, type[nn.Module]]] = {"update": TokenRows}
    weight_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": ()}

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        scale: float | None = None,
        padding_idx: int | None = None,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__(vocab_size, hidden_size, padding_idx)
        self.scale, self.norm_eps = scale, norm_eps

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.scale is None else f", scale={self.scale}")

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids long (...) -> (..., H)."""
        x = self._of_shard(input_ids) if is_tensor_parallel(self) else super().forward(input_ids)
        x = x if self.update is None else self.update(x, input_ids)
        x = x if self.norm_eps is None else ops.rms_norm(x, None, self.norm_eps)
        return x if self.scale is None else x * torch.tensor(self.scale, dtype=x.dtype, device="cpu")

    def _of_shard(self, input_ids: Tensor) -> Tensor:
        """The rows of a sharded weight: each row is on one rank, and the other ranks add zeros."""
        from ligermodels.ops.runtime.class_shards import shard_of_classes  # imports DTensors

        weight, shard = shard_of_classes("Embedding", "weight", self.weight, 0)
        padding = None if self.padding_idx is None else self.padding_idx - shard.first
        rows = input_ids - shard.first
        inside = (rows >= 0) & (rows < shard.size)
        padding = padding if padding is not None and 0 <= padding < shard.size else None
        x = F.embedding(rows.where(inside, 0), weight, padding)
        return sum_over_ranks(self, x.masked_fill(~inside[..., None], 0.0))
