"""Trees that differ among the sequences of a batch: each sequence gets the results that it gets alone."""

from typing import Any

import pytest
import torch
from conftest import Where
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError

BATCH, DEPTH = 3, 4


def trees(nodes: int, device: torch.device) -> dict[str, Tensor]:
    """Random trees, whose nodes are ordered by depth; all tensors begin with the dimension of the sequences."""
    parent = torch.zeros(BATCH, nodes, dtype=torch.long)
    for row in range(BATCH):
        for node in range(1, nodes):
            parent[row, node] = torch.randint(max(parent[row, node - 1], node - 3), node, ())
    ancestors, depth = torch.eye(nodes, dtype=torch.bool).repeat(BATCH, 1, 1), torch.zeros_like(parent)
    routes = torch.arange(nodes)[None, :, None].repeat(BATCH, 1, nodes)
    for row in range(BATCH):
        for node in range(1, nodes):
            above = int(parent[row, node])
            ancestors[row, node] |= ancestors[row, above]
            depth[row, node] = depth[row, above] + 1
            routes[row, node, : depth[row, node]] = routes[row, above, : depth[row, node]]
    longest = int(depth.max()) + 1
    found = {"parent": parent, "depth": depth, "ancestors": ancestors, "routes": routes[:, :, :longest].contiguous()}
    return {name: x.to(device) for name, x in found.items()}


@torch.no_grad()
@pytest.mark.parametrize("by_channel", [False, True], ids=["one decay", "by channel"])
@pytest.mark.parametrize("nodes", [1, 7, 33])
def test_recurrent_mixers(where: Where, nodes: int, by_channel: bool) -> None:
    own, device, dtype = trees(nodes, where.device), where.device, where.dtype
    q, k = (torch.randn(BATCH, nodes, 2, 16, device=device).to(dtype) for _ in range(2))
    v, channels = torch.randn(BATCH, nodes, 4, 12, device=device).to(dtype), [16] * by_channel
    g = -torch.rand(BATCH, nodes, 4, *channels, device=device)
    operands = q, k, v, g, torch.rand(BATCH, nodes, 4, device=device)
    state, node = torch.randn(BATCH, 4, 16, 12, device=device), torch.randint(nodes, (BATCH,), device=device)
    x, weight = torch.randn(BATCH, nodes, 8, device=device).to(dtype), torch.randn(8, 4, device=device).to(dtype)
    inputs = torch.randn(BATCH, 3, 8, device=device).to(dtype)

    def run(rows: slice, parent: Tensor, depth: Tensor, ancestors: Tensor) -> tuple[Tensor, ...]:
        after, kept = state[rows].clone(), inputs[rows].clone()
        o, updates = ops.gated_delta_rule_tree(*(x[rows] for x in operands), after, ancestors)
        ops.commit_tree(after, updates, node[rows], ancestors)
        convolved = ops.causal_conv(x[rows], weight, earlier=kept, tree=(parent, depth))
        ops.commit_conv_inputs(kept, x[rows], node[rows], (parent, depth))
        return o, *updates, after, convolved, kept

    names = ("parent", "depth", "ancestors")
    together = run(slice(None), *(own[name] for name in names))
    alone = [run(slice(row, row + 1), *(own[name][row] for name in names)) for row in range(BATCH)]
    for ours, parts in zip(together, zip(*alone, strict=True), strict=True):
        # torch's batched products round differently for another number of rows.
        torch.testing.assert_close(
            ours, torch.cat(parts), rtol=1.6e-2 if ours.dtype == torch.bfloat16 else 1e-4, atol=1e-4
        )


@torch.no_grad()
@pytest.mark.parametrize("scored", [False, True])
def test_the_end_of_a_step(where: Where, scored: bool) -> None:
    nodes, device = 23, where.device
    own = trees(nodes, device)
    rank = torch.arange(nodes, device=device).expand(BATCH, -1).contiguous()
    depths = int(own["depth"].max())
    best = torch.randint(6, (BATCH, depths, nodes), device=device)
    root, lengths = torch.randint(6, (BATCH,), device=device), torch.tensor([3, 9, 5], device=device)
    choices, states = torch.randint(6, (BATCH, nodes), device=device), torch.randn(BATCH, nodes, 8, device=device)
    verdict = (torch.rand(BATCH, nodes, device=device) < 0.8, torch.rand(BATCH, nodes, device=device)) if scored else ()
    stops, eos = torch.tensor([12], device=device), torch.tensor([5], device=device)

    def run(rows: slice, parent: Tensor, depth: Tensor, routes: Tensor, ranks: Tensor) -> list[Tensor]:
        paths = ops.Paths(parent, depth, routes)
        tokens, positions = ops.tree_inputs(best[rows], root[rows], lengths[rows], depth, ranks, stops)
        given = lengths[rows]
        sequences = ops.Sequences(
            torch.zeros(len(given), 60, dtype=torch.long, device=device), given.clone(), torch.ones_like(given),
            given.clone(), root[rows].clone(), states[rows, 0].clone(), torch.zeros_like(given, dtype=torch.bool),
            torch.zeros_like(given),
        )  # fmt: skip
        nodes_of = tokens, positions, choices[rows], states[rows]
        slots = ops.accept_path(sequences, paths, *nodes_of, eos, 40, *(x[rows] for x in verdict))
        return [tokens, positions, slots, *vars(sequences).values()]

    names = ("parent", "depth", "routes")
    together = run(slice(None), *(own[name] for name in names), rank)
    alone = [run(slice(row, row + 1), *(own[name][row] for name in names), rank[row]) for row in range(BATCH)]
    for ours, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(ours, torch.cat(parts))
    assert len(together[4].unique()) > 1 or scored  # rows gain numbers of tokens of their own


def test_trees_of_another_batch_are_named() -> None:
    zeros = torch.zeros(2, 1, dtype=torch.long)
    sequences: Any = ops.Sequences(
        torch.zeros(3, 9, dtype=torch.long), *(torch.ones(3, dtype=torch.long) for _ in range(4)), torch.zeros(3, 4),
        torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long),
    )  # fmt: skip
    call = torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, 1).long()
    with pytest.raises(InputError, match="tree has paths of 2 sequences, there are 3"):
        ops.accept_path(
            sequences, ops.Paths(zeros, zeros, zeros[..., None]), *call, torch.zeros(3, 1, 4), torch.zeros(0).long(), 5
        )
    with pytest.raises(InputError, match="depth must have the shape"):
        ops.Paths(zeros[None], zeros[None], zeros[None, ..., None])
