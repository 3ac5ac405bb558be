import importlib

import pytest
import torch
from conftest import Where

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.ops.add_rows import BLOCK, ROWS, WINDOW


@pytest.mark.parametrize("H", [1, 70, 2 * BLOCK + 3])
@pytest.mark.parametrize(
    "index",
    [
        [3],
        [0, 19, 7, 7, 0, 7, 12],
        [5] * (2 * ROWS),
        [5] * (3 * ROWS + 1) + [4] * ROWS + [6] * (ROWS - 1) + [19],
        [5] * (3 * WINDOW + ROWS + 3) + [4] * (WINDOW - 1) + [9] * (2 * WINDOW),
        [7] * (2 * WINDOW) + [8] * (WINDOW + 1) + [6] * WINDOW,
        [],
    ],
    ids=["one", "some", "the same", "many the same", "windows", "whole windows", "none"],
)
def test_add_rows(where: Where, index: list[int], H: int) -> None:
    """Right to the rounding of the result, however many rows are added."""
    x = torch.randn(20, H, device=where.device).to(where.dtype)
    at = torch.tensor(index, dtype=torch.long, device=where.device)
    rows = torch.randn(H, len(index), device=where.device).to(where.dtype).t()  # any strides
    after = x.clone()
    ops.add_rows(after, at, rows)
    truth = x.double().index_add_(0, at, rows.double())
    limit = torch.finfo(where.dtype).eps / 2 + len(index) * 2**-24
    torch.testing.assert_close(after.double(), truth, rtol=limit, atol=4 * len(index) * 2**-24)
    untouched = torch.ones(20, dtype=torch.bool, device=where.device).index_fill_(0, at, value=False)
    assert torch.equal(after[untouched], x[untouched])


@pytest.mark.kernels
def test_rows_that_are_not_there(kernels_device: torch.device) -> None:
    """Nothing outside is read or written."""
    x, rows = torch.randn(4, 3, device=kernels_device), torch.randn(3, 3, device=kernels_device)
    after = x.clone()
    ops.add_rows(after[1:3], torch.tensor([-1, 2, -100], device=kernels_device), rows)
    assert torch.equal(after, x)
    torch.library.opcheck(
        torch.ops.ligermodels.add_rows.default,
        (after, torch.tensor([0, 2, 0], device=kernels_device), rows),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.kernels
@pytest.mark.parametrize("T", [1, 4, ROWS, ROWS + 2, WINDOW - 1, WINDOW, WINDOW + ROWS, 3 * WINDOW + 1])
def test_nothing_past_the_index_counts(kernels_device: torch.device, T: int) -> None:
    """Though it is the same index, as memory that is not ours might be."""
    x, rows = torch.zeros(3, 16, device=kernels_device), torch.ones(4 * WINDOW, 16, device=kernels_device)
    index, order = torch.ones_like(rows[:, 0]).long(), torch.arange(len(rows), device=kernels_device)
    module = importlib.import_module("ligermodels.ops.add_rows")  # the op has its name
    windows = torch.full_like(rows, 2 * WINDOW)  # twice what they are, to see who takes them
    module._add_rows_kernel[(T, 1)](
        x, index, order, rows, 16, windows, 3, T, 16, WINDOW=WINDOW, ROWS=ROWS, BLOCK=16, num_warps=4
    )
    assert x.sum(1).tolist() == [0, 16 * (T + max(T // WINDOW - 1, 0) * WINDOW), 0]  # but for the first one's window


@pytest.mark.parametrize(
    ("x", "index", "rows", "message"),
    [
        (torch.zeros(4, 3, 2), torch.zeros(2, dtype=torch.long), torch.zeros(2, 3), r"x must be floating, \(V, H\)"),
        (torch.zeros(3, 4).t(), torch.zeros(2, dtype=torch.long), torch.zeros(2, 3), "contiguous"),
        (torch.zeros(4, 3), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3), "index must be long"),
        (torch.zeros(4, 3), torch.zeros(2, dtype=torch.long), torch.zeros(2, 4), "rows must be"),
        (torch.zeros(4, 3), torch.zeros(2, dtype=torch.long), torch.zeros(2, 3).half(), "rows must be"),
    ],
)
def test_what_does_not_fit_is_refused(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ops.add_rows(x, index, rows)
