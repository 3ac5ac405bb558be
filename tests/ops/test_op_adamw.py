import copy

import pytest
import torch
from conftest import Where

from ligermodels.errors import InputError
from ligermodels.ops import adamw_step, set_backend
from ligermodels.ops.optimizer.adamw import Shard, adamw_numbers, adamw_step_in_memory, rounding_key
from ligermodels.ops.runtime.dispatch import use_kernels
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
        frozen = torch.nn.Parameter(torch.ones(3, device=where.device), requires_grad=False)
        optimizer = FusedAdamW([a, frozen, b], **NUMBERS)
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


# -- stochastic rounding -----------------------------------------------------------------------------------------------

ULP = 2**-7
"""Of bfloat16 from 1 to 2."""
in_bfloat16 = pytest.mark.parametrize(
    "where",
    [
        pytest.param((place, torch.bfloat16), id=place, marks=marks)
        for place, marks in (
            ("reference", ()),
            ("interpreter", pytest.mark.kernels),
            ("cuda", (pytest.mark.gpu, pytest.mark.kernels)),
        )
    ],
    indirect=True,
)


def is_interpreted(where: Where) -> bool:
    """The interpreter truncates on its way to bfloat16, and misreads its subnormal numbers."""
    return use_kernels(torch.empty(0, device=where.device)) and where.device.type == "cpu"


def one_step(
    p: torch.Tensor, seeds: tuple[int, ...] | None, *, lr: float = ULP / 8, step: int = 1, sign: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameter after a step of sign * lr; both averages after one without a gradient, from 1, end to end."""
    p, m, v, zero = p.clone(), torch.ones_like(p), torch.ones_like(p), torch.zeros_like(p)
    options = {"eps": 0.0, "weight_decay": 0.0, "rounding_seeds": seeds}
    adamw_step(p, zero + sign, zero.clone(), zero.clone(), step=1, lr=lr, betas=(0.0, 0.0), **options)
    adamw_step(zero.clone(), zero, m, v, step=step, lr=lr, betas=(0.999, 0.999), **options)
    return p, torch.cat([m, v])


@in_bfloat16
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_small_changes_count_on_average(where: Where, sign: float) -> None:
    """An eighth of a unit moves one element in eight, by a whole unit; to the nearest it moves none."""
    n = 100_003
    p = (1 + torch.randint(1, 127, (n,), device=where.device) * ULP).to(where.dtype)
    nearest, averages = one_step(p, None, sign=sign)
    assert is_interpreted(where) or (torch.equal(nearest, p) and (averages == 1).all())
    moved, averages = one_step(p, (5, 0), sign=sign)
    steps = (p.double() - moved.double()) / (sign * ULP)
    assert steps.unique().tolist() == [0, 1]
    assert abs(steps.mean() - 1 / 8) < 4 * (1 / 8 * 7 / 8 / n) ** 0.5
    # The averages fall from 1 to 0.999, a quarter of a unit, on average.
    falls = ((1 - averages.double()) / 2**-8).split(n)
    share = 0.001 * 2**8
    for each in falls:
        assert each.unique().tolist() == [0, 1]
        assert abs(each.mean() - share) < 4 * (share * (1 - share) / n) ** 0.5
    assert abs(torch.corrcoef(torch.stack(falls))[0, 1]) < 4 / n**0.5
    # No element's draw knows of its neighbours', nor a parameter's of its averages'.
    for other, apart in ((steps, 1), (steps, 2), (steps, 4), (falls[0], 0), (falls[1], 0)):
        pair = torch.stack([steps[apart:], other[: n - apart]])
        assert abs(torch.corrcoef(pair)[0, 1]) < 4 / n**0.5


@in_bfloat16
def test_numbers_decide_the_draws(where: Where) -> None:
    p = torch.ones(5003, dtype=where.dtype, device=where.device) * 1.5
    first = one_step(p, (5, 0))
    assert all(map(torch.equal, first, one_step(p, (5, 0))))
    for other in (one_step(p, (6, 0)), one_step(p, (5, 1)), one_step(p, (0, 5))):
        for a, b in zip(first, other, strict=True):
            moved = torch.stack([a != a[0], b != b[0]]).double()
            assert abs(torch.corrcoef(moved)[0, 1]) < 4 / moved.shape[1] ** 0.5
    assert not torch.equal(first[1], one_step(p, (5, 0), step=2)[1])


@in_bfloat16
def test_what_bfloat16_holds_stays(where: Where) -> None:
    """Every number there is, infinities and NaNs too, is itself, whatever is drawn; other dtypes are as before."""
    every = torch.arange(2**16, dtype=torch.int32, device=where.device).to(torch.int16).view(torch.bfloat16)
    if is_interpreted(where):
        every = every[(every == 0) | ~(every.abs() < torch.finfo(torch.bfloat16).smallest_normal)]
    for seed in range(3):
        p, g = every.clone(), torch.zeros_like(every)
        adamw_step(p, g, g.clone(), g.clone(), step=1, lr=0.0, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0,
                   rounding_seeds=(seed,))  # fmt: skip
        torch.testing.assert_close(p, every, rtol=0, atol=0, equal_nan=True)
    # A NaN as GPUs give it, whose bits are all set, stays one.
    p, g = torch.zeros_like(every), torch.full(every.shape, 2**31 - 1, dtype=torch.int32, device=where.device)
    adamw_step(p, g.view(torch.float32), p.clone(), p.clone(), step=1, lr=1.0, betas=(0.9, 0.9), eps=1e-8,
               weight_decay=0.0, rounding_seeds=(0,))  # fmt: skip
    assert p.isnan().all()
    for dtype in (torch.float16, torch.float32):
        x = torch.rand(4099, device=where.device).to(dtype)
        for a, b in zip(one_step(x, None, lr=1e-3), one_step(x, (5, 0), lr=1e-3), strict=True):
            assert torch.equal(a, b)


@in_bfloat16
def test_a_weight_in_bfloat16_goes_where_one_in_float32_goes(where: Where) -> None:
    """Two hundred steps of an eighth of a unit; and, resumed half-way, the same bits."""

    def run(optimizer: FusedAdamW, p: torch.nn.Parameter, steps: int) -> None:
        for _ in range(steps):
            p.grad = torch.ones_like(p)
            optimizer.step()

    def made(p: torch.Tensor, **options) -> tuple[torch.nn.Parameter, FusedAdamW]:
        p = torch.nn.Parameter(p.clone())
        other = torch.nn.Parameter(p.detach().clone())
        return p, FusedAdamW([other, p], lr=ULP / 8, betas=(0.9, 0.999), eps=0.0, weight_decay=0.0, **options)

    start = torch.full((2003,), 25 * ULP + 1.0, dtype=where.dtype, device=where.device)
    still, nearest = made(start)
    run(nearest, still, 10)
    assert is_interpreted(where) or torch.equal(still, start)
    p, optimizer = made(start, rounding="stochastic", seed=7)
    run(optimizer, p, 90)
    again, resumed = made(p.detach(), rounding="stochastic", seed=7)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, weight in ((optimizer, p), (resumed, again)):
        run(each, weight, 20)
    assert torch.equal(again, p)
    run(optimizer, p, 90)
    # Each step adds the variance of a coin that falls on one side in eight.
    assert abs((p.double() - 1.0).mean()) < 4 * ULP * (200 * 7 / 64 / 2003) ** 0.5


@in_bfloat16
@pytest.mark.parametrize(
    "shape, starts, sizes",
    [
        ((5003,), (1999,), (3001,)),
        ((5003,), (2000,), (1,)),
        ((37, 129), (5, 0), (30, 129)),
        ((37, 129), (0, 67), (37, 62)),
        ((37, 130), (0, 65), (37, 65)),
        ((12, 4112), (0, 2056), (12, 2056)),
        ((5, 7, 33), (2, 3, 0), (3, 4, 33)),
        ((5, 7, 33), (2, 0, 17), (3, 7, 16)),
        ((5, 7, 33), (2, 3, 17), (1, 4, 16)),
        ((5, 7, 33), (2, 3, 17), (1, 1, 16)),
        ((8, 16), (8, 0), (0, 16)),
        ((), (), ()),
    ],
    ids=str,
)
def test_a_shard_rounds_as_the_whole_does(
    where: Where, shape: tuple[int, ...], starts: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    """Also with the numbers of the step in memory, as in a CUDA graph."""
    tensors = [torch.rand(shape, device=where.device).add(0.5).to(where.dtype) for _ in range(4)]
    part = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    shards, graphed = ([each[part].clone() for each in tensors] for _ in range(2))
    adamw_step(*tensors, step=3, rounding_seeds=(7, 1), **NUMBERS)
    adamw_step(*shards, step=3, rounding_seeds=(7, 1), shard=Shard(shape, starts), **NUMBERS)
    *decay, lr = (NUMBERS[name] for name in ("betas", "weight_decay", "lr"))
    numbers = torch.tensor([*adamw_numbers(3, lr, *decay), 0.0], dtype=torch.float64, device=where.device)
    key = torch.tensor([rounding_key((7, 1), 3), 0], device=where.device)
    options = {name: NUMBERS[name] for name in ("betas", "eps")}
    adamw_step_in_memory(*graphed, numbers=numbers, key=key, shard=Shard(shape, starts), **options)
    for whole, found, again in zip(tensors, shards, graphed, strict=True):
        assert torch.equal(whole[part], found) and torch.equal(found, again)


def test_a_copy_rounds_as_it_did() -> None:
    p = torch.nn.Parameter(torch.ones(50, dtype=torch.bfloat16))
    optimizer = FusedAdamW([p], lr=1e-4, rounding="stochastic", seed=3)
    copied = copy.deepcopy(optimizer)
    (twin,) = copied.param_groups[0]["params"]
    for one, parameter in ((optimizer, p), (copied, twin)):
        parameter.grad = torch.ones_like(parameter)
        one.step()
    assert torch.equal(p, twin) and (p != 1).any() and (p == 1).any()


@pytest.mark.gpu
def test_a_count_on_the_gpu_is_fetched_once() -> None:
    """That of torch's fused optimiser."""
    p = torch.nn.Parameter(torch.ones(50, device="cuda"))
    theirs, ours = torch.optim.AdamW([p], fused=True), FusedAdamW([p])
    p.grad = torch.ones_like(p)
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    ours.step()
    assert ours.state[p]["step"].device.type == "cpu" and ours.state[p]["step"] == 2


def test_bad_input() -> None:
    with pytest.raises(InputError, match="rounding: must be 'nearest' or 'stochastic', got 'up'"):
        FusedAdamW([torch.nn.Parameter(torch.zeros(1))], rounding="up")
    x = torch.zeros(4, 4)
    with pytest.raises(InputError, match=r"gradient must be floating of shape \(4, 4\)"):
        adamw_step(x, torch.zeros(4), x, x, step=1, **NUMBERS)
    with set_backend("triton"), pytest.raises(InputError, match=r"shard: \(2, 2, 2\) of \(4, 4, 4\) is divided in dim"):
        shard = [torch.zeros(2, 2, 2, dtype=torch.bfloat16) for _ in range(4)]
        adamw_step(*shard, step=1, rounding_seeds=(1,), shard=Shard((4, 4, 4), (0, 2, 0)), **NUMBERS)
    with pytest.raises(InputError, match="exp_avg must be contiguous"):
        adamw_step(x, x, torch.zeros(4, 8)[:, ::2], x, step=1, **NUMBERS)
