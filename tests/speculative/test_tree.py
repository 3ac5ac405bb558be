"""Medusa trees: their tensors against the definition, their growth against brute force."""

import itertools
import json
import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.speculative.tree import (
    REFERENCE_TOP1,
    REFERENCE_TOP5,
    DynamicTree,
    Tree,
    chain,
    default_tree,
    expected_tokens,
    grow,
    reference_accuracies,
)


@st.composite
def closed_paths(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Paths closed under prefix, in any order."""
    tips = draw(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), max_size=6))
    return draw(st.permutations(sorted({tip[:depth] for tip in tips for depth in range(1, len(tip) + 1)})))


@st.composite
def tables(draw: st.DrawFn) -> list[list[float]]:
    """Rank accuracies in no order, with ties and zeros; sixteenths, so that products are exact."""
    heads, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return [[draw(st.integers(0, 16 // ranks)) / 16 for _ in range(ranks)] for _ in range(heads)]


@given(closed_paths())
def test_tensors_follow_from_the_paths(paths: list[tuple[int, ...]]) -> None:
    tree = Tree.from_paths(paths)
    assert tree == Tree.from_paths(reversed(paths))
    assert set(tree.paths) == set(paths) and len(tree) == len(paths) + 1
    nodes = [(), *tree.paths]
    for i, node in enumerate(nodes):
        assert tree.mask[i].tolist() == [node[: len(other)] == other for other in nodes]
        assert nodes[tree.parent[i]] == node[:-1]
        assert tree.depth[i] == len(node)
        route = [node[:depth] for depth in range(len(node) + 1)]
        assert [nodes[each] for each in tree.route[i]] == route + [node] * (tree.max_depth + 1 - len(route))
        if node:
            assert tree.rank[i] == node[-1]
            assert tree.parent[i] < i  # a path's nodes are numbered in its order
    assert tree.max_depth == max(map(len, nodes))
    assert tree.width == max((max(path) + 1 for path in paths), default=0)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (1, 0)], r"\(1, 0\) lacks its parent \(1,\)"),
        ([(0,), (0,)], "more than once"),
        ([(0,), ()], "one or more ranks"),
        ([(-1,)], "one or more ranks"),
        ([(0.0,)], "one or more ranks"),
        ([(True,)], "one or more ranks"),
        ([0, 1], "path 0 must be one or more ranks"),
        (None, "path None must be one or more ranks"),
        ([(0,), (0, 0), (0, 0, 0)], "needs 3 heads, there are 2"),
    ],
)
def test_paths_that_are_no_tree(paths: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Tree.from_paths(paths, num_heads=2)


def test_ranks_of_numpy_are_whole_numbers() -> None:
    tree = Tree.from_paths([[numpy.int64(0), numpy.int64(1)], [numpy.int64(0)]])
    assert tree == Tree.from_paths([(0,), (0, 1)]) and json.dumps(tree.paths) == "[[0], [0, 1]]"


@given(tables(), st.integers(1, 20))
def test_grown_tree_is_the_best_of_its_size(table: list[list[float]], nodes: int) -> None:
    tree = grow(table, nodes)
    products = [
        math.prod(table[head][rank] for head, rank in enumerate(path))
        for depth in range(1, len(table) + 1)
        for path in itertools.product(range(len(table[0])), repeat=depth)
    ]
    best = sorted((product for product in products if product > 0), reverse=True)[:nodes]
    # Nodes of a path are never less probable than the path, so the most probable paths are a tree, and the best one.
    assert len(tree.paths) == len(best)
    assert expected_tokens(tree, table) == 1 + sum(best)


def test_expected_tokens_by_hand() -> None:
    tree = Tree.from_paths([(0,), (2,), (2, 1)])
    assert expected_tokens(tree, torch.tensor([[0.5, 0.2, 0.1], [0.4, 0.3, 0.1]])) == pytest.approx(1.63)
    assert expected_tokens(Tree.from_paths([]), [[0.5]]) == 1


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 9])
def test_default_tree(num_heads: int) -> None:
    """With five heads it has the published tree's size, depth and breadth."""
    tree = default_tree(num_heads)
    assert len(tree) == (11 if num_heads == 1 else 64)
    assert tree.max_depth == min(num_heads, 4)
    assert tree.width == int(tree.parent[1:].bincount().max()) == 10
    table = [reference_accuracies(head) for head in range(num_heads)]
    for row in table:
        assert row == sorted(row, reverse=True) and 0 < sum(row) < 1
    for row, top1, top5 in zip(table, REFERENCE_TOP1, REFERENCE_TOP5, strict=False):
        assert (row[0], sum(row[:5])) == pytest.approx((top1, top5))
    assert [row[0] for row in table] == sorted((row[0] for row in table), reverse=True)


@pytest.mark.parametrize("vocab_size", [1, 3, 9, 10, 500])
def test_default_tree_of_a_small_vocabulary(vocab_size: int) -> None:
    tree = default_tree(3, vocab_size=vocab_size)
    assert tree.width == min(vocab_size, 10) and len(tree) == min(64, sum(vocab_size**n for n in range(4)))
    assert vocab_size < 10 or tree == default_tree(3)


def test_what_a_dynamic_tree_needs() -> None:
    assert (len(DynamicTree(3, 2, 5)), DynamicTree(3, 2, 5).pool, len(DynamicTree(3, 2, 99))) == (6, 10, 11)
    assert len(DynamicTree(1, 4, 99)) == 5
    for wrong in ({"max_depth": 0}, {"top_k": 0}, {"nodes": 1.5}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            DynamicTree(**wrong)
    base = lm.from_config(
        {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 7, "num_attention_heads": 2}
    )
    for model, tree, message in (
        (lm.MedusaModel.from_base(base, 2), DynamicTree(), "after each candidate; give a Tree"),
        (lm.DSparkModel.from_base(base, 2, num_layers=1), DynamicTree(), "and MTP heads; DSpark heads have"),
        (lm.MTPModel.from_base(base, num_layers=2), DynamicTree(), "needs a head of one layer, this head has 2"),
        (lm.Eagle3Model.from_base(base), DynamicTree(top_k=8), "8 candidates per token, but there are 7 tokens"),
    ):
        with pytest.raises(InputError, match=message):
            model.generate([[1, 2]], 3, tree=tree)


def test_chain() -> None:
    assert chain(3).paths == ((0,), (0, 0), (0, 0, 0))


@pytest.mark.parametrize(
    ("accuracies", "message"),
    [
        ([], "shape"),
        ([0.5, 0.2], "shape"),
        ([[0.5], [0.2, 0.1]], "table"),
        ([[1.5]], r"\[0, 1\]"),
        ([[float("nan")]], r"\[0, 1\]"),
        ([[0.56, 0.78]], "cumulative"),
    ],
)
def test_accuracies_that_are_no_table(accuracies: list[list[float]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        grow(accuracies)


def test_other_errors() -> None:
    for wrong in (0, 2.5, "3", True):
        with pytest.raises(InputError, match=r"^nodes: must be a whole number of at least 1"):
            grow([[0.5]], nodes=wrong)  # type: ignore[arg-type]
    for wrong in (0, 2.5):
        with pytest.raises(InputError, match=r"^num_heads: must be a whole number of at least 1"):
            default_tree(wrong)  # type: ignore[arg-type]
    for wrong in (-1, "3"):
        with pytest.raises(InputError, match=r"^num_heads: must be a whole number of at least 0"):
            chain(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="vocab_size"):
        default_tree(1, vocab_size=0)
    with pytest.raises(InputError, match="uses 2 heads and 1 ranks"):
        expected_tokens(chain(2), [[0.5]])
