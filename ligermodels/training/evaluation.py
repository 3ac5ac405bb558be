"""Scores on held-out text, and decoding with Medusa heads against decoding without."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ligermodels.archs.medusa import MedusaModel
from ligermodels.errors import InputError
from ligermodels.generation import Tree
from ligermodels.generation.generate import evaluating
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
def evaluate_heads(medusa: MedusaModel, batches: Iterable[Batch]) -> HeadScores:
    """Loss and hits of every head over all batches. Raises InputError when there is no batch."""
    losses, hits, counts = [], [], []
    device = medusa.base.device
    rank = torch.arange(RANKS, device=device)
    with evaluating(medusa):
        for batch in batches:
            out = medusa(**on_device(batch, device), reduction="sum")
            losses.append(out.head_losses.double())
            hits.append((out.ranks[..., None] == rank).sum((1, 2)))
            counts.append(out.counts)
    if not losses:
        raise InputError("there is no text to evaluate on: not a single batch was given")
    count = torch.stack(counts).sum(0).double().cpu()
    at_least_one = count.clamp(min=1)
    return HeadScores(
        torch.stack(losses).sum(0).cpu() / at_least_one, torch.stack(hits).sum(0).cpu() / at_least_one[:, None], count
    )


@dataclass(frozen=True)
class Race:
    """Decoding with heads against decoding without: on how many `prompts` both gave the `same` tokens, the `tokens`
    generated, the `steps` that the heads took, `tokens_per_step` (plain decoding has 1), and the seconds of each."""

    prompts: int
    same: int
    tokens: int
    steps: int
    tokens_per_step: float
    plain_seconds: float
    medusa_seconds: float


def race(
    medusa: MedusaModel,
    prompts: Sequence[Sequence[int]],
    *,
    tree: Tree,
    max_new_tokens: int,
    progress: Callable[[int, int], object] | None = None,
) -> Race:
    """Continue each prompt (token ids) greedily with the heads and without, one at a time, after a warm-up of both."""
    if not prompts:
        raise InputError("there is no prompt to continue: give at least one")
    for warm_up in (medusa.base.generate, medusa.generate):
        warm_up([prompts[0]], max_new_tokens=2)
    same = tokens = steps = 0
    plain_seconds = medusa_seconds = 0.0
    for done, prompt in enumerate(prompts, start=1):
        start = time.perf_counter()
        plain = medusa.base.generate([prompt], max_new_tokens=max_new_tokens).tolist()
        middle = time.perf_counter()
        out = medusa.generate([prompt], max_new_tokens=max_new_tokens, tree=tree, return_stats=True)
        same += out.sequences.tolist() == plain
        medusa_seconds += time.perf_counter() - middle
        plain_seconds += middle - start
        tokens, steps = tokens + out.new_tokens, steps + out.steps
        if progress is not None:
            progress(done, len(prompts))
    per_step = (tokens - len(prompts)) / steps if steps else math.nan
    return Race(len(prompts), same, tokens, steps, per_step, plain_seconds, medusa_seconds)
