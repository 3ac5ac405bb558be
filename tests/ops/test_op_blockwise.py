"""8-bit states: the codes by hand, and steps of AdamW and of Muon's momentum with them, beside float64."""

import pytest
import torch
from conftest import Where
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops import adamw_step
from ligermodels.ops.optimizer.adamw import Shard, adamw_numbers, adamw_step_in_memory, rounding_key
from ligermodels.ops.optimizer.blockwise import FIRST, MOMENTUM, SECOND, Blockwise, Code, decode, encode
from ligermodels.ops.optimizer.muon import momentum_step, newton_schulz

OPTIONS = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CODES = pytest.mark.parametrize("code", [FIRST, SECOND, MOMENTUM], ids=["first", "second", "momentum"])
SHAPES = ((3, 700), (5, 256), (2, 3, 40), (1, 1), (9, 2049), (0, 4))


def test_codes_by_hand() -> None:
    """Of a block whose largest number is that of the code."""
    top = 2.0**15 * 1.875 - 1
    signed = torch.tensor([[0.0, 0.125, -0.125, 1.0, 1.25, 3.0, -7.0, 2.0**15 - 1, -top, top]])
    codes, scales = encode(signed, FIRST)
    assert codes.tolist() == [[0, 1, 129, 8, 9, 16, 128 + 24, 120, 255, 127]] and scales.tolist() == [[top]]
    assert torch.equal(decode(Blockwise(codes, scales), FIRST), signed)
    top = 2.0**31 * 1.875
    unsigned = torch.tensor([[1.0, 1.125, 1.875, 2.0, 3.0, 2.0**31, top]])
    codes, scales = encode(unsigned, SECOND)
    assert codes.tolist() == [[0, 1, 7, 8, 12, 248, 255]] and scales.tolist() == [[top]]
    assert torch.equal(decode(Blockwise(codes, scales), SECOND), unsigned)
    assert encode(torch.tensor([[0.0, top]]), SECOND).codes.tolist() == [[0, 255]]  # no second moment is 0
    top = 14.75
    momentum = torch.tensor([[0.0, 1 / 32, -1 / 32, 1.0, 1 + 1 / 16, 3.0, -7.0, 7.25, -top, top]])
    codes, scales = encode(momentum, MOMENTUM)
    assert codes.tolist() == [[0, 1, 129, 32, 33, 64, 128 + 96, 97, 255, 127]] and scales.tolist() == [[top]]
    assert torch.equal(decode(Blockwise(codes, scales), MOMENTUM), momentum)


def largest_error(x: Tensor, code: Code) -> Tensor:
    """The largest error of rounding to nearest: a fixed part of a number, and near zero of the largest."""
    largest = x.abs().amax() if x.numel() else torch.tensor(0.0)
    near_zero = largest / (2 ** (code.mantissa + 1) * code.top if code.is_signed else 2**31)
    return x.abs() / 2 ** (code.mantissa + 1) * (1 + 1e-5) + near_zero * (1 + 1e-5)


@CODES
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_errors_of_codes(code: Code, scale: float) -> None:
    """To nearest no more than `largest_error`; on average none, if rounded at random."""
    x = torch.randn(20, 1000).exp2() ** 3 * scale
    x = x * torch.randn(20, 1000).sign() if code.is_signed else x
    found = decode(encode(x, code), code)
    assert ((found - x).abs() <= largest_error(x, code)).all()
    draws = torch.randint(256, x.shape)
    found = decode(encode(x, code, draws), code)
    relative = (found / x - 1)[x.abs() > x.abs().amax() * 1e-3].double()
    assert abs(relative.mean()) < 4 * relative.std() / len(relative) ** 0.5
    zeros = torch.zeros(2, 300)
    assert (decode(encode(zeros, code, torch.full((2, 300), 255)), code) == 0).all()


def test_the_orthogonalised_momentum_keeps_its_direction() -> None:
    """Newton-Schulz makes small singular values large, and with them the errors of codes: with 3 mantissa bits the
    cosine is 0.73."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randn(256, 8, generator=generator) for _ in range(2))
    exact, found = torch.zeros(256, 256), encode(torch.zeros(256, 256), MOMENTUM)
    for step in range(100):
        rows += 0.05 * torch.randn(256, 8, generator=generator)
        gradient = 0.3 * rows @ columns.T + torch.randn(256, 256, generator=generator)
        exact.lerp_(gradient, 0.05)
        momentum_step(gradient, found, beta=0.95, key=step)
    updates = [newton_schulz(m).float().flatten() for m in (exact, decode(found, MOMENTUM))]
    assert torch.cosine_similarity(*updates, dim=0) > 0.93


def states(shape: tuple[int, ...], device: torch.device) -> list[Blockwise]:
    m = torch.randn(shape, device=device)
    return [encode(m * 0.1, FIRST), encode(m.square() + 1e-3, SECOND)]


def decoded(found: list[Blockwise]) -> list[Tensor]:
    return [decode(state, code).double() for state, code in zip(found, (FIRST, SECOND), strict=True)]


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adamw_beside_float64(where: Where, shape: tuple[int, ...], in_memory: bool) -> None:
    """The parameter to rounding, from the numbers that the codes are; the new codes to half the distance of codes."""
    p, g = (torch.randn(shape, dtype=where.dtype, device=where.device) for _ in range(2))
    averages = states(shape, where.device) if p.numel() else [encode(p, FIRST), encode(p, SECOND)]
    m, v = decoded(averages)
    truth = torch.nn.Parameter(p.double())
    optimizer = torch.optim.AdamW([truth], **OPTIONS)
    optimizer.state[truth] = {"step": torch.tensor(6.0), "exp_avg": m, "exp_avg_sq": v}
    truth.grad = g.double()
    optimizer.step()
    if in_memory:
        numbers = torch.tensor([*adamw_numbers(7, 0.02, (0.9, 0.95), 0.1), 0.0], dtype=torch.float64).to(where.device)
        adamw_step_in_memory(p, g, *averages, numbers=numbers, key=None, betas=(0.9, 0.95), eps=1e-8)
    else:
        adamw_step(p, g, *averages, step=7, **OPTIONS)
    unit = 2 * torch.finfo(where.dtype).eps
    torch.testing.assert_close(p.double(), truth.detach(), rtol=unit, atol=unit)
    for found, wanted, code in zip(decoded(averages), (m, v), (FIRST, SECOND), strict=True):
        assert ((found - wanted).abs() <= largest_error(wanted, code)).all()


@pytest.mark.parametrize("seeds", [None, (3, 1)])
@pytest.mark.parametrize(
    ("shape", "starts", "sizes"),
    [
        ((9, 700), (4, 0), (3, 700)),
        ((4, 5, 70), (1, 0, 0), (2, 5, 70)),
        ((4, 5, 70), (1, 2, 0), (2, 3, 70)),
        ((6, 1024), (0, 512), (6, 512)),
        ((4, 30), (4, 0), (0, 30)),
    ],
    ids=str,
)
def test_a_shard_has_the_codes_of_the_whole(
    where: Where, shape: tuple[int, ...], starts: tuple[int, ...], sizes: tuple[int, ...], seeds: tuple[int, int] | None
) -> None:
    def part(x: Tensor, unit: int = 1) -> Tensor:
        for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            last = dim == x.ndim - 1
            x = x.narrow(dim, start // (unit if last else 1), -(-size // (unit if last else 1)))
        return x.clone()

    p, g = (torch.randn(shape, device=where.device).to(torch.bfloat16) for _ in range(2))
    averages = states(shape, where.device)
    shards = [part(p), part(g), *(Blockwise(part(x.codes), part(x.scales, 256)) for x in averages)]
    momentum = [Blockwise(x.codes.clone(), x.scales.clone()) for x in (averages[0], shards[2])]
    adamw_step(p, g, *averages, step=3, rounding_seeds=seeds, **OPTIONS)
    adamw_step(*shards, step=3, rounding_seeds=seeds, shard=Shard(shape, starts), **OPTIONS)
    assert torch.equal(part(p), shards[0])
    for whole, found in zip(averages, shards[2:], strict=True):
        assert torch.equal(part(whole.codes), found.codes) and torch.equal(part(whole.scales, 256), found.scales)
    key = None if seeds is None else rounding_key(seeds, 3)
    direction = momentum_step(g, momentum[0], beta=0.9, key=key)
    assert torch.equal(
        part(direction), momentum_step(shards[1], momentum[1], beta=0.9, key=key, shard=Shard(shape, starts))
    )
    assert torch.equal(part(momentum[0].codes), momentum[1].codes)


def test_codes_are_rounded_at_random(where: Where) -> None:
    """An average of one number, which falls by a third of the distance of two codes: a third of the codes falls."""
    n = 256 * 40
    m = torch.ones(40, 256, device=where.device)
    m[:, 0] = 64.0  # the largest of each block, whose gradient keeps it
    averages = encode(m, FIRST), encode(m, SECOND)
    before = [x.codes.clone() for x in averages]
    at = decode(averages[0], FIRST)[0, 1]
    gradient = torch.where(m > 1, m, at * (1 - 0.04 / 0.1))
    adamw_step(torch.zeros_like(m), gradient, *averages, step=1, rounding_seeds=(1,), **OPTIONS)
    fallen = (before[0].int() - averages[0].codes.int())[:, 1:].double()
    assert set(fallen.unique().tolist()) == {0, 1}
    step = at - decode(Blockwise(before[0] - 1, averages[0].scales), FIRST)[0, 1]
    share = float(0.04 * at / step)
    assert abs(fallen.mean() - share) < 4 * (share * (1 - share) / n) ** 0.5


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_momentum_beside_float64(where: Where, shape: tuple[int, ...], nesterov: bool) -> None:
    g = torch.randn(shape, device=where.device).to(where.dtype)
    state = encode(torch.randn(shape, device=where.device) * 0.1, MOMENTUM)
    m = decode(state, MOMENTUM).double().lerp(g.double(), 0.05)
    wanted = g.double().lerp(m, 0.95) if nesterov else m
    found = momentum_step(g, state, beta=0.95, nesterov=nesterov)
    unit = 2 * torch.finfo(where.dtype).eps
    torch.testing.assert_close(found.double(), wanted, rtol=unit, atol=unit)
    assert ((decode(state, MOMENTUM) - m).abs() <= largest_error(m, MOMENTUM)).all()


def test_bad_states() -> None:
    x = torch.zeros(4, 300)
    state = encode(x, FIRST)
    with pytest.raises(InputError, match=r"exp_avg.scales must be torch.float32 of shape \(4, 2\) on cpu"):
        adamw_step(x, x, Blockwise(state.codes, state.scales[:, :1]), state, step=1, **OPTIONS)
    with pytest.raises(InputError, match="must both be tensors, or both Blockwise"):
        adamw_step(x, x, state, x, step=1, **OPTIONS)
    with pytest.raises(InputError, match=r"momentum.codes must be torch.uint8 of shape \(4, 300\)"):
        momentum_step(x, Blockwise(x, state.scales), beta=0.9)
