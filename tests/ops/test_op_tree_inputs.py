from typing import Any

import pytest
import torch
from conftest import Where

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.speculative.tree import Tree, chain, default_tree


@pytest.mark.parametrize(
    ("stops", "moving"), [([], None), ([6], None), ([9, 4, 5], None), ([7], 7), ([4, 8], 8)], ids=str
)
@pytest.mark.parametrize(
    "tree", [Tree.from_paths([]), chain(4), default_tree(4, 20), default_tree(5, 300)], ids=lambda tree: str(len(tree))
)
def test_tree_inputs(where: Where, tree: Tree, stops: list[int], moving: int | None) -> None:
    """Node by node: the tokens of its head and rank, and positions up to the last that its row may reach."""
    batch, device = 9, where.device
    best = torch.randint(1000, (tree.max_depth, batch, tree.width), device=device).transpose(0, 1)
    root, cache_seqlens = torch.randint(1000, (batch,), device=device), torch.arange(1, 1 + batch, device=device)
    data = [x.to(device) for x in (tree.depth, tree.rank, torch.tensor(stops, dtype=torch.long))]
    tokens, positions = ops.tree_inputs(best, root, cache_seqlens, *data, moving)
    assert tokens.dtype == positions.dtype == torch.long
    for b, length in enumerate(cache_seqlens.tolist()):
        limit = min([stop - 1 for stop in stops if length < stop], default=10**9)
        if moving is not None and length >= moving:
            limit = length
        assert positions[b].tolist() == [min(length + len(path), limit) for path in ((), *tree.paths)]
        assert tokens[b].tolist() == [int(root[b]), *(int(best[b, len(path) - 1, path[-1]]) for path in tree.paths)]
    none = best[:0], root[:0], cache_seqlens[:0]
    assert ops.tree_inputs(*none, *data, moving)[0].shape == (0, len(tree))


@pytest.mark.kernels
@pytest.mark.parametrize("moving", [None, 3])
def test_schema_and_fake(moving: int | None, kernels_device: torch.device) -> None:
    tensors = (
        torch.ones(2, 1, 1),
        *(torch.ones(2), torch.ones(2)),
        torch.tensor([0, 1]),
        torch.tensor([-1, 0]),
        torch.ones(1),
    )
    torch.library.opcheck(
        torch.ops.ligermodels.tree_inputs.default,
        (*(x.long().to(kernels_device) for x in tensors), moving),
        test_utils=("test_schema", "test_faketensor"),
    )


LONG = torch.ones(3).long()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"best": LONG}, r"best must be torch.int64 of shape \(3, D, W\)"),
        ({"root": LONG[:2]}, r"root must be torch.int64 of shape \(3\)"),
        ({"cache_seqlens": LONG.float()}, "cache_seqlens must be torch.int64"),
        ({"rank": LONG}, r"rank must be torch.int64 of shape \(2\)"),
        ({"stops": LONG[None]}, "stops must be"),
        ({"depth": LONG[:2].to("meta")}, "depth .* on meta"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    call = {
        "best": torch.ones(3, 1, 1).long(),
        "root": LONG,
        "cache_seqlens": LONG,
        "depth": LONG[:2],
        "rank": LONG[:2],
    }
    with pytest.raises(InputError, match=message):
        ops.tree_inputs(**(call | {"stops": LONG[:0]} | change))
