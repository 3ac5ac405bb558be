import copy

import pytest
import torch
from conftest import Where

from ligermodels.errors import InputError
from ligermodels.ops import adamw_step
from ligermodels.training.fused_adamw import FusedAdamW

NUMBERS = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("shape", [(1,), (5000,), (3, 1001), (0, 4)], ids=str)
def test_like_torch(where: Where, shape: tuple[int, ...]) -> None:
    """Five steps beside torch's own in float64, from the rounded gradients; each rounding may add to the error."""
    p = torch.randn(shape, dtype=where.dtype, device=where.device)
    ours, truth = torch.nn.Parameter(p.clone()), torch.nn.Parameter(p.double())
    optimizers = FusedAdamW([ours], **NUMBERS), torch.optim.AdamW([truth], **NUMBERS)
    for _ in range(5):
        ours.grad = torch.randn_like(p)
        truth.grad = ours.grad.double()
        for optimizer in optimizers:
            optimizer.step()
    unit = 5 * torch.finfo(where.dtype).eps
    torch.testing.assert_close(ours.double(), truth, rtol=unit, atol=unit)
    for name in ("exp_avg", "exp_avg_sq"):
        found, wanted = (optimizer.state_dict()["state"][0][name].double() for optimizer in optimizers)
        torch.testing.assert_close(found, wanted, rtol=unit, atol=unit)


def test_state_of_torch(where: Where) -> None:
    """Training goes on from a state dict of torch's AdamW."""
    p = torch.randn(100, device=where.device)
    parameters = [torch.nn.Parameter(p.clone()) for _ in range(2)]
    theirs, ours = torch.optim.AdamW([parameters[0]], **NUMBERS), FusedAdamW([parameters[1]], **NUMBERS)
    for step in range(3):
        parameters[0].grad = torch.randn_like(p)
        if step == 2:
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))  # which would share its tensors
            with torch.no_grad():
                parameters[1].copy_(parameters[0])
            parameters[1].grad = parameters[0].grad.clone()
            ours.step()
        theirs.step()
    torch.testing.assert_close(*parameters)


def test_in_backward(where: Where) -> None:
    """The same as after it, without gradients left behind; a parameter used twice is updated once."""
    results = []
    for inside in (False, True):
        torch.manual_seed(0)
        a, b = (torch.nn.Parameter(torch.randn(6, 6, device=where.device)) for _ in range(2))
        optimizer = FusedAdamW([a, b], **NUMBERS)
        handles = optimizer.step_in_backward() if inside else []
        for _ in range(3):
            (a @ b @ a).square().sum().backward()
            assert (a.grad is None) == inside
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.state[a]["step"] == 3
        results.append((a.detach().clone(), b.detach().clone()))
        for handle in handles:
            handle.remove()
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_bad_input() -> None:
    x = torch.zeros(4, 4)
    with pytest.raises(InputError, match=r"gradient must be floating \(4, 4\)"):
        adamw_step(x, torch.zeros(4), x, x, step=1, **NUMBERS)
    with pytest.raises(InputError, match="exp_avg must be contiguous"):
        adamw_step(x, x, torch.zeros(4, 8)[:, ::2], x, step=1, **NUMBERS)
