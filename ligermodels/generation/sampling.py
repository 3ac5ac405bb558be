"""The next token from logits: greedy, or drawn after temperature, top-k, top-p and min-p."""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.arguments import LARGEST
from ligermodels.errors import InputError, short
from ligermodels.layers.packing import assert_async


def greedy(logits: Tensor) -> Tensor:
    """The most probable token, of equal ones the lowest: logits (..., V) -> long (...)."""
    return ops.topk_indices(logits, 1)[..., 0]


def penalise_repetition(logits: Tensor, text: Tensor, lengths: Tensor, *, penalty: float) -> Tensor:
    """Logits (B, V) with those of tokens that a sequence has divided by `penalty`, or multiplied where negative.

    text: long (B, W), of which sequence b has the first lengths[b], at least one. As in transformers (Keskar et al.,
    2019, section 4.1).
    """
    place = torch.arange(text.shape[1], device=text.device)
    seen = torch.where(place < lengths[:, None], text, text[:, :1])
    scores = logits.gather(1, seen)
    return logits.scatter(1, seen, torch.where(scores < 0, scores * penalty, scores / penalty))


def warp(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Logits (..., V) -> fp32 logits of the distribution to draw from, with -inf where a token is ruled out.

    The filters run in this order, each on the result of the one before, as in transformers. At least one token stays.

    Args:
        temperature: logits are divided by it; > 0.
        top_k: only the k largest logits stay (and any equal to the k-th); None or 0: all.
        top_p: in [0, 1]; the smallest set of the most probable tokens whose probability reaches top_p stays.
        min_p: in [0, 1]; tokens less probable than min_p times the most probable one go.

    Raises:
        InputError: a value is out of its range.
    """
    check_sampling(temperature, top_k, top_p, min_p)
    logits = logits.float() / temperature
    if top_k:
        smallest = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    if top_p is not None and top_p < 1:
        ascending, order = logits.sort(dim=-1)
        # a token goes when it and all less probable ones together hold no more than 1 - top_p
        drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        drop[..., -1] = False
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -math.inf)
    if min_p:
        probabilities = logits.softmax(dim=-1)
        logits = logits.masked_fill(probabilities < min_p * probabilities.amax(dim=-1, keepdim=True), -math.inf)
    return logits


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one token a row: logits (B, V) -> long (B,). The options are those of `warp`.

    `generator` must live on the device of the logits. Raises InputError (on a GPU: a device assertion) for NaN.
    """
    warped = warp(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities = warped.softmax(dim=-1)
    assert_async(~probabilities.isnan(), "sampling: probabilities are NaN, as the model's logits are NaN or infinite")
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


MOST = 999_999_999
"""Tokens, or samples, of a call."""
VALUES: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    **dict.fromkeys(("do_sample", "cuda_graph", "return_stats"), (bool, lambda value: True, "True or False")),
    **dict.fromkeys(("on_token", "on_tokens"), (Callable, lambda value: True, "a function")),
    "generator": (torch.Generator, lambda value: True, "a torch.Generator"),
    "temperature": (Real, lambda value: 0 <= value < LARGEST, "a number above 0"),
    "top_k": (Integral, lambda value: value >= 0, "1 or more (None or 0 to keep every token)"),
    **dict.fromkeys(("top_p", "min_p"), (Real, lambda value: 0 <= value <= 1, "a number in [0, 1]")),
    **dict.fromkeys(
        ("repetition_penalty", "epsilon", "delta"), (Real, lambda value: 0 < value < LARGEST, "a number above 0")
    ),
    **dict.fromkeys(
        ("max_new_tokens", "max_length", "num_return_sequences"),
        (Integral, lambda value: 1 <= value <= MOST, f"a whole number from 1 to {MOST:,}"),
    ),
}
"""Options of `generate` -> their type, whether a value is in range, and what it must be."""


def check_values(**options: Any) -> None:
    """InputError for an option of VALUES that is not of its type or out of its range; None passes."""
    for name, value in options.items():
        kind, fits, wanted = VALUES[name]
        right = isinstance(value, kind) and isinstance(value, bool) == (kind is bool) and fits(value)
        if value is not None and not right:
            raise InputError(f"{name} must be {wanted}, got {short(value)}")


def check_sampling(temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    """InputError when a sampling option is out of its range."""
    check_values(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if not temperature:
        raise InputError(f"temperature must be above 0, got {temperature}; for greedy decoding leave do_sample off")
