import pytest
import torch
from conftest import Where

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.ops.decoding.topk_indices import CHUNK, MAX_K

INF, NAN = float("inf"), float("nan")


def expected(x: torch.Tensor, k: int) -> list[list[int]]:
    """By Python's sort, which is stable."""
    rows = x.double().reshape(-1, x.shape[-1]).tolist()
    key = [[(v != v, 0.0 if v != v else v) for v in row] for row in rows]
    return [sorted(range(len(row)), key=row.__getitem__, reverse=True)[:k] for row in key]


@pytest.mark.parametrize(
    ("shape", "k"),
    [((5,), 1), ((2, 3, 70), 7), ((1,), 1), ((2, CHUNK), 4), ((CHUNK + 1,), 9), ((2 * CHUNK + 9,), MAX_K), ((0, 9), 2)],
)  # fmt: skip
def test_topk_indices(where: Where, shape: tuple[int, ...], k: int) -> None:
    """Few values, so that many are equal; signs of zero, infinities and NaN among them; rows with strides."""
    values = torch.tensor([-0.0, 0.0, 1.5, -1.5, 1e-3, -2e-5, 3.0, -INF], dtype=where.dtype, device=where.device)
    torch.manual_seed(len(shape) + k)
    x = values[torch.randint(len(values), (*shape, 2), device=where.device)][..., 0]
    for special in ((), (INF,), (NAN, INF, NAN)):
        if x.numel() and shape[-1] > 4:
            for place, value in enumerate(special):
                x[..., -1 - 2 * place] = value
        found = ops.topk_indices(x, k)
        assert found.dtype == torch.long and found.shape == (*shape[:-1], k)
        assert found.reshape(-1, k).tolist() == expected(x, k)


def test_unequal_values(where: Where) -> None:
    assert ops.topk_indices(torch.randn(4, 9, device=where.device), 0).shape == (4, 0)
    x = torch.randn(2, 5000, device=where.device).to(where.dtype)
    assert ops.topk_indices(x, 5).tolist() == expected(x, 5)
    assert torch.equal(ops.topk_indices(x, 1), ops.topk_indices_reference(x, 1))
    assert torch.equal(ops.topk_indices(x[:, :9].mT, 2), ops.topk_indices_reference(x[:, :9].mT, 2))


@pytest.mark.parametrize(
    ("x", "k", "message"),
    [
        (torch.ones(3), -1, "k must be from 0 to 3"),
        (torch.ones(2, 3), 4, "k must be from 0 to 3"),
        (torch.ones(3, dtype=torch.long), 1, "x must be floating"),
        (torch.tensor(1.0), 1, "at least one dimension"),
    ],
)
def test_errors(x: torch.Tensor, k: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ops.topk_indices(x, k)
