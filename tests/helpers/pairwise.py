"""Pairwise coverage of products of parameters: few cases in which every pair of values still occurs."""

from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch


def cover(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """Indices of cases that contain every pair of values, of two different parameters, that `cases` contain.

    Greedy: the case with the most pairs that are still missing is next, the first of equal ones.

    Args:
        cases: The values of the parameters, for each case.
    """
    numbers: dict[Hashable, int] = {}
    masks = []
    for case in cases:
        pairs = combinations(enumerate(case), 2)
        masks.append(sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs))
    missing, chosen = (1 << len(numbers)) - 1, []
    while missing:
        best = max(range(len(masks)), key=lambda index: (masks[index] & missing).bit_count())
        chosen.append(best)
        missing &= ~masks[best]
    return sorted(chosen)


def by_turns(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """As many tuples as the longest of `axes` has values; the others take turns, so every value of each occurs.

    For parameters that do not interact: a layer and the form of its weights, say.

    Args:
        axes: the values of the parameters.
    """
    return [tuple(axis[index % len(axis)] for axis in axes) for index in range(max(map(len, axes)))]


def parameters(item: pytest.Function) -> tuple[Hashable, ...]:
    """One value for each `parametrize` of a test, and for each fixture with parameters.

    The fixture `where` of tests/ops has two: the place, and the dtype (on a GPU each of them, elsewhere whether it is
    float32).
    """
    params, values = dict(item.callspec.params), list[Hashable]()
    if isinstance(params.get("where"), tuple):
        place, dtype = params.pop("where")
        values += [place, dtype if place == "cuda" else dtype == torch.float32]
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        values.append(tuple(id(params.pop(name.strip(), None)) for name in names))
    return (*values, *map(id, params.values()))


def pairwise(items: Sequence[pytest.Item], *, has_gpu: bool = False) -> list[pytest.Item]:
    """Items that cover, for each test, all pairs of values of its parameters; all cases of a test marked `every_case`.

    Args:
        items: The cases of all tests.
        has_gpu: Whether there is a GPU. Then the cases of a test on the GPU cover all pairs, and so do its others.
            Without one a test's cases on the GPU are dropped if it has others; else the first of them is kept.
    """
    tests: dict[tuple[object, str, bool], list[pytest.Item]] = {}
    for item in items:
        on_gpu = item.get_closest_marker("gpu") is not None
        tests.setdefault((item.parent, getattr(item, "originalname", item.name), on_gpu), []).append(item)
    kept: set[pytest.Item] = set()
    for (parent, name, on_gpu), cases in tests.items():
        if on_gpu and not has_gpu:
            kept.update(() if (parent, name, False) in tests else cases[:1])
            continue
        if len(cases) > 2 and not any(case.get_closest_marker("every_case") for case in cases):
            cases = [cases[index] for index in cover([parameters(case) for case in cases])] or cases
        kept.update(cases)
    return [item for item in items if item in kept]
