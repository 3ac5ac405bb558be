"""The parts of Muon, beside float64 and beside torch's own."""

import pytest
import torch
from conftest import Where
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.optimizer.muon import COEFFICIENTS, apply_update, momentum_step, newton_schulz
from ligermodels.ops.optimizer.rounding import Shard, rounding_key


def oracle(x: Tensor, steps: int = 5) -> Tensor:
    """By a singular value decomposition in float64: the polynomial is one of singular values alone."""
    a, b, c = COEFFICIENTS
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u * s[..., None, :] @ v


@pytest.mark.parametrize("shape", [(24, 24), (24, 40), (40, 24), (3, 12, 20), (2, 2, 20, 12), (1, 8)], ids=str)
def test_newton_schulz(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(newton_schulz(x), oracle(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(newton_schulz(x * 1e-3, 3), oracle(x, 3), rtol=1e-9, atol=1e-9)
    assert newton_schulz(torch.zeros(shape)).eq(0).all()
    error = (newton_schulz(x.float()).double() - oracle(x)).norm() / oracle(x).norm()
    assert newton_schulz(x.float()).dtype == torch.bfloat16 and error < 0.02


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)], ids=str)
def test_steps_of_torch(shape: tuple[int, int]) -> None:
    """Three steps in float32: the momentum bit for bit, the update as far as Newton-Schulz in bfloat16 agrees."""
    ours = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizer = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    momentum = torch.zeros(shape)
    for _ in range(3):
        theirs.grad = torch.randn(shape)
        optimizer.step()
        update = newton_schulz(momentum_step(theirs.grad, momentum, beta=0.95))
        apply_update(ours, update, numbers=(1 - 0.02 * 0.1, 0.02 * 0.2 * max(shape) ** 0.5))
        torch.testing.assert_close(momentum, optimizer.state[theirs]["momentum_buffer"], rtol=0, atol=0)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02 * 0.02 * 0.2 * max(shape) ** 0.5)


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("shape", [(1,), (5000,), (3, 1001), (0, 4)], ids=str)
def test_update_beside_float64(where: Where, shape: tuple[int, ...], in_memory: bool) -> None:
    p, u = (torch.randn(shape, device=where.device).to(dtype) for dtype in (where.dtype, torch.float32))
    wanted = p.double() * 0.9 - 0.03 * u.double()
    numbers = [0.9, 0.03, 1.0, 0.0]
    apply_update(
        p, u, numbers=torch.tensor(numbers, device=where.device, dtype=torch.float64) if in_memory else numbers
    )
    unit = torch.finfo(where.dtype).eps
    torch.testing.assert_close(p.double(), wanted, rtol=unit, atol=unit)


def test_updates_are_rounded_at_random(where: Where) -> None:
    """A quarter of a unit moves one element of bfloat16 in four; a shard as the whole; and by numbers in memory."""
    n, ulp = 40_000, 2**-7
    p = (1 + torch.randint(1, 127, (40, n // 40), device=where.device) * ulp).to(torch.bfloat16)
    update, key = torch.ones_like(p), rounding_key((3, 0), 1)
    found, again, shard = p.clone(), p.clone(), p[7:20].clone()
    apply_update(found, update, numbers=(1.0, ulp / 4), key=key)
    apply_update(shard, update[7:20], numbers=(1.0, ulp / 4), key=key, shard=Shard(p.shape, (7, 0)))
    in_memory = torch.tensor([1.0, ulp / 4, 0, 0], dtype=torch.float64, device=where.device)
    apply_update(again, update, numbers=in_memory, key=torch.tensor([key, 0], device=where.device))
    moved = (p.double() - found.double()) / ulp
    assert moved.unique().tolist() == [0, 1] and abs(moved.mean() - 1 / 4) < 4 * (3 / 16 / n) ** 0.5
    assert torch.equal(found[7:20], shard) and torch.equal(found, again)


def test_bad_arguments() -> None:
    x = torch.zeros(4, 8)
    with pytest.raises(InputError, match=r"update must be floating of shape \(4, 8\)"):
        apply_update(x, x[:2], numbers=(1.0, 1.0))
    with pytest.raises(InputError, match="parameter must be contiguous"):
        apply_update(x[:, ::2], torch.zeros(4, 4), numbers=(1.0, 1.0))
    with pytest.raises(InputError, match="momentum must be floating of shape"):
        momentum_step(x, x[:2], beta=0.9)
