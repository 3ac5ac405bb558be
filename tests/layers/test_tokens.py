"""Steps of a token layout: each is undone by `restore`, alone and one after another."""

from types import SimpleNamespace

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.layers.tokens import ContextShard, PackedRows, SelectedTokens, Tokens, Unpadding, token_layout

MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 1, 0], [1, 1, 1, 1, 1]])
STEPS: dict[str, Tokens] = {
    "all": Tokens(),
    "padding": Unpadding(MASK),
    "packed": PackedRows(3, 5),
    "selected": SelectedTokens(torch.tensor([0, 4, 7, 13]), 3, 5),
}


@pytest.mark.parametrize("name", STEPS)
def test_restore_is_the_inverse_of_take(name: str) -> None:
    step, index = STEPS[name], torch.arange(15).view(3, 5)
    taken = step.take(index)
    restored = step.restore(taken, -1)
    assert restored.shape == index.shape and torch.equal(restored[restored >= 0], taken.flatten().sort().values)
    assert torch.equal(torch.where(restored >= 0, index, -1), restored)
    x = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(step.take, (x,)) and torch.equal(step.take(x)[..., 0], step.take(x[..., 0]))
    y = step.take(x).detach().requires_grad_()
    assert torch.autograd.gradcheck(step.restore, (y,))


def test_one_row_of_positions_stands_for_all_rows() -> None:
    step, row = STEPS["selected"], torch.arange(5)[None]
    assert torch.equal(step.take(row), step.take(row.expand(3, 5)))


def shards(length: int, ranks: int) -> list[ContextShard]:
    def mesh(rank: int) -> SimpleNamespace:
        return SimpleNamespace(size=lambda: ranks, get_local_rank=lambda: rank)

    return [ContextShard(mesh(rank), 2, length) for rank in range(ranks)]


@pytest.mark.parametrize("length", [1, 7, 12, 13])
@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_of_a_sequence(length: int, ranks: int) -> None:
    """Every token is on one rank, and its place there is a token's; the rest is filled."""
    x = torch.arange(2 * length).view(2, length)
    taken = [shard.take(x, -1) for shard in shards(length, ranks)]
    assert len({each.shape for each in taken}) == 1
    together = torch.cat(taken, 1)
    assert torch.equal(together[together >= 0].sort().values, x.flatten())
    for shard, each in zip(shards(length, ranks), taken, strict=True):
        assert torch.equal(shard.is_token(x.device), each >= 0)


def test_layouts() -> None:
    shape, positions = (3, 5), torch.tensor([[0, 1, 0, 1, 2], [*range(5)], [*range(5)]])
    index = torch.arange(15).view(shape)
    padded, packed, plain = (
        token_layout(shape, attention_mask=MASK),
        token_layout(shape, position_ids=positions),
        token_layout(shape, attention_mask=torch.ones_like(MASK)),
    )
    assert padded.cu_seqlens is not None and padded.cu_seqlens.tolist() == [0, 3, 6, 11]
    assert torch.equal(padded.take(index), index[MASK.bool()][None])
    assert torch.equal(padded.restore(padded.take(index), -1), index.masked_fill(MASK == 0, -1))
    assert packed.cu_seqlens is not None and packed.cu_seqlens.tolist() == [0, 2, 5, 10, 15]
    assert torch.equal(packed.take(index), index.view(1, 15)) and torch.equal(packed.restore(index.view(1, 15)), index)
    assert plain.cu_seqlens is None and plain.take(index) is index and plain.restore(index) is index
    with pytest.raises(InputError, match="attention_mask: give no position_ids or cu_seqlens with it"):
        token_layout(shape, attention_mask=MASK, position_ids=positions)


@pytest.mark.parametrize("name", ["padding", "packed", "selected"])
def test_what_is_restored_is_no_view(name: str) -> None:
    """FSDP2 warns of models that return views."""
    taken = STEPS[name].take(torch.randn(3, 5, 2, requires_grad=True)).sin()
    assert not STEPS[name].restore(taken)._is_view()
