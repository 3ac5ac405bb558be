"""Decoding with heads: a tree fitted on some prompts, and a benchmark against plain decoding on others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ligermodels.data.batches import Batch
from ligermodels.errors import InputError
from ligermodels.generation.generate import as_eos_ids, until_eos
from ligermodels.layers import IGNORE_INDEX
from ligermodels.speculative.evaluation import HeadScores, evaluate_heads
from ligermodels.speculative.multi_head import MultiHeadModel
from ligermodels.speculative.tree import Tree, expected_tokens, grow

GREEDY: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0}
"""Options of plain decoding under which tree decoding gives the same tokens, whatever the checkpoint says."""

AT_ONCE = 16
"""Prompts per batch."""


@dataclass(frozen=True)
class ContinuationScores:
    """Scores of K heads on the model's own greedy continuations of some prompts, the text that they decode.

    `ranks`, per prompt long (K, n), from the position that predicts the first new token on: the number of tokens that a
    head ranks above the right one, -1 past the end. `lengths`: new tokens per prompt.
    """

    scores: HeadScores
    ranks: list[Tensor]
    lengths: list[int]

    def tokens_per_step(self, tree: Tree) -> float:
        """Tokens per step of decoding with `tree`, replayed from the ranks: each step takes the longest path on which
        every head is right. Exact for these prompts, a prediction for others; unlike `tree.expected_tokens` it does not
        assume that heads err independently. nan without a step.
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
def evaluate_continuations(
    model: MultiHeadModel, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> ContinuationScores:
    """Continue prompts (token ids) greedily with the base model, and score the heads on the new tokens.

    Accuracies on other text are lower: a model's own text is easier to predict. Raises InputError without a prompt.
    """
    if not prompts:
        raise InputError("there is no prompt to continue: give at least one")
    ends = as_eos_ids(model.base.generation_defaults().get("eos_token_id"))
    pad = {} if ends else {"pad_token_id": 0}  # never attended to
    ranks: list[Tensor] = []
    lengths, parts = [], []
    for first in range(0, len(prompts), AT_ONCE):
        some = prompts[first : first + AT_ONCE]
        out = model.base.generate(some, max_new_tokens, **pad, **GREEDY)[:, max(map(len, some)) :].tolist()
        for prompt, row in zip(some, out, strict=True):
            new = until_eos(row, ends)
            ids = torch.tensor([[*prompt, *new]])
            labels = ids.clone()
            labels[:, : len(prompt) + 1] = IGNORE_INDEX  # the base model predicts the first new token
            parts.append(Batch({"input_ids": ids, "labels": labels}))
            lengths.append(len(new))
    scores = evaluate_heads(model, parts, on_ranks=lambda found: ranks.append(found[:, 0]))
    ranks = [found[:, len(prompt) - 1 :].cpu() for found, prompt in zip(ranks, prompts, strict=True)]
    return ContinuationScores(scores, ranks, lengths)


@dataclass(frozen=True)
class DecodingBenchmark:
    """Decoding with heads against plain decoding: the number of `prompts`, on how many of them both gave the `same`
    tokens, `tokens` generated, `steps` with heads, `tokens_per_step` (1 for plain decoding), and the times."""

    prompts: int
    same: int
    tokens: int
    steps: int
    tokens_per_step: float
    plain_seconds: float
    medusa_seconds: float

    @property
    def speed_up(self) -> float:
        """Time of plain decoding over that with heads."""
        return self.plain_seconds / self.medusa_seconds


def benchmark_decoding(
    model: MultiHeadModel,
    prompts: Sequence[Sequence[int]],
    *,
    tree: Tree,
    max_new_tokens: int,
    progress: Callable[[int, int], object] | None = None,
) -> DecodingBenchmark:
    """Continue each prompt (token ids) greedily with the heads and without, one at a time, after a warm-up of both."""
    if not prompts:
        raise InputError("there is no prompt to continue: give at least one")
    model.base.generate([prompts[0]], max_new_tokens=2, **GREEDY)
    model.generate([prompts[0]], max_new_tokens=2, tree=tree, **GREEDY)  # kernels are compiled for the size of the tree
    same = tokens = steps = 0
    plain_seconds = medusa_seconds = 0.0
    for done, prompt in enumerate(prompts, start=1):
        start = time.perf_counter()
        plain = model.base.generate([prompt], max_new_tokens=max_new_tokens, **GREEDY).tolist()
        middle = time.perf_counter()
        out = model.generate([prompt], max_new_tokens=max_new_tokens, tree=tree, return_stats=True, **GREEDY)
        same += out.sequences.tolist() == plain
        medusa_seconds += time.perf_counter() - middle
        plain_seconds += middle - start
        tokens, steps = tokens + out.new_tokens, steps + out.steps
        if progress is not None:
            progress(done, len(prompts))
    per_step = (tokens - len(prompts)) / steps if steps else math.nan
    return DecodingBenchmark(len(prompts), same, tokens, steps, per_step, plain_seconds, medusa_seconds)


@dataclass(frozen=True)
class TreeFit:
    """A tree fitted on one half of some prompts, and its benchmark on the other.

    From the first half: `continuations`, the heads' scores there; the `tree` grown from them; and tokens per step,
    `expected` if heads err independently, and `predicted` by replay. From the second half: the `benchmark`.
    """

    continuations: ContinuationScores
    tree: Tree
    expected: float
    predicted: float
    benchmark: DecodingBenchmark


def fit_tree(
    model: MultiHeadModel,
    prompts: Sequence[Sequence[int]],
    *,
    nodes: int,
    max_new_tokens: int,
    progress: Callable[[int, int], object] | None = None,
) -> TreeFit:
    """Grow a tree of `nodes` candidates from every other prompt (token ids), and benchmark it on the rest.

    Prompts should be distinct, as those of `opening_prompts`. Sampling noise between prediction and measurement is a
    few percent with 64 prompts per half. Raises InputError for fewer than two prompts.
    """
    if len(prompts) < 2:
        raise InputError(f"need two prompts or more, one to fit the tree and one to benchmark it, got {len(prompts)}")
    own = evaluate_continuations(model, prompts[::2], max_new_tokens=max_new_tokens)
    tree = grow(own.scores.hits, nodes)
    outcome = benchmark_decoding(model, prompts[1::2], tree=tree, max_new_tokens=max_new_tokens, progress=progress)
    return TreeFit(own, tree, expected_tokens(tree, own.scores.hits), own.tokens_per_step(tree), outcome)
