"""The next token from logits: greedy, or sampled with temperature, top-k, top-p and min-p."""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.arguments import LARGEST
from ligermodels.errors import InputError, short
from ligermodels.ops.runtime.checks import assert_async


def greedy(logits: Tensor) -> Tensor:
    """The most probable token, the lowest id among equal logits: logits (..., V) -> long (...)."""
    return ops.topk_indices(logits, 1)[..., 0]


def penalise_repetition(logits: Tensor, text: Tensor, lengths: Tensor, *, penalty: float) -> Tensor:
    """Lower the logits of tokens that a sequence contains, as transformers does (Keskar et al., 2019, section 4.1).

    Args:
        logits: (B, V), any floating-point dtype.
        text: long (B, W); sequence b is the first lengths[b] tokens of row b.
        lengths: long (B,), at least 1.
        penalty: positive logits of tokens in the sequence are divided by it, negative logits multiplied.

    Returns:
        New logits (B, V), in float32 or wider: rounded to 16 bits, a lowered logit could equal another one.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    position = torch.arange(text.shape[1], device=text.device)
    seen = torch.where(position < lengths[:, None], text, text[:, :1])
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
    """Shape the distribution to sample from: temperature, then top-k, top-p and min-p, in this order, as transformers.

    Args:
        logits: (..., V), any floating-point dtype.
        temperature: above 0; logits are divided by it.
        top_k: keep the k largest logits, and logits equal to the k-th; None or 0 keeps all.
        top_p: in [0, 1]; keep the fewest most probable tokens with a total probability of at least top_p.
        min_p: in [0, 1]; drop tokens less probable than min_p times the highest probability.

    Returns:
        fp32 logits (..., V), -inf for dropped tokens. At least one token stays.

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
        # Drop a token if it and all less probable tokens have a total probability of at most 1 - top_p.
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
    """Sample one token per sequence.

    Args:
        logits: (B, V), any floating-point dtype.
        temperature: above 0; logits are divided by it.
        top_k: sample from the k most probable tokens; None or 0: from all.
        top_p: in [0, 1]; sample from the fewest tokens with a total probability of at least top_p.
        min_p: in [0, 1]; drop tokens less probable than min_p times the highest probability.
        generator: random generator on the device of the logits; by default torch's own.

    Returns:
        Long (B,).

    Raises:
        InputError: an option is out of its range, or a probability is NaN (on a GPU: a device assertion).

    Examples:
        >>> sample(torch.tensor([[0.0, 9.0, 1.0]]), temperature=0.7, top_k=1)
        tensor([1])
    """
    warped = warp(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities = warped.softmax(dim=-1)
    assert_async(~probabilities.isnan(), "sampling: probabilities are NaN, as the model's logits are NaN or infinite")
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


SHAPING = ("temperature", "top_k", "top_p", "min_p")
"""Options that shape the distribution to sample from."""
MOST = 999_999_999
"""Upper bound of the number of tokens, and of samples, of a call."""
VALUES: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("do_sample", "cuda_graph", "batch_invariant", "return_stats", "return_routing"),
        (bool, lambda value: True, "True or False"),
    ),
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
"""Options of `generate` -> (type, whether a value is in range, description of the range for messages)."""


def check_values(**options: Any) -> None:
    """InputError for an option of VALUES with a wrong type or out of its range; None passes."""
    for name, value in options.items():
        value_type, in_range, expected = VALUES[name]
        valid = isinstance(value, value_type) and isinstance(value, bool) == (value_type is bool) and in_range(value)
        if value is not None and not valid:
            raise InputError(f"{name} must be {expected}, got {short(value)}")


def check_sampling(temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    """InputError if temperature (above 0), top_k (0 or more), top_p or min_p (in [0, 1]) is out of its range."""
    check_values(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if not temperature:
        raise InputError(
            f"temperature must be above 0 to sample, got {temperature}; generate with do_sample=False decodes greedily"
        )
