"""Evaluation on given text: loss of a model, scores of heads, KL of a model to a reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ligermodels.data.batches import Batch, count_targets, on_device
from ligermodels.errors import InputError
from ligermodels.generation.generate import evaluating
from ligermodels.layers import IGNORE_INDEX, HeadLoss, Targets
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.ranks import DataRanks
from ligermodels.speculative.distillation import divergence_and_losses
from ligermodels.speculative.multi_head import MultiHeadModel

RANKS = 10
"""Ranks of a head's candidates that are counted separately; a tree uses no more."""


@torch.no_grad()
def evaluate(model: CausalLM, batches: Iterable[Batch]) -> float:
    """Mean loss per target, in nats, over all batches; its exponential is the perplexity.

    Of a model that FSDP2 shards these are the batches of all ranks: each has as many as the others, some may be without
    a target.

    Raises InputError when there is no target at all.
    """
    losses, counts = [], []
    with evaluating(model):
        ranks = DataRanks.of(model)
        for batch in batches:
            inputs: dict[str, Any] = on_device(batch, model.device)
            count = int(count_targets(model, [batch]))
            loss = model(**inputs, reduction="sum")["loss"].double()
            losses.append(loss if count else torch.zeros_like(loss))  # an auxiliary loss does not depend on targets
            counts.append(count)
    if not losses:
        raise InputError("there is no text to evaluate on: not a single batch was given")
    sums = torch.stack([torch.stack(losses).sum(), losses[0].new_tensor(sum(counts))])
    loss, count = ranks.sum(sums).tolist()
    return loss / max(1, count)


@dataclass(frozen=True)
class HeadScores:
    """Scores of K heads: `losses` (K,), nats per target; `hits` (K, 10), the frequency with which the target is the
    candidate of rank 0, 1, ... (the argument of `tree.grow`); `counts` (K,), targets. On the CPU, in float64."""

    losses: Tensor
    hits: Tensor
    counts: Tensor

    def accuracy(self, k: int) -> Tensor:
        """Top-k accuracy of each head, (K,), for k up to 10; InputError beyond."""
        if not 1 <= k <= RANKS:
            raise InputError(f"accuracy is known for the 1 to {RANKS} likeliest tokens, not for {k}")
        return self.hits[:, :k].sum(1)


@torch.no_grad()
def evaluate_heads(
    model: MultiHeadModel, batches: Iterable[Batch], on_ranks: Callable[[Tensor], object] | None = None
) -> HeadScores:
    """Scores of every head over all batches; `on_ranks` gets the ranks of each batch, long (K, B, T). Of a
    sharded model as `evaluate`.

    Raises InputError when there is no batch.
    """
    losses, hits, counts = [], [], []
    device = model.base.device
    rank = torch.arange(RANKS, device=device)
    with evaluating(model):
        over = DataRanks.of(model)
        for batch in batches:
            out = model(**on_device(batch, device), reduction="sum")
            losses.append(out.head_losses.double())
            hits.append((out.ranks[..., None] == rank).sum((1, 2)))
            counts.append(out.counts)
            if on_ranks is not None:
                on_ranks(out.ranks)
    if not losses:
        raise InputError("there is no text to evaluate on: not a single batch was given")
    loss, hit, count = (over.sum(torch.stack(each).sum(0).double()).cpu() for each in (losses, hits, counts))
    at_least_one = count.clamp(min=1)
    return HeadScores(loss / at_least_one, hit / at_least_one[:, None], count)


def perplexity(loss: float) -> float:
    """exp(loss); infinity where that is more than a float holds."""
    return math.inf if loss > 700 else math.exp(loss)


@dataclass(frozen=True)
class KLToReference:
    """KL(reference || model) over some text, and the losses of both, all in nats per target."""

    kl: float
    loss: float
    reference_loss: float

    @property
    def perplexity_change(self) -> float:
        """Relative change of the perplexity: 0.01 is one percent worse than the reference's."""
        return perplexity(self.loss - self.reference_loss) - 1


@torch.no_grad()
def evaluate_kl(model: CausalLM, reference: CausalLM, batches: Iterable[Batch]) -> KLToReference:
    """KL of `model` to `reference`, a model of the same vocabulary on the same device. Of sharded models as `evaluate`.

    Raises InputError when there is no batch.
    """
    sums, counts = [], []
    with evaluating(model), evaluating(reference):
        ranks = DataRanks.of(model)
        for batch in batches:
            part: dict[str, Any] = on_device(batch, model.device)
            labels, size = part.pop("labels"), model.config.vocab_size
            documents = {name: part.pop(name, None) for name in ("attention_mask", "position_ids", "cu_seqlens")}
            layout = model.layout((labels.shape[0], labels.shape[1]), sharded=False, **documents)
            targets = Targets(labels, (1,), vocab_size=size, layout=layout)
            positions = documents["position_ids"]
            part = {name: layout.rows.take(x) for name, x in part.items()}
            part |= {"cu_seqlens": layout.cu_seqlens, "token_indices": targets, "return_last_hidden_state": True}
            part["position_ids"] = None if positions is None else layout.rows.take(positions)
            hidden, untouched = (each(**part)["last_hidden_state"] for each in (model, reference))

            def head(
                hidden: Tensor, right: Tensor, untouched: Tensor = untouched, size: int = size, **_: Any
            ) -> HeadLoss:
                sizes = {"vocab_size": size}
                return HeadLoss(
                    loss=divergence_and_losses(hidden, model.logits, untouched, reference.logits, right, **sizes)
                )

            sums.append(cast(Tensor, targets.loss(0, head, hidden).loss).double())
            counts.append((targets.values[0] != IGNORE_INDEX).sum())
    if not sums:
        raise InputError("there is no text to evaluate on: not a single batch was given")
    count = ranks.sum(torch.stack(counts).sum())
    return KLToReference(*(ranks.sum(torch.stack(sums).sum(0)) / count.clamp(min=1)).tolist())
