"""Evaluation of the heads of a multi-head model on given text: loss, accuracy and ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ligermodels import evaluation
from ligermodels.data.batches import Batch, on_device
from ligermodels.errors import InputError
from ligermodels.generation.eval_mode import evaluating
from ligermodels.parallel.ranks import DataRanks
from ligermodels.speculative.acceptance import chain_length
from ligermodels.speculative.multi_head import MultiHeadModel
from ligermodels.speculative.output import ACCEPTED

RANKS = 10
"""Ranks of a head's candidates that are counted separately; a tree uses no more."""


@dataclass(frozen=True)
class HeadScores:
    """Scores of K heads, float64 tensors on the CPU; NaN for a head without a target.

    losses: (K,), nats per target.
    hits: (K, 10), how often the target is the candidate of rank 0, 1, ..., as a fraction: the argument of `tree.grow`.
        0 for a head without a target.
    counts: (K,), number of targets.
    accepted: of heads that learn the model's distribution, "acceptance" and "agreement", each (K,): see
        `MultiHeadOutput`; empty for other heads.
    """

    losses: Tensor
    hits: Tensor
    counts: Tensor
    accepted: Mapping[str, Tensor] = field(default_factory=dict)

    def accuracy(self, k: int) -> Tensor:
        """Top-k accuracy of each head, (K,), for k from 1 to 10; InputError for any other k."""
        if not 1 <= k <= RANKS:
            raise InputError(f"k: the top-k accuracy is known for k from 1 to {RANKS}, got {k}")
        return self.hits[:, :k].sum(1).where(self.counts > 0, torch.nan)

    def tokens_per_step(self) -> dict[str, float]:
        """For each of `accepted` the mean number of tokens per step with drafts in a chain: see `chain_length`."""
        return {name: chain_length(share.tolist()) for name, share in self.accepted.items()}


@torch.no_grad()
def evaluate_heads(
    model: MultiHeadModel,
    batches: Iterable[Batch],
    on_ranks: Callable[[Tensor], object] | None = None,
    *,
    every_token: bool = False,
) -> HeadScores:
    """Scores of every head over all batches.

    If FSDP2 shards the model, each rank gives its own batches, and the scores are means over the batches of all ranks.
    Every rank needs the same number of batches; a batch may be without targets.

    Args:
        model: a model with draft heads.
        batches: arguments of the model's forward, with labels.
        on_ranks: called after each batch with the ranks of its targets, long (K, B, T), -1 without a target.
        every_token: score DFlash and DSpark heads on blocks from all tokens, not from `num_anchors` of each sequence.

    Returns:
        The scores.

    Raises:
        InputError: there is no batch.

    Examples:
        >>> ids = torch.arange(3, 40)[None]
        >>> evaluate_heads(medusa, [Batch({"input_ids": ids, "labels": ids})]).accuracy(1)
    """
    losses, hits, counts, accepted = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    device, options = model.base.device, model.every_token if every_token else {}
    rank = torch.arange(RANKS, device=device)
    with evaluating(model):
        data_ranks = DataRanks.of(model)
        for batch in batches:
            out = model(**on_device(batch, device), reduction="sum", **options)
            losses.append(out.head_losses.double())
            hits.append((out.ranks[..., None] == rank).sum((1, 2)))
            counts.append(out.counts)
            if shares := out.accepted():
                accepted.append(torch.stack([torch.stack(share) for share in shares.values()]).double())
            if on_ranks is not None:
                on_ranks(out.ranks)
    if not losses:
        raise InputError(evaluation.NO_BATCH)
    loss, hit, count, *sums = (
        data_ranks.sum(torch.stack(x).sum(0).double()).cpu() for x in (losses, hits, counts, accepted) if x
    )
    named = dict(zip(ACCEPTED, sums[0], strict=True)) if sums else {}
    means = {name: total / number for name, (total, number) in named.items()}
    return HeadScores(loss / count, hit / count.clamp(min=1)[:, None], count, means)


def __getattr__(name: str) -> Any:
    """Names of an earlier release: using one warns and gives the object in `ligermodels.evaluation`."""
    if name not in ("KLToReference", "evaluate", "evaluate_kl", "perplexity"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = f"{evaluation.__name__}.{name}"
    warnings.warn(f"{__name__}.{name} is now {new}; change the import", DeprecationWarning, stacklevel=2)
    return getattr(evaluation, name)
