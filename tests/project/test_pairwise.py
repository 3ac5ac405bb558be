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

GPU = pytest.mark.gpu

@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=GPU)])
@pytest.mark.parametrize("c", range(4))
def test_places(a, b, c, place): ...

@GPU
@pytest.mark.parametrize("a", range(4))
def test_on_the_gpu(a): ...
"""


@pytest.mark.parametrize(("sizes", "most"), [((7,), 0), ((3, 5), 15), ((2, 2, 7, 3), 24), ((4, 4, 4, 4), 28)])
def test_every_pair_is_covered(sizes: tuple[int, ...], most: int) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = [cases[index] for index in cover(cases)]

    def pairs(cases: list[tuple[int, ...]]) -> set[tuple[tuple[int, int], ...]]:
        return {pair for case in cases for pair in combinations(enumerate(case), 2)}

    assert pairs(chosen) == pairs(cases) and len(chosen) <= most


@pytest.mark.parametrize("has_gpu", [False, True])
def test_cases_of_a_test(pytester: pytest.Pytester, has_gpu: bool) -> None:
    """On a machine with a GPU the cases there cover all pairs by themselves; without one they are left out."""
    pytester.makepyfile(PAIRWISE)
    pytester.makeconftest(
        "from pairwise import pairwise\n"
        f"def pytest_collection_modifyitems(items): items[:] = pairwise(items, has_gpu={has_gpu})"
    )
    pytester.makeini("[pytest]\nmarkers =\n    every_case: all cases\n    gpu: on a GPU")
    names = [line.partition("::")[2] for line in pytester.runpytest("--collect-only", "-q").outlines if "::" in line]
    assert 12 <= sum(name.startswith("test_product[") for name in names) < 18
    assert sum(name.startswith("test_every_case[") for name in names) == 64
    places = [name for name in names if name.startswith("test_places[")]
    assert 16 <= sum("cpu" in name for name in places) < 32
    assert 16 <= sum("gpu" in name for name in places) < 32 if has_gpu else not any("gpu" in name for name in places)
    assert sum(name.startswith("test_on_the_gpu[") for name in names) == (4 if has_gpu else 1)
