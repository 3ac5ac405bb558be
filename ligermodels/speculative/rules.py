"""The rule of a call of `speculative_generate`: greedy decoding, typical acceptance, or speculative sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.generation.sampling import SHAPING, check_values, greedy, sample
from ligermodels.layers.sharding import ModuleLike, chosen_together
from ligermodels.speculative.acceptance import Accept, Typical, accept_greedy
from ligermodels.speculative.drafting import ChooseDrafts
from ligermodels.speculative.sampling import Sampling
from ligermodels.speculative.tree import DynamicTree, Tree


@dataclass(frozen=True)
class Rule:
    """How tokens are chosen and accepted.

    accept: accepts nodes of a tree.
    choose: logits (B, V) -> tokens, long (B,), after a prefill.
    drafts: chooses candidates from a head's logits; None for the most probable tokens.
    renew: called before each step, outside of its CUDA graph; None if the rule draws no random numbers.
    """

    accept: Accept = accept_greedy
    choose: Callable[[Tensor], Tensor] = greedy
    drafts: ChooseDrafts | None = None
    renew: Callable[[], object] | None = None


GREEDY = Rule()


def shaping_of(
    do_sample: bool, generator: torch.Generator | None, temperature: float | None, *filters: Any
) -> dict[str, Any]:
    """The options of SHAPING, for sampling or typical acceptance.

    Args:
        do_sample: whether to sample.
        generator: random generator, or None.
        temperature: None for 1 in sampling and for 0 otherwise.
        filters: `top_k`, `top_p` and `min_p`.

    Returns:
        The options, with defaults; empty for greedy decoding, which is also sampling at temperature 0.

    Raises:
        InputError: a value is out of range, or an option of sampling is given without `do_sample`.
    """
    values = dict(zip(SHAPING, (temperature, *filters), strict=True))
    check_values(do_sample=do_sample, generator=generator, **values)
    unused = [name for name, value in {**values, "generator": generator}.items() if value is not None]
    if not do_sample and (unused := [name for name in unused if name != "temperature"]):
        raise InputError(f"{unused[0]}: is for sampling; give do_sample=True, or leave it out")
    values["temperature"] = float((1 if do_sample else 0) if temperature is None else temperature)
    return values if values["temperature"] else {}


def typical_of(is_typical: bool, **options: float | None) -> dict[str, float]:
    """The given options of typical acceptance, `epsilon` and `delta`.

    Args:
        is_typical: whether the call accepts tokens by typical acceptance.
        options: their values, None where one is not given.

    Raises:
        InputError: a value is out of range, or is given for another rule, where it has no effect.
    """
    check_values(**options)
    given = {name: float(value) for name, value in options.items() if value is not None}
    if given and not is_typical:
        raise InputError(
            f"{next(iter(given))}: is for typical acceptance; give a temperature above 0 without do_sample, or leave "
            "it out"
        )
    return given


def rule_of(
    model: ModuleLike,
    tree: Tree | DynamicTree,
    batch_size: int,
    device: torch.device,
    do_sample: bool,
    shaping: Mapping[str, Any],
    typical: Mapping[str, float],
    generator: torch.Generator | None,
) -> Rule:
    """The rule of a call.

    Args:
        model: the model; tensor-parallel ranks draw the same random numbers.
        tree: the candidates.
        batch_size: B.
        device: the model's device.
        do_sample: whether to sample.
        shaping: the result of `shaping_of`.
        typical: the result of `typical_of`.
        generator: random generator; None for torch's own.

    Returns:
        The rule.

    Raises:
        InputError: the generator is on another device.
    """
    if not shaping:
        return GREEDY
    if not do_sample:
        return Rule(Typical(shaping["temperature"], **typical))
    if generator is not None and generator.device.type != device.type:
        raise InputError(f"generator: is on {generator.device}, and the model on {device}")
    fill = chosen_together(model, lambda numbers: numbers.uniform_(generator=generator))
    rule = Sampling(shaping, batch_size, tree, device, fill)
    choose = chosen_together(model, partial(sample, **shaping, generator=generator))
    return Rule(rule, choose, rule.drafts, rule.renew)
