"""Decoding with Medusa heads: foreseen on some prompts, and measured on others against decoding without."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ligermodels.archs.medusa import MedusaModel
from ligermodels.errors import InputError
from ligermodels.generation import Tree, expected_tokens, grow
from ligermodels.generation.generate import as_eos_ids, until_eos
from ligermodels.layers import IGNORE_INDEX
from ligermodels.training.data import Batch
from ligermodels.training.evaluation import HeadScores, evaluate_heads

AT_ONCE = 16
"""Prompts that the model continues side by side."""


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
        """What decoding with `tree` yields, from the ranks alone: step by step, the longest path on which every head is
        right. Of these prompts it is true by construction; for others like them it is a prediction. Unlike
        `generation.expected_tokens` it takes no head's errors as independent of another's, and no place as like any
        other. nan when there is no step to take.
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
    ends = as_eos_ids(medusa.base.generation_defaults().get("eos_token_ids"))
    pad = {} if ends else {"pad_token_id": 0}  # Where no row ends early, what fills up prompts is never seen.
    ranks: list[Tensor] = []
    lengths, parts = [], []
    for first in range(0, len(prompts), AT_ONCE):
        some = prompts[first : first + AT_ONCE]
        out = medusa.base.generate(some, max_new_tokens, **pad)[:, max(map(len, some)) :].tolist()
        for prompt, row in zip(some, out, strict=True):
            new = until_eos(row, ends)
            ids = torch.tensor([[*prompt, *new]])
            labels = ids.clone()
            labels[:, : len(prompt) + 1] = IGNORE_INDEX  # The first new token is the model's, not a head's.
            parts.append(Batch({"input_ids": ids, "labels": labels}))
            lengths.append(len(new))
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
    medusa.base.generate([prompts[0]], max_new_tokens=2)
    medusa.generate([prompts[0]], max_new_tokens=2, tree=tree)  # The same tree: kernels are made for its size.
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


@dataclass(frozen=True)
class Trial:
    """Decoding foreseen on one half of some prompts, and measured on the other.

    Of the first half: `own`, the heads on the model's own text; the `tree` grown from their accuracies there; and
    tokens a step, `expected` if heads err independently, and `predicted`, as they do err. Of the second: the `race`.
    """

    own: OwnText
    tree: Tree
    expected: float
    predicted: float
    race: Race


def trial(
    medusa: MedusaModel,
    prompts: Sequence[Sequence[int]],
    *,
    nodes: int,
    max_new_tokens: int,
    progress: Callable[[int, int], object] | None = None,
) -> Trial:
    """Grow a tree of `nodes` candidates on every other prompt, foresee tokens a step there, and race it on the rest.

    Give no prompt twice (`opening_prompts` finds each once). With none on both sides what is measured can differ from
    what was predicted: by the luck of the draw, a few percent with 64 prompts a side and more with less, and by
    whatever is wrong with either.
    Raises InputError for fewer than two prompts.
    """
    if len(prompts) < 2:
        raise InputError(f"a trial needs two prompts or more, one to predict from and one to measure: {len(prompts)}")
    own = evaluate_own_text(medusa, prompts[::2], max_new_tokens=max_new_tokens)
    tree = grow(own.scores.hits, nodes)
    outcome = race(medusa, prompts[1::2], tree=tree, max_new_tokens=max_new_tokens, progress=progress)
    return Trial(own, tree, expected_tokens(tree, own.scores.hits), own.tokens_per_step(tree), outcome)
