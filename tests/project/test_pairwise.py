"""Products of parameters are covered pairwise: every pair of values, and so every value, is in a case."""

from itertools import combinations, product

import pytest
from pairwise import cover

pytest_plugins = ["pytester"]

PAIRWISE = """
import pytest

@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize(("b", "c"), [(1, 2), (3, 4), (1, 5)])
@pytest.mark.parametrize("d", "xyz")
def test_product(a, b, c, d): ...

@pytest.mark.every_case
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("c", range(4))
def test_every_case(a, b, c): ...
"""


@pytest.mark.parametrize(("sizes", "most"), [((7,), 0), ((3, 5), 15), ((2, 2, 7, 3), 24), ((4, 4, 4, 4), 28)])
def test_every_pair_is_covered(sizes: tuple[int, ...], most: int) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = [cases[index] for index in cover(cases)]

    def pairs(cases: list[tuple[int, ...]]) -> set[tuple[tuple[int, int], ...]]:
        return {pair for case in cases for pair in combinations(enumerate(case), 2)}

    assert pairs(chosen) == pairs(cases) and len(chosen) <= most


def test_cases_of_a_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PAIRWISE)
    pytester.makeconftest(
        "from pairwise import pairwise\ndef pytest_collection_modifyitems(items): items[:] = pairwise(items)"
    )
    pytester.makeini("[pytest]\nmarkers = every_case: all cases")
    names = [line.partition("::")[2] for line in pytester.runpytest("--collect-only", "-q").outlines if "::" in line]
    assert 12 <= sum(name.startswith("test_product[") for name in names) < 18
    assert sum(name.startswith("test_every_case[") for name in names) == 64
