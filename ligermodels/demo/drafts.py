"""Medusa, EAGLE-3 and DSpark heads, trained on the same model and data in the same time, and decoding with each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ligermodels.demo.decoding import fastest_tree_record, now, timed_generate
from ligermodels.demo.settings import DemoSettings
from ligermodels.speculative.benchmark import GREEDY, evaluate_continuations
from ligermodels.speculative.multi_head import MultiHeadModel
from ligermodels.speculative.tree import DynamicTree, chain, grow
from ligermodels.training import Callback, DSparkRecipe, EagleRecipe, MedusaRecipe, train_dspark, train_eagle
from ligermodels.training import train_heads as train_medusa

KINDS: dict[str, tuple[Any, Any]] = {
    "medusa": (MedusaRecipe, train_medusa),
    "eagle": (EagleRecipe, train_eagle),
    "dspark": (DSparkRecipe, train_dspark),
}
"""Kind of heads -> its recipe, and the function that trains."""
WARM_UP, TIMED = 5, 15
"""Steps of the run that measures the time of a step: before the measurement, and in it."""
SAMPLED = {"do_sample": True, "temperature": 1.0}


class StepSeconds(Callback):
    """Measures the seconds of a step on a device, after a warm-up."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._start = self.seconds = 0.0

    def on_step(self, event: Any) -> None:
        if event.step not in (WARM_UP, WARM_UP + TIMED):
            return
        time = now(self._device)
        self.seconds, self._start = (time - self._start) / TIMED, time


def settings_of(kind: str, s: DemoSettings) -> dict[str, Any]:
    """The settings of a recipe that differ from its defaults, for heads of a small model."""
    if kind == "medusa":
        return {"num_heads": s.num_heads, "learning_rate": s.head_learning_rate}
    if kind == "eagle":
        return {"num_steps": s.draft_steps, "draft_vocab_size": s.vocab_size, "learning_rate": s.draft_learning_rate}
    return {
        "block_size": s.draft_steps,
        "num_layers": 2,
        "num_anchors": max(1, s.seq_len // 8),  # as published: 512 for 4,096 tokens
        "markov_rank": min(256, s.hidden_size),
        "learning_rate": s.draft_learning_rate,
    }


def trees_of(model: MultiHeadModel, kind: str, fit: Sequence[Sequence[int]], s: DemoSettings) -> dict[str, Any]:
    """The trees to choose from, by name.

    Args:
        model: the model with the heads.
        kind: a name of KINDS.
        fit: prompts that the trees of Medusa heads are grown for.
        s: sizes of the demo.
    """
    if kind == "medusa":
        hits = evaluate_continuations(model, fit, max_new_tokens=s.new_tokens).scores.hits
        return {f"tree of {size}": grow(hits, size) for size in s.tree_sizes}
    depths = sorted({max(1, model.num_heads // 2), model.num_heads})
    trees: dict[str, Any] = {f"chain of {depth}": chain(depth) for depth in depths}
    if kind == "eagle":
        trees["dynamic tree"] = DynamicTree(model.num_heads, 4, 16)
    return trees


def compare_drafts(
    models: Mapping[str, MultiHeadModel], prompts: Sequence[Sequence[int]], s: DemoSettings
) -> Iterator[dict[str, Any]]:
    """Tokens per step and wall time of whole calls of `generate`, for each batch size, greedy and sampled.

    Args:
        models: kind of heads -> a model with such heads, all on the same base model.
        prompts: token ids. Half of the prompts choose the fastest tree of each kind; the other half measure decoding.
        s: batch sizes, tree sizes and number of new tokens.

    Yields:
        A record for each batch size, way of decoding and kind. `same` counts the sequences with the tokens of greedy
        decoding without heads; None for sampled ones.
    """
    fit, measured = prompts[::2], prompts[1::2]
    trees = {kind: trees_of(model, kind, fit, s) for kind, model in models.items()}
    base = next(iter(models.values())).base
    for batch in s.batch_sizes:
        for way, options in (("greedy", GREEDY), ("sampled", SAMPLED)):
            plain = timed_generate(base.generate, measured, batch, s, options)
            for kind, model in models.items():
                record = fastest_tree_record(model, trees[kind], fit, measured, batch, s, options, plain)
                record["same"] = record["same"] if way == "greedy" else None
                yield {"kind": model.kind, "batch": batch, "decoding": way, **record}
