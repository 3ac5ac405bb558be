"""The speed of decoding with heads, against decoding without."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ligermodels.demo.settings import DemoSettings
from ligermodels.speculative.benchmark import GREEDY, evaluate_continuations
from ligermodels.speculative.multi_head import MultiHeadModel
from ligermodels.speculative.tree import grow

NO_END = {"eos_token_id": None, "pad_token_id": 0}
"""All sequences of a batch are decoded to the same length."""
TREE_PROMPTS = 4
"""Smallest number of prompts that are decoded to choose a tree."""
WARM_UP = 4
"""New tokens of a call that compiles kernels."""


def decoding_speeds(
    model: MultiHeadModel, prompts: Sequence[Sequence[int]], s: DemoSettings
) -> Iterator[dict[str, Any]]:
    """Wall time of whole calls of `generate`, for each batch size, greedy and with typical acceptance.

    Args:
        model: the model with heads.
        prompts: token ids. Half of the prompts fit the trees and choose the fastest tree; the other half measure
            decoding.
        s: batch sizes, tree sizes, temperature and number of new tokens.

    Yields:
        A record for each case. `same` counts the sequences with the tokens of greedy decoding without heads.
    """
    fit, measured = prompts[::2], prompts[1::2]
    hits = evaluate_continuations(model, fit, max_new_tokens=s.new_tokens).scores.hits
    trees = {size: grow(hits, size) for size in s.tree_sizes}
    acceptances: dict[str, dict[str, Any]] = {"greedy": {}}
    if s.temperature is not None:
        acceptances["typical"] = {"temperature": s.temperature}
    for batch in s.batch_sizes:
        plain = timed_generate(model.base.generate, measured, batch, s, GREEDY)
        for acceptance, options in acceptances.items():
            record = fastest_tree_record(model, trees, fit, measured, batch, s, options, plain)
            yield {"batch": batch, "acceptance": acceptance, **record}


def fastest_tree_record(
    model: MultiHeadModel,
    trees: Mapping[Any, Any],
    fit: Sequence[Sequence[int]],
    measured: Sequence[Sequence[int]],
    batch: int,
    s: DemoSettings,
    options: Mapping[str, Any],
    plain: tuple[float, list[Any]],
) -> dict[str, Any]:
    """The record of decoding with the fastest of several trees.

    Args:
        model: the model with heads.
        trees: name -> tree.
        fit: prompts that choose the tree.
        measured: prompts that are timed.
        batch: prompts per batch.
        s: number of new tokens.
        options: options of `generate`.
        plain: seconds and outputs of decoding `measured` without heads.
    """

    def seconds(name: Any) -> float:
        few = fit[: max(batch, TREE_PROMPTS)]
        return timed_generate(model.generate, few, batch, s, {"tree": trees[name], **options})[0]

    best = min(trees, key=seconds) if len(trees) > 1 else next(iter(trees))
    with_tree = {"tree": trees[best], "return_stats": True, **options}
    total, outputs = timed_generate(model.generate, measured, batch, s, with_tree)
    steps, tokens = sum(out.steps for out in outputs), sum(out.new_tokens for out in outputs)
    pairs = zip(torch.cat(plain[1]), torch.cat([out.sequences for out in outputs]), strict=True)
    return {
        "tree": best,
        "plain_seconds": plain[0],
        "seconds": total,
        "steps": steps,
        "tokens_per_step": (tokens - len(measured)) / steps,
        "speed_up": plain[0] / total,
        "prompts": len(measured),
        "new_tokens": s.new_tokens,
        "same": sum(torch.equal(one, other) for one, other in pairs),
    }


def timed_generate(
    generate: Callable[..., Any],
    prompts: Sequence[Sequence[int]],
    batch: int,
    s: DemoSettings,
    options: Mapping[str, Any],
) -> tuple[float, list[Any]]:
    """Seconds and outputs of decoding all prompts in batches, after a warm-up.

    Args:
        generate: a method `generate`.
        prompts: token ids.
        batch: prompts per batch.
        s: number of new tokens, and device.
        options: options of `generate`.
    """
    options = {**options, **NO_END}
    for filling in (0, s.new_tokens - WARM_UP):  # kernels of attention depend on the size of the cache
        generate([[*prompt, *[0] * filling] for prompt in prompts[:batch]], WARM_UP, **options)
    start = now(s.device)
    outputs = [
        generate(prompts[first : first + batch], s.new_tokens, **options) for first in range(0, len(prompts), batch)
    ]
    return now(s.device) - start, outputs


def now(device: str) -> float:
    """The time in seconds, after all kernels on the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()
