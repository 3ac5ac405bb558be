"""Metrics and evaluations of heads: Medusa and multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ligermodels.evaluation import KLToReference, perplexity
from ligermodels.speculative.evaluation import HeadScores
from ligermodels.training.reports import OutputMetrics, Value


@dataclass(frozen=True)
class HeadsEvaluation:
    """Scores of the heads on the validation split and, if the recipe asks for it, the KL to the initial model."""

    scores: HeadScores
    kl: KLToReference | None = None

    def metrics(self) -> dict[str, Value]:
        """The mean loss of the heads and their accuracies, the KL in nats per token, the perplexity and its relative
        change."""
        values: dict[str, Value] = {"loss": float(self.scores.losses.mean())}
        values |= {f"top{k}": self.scores.accuracy(k).tolist() for k in (1, 5)}
        if self.kl is not None:
            values |= {"kl_to_reference": self.kl.kl, "perplexity": perplexity(self.kl.loss)}
            values["perplexity_change"] = self.kl.perplexity_change
        return values


def head_metrics(out: Any) -> OutputMetrics:
    """Losses of the base model (if it is trained) and of each head, and the accuracy of each head."""
    losses = {"head_losses": out.head_losses}
    if out.base_loss is not None:
        losses["base_loss"] = out.base_loss
    return OutputMetrics(losses, {"head_accuracy": (out.accuracy[1] * out.counts, out.counts)})
