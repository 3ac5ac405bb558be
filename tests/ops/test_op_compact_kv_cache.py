import pytest
import torch
from conftest import Where

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.ops.decoding.compact_kv_cache import MAX_SLOTS, TILE


@pytest.mark.parametrize(
    ("shape", "slots"),
    [
        ((2, 3, 2, 9, 6), [[2, 4, 5, 8], [0, 1, 1, 1]]),
        ((1, 20, 7), [[4, 4, 4]]),
        ((4, 3, 5, 1), [[3], [0], [4]]),
        ((2, 1, 12, 2 * TILE + 5), [[1, 6, 3]]),
        ((3, 1, 12, 300), [[2, 11, 10, 9, 8, 7, 6, 5, 4, 3]]),  # targets are others' sources, in every order
        ((2, 1, 12, 1030), [[6, 5, 4, 3, 2, 1]]),
        ((2, 1, MAX_SLOTS + 1, 2), [[*range(MAX_SLOTS), MAX_SLOTS]]),
        ((0, 2, 5, 3), [[1, 2], [1, 2]]),
        ((2, 2, 5, 3), [[], []]),
    ],
)
def test_move_slots(where: Where, shape: tuple[int, ...], slots: list[list[int]]) -> None:
    stored = torch.randn(shape, device=where.device).to(where.dtype)
    after = stored.clone()
    ops.compact_kv_cache(after, torch.tensor(slots, dtype=torch.long, device=where.device))
    wanted = stored.clone()
    for row, chosen in enumerate(slots):
        for place, slot in enumerate(chosen):
            wanted[..., row, chosen[0] + place, :] = stored[..., row, slot, :]
    assert torch.equal(after, wanted)


def test_slots_that_are_not_there(where: Where) -> None:
    """Nothing outside is read or written, also not the next row's."""
    stored = torch.randn(2, 2, 4, 3, device=where.device).to(where.dtype)
    after = stored.clone()
    ops.compact_kv_cache(after, torch.tensor([[3, 2, 9], [1, -5, 4]], device=where.device))
    assert torch.equal(after, stored)


@pytest.mark.kernels
def test_schema_and_fake(kernels_device: torch.device) -> None:
    stored = torch.randn(2, 2, 4, 3, device=kernels_device)
    torch.library.opcheck(
        torch.ops.ligermodels.compact_kv_cache.default,
        (stored, torch.tensor([[0, 2], [1, 3]], device=kernels_device)),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("stored", "slots", "message"),
    [
        (torch.ones(4, 3), torch.ones(4, 1).long(), r"stored must be \(..., B, S, E\)"),
        (torch.ones(2, 3, 4).mT, torch.ones(2, 1).long(), "contiguous"),
        (torch.ones(2, 3, 4), torch.ones(3, 1).long(), r"slots must be torch.int64 of shape \(2, P\)"),
        (torch.ones(2, 3, 4), torch.ones(2, 1), "slots must be torch.int64"),
        (torch.ones(2, 3, 4), torch.ones(2).long(), "slots must be torch.int64"),
        (torch.ones(2, 3, 4), torch.ones(2, 1, device="meta").long(), "on meta"),
    ],
)
def test_bad_input(stored: torch.Tensor, slots: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ops.compact_kv_cache(stored, slots)
