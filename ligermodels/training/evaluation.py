"""Scores on held-out text, and decoding with Medusa heads against decoding without."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ligermodels.archs.distillation import divergence_and_losses
from ligermodels.archs.medusa import MedusaModel
from ligermodels.errors import InputError
from ligermodels.generation import Tree
from ligermodels.generation.generate import as_eos_ids, evaluating
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


@dataclass(frozen=True)
class OwnText:
    """What K heads achieve on the model's own greedy continuations of some prompts: the text that they work on.

    `scores` as of any text; `ranks`, for each prompt, long (K, n) from the state that chose the first new token on: how
    many tokens a head finds likelier than the right one, -1 past the end; `lengths`, how many tokens are new.
    """

    scores: HeadScores
    ranks: list[Tensor]
    lengths: list[int]

    def tokens_per_step(self, tree: Tree) -> float:
        """What decoding these prompts with `tree` will yield, from the ranks alone: step by step, the longest path on
        which every head is right. Unlike `generation.expected_tokens` it takes no head's errors as independent of
        another's, and no place as like any other. nan when there is no step to take.
        """
        paths, tokens, steps = set(tree.paths), 0, 0
        for ranks, length in zip(self.ranks, self.lengths, strict=True):
            at, columns = 0, ranks.T.tolist()
            while at < length - 1:
                right = columns[at]
                depth = 0
                while depth < len(right) and tuple(right[: depth + 1]) in paths:
                    depth += 1
                at += depth + 1
                steps += 1
            tokens += length - 1
        return tokens / steps if steps else math.nan


@torch.no_grad()
def evaluate_own_text(medusa: MedusaModel, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> OwnText:
    """Let the base model continue prompts (token ids) greedily, and score the heads on what it says.

    Accuracies on text by others are lower: a model's own text is easier to foresee, and it is what heads see at work.
    Raises InputError without a prompt.
    """
    if not prompts:
        raise InputError("there is no prompt to continue: give at least one")
    defaults = medusa.base.generation_defaults()
    ends = as_eos_ids(defaults.get("eos_token_ids"))
    pad = {} if ends else {"pad_token_id": 0}  # Where no row ends early, what fills up prompts is never seen.
    out = medusa.base.generate(prompts, max_new_tokens, **pad)
    ranks: list[Tensor] = []
    lengths, parts = [], []
    for prompt, new in zip(prompts, out[:, max(map(len, prompts)) :].tolist(), strict=True):
        length = next((place for place, token in enumerate(new, start=1) if token in ends), len(new))
        ids = torch.tensor([[*prompt, *new[:length]]])
        labels = ids.clone()
        labels[:, : len(prompt) + 1] = IGNORE_INDEX  # The first new token is the model's, not a head's.
        parts.append(Batch({"input_ids": ids, "labels": labels}))
        lengths.append(length)
    scores = evaluate_heads(medusa, parts, on_ranks=lambda found: ranks.append(found[:, 0]))
    ranks = [found[:, len(prompt) - 1 :].cpu() for found, prompt in zip(ranks, prompts, strict=True)]
    return OwnText(scores, ranks, lengths)


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

    @property
    def speed_up(self) -> float:
        """How many times as fast decoding with the heads is."""
        return self.plain_seconds / self.medusa_seconds


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
