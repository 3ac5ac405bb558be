"""The output of a multi-head model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.utils._pytree import register_dataclass

from ligermodels.models.output import ModelOutput

ACCEPTED = ("acceptance", "agreement")
"""How often tokens are accepted by sampling, and greedily: fields of `MultiHeadOutput`."""
TOP_K = (1, 5)
"""Ranks at which accuracy is reported."""


@dataclass
class MultiHeadOutput(ModelOutput):
    """The output of a multi-head model. Fields that do not apply are None.

    loss: scalar.
    head_losses: (K,), unweighted.
    ranks: long (K, B, T), number of tokens that a head finds more probable than the target, -1 without a target; of
        DFlash and DSpark heads at the anchors of blocks.
    accuracy: {1: (K,), 5: (K,)}, the fraction of targets among the 1 or 5 most probable tokens of each head.
    counts: (K,), number of targets of each head.
    logits: (K, B, T, V), without labels.
    base_loss: the base model's own loss, where it is part of the loss.
    acceptance: (K,), of heads that learn the model's distribution p: the mean of sum_v min(p, q), the probability that
        a proposed token is accepted by exact sampling. v are the tokens that the heads can propose, and p is over all
        tokens of the model.
    agreement: (K,), of the same heads: how often the likeliest token is the model's, of all its tokens: the acceptance
        of greedy decoding.
    trials: for "acceptance" and "agreement" the number (K,) that each is a mean over; None: `counts`, for both.
    confidence_loss: scalar, the cross entropy of DSpark's confidence head.
    """

    loss: Any = None  # as in CausalLMOutput
    head_losses: Tensor | None = None
    ranks: Tensor | None = None
    accuracy: dict[int, Tensor] | None = None
    counts: Tensor | None = None
    logits: Any = None
    base_loss: Tensor | None = None
    acceptance: Tensor | None = None
    agreement: Tensor | None = None
    trials: dict[str, Tensor] | None = None
    confidence_loss: Tensor | None = None

    def accepted(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The sums (K,) whose means `acceptance` and `agreement` are, and their numbers (K,); empty for other heads."""
        if self.acceptance is None:
            return {}
        numbers = {name: self.counts for name in ACCEPTED} if self.trials is None else self.trials
        return {name: (getattr(self, name) * numbers[name], cast(Tensor, numbers[name])) for name in ACCEPTED}

    @classmethod
    def of_ranks(cls, ranks: Tensor, **fields: Any) -> MultiHeadOutput:
        """An output with `ranks`, with the accuracy and counts computed from them, and with other fields."""
        counts = (ranks >= 0).sum((1, 2))
        correct = {k: ((ranks >= 0) & (ranks < k)).sum((1, 2)) for k in TOP_K}
        accuracy = {k: hits.float() / counts.clamp(min=1) for k, hits in correct.items()}
        return cls(ranks=ranks, counts=counts, accuracy=accuracy, **fields)


register_dataclass(MultiHeadOutput)  # so that FSDP2 finds the tensors in it

MedusaOutput = MultiHeadOutput
