from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from conftest import Where

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.speculative.tree import Tree, chain, default_tree

TREES = {
    "root": Tree.from_paths([]),
    "chain": chain(3),
    "bushy": Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 2), (1, 0, 0), (2, 2, 1), (0, 1, 2)]),
    "default": default_tree(5),
    "too deep for a tile": chain(128),
}
VOCAB, MAX_NEW = 3, 9  # so few tokens that many are right


def paths_of(tree: Tree, device: torch.device) -> ops.Paths:
    """By the definition: each node's path from the root, its last node repeated."""
    retrieve_indices = []
    for node in range(len(tree)):
        path = [node]
        while path[0]:
            path.insert(0, int(tree.parent[path[0]]))
        retrieve_indices.append(path + [node] * (tree.max_depth + 1 - len(path)))
    tensors = tree.parent, tree.depth, torch.tensor(retrieve_indices)
    return ops.Paths(*(x.to(device) for x in tensors))


def copied(rows: ops.Sequences) -> ops.Sequences:
    return ops.Sequences(*(getattr(rows, field.name).clone() for field in fields(rows)))


def in_lists(rows: ops.Sequences) -> dict[str, Any]:
    return {field.name: getattr(rows, field.name).tolist() for field in fields(rows)}


def make_sequences(batch: int, width: int, tree: Tree, device: torch.device, dtype: torch.dtype) -> ops.Sequences:
    """Sequences of different lengths in the middle of decoding: some about to end, some done."""
    start, count = torch.randint(1, 5, (batch,)), torch.randint(1, MAX_NEW, (batch,))
    done = torch.rand(batch) < 0.2
    count[done] += torch.randint(2, (int(done.sum()),))  # up to the last token
    text = torch.randint(VOCAB, (batch, 4 + MAX_NEW + tree.max_depth + 1))
    tensors = (text, start, count, start + count - 1, torch.randint(VOCAB, (batch,)))
    hidden = torch.randn(batch, width, dtype=dtype, device=device)
    steps = torch.randint(5, (batch,))
    return ops.Sequences(*(x.to(device) for x in tensors), hidden, done.to(device), steps.to(device))


def make_step(
    rows: ops.Sequences, tree: Tree, width: int, right: float, judged: bool
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]:
    """What the model makes of a tree: a part `right` of its tokens are chosen, some positions are beyond the limit."""
    device, batch, nodes = rows.root.device, len(rows.root), len(tree)
    choices = torch.randint(VOCAB, (batch, nodes))
    tokens = torch.where(
        torch.rand(batch, nodes) < right, choices[:, tree.parent], torch.randint(VOCAB, (batch, nodes))
    )
    tokens[:, 0] = rows.root.cpu()
    cache_seqlens = rows.cache_seqlens.cpu()[:, None]
    limit = cache_seqlens + torch.randint(tree.max_depth + 1, (batch, 1)) * (torch.rand(batch, 1) < 0.3) + 2
    positions = torch.minimum(cache_seqlens + tree.depth, limit)
    states = torch.randn(batch, nodes, width, dtype=rows.hidden.dtype)
    score = torch.randn(batch, nodes).round()  # so that sums are often equal
    score[torch.rand(batch, nodes) < 0.1] = -torch.inf
    yes = (torch.rand(batch, nodes) < right) & score.isfinite()
    given = [x.to(device) for x in (tokens, positions, choices, states)]
    return given, (yes.to(device), score.to(device)) if judged else None


def expected(
    rows: ops.Sequences,
    tree: Tree,
    given: Sequence[torch.Tensor],
    eos: Sequence[int],
    judged: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[dict[str, Any], list[list[int]]]:
    """Row by row and node by node, in Python: the rows afterwards, and the slots."""
    tokens, positions, choices, states = (x.tolist() for x in given)
    parent, depth, after, slots = tree.parent.tolist(), tree.depth.tolist(), in_lists(rows), []
    right = judged[0].tolist() if judged else [
        [token == chosen[above] for token, above in zip(row, parent, strict=True)]
        for row, chosen in zip(tokens, choices, strict=True)
    ]  # fmt: skip
    for b in range(len(tokens)):
        inside, total = [True], [0.0]
        for n in range(1, len(tree)):
            fits = right[b][n] and positions[b][n] == after["cache_seqlens"][b] + depth[n]
            inside.append(fits and inside[parent[n]])
            total.append(total[parent[n]] + (float(judged[1][b, n]) if judged else 0.0))
        last = max(
            (n for n in range(len(tree)) if inside[n]), key=lambda n: (depth[n], total[n] if inside[n] else 0, -n)
        )
        path = [last]
        while path[0]:
            path.insert(0, parent[path[0]])
        slots.append([after["cache_seqlens"][b] + n for n in path + [last] * (tree.max_depth - depth[last])])
        if after["done"][b]:
            continue
        after["steps"][b] += 1
        ended = False
        for token in [*(tokens[b][n] for n in path[1:]), choices[b][last]]:
            after["text"][b][after["start"][b] + after["count"][b]] = token
            after["count"][b] += 1
            ended = token in eos or after["count"][b] == MAX_NEW
            if ended:
                break
        after["done"][b] = ended
        if not ended:
            after["cache_seqlens"][b] += depth[last] + 1
            after["root"][b] = choices[b][last]
            after["hidden"][b] = states[b][last]
    return after, slots


@pytest.mark.parametrize("judged", [False, True], ids=["chosen", "masked"])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_accept_path(where: Where, tree: Tree, judged: bool) -> None:
    """Step after step, as Python does it, and to the bits of the reference, what nobody reads included."""
    device, batch = where.device, 7
    paths = paths_of(tree, device)
    gained, ended = set(), 0
    for seed, (width, right, eos) in enumerate(
        [(5, 0.95, []), (1, 0.6, [2]), (4097, 0.9, [1, 7]), (3, 1.0, [7, 8, 9])]
    ):
        torch.manual_seed(seed)
        rows = make_sequences(batch, width, tree, device, where.dtype)
        for _ in range(3):
            given, verdict = make_step(rows, tree, width, right, judged)
            rest = torch.tensor(eos, dtype=torch.long, device=device), MAX_NEW, *(verdict or ())
            before, other = copied(rows), copied(rows)
            slots = ops.accept_path(rows, paths, *given, *rest)
            assert torch.equal(slots, ops.accept_path_reference(other, paths, *given, *rest))
            assert in_lists(rows) == in_lists(other)
            after, wanted = expected(before, tree, given, eos, verdict)
            found = in_lists(rows)
            for state in (found, after):  # up to where the text counts
                ends = [start + count for start, count in zip(state["start"], state["count"], strict=True)]
                state["text"] = [text[:end] for text, end in zip(state["text"], ends, strict=True)]
            assert (found, slots.tolist()) == (after, wanted)
            gained |= set((rows.count - before.count).tolist())
            ended += int((rows.done & ~before.done).sum())
    assert ended and {0, 1} <= gained and (len(tree) == 1 or len(gained) > 3)


def test_a_score_of_minus_infinity(where: Where) -> None:
    """An accepted node counts, whatever its score."""
    tree = ops.Paths(*(torch.tensor(x, device=where.device) for x in ([0, 0], [0, 1], [[0, 0], [0, 1]])))
    zero, hidden = torch.zeros(1, dtype=torch.long, device=where.device), torch.zeros(1, 4, device=where.device)
    rows = ops.Sequences(zero.new_zeros(1, 9), *(zero.clone() for _ in range(4)), hidden, zero.bool(), zero.clone())
    tokens, positions, choices = (torch.tensor([x], device=where.device) for x in ([5, 6], [0, 1], [7, 8]))
    accepted = torch.ones(1, 2, dtype=torch.bool, device=where.device)
    scores = torch.tensor([[0.0, -torch.inf]], device=where.device)
    ops.accept_path(
        rows, tree, tokens, positions, choices, hidden.expand(1, 2, 4), zero[:0], 9, accept_mask=accepted, scores=scores
    )
    assert rows.count.tolist() == [2] and rows.root.tolist() == [8]


def test_inputs_may_be_what_is_changed(where: Where) -> None:
    """Tokens and positions that are the rows' own; inputs of any strides; no rows at all."""
    tree = TREES["root"]
    paths = paths_of(tree, where.device)
    rows = make_sequences(6, 8, tree, where.device, where.dtype)
    other = copied(rows)
    (_, _, choices, states), _ = make_step(rows, tree, 8, 1.0, False)
    eos = torch.tensor([2], device=where.device)
    wide = states.expand(6, 2, 8)[:, 1:], choices.expand(6, 2)[:, 1:]
    ops.accept_path(rows, paths, rows.root[:, None], rows.cache_seqlens[:, None], *wide[::-1], eos, MAX_NEW)
    same = other.root[:, None].clone(), other.cache_seqlens[:, None].clone(), choices, states
    ops.accept_path_reference(other, paths, *same, eos, MAX_NEW)
    assert in_lists(rows) == in_lists(other)
    rows = make_sequences(0, 8, tree, where.device, where.dtype)
    assert ops.accept_path(rows, paths, *make_step(rows, tree, 8, 1.0, False)[0], eos, MAX_NEW).shape == (0, 1)


@pytest.mark.kernels
def test_schema_and_fake(kernels_device: torch.device) -> None:
    tree = TREES["bushy"]
    rows = make_sequences(3, 4, tree, kernels_device, torch.float32)
    given, judged = make_step(rows, tree, 4, 0.9, True)
    paths = paths_of(tree, kernels_device)
    state = [getattr(rows, field.name) for field in fields(rows)]
    eos = torch.tensor([2], device=kernels_device)
    args = (*given, *vars(paths).values(), eos, *judged, *state, MAX_NEW)
    torch.library.opcheck(
        torch.ops.ligermodels.accept_path.default, args, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.ones(2, 3, dtype=torch.long)}, r"tokens must be torch.int64 of shape \(2, 4\) on cpu"),
        ({"choices": torch.ones(2, 4)}, "choices must be torch.int64"),
        ({"positions": torch.ones(2, 4, dtype=torch.long, device="meta")}, "on cpu; got|on cpu, got .* on meta"),
        ({"states": torch.ones(2, 4, 6)}, r"states must be floating of shape \(2, 4, 5\)"),
        ({"eos": torch.ones(1, 1, dtype=torch.long)}, "eos must be"),
        ({"accept_mask": torch.ones(2, 4), "scores": torch.ones(2, 4)}, "accept_mask must be torch.bool"),
        ({"accept_mask": torch.ones(2, 4).bool(), "scores": torch.ones(2, 4).double()}, "scores must be torch.float32"),
        ({"accept_mask": torch.ones(2, 4).bool()}, "accept_mask and scores must be given together"),
        ({"tree": ("retrieve_indices", torch.zeros(3, 4, dtype=torch.long))}, "Paths: retrieve_indices must be"),
        ({"sequences": ("done", torch.zeros(2))}, "Sequences: done must be torch.bool"),
        ({"sequences": ("text", torch.zeros(30, 2, dtype=torch.long).t())}, "Sequences: text must be contiguous"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    tree, rows = chain(3), make_sequences(2, 5, chain(3), torch.device("cpu"), torch.float32)
    given, _ = make_step(rows, tree, 5, 1.0, False)
    call: dict[str, Any] = dict(zip(("tokens", "positions", "choices", "states"), given, strict=True))
    call |= {"sequences": rows, "tree": paths_of(tree, torch.device("cpu"))}
    call |= {"eos": torch.zeros(0, dtype=torch.long), "max_new_tokens": 9} | change
    with pytest.raises(InputError, match=message):
        if "tree" in change:
            call["tree"] = replace(paths_of(tree, torch.device("cpu")), **dict([change["tree"]]))
        if "sequences" in change:
            call["sequences"] = replace(rows, **dict([change["sequences"]]))
        ops.accept_path(**call)
