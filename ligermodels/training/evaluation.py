"""Scores on text that is given: of a model, of Medusa heads, and how far a model has moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ligermodels.archs.distillation import divergence_and_losses
from ligermodels.archs.medusa import MedusaModel
from ligermodels.errors import InputError
from ligermodels.generation.generate import evaluating
from ligermodels.layers import IGNORE_INDEX
from ligermodels.model import CausalLM
from ligermodels.training.data import Batch
from ligermodels.training.loop import count_targets, on_device

RANKS = 10
"""Candidates of a head that are told apart: as many as a tree has use for."""


@torch.no_grad()
def evaluate(model: CausalLM, batches: Iterable[Batch]) -> float:
    """Mean loss of a target token, in nats, over all batches; its exponential is the perplexity.

    Raises InputError when there is no target at all.
    """
    losses, counts = [], []
    with evaluating(model):
        for batch in batches:
            losses.append(model(**on_device(batch, model.device), reduction="sum").loss.double())
            counts.append(int(count_targets(model, [batch])))
    if not losses:
        raise InputError("there is no text to evaluate on: not a single batch was given")
    return float(torch.stack(losses).sum()) / max(1, sum(counts))


@dataclass(frozen=True)
class HeadScores:
    """What K heads achieve: `losses` (K,), nats a target; `hits` (K, 10), how often the right token is the candidate of
    rank 0, 1, ... (what `generation.grow` takes); `counts` (K,), targets. All on the CPU, in float64."""

    losses: Tensor
    hits: Tensor
    counts: Tensor

    def accuracy(self, k: int) -> Tensor:
        """(K,): how often the right token is among a head's `k` likeliest, k at most 10."""
        if not 1 <= k <= RANKS:
            raise InputError(f"accuracy is known for the 1 to {RANKS} likeliest tokens, not for {k}")
        return self.hits[:, :k].sum(1)


@torch.no_grad()
def evaluate_heads(
    medusa: MedusaModel, batches: Iterable[Batch], on_ranks: Callable[[Tensor], object] | None = None
) -> HeadScores:
    """Loss and hits of every head over all batches; `on_ranks` gets the ranks of each, long (K, B, T).

    Raises InputError when there is no batch.
    """
    losses, hits, counts = [], [], []
    device = medusa.base.device
    rank = torch.arange(RANKS, device=device)
    with evaluating(medusa):
        for batch in batches:
            out = medusa(**on_device(batch, device), reduction="sum")
            losses.append(out.head_losses.double())
            hits.append((out.ranks[..., None] == rank).sum((1, 2)))
            counts.append(out.counts)
            if on_ranks is not None:
                on_ranks(out.ranks)
    if not losses:
        raise InputError("there is no text to evaluate on: not a single batch was given")
    count = torch.stack(counts).sum(0).double().cpu()
    at_least_one = count.clamp(min=1)
    return HeadScores(
        torch.stack(losses).sum(0).cpu() / at_least_one, torch.stack(hits).sum(0).cpu() / at_least_one[:, None], count
    )


@dataclass(frozen=True)
class Drift:
    """How far a model has moved from a reference, over some text: `kl`, KL(reference || model), nats a target; `loss`
    and `reference_loss`, nats a target."""

    kl: float
    loss: float
    reference_loss: float

    @property
    def perplexity_change(self) -> float:
        """Perplexity over the reference's, less 1: 0.01 is one percent worse."""
        return math.exp(self.loss - self.reference_loss) - 1


@torch.no_grad()
def evaluate_drift(model: CausalLM, reference: CausalLM, batches: Iterable[Batch]) -> Drift:
    """How far `model` is from `reference`, a model of the same vocabulary on the same device.

    Raises InputError when there is no batch.
    """
    sums, counts = [], []
    with evaluating(model), evaluating(reference):
        for batch in batches:
            part: dict[str, Any] = on_device(batch, model.device)
            labels = part.pop("labels")
            shape = (labels.shape[0], labels.shape[1])
            bounds = model.document_bounds(shape, part.get("position_ids"), part.get("cu_seqlens"))
            targets = model.shift_labels(labels, 1, bounds)
            part["cu_seqlens"] = bounds
            hidden, untouched = (each.hidden_states(**part) for each in (model, reference))
            sums.append(divergence_and_losses(hidden, model.head, untouched, reference.head, targets).double())
            counts.append((targets != IGNORE_INDEX).sum())
    if not sums:
        raise InputError("there is no text to evaluate on: not a single batch was given")
    return Drift(*(torch.stack(sums).sum(0) / torch.stack(counts).sum().clamp(min=1)).tolist())
