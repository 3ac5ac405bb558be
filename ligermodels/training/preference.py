"""A model trained by an objective on preference data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ligermodels.layers import IGNORE_INDEX, Router
from ligermodels.layers.packing import document_of
from ligermodels.layers.targets import shift_labels
from ligermodels.losses.sequences import sequence_log_probs
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.ranks import DataRanks
from ligermodels.training.objective_evaluation import ObjectiveModel, ObjectiveOutput
from ligermodels.training.objective_losses import ItemLosses, PreferenceObjective, Scores, metrics_of
from ligermodels.training.reports import LossUnit

CUSTOM = "a loss of your own may do what a graph cannot record"
SORTED = frozenset({"aot", "aot_unpaired"})
"""Loss types that sort the pairs of a batch."""


class PreferenceModel(ObjectiveModel):
    """A model whose forward computes an objective on batches of `ExampleBatches`.

    An item is a pair, or a single sequence. The loss of an item does not depend on how a batch is divided over
    micro-batches and ranks, with two exceptions, which TRL has too: KTO's estimate of the KL divergence is of one
    micro-batch of all ranks, and the loss types "aot" and "aot_unpaired" sort within a micro-batch of a rank.

    Args:
        model: the model.
        objective: the objective.
        settings: its settings, by name.
        pairs: whether an item has two sequences.
    """

    def __init__(
        self, model: CausalLM, objective: PreferenceObjective, settings: Mapping[str, Any], *, pairs: bool
    ) -> None:
        super().__init__(model)
        self.objective, self.settings = objective, dict(settings)
        self.sequences_per_item = 2 if pairs else 1
        self.loss_unit = LossUnit("pairs" if pairs else "completions", 0)

    @property
    def unrecordable(self) -> str:
        """Why steps are not recorded in CUDA graphs, where batches are padded; "" if they are."""
        if self.objective.is_custom:
            return CUSTOM
        if sorted_types := SORTED.intersection(self.settings.get("loss_type", ())):
            return f"loss_type {min(sorted_types)} sorts the pairs of a batch, which padding would change"
        if any(isinstance(module, Router) for module in self.model.modules()):
            return "the losses and the load of a mixture's experts would count the padding of batches"
        return ""

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor,
        targets: Tensor,
        completion_mask: Tensor,
        examples: Tensor,
        ref_log_probs: Tensor | None = None,
        desirable: Tensor | None = None,
        kl_input_ids: Tensor | None = None,
        kl_labels: Tensor | None = None,
        kl_cu_seqlens: Tensor | None = None,
        kl_targets: Tensor | None = None,
        kl_ref_log_probs: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> ObjectiveOutput:
        """The loss of a batch: see `ExampleBatches` for its tensors.

        Args:
            input_ids: (1, n).
            labels: (1, n).
            cu_seqlens: (S + 1,).
            targets: (S, T).
            completion_mask: (S, T).
            examples: (B, 2), not used.
            ref_log_probs: (S,), if the objective uses a reference.
            desirable: (B,), for single sequences.
            kl_input_ids: (1, m), the mismatched sequences of KTO.
            kl_labels: (1, m).
            kl_cu_seqlens: (B + 1,).
            kl_targets: (B, T').
            kl_ref_log_probs: (B,).
            num_items_in_batch: the sum of `num_targets` over all micro-batches. Default: of this one.
        """
        if num_items_in_batch is None:
            num_items_in_batch = self.num_targets(labels, cu_seqlens=cu_seqlens).clamp(min=1)
        num_items, num_tokens = num_items_in_batch[0], num_items_in_batch[1]
        out = self.model.log_probs(input_ids, labels, cu_seqlens=cu_seqlens)
        log_probs, nll_mask = by_sequence(out.log_probs, labels, targets)
        counted = nll_mask.any(1)
        items = counted[: len(counted) // self.sequences_per_item]
        kl = None
        if kl_input_ids is not None:
            with torch.no_grad():
                other = self.model.log_probs(kl_input_ids, kl_labels, cu_seqlens=kl_cu_seqlens).log_probs
            sums = sequence_log_probs(*by_sequence(other, cast(Tensor, kl_labels), cast(Tensor, kl_targets)))
            kl = self._kl(sums - cast(Tensor, kl_ref_log_probs), items)
        # The likelihood's divisor of this micro-batch, whose losses count by the fraction of its items.
        dtype = log_probs.dtype
        nll_tokens = (num_tokens * len(items)).to(dtype) / num_items
        scores = Scores(
            log_probs, nll_mask & completion_mask, nll_mask, nll_tokens,
            None if ref_log_probs is None else ref_log_probs.to(dtype), desirable,
            None if kl is None else kl.to(dtype),
        )  # fmt: skip
        result = self.objective.losses(scores, self.settings)
        loss = torch.where(items, result.losses, 0.0).sum() / num_items
        metrics = metrics_of(scores, result, counted, averages=self.objective.averages)
        return ObjectiveOutput.of(self.model, loss, items.sum() / num_items, out, metrics)

    def num_targets(
        self,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Number of items of a batch, and of the likelihood's tokens in their first sequences: int64 (2,).

        Args:
            labels: (1, n); a batch without labels has no items.
            position_ids: not used.
            cu_seqlens: (S + 1,).
            attention_mask: not used.
        """
        counts = _num_labels(labels, cu_seqlens)
        first = counts[: len(counts) // self.sequences_per_item]
        return torch.stack([(first > 0).sum(), first.sum()])

    def _kl(self, log_ratios: Tensor, items: Tensor) -> Tensor:
        """The mean log-ratio of the mismatched sequences (B,) of all ranks whose items (B,) count."""
        total = torch.stack([torch.where(items, log_ratios, 0.0).sum(), items.sum().to(log_ratios.dtype)])
        total = DataRanks.of(self.model).sum(total)
        return total[0] / total[1].clamp(min=1)


def by_sequence(log_probs: Any, labels: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probabilities of a batch's targets, sequence by sequence.

    Args:
        log_probs: (1, n), of the labels of a row.
        labels: long (1, n), -100 where ignored.
        targets: long (S, T), places of the targets in the row, -1 for none.

    Returns:
        (S, T), 0 without a label; and a mask, bool (S, T), False there.
    """
    index = targets.clamp(min=0)
    # A batch that stands in for none has no labels.
    mask = (targets >= 0) & (labels.flatten()[index + 1] != IGNORE_INDEX)
    return torch.where(mask, log_probs.flatten()[index], 0.0), mask


def _num_labels(labels: Tensor, cu_seqlens: Any) -> Tensor:
    """Number of labels in each sequence of a row, (S,)."""
    present = shift_labels(labels, 1, cu_seqlens).flatten() != IGNORE_INDEX
    counts = torch.zeros(len(cu_seqlens) - 1, dtype=torch.int64, device=labels.device)
    return counts.index_add_(0, document_of(cu_seqlens, labels.numel()), present.long())


@torch.no_grad()
def completion_log_probs(model: CausalLM, batch: Mapping[str, Tensor]) -> Tensor:
    """Log-probabilities of the completions in a batch of `ExampleBatches`, (S,), and of its mismatched sequences,
    (S + B,) in all; float64, NaN for sequences without a label."""

    def sums_of(prefix: str, mask: Tensor | None) -> Tensor:
        input_ids, labels, cu_seqlens, targets = (batch[prefix + name] for name in _SEQUENCES)
        out = model.log_probs(input_ids, labels, cu_seqlens=cu_seqlens)
        log_probs, has_label = by_sequence(out.log_probs, labels, targets)
        sums = sequence_log_probs(log_probs.double(), has_label if mask is None else has_label & mask)
        return torch.where(has_label.any(1), sums, torch.nan)

    sums = sums_of("", batch["completion_mask"])
    if "kl_input_ids" not in batch:
        return sums
    return torch.cat([sums, torch.where(sums.isnan(), torch.nan, sums_of("kl_", None))])


_SEQUENCES = ("input_ids", "labels", "cu_seqlens", "targets")


def check_settings(objective: PreferenceObjective, settings: Mapping[str, Any], *, pairs: bool, kl: bool) -> ItemLosses:
    """Compute the objective on sequences of one token, so that a wrong setting is an error before training.

    Args:
        objective: the objective.
        settings: its settings, by name.
        pairs: whether an item has two sequences.
        kl: whether there are mismatched sequences.

    Raises:
        InputError: a setting is out of range, or has no effect.
    """
    log_probs, mask = torch.full((2, 1), -1.0, requires_grad=True), torch.ones(2, 1, dtype=torch.bool)
    desirable = None if pairs else torch.tensor([True, False])
    one = torch.ones(())
    return objective.losses(
        Scores(log_probs, mask, mask, one, -torch.ones(2), desirable, one if kl else None), settings
    )
