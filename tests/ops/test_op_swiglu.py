from collections.abc import Callable

import pytest
import torch
from conftest import Where
from op_harness import LAYOUTS, check, contiguous, wide

from ligermodels.errors import InputError
from ligermodels.ops import swiglu, swiglu_reference

SHAPES = [(1, 1), (5,), (3, 100), (2, 3, 2050), (2, 0, 6), (4, 0)]


def plain(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (wide(gate) * torch.sigmoid(wide(gate))).to(gate.dtype) * up


def plain_packed(x: torch.Tensor) -> torch.Tensor:
    return plain(*x.chunk(2, -1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_swiglu(where: Where, shape: tuple[int, ...], layout: Callable) -> None:
    gate, up, packed = (
        layout(3 * torch.randn(*shape[:-1], n * shape[-1], dtype=where.dtype, device=where.device)) for n in (1, 1, 2)
    )
    check(swiglu, plain, [gate, up], frozen=layout is contiguous)
    check(swiglu, plain_packed, [packed])


def test_great_values(where: Where) -> None:
    gate = torch.tensor([[-1e4, -90.0, -1e-4, 0.0, 1e-4, 90.0, 1e4]], dtype=where.dtype, device=where.device)
    check(swiglu, plain, [gate, torch.randn_like(gate)])


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("shape", [(4096, 14336), (1003, 8960), (70000, 768)], ids=str)
def test_large(shape: tuple[int, int]) -> None:
    check(swiglu, plain_packed, [torch.randn(shape[0], 2 * shape[1], dtype=torch.bfloat16, device="cuda")])


@pytest.mark.gpu
@pytest.mark.kernels
def test_more_than_2_to_the_31_elements() -> None:
    packed = torch.randn(75001, 2 * 14336, dtype=torch.bfloat16, device="cuda")
    ends = torch.cat([packed[:2], packed[-2:]]).requires_grad_()
    packed.requires_grad_()
    y, few = swiglu(packed), swiglu(ends)
    y.backward(torch.ones_like(y))
    few.backward(torch.ones_like(few))
    assert torch.equal(torch.cat([y[:2], y[-2:]]), few)
    assert torch.equal(torch.cat([packed.grad[:2], packed.grad[-2:]]), ends.grad)


def test_reference_gradients() -> None:
    gate, up, packed = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (3, 4), (2, 6)))
    assert torch.autograd.gradcheck(swiglu_reference, (gate, up))
    assert torch.autograd.gradcheck(swiglu_reference, (packed,))


@pytest.mark.parametrize(
    ("gate", "up", "message"),
    [
        (torch.ones(3), None, "even last dimension"),
        (torch.ones(2, 4), torch.ones(2, 3), "up must be like gate"),
        (torch.ones(2, 4), torch.ones(2, 4, dtype=torch.float64), "up must be like gate"),
        (torch.ones(2, dtype=torch.int64), None, "gate must be floating"),
    ],
)
def test_bad_input(gate: torch.Tensor, up: torch.Tensor | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        swiglu(gate, up)
