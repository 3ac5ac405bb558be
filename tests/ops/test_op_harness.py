"""The harness refuses what is further from the truth than chance explains."""

import pytest
import torch
from op_harness import assert_as_good


@pytest.mark.parametrize("great", [0, 20], ids=["even", "of few great elements"])
@pytest.mark.parametrize(("element", "accepted"), [(1.5, (True, True)), (2.6, (False, True)), (3.5, (False, False))])
def test_one_element(great: int, element: float, accepted: tuple[bool, bool]) -> None:
    """An error in one element of 4,000, in units of the greatest error of the eager result."""
    truth = torch.randn(4000, dtype=torch.float64)
    truth[:great] *= 1000
    noise = truth.abs().max() * 1e-5 * torch.rand(4000, dtype=torch.float64)
    eager, ours = (truth + noise).float(), truth.float()
    ours[0] += element * (eager.double() - truth).abs().max()
    if accepted[great > 0]:
        assert_as_good("result", ours, eager, truth)
    else:
        with pytest.raises(AssertionError, match="in norm inf"):
            assert_as_good("result", ours, eager, truth)
