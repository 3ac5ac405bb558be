"""Benchmark of decoding with heads against plain decoding, and trees that are fitted to the heads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ligermodels.arguments import check_count
from ligermodels.data.batches import Batch
from ligermodels.errors import InputError
from ligermodels.generation.generate import as_eos_ids, until_eos
from ligermodels.layers import IGNORE_INDEX
from ligermodels.speculative.evaluation import HeadScores, evaluate_heads
from ligermodels.speculative.multi_head import MultiHeadModel
from ligermodels.speculative.tree import DynamicTree, Tree, expected_tokens, grow

GREEDY: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0}
"""Options of greedy decoding, in place of the checkpoint's: tree decoding then gives the tokens of plain decoding."""

BATCH_SIZE = 16
"""Prompts per batch."""


@dataclass(frozen=True)
class ContinuationScores:
    """Scores of K heads on the model's own greedy continuations of prompts, the text that the heads draft.

    scores: scores over all new tokens.
    ranks: for each prompt, long (K, n): after each new token, from the first one on, the number of tokens that a head
        ranks above the correct token, -1 without a target.
    lengths: for each prompt, the number of new tokens.
    """

    scores: HeadScores
    ranks: list[Tensor]
    lengths: list[int]

    def tokens_per_step(self, tree: Tree) -> float:
        """Tokens per step of decoding with `tree`, computed from the ranks; nan without a step.

        Each step takes the longest path of correct candidates. For these prompts the result is exact with Medusa and
        DFlash heads. The candidates of other heads also depend on the candidates before them, which here are the
        correct tokens, and MTP heads attend to other keys in training: an estimate. Unlike
        `tree.expected_tokens`, it does not assume independent errors of the heads.
        """
        paths, tokens, steps = set(tree.paths), 0, 0
        for ranks, length in zip(self.ranks, self.lengths, strict=True):
            position, columns = 0, ranks.T.tolist()
            while position < length - 1:
                path = columns[position]
                depth = 0
                while depth < len(path) and tuple(path[: depth + 1]) in paths:
                    depth += 1
                position += depth + 1
                steps += 1
            tokens += length - 1
        return tokens / steps if steps else math.nan


@torch.no_grad()
def evaluate_continuations(
    model: MultiHeadModel, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> ContinuationScores:
    """Continue prompts greedily with the base model, and score the heads on the new tokens.

    Accuracies on other text are lower, since a model's own text is easier to predict.

    Args:
        model: a model with draft heads.
        prompts: token ids of each prompt.
        max_new_tokens: largest number of new tokens per prompt.

    Returns:
        The scores.

    Raises:
        InputError: there is no prompt.
    """
    if not prompts:
        raise InputError("prompts: there is no prompt to continue; give at least one")
    ends = as_eos_ids(model.base.generation_defaults().get("eos_token_id"))
    pad: dict[str, Any] = {} if ends else {"pad_token_id": 0}  # never attended to
    ranks: list[Tensor] = []
    lengths, batches = [], []
    for first in range(0, len(prompts), BATCH_SIZE):
        part = prompts[first : first + BATCH_SIZE]
        out = model.base.generate(part, max_new_tokens, **pad, **GREEDY)[:, max(map(len, part)) :].tolist()
        for prompt, row in zip(part, out, strict=True):
            new = until_eos(row, ends)
            ids = torch.tensor([[*prompt, *new]])
            labels = ids.clone()
            # The base model predicts the first new token; heads may start from it.
            labels[:, : len(prompt) + model.first_ahead - 1] = IGNORE_INDEX
            batches.append(Batch({"input_ids": ids, "labels": labels}))
            lengths.append(len(new))
    scores = evaluate_heads(model, batches, lambda batch_ranks: ranks.append(batch_ranks[:, 0]), every_token=True)
    # Heads draft after the first new token from this token, or from the state of the prompt's last token.
    before = model.first_ahead - 1
    ranks = [row[:, len(prompt) - before :].cpu() for row, prompt in zip(ranks, prompts, strict=True)]
    return ContinuationScores(scores, ranks, lengths)


@dataclass(frozen=True)
class DecodingBenchmark:
    """Results of decoding with heads and of plain decoding.

    prompts: number of prompts.
    same: number of prompts for which both gave the same tokens.
    tokens: number of new tokens.
    steps: number of steps with heads.
    tokens_per_step: tokens per step with heads; 1 for plain decoding.
    plain_seconds: time of plain decoding.
    medusa_seconds: time of decoding with heads.
    batch_size: largest number of prompts in a batch.
    """

    prompts: int
    same: int
    tokens: int
    steps: int
    tokens_per_step: float
    plain_seconds: float
    medusa_seconds: float
    batch_size: int = 1

    @property
    def speed_up(self) -> float:
        """Time of plain decoding divided by the time with heads."""
        return self.plain_seconds / self.medusa_seconds


def benchmark_decoding(
    model: MultiHeadModel,
    prompts: Sequence[Sequence[int]],
    *,
    tree: Tree | DynamicTree,
    max_new_tokens: int,
    batch_size: int = 1,
    progress: Callable[[int, int], object] | None = None,
) -> DecodingBenchmark:
    """Time greedy decoding with heads and plain greedy decoding, batch by batch, after a warm-up of both.

    Args:
        model: a model with draft heads.
        prompts: token ids of each prompt.
        tree: the candidates to check in each step.
        max_new_tokens: largest number of new tokens per prompt.
        batch_size: prompts that are decoded together.
        progress: called after each batch with (prompts done, prompts in total).

    Returns:
        The results.

    Raises:
        InputError: there is no prompt.

    Examples:
        >>> benchmark_decoding(medusa, [[1, 5, 9]], tree=medusa.default_tree(), max_new_tokens=64).speed_up
    """
    if not prompts:
        raise InputError("prompts: there is no prompt to continue; give at least one")
    batch_size = check_count("batch_size", batch_size)
    ends = as_eos_ids(model.base.generation_defaults().get("eos_token_id"))
    options = {**GREEDY, **({} if ends or batch_size == 1 else {"pad_token_id": 0})}
    first = prompts[:batch_size]
    model.base.generate(first, max_new_tokens=2, **options)
    model.generate(first, max_new_tokens=2, tree=tree, **options)  # kernels are compiled for the size of the tree
    same = tokens = steps = 0
    plain_seconds = medusa_seconds = 0.0
    for start in range(0, len(prompts), batch_size):
        part = prompts[start : start + batch_size]
        before = time.perf_counter()
        plain = model.base.generate(part, max_new_tokens=max_new_tokens, **options).tolist()
        middle = time.perf_counter()
        out = model.generate(part, max_new_tokens=max_new_tokens, tree=tree, return_stats=True, **options)
        found = out.sequences.tolist()
        medusa_seconds += time.perf_counter() - middle
        plain_seconds += middle - before
        longest = max(map(len, part))
        pairs = zip(found, plain, strict=True)
        same += sum(until_eos(a[longest:], ends) == until_eos(b[longest:], ends) for a, b in pairs)
        tokens, steps = tokens + out.new_tokens, steps + out.steps
        if progress is not None:
            progress(start + len(part), len(prompts))
    per_step = (tokens - len(prompts)) / steps if steps else math.nan
    return DecodingBenchmark(len(prompts), same, tokens, steps, per_step, plain_seconds, medusa_seconds, batch_size)


@dataclass(frozen=True)
class TreeFit:
    """A tree fitted on one half of the prompts, and its benchmark on the other half.

    continuations: scores of the heads on the first half.
    tree: the tree grown from these scores.
    expected: tokens per step on the first half, if the heads' errors are independent (`tree.expected_tokens`).
    predicted: tokens per step on the first half, from the ranks (`ContinuationScores.tokens_per_step`).
    benchmark: results on the second half.
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
    """Grow a tree from the heads' scores on every other prompt, and benchmark it on the other prompts.

    With 64 prompts per half, predicted and measured tokens per step differ by a few percent. Prompts should be
    distinct: see `data.prompts.opening_prompts`.

    Args:
        model: a model with draft heads.
        prompts: token ids of each prompt, two prompts or more.
        nodes: number of candidates in the tree.
        max_new_tokens: largest number of new tokens per prompt.
        progress: called after each prompt of the benchmark with (prompts done, prompts in total).

    Returns:
        The tree and the results.

    Raises:
        InputError: there are fewer than two prompts.

    Examples:
        >>> fit = fit_tree(medusa, prompts, nodes=63, max_new_tokens=128)
        >>> medusa.generate([[1, 5, 9]], max_new_tokens=64, tree=fit.tree)
    """
    if len(prompts) < 2:
        raise InputError(f"prompts: give two prompts or more, to fit the tree and to benchmark it, got {len(prompts)}")
    continuations = evaluate_continuations(model, prompts[::2], max_new_tokens=max_new_tokens)
    hits = continuations.scores.hits
    tree = grow(hits, nodes)
    benchmark = benchmark_decoding(model, prompts[1::2], tree=tree, max_new_tokens=max_new_tokens, progress=progress)
    return TreeFit(continuations, tree, expected_tokens(tree, hits), continuations.tokens_per_step(tree), benchmark)
