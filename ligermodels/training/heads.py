"""What the training of Medusa heads and that of multi-token prediction report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ligermodels.speculative.evaluation import HeadScores, KLToReference, perplexity
from ligermodels.training.reports import OutputMetrics, Value


@dataclass(frozen=True)
class HeadsEvaluation:
    """Scores of the heads on the validation split and, if the recipe asks for it, the KL to the initial model."""

    scores: HeadScores
    kl: KLToReference | None = None

    def metrics(self) -> dict[str, Value]:
        """Accuracies by head, the KL in nats per token, the perplexity and its relative change."""
        found: dict[str, Value] = {f"top{k}": self.scores.accuracy(k).tolist() for k in (1, 5)}
        if self.kl is not None:
            found |= {"kl_to_reference": self.kl.kl, "perplexity": perplexity(self.kl.loss)}
            found["perplexity_change"] = self.kl.perplexity_change
        return found


def head_metrics(out: Any) -> OutputMetrics:
    """Losses of the base model (where it is trained) and of each head, and how often each head is right."""
    losses = {"head_losses": out.head_losses}
    if out.base_loss is not None:
        losses["base_loss"] = out.base_loss
    return OutputMetrics(losses, {"head_accuracy": (out.accuracy[1] * out.counts, out.counts)})
