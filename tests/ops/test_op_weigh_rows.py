import importlib

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.ops import force
from ligermodels.ops.token_losses import row_coefficients
from ligermodels.ops.weigh_rows import MAX_BLOCK, weigh_rows


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "ignored"), [((1,), 0.0), ((3, 5), 0.4), ((7,), 1.0), ((2, MAX_BLOCK + 3), 0.5), ((0,), 0.0)], ids=str
)
def test_coefficients(
    kernels_device: torch.device, reduction: str, weighted: torch.dtype | None, shape: tuple[int, ...], ignored: float
) -> None:
    """As in plain torch, whatever the strides and the weights of ignored rows."""
    target = torch.randint(9, shape[::-1], device=kernels_device).permute(*reversed(range(len(shape))))
    target = torch.where(torch.rand(shape, device=kernels_device) < ignored, 4, target)
    weights = None
    if weighted is not None:
        weights = torch.rand(shape, device=kernels_device).to(weighted)
        weights[target == 4] = torch.nan
    found = weigh_rows(target, 9, 4, reduction, weights, torch.bfloat16)
    wanted = row_coefficients(target, 4, reduction, weights, torch.bfloat16)
    assert found.dtype == wanted.dtype == torch.float32 and found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)


@pytest.mark.kernels
@pytest.mark.parametrize("value", [-1, 9, 2**40, -(2**40)])
@pytest.mark.parametrize("at", [0, 3, MAX_BLOCK + 1])
def test_a_target_that_is_none(
    kernels_device: torch.device, value: int, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel finds it wherever it is, even among ignored ones, and nothing else; on the CPU it is named."""
    module, asked = importlib.import_module("ligermodels.ops.weigh_rows"), []
    monkeypatch.setattr(torch, "_assert_async", lambda good, message: asked.append((int(good), message)))
    target = torch.full((MAX_BLOCK + 2,), -100, device=kernels_device)
    target[::2] = 8
    module._weigh_rows(target, None, 9, -100, True)
    target[at] = value
    module._weigh_rows(target, None, 9, -100, True)
    module._weigh_rows(target, None, 9, value, True)  # ignored, but then the others are none
    assert [good for good, _ in asked] == [1, 0, 0]
    assert "[0, 9)" in asked[0][1] and "(-100)" in asked[0][1]
    with force(None), pytest.raises(InputError, match=rf"target\[{at}\] is {value}.*1 such"):
        weigh_rows(target.cpu(), 9, -100, "mean", None, torch.float32)
