from collections.abc import Callable
from functools import partial

import pytest
import torch
from conftest import Where
from op_harness import LAYOUTS, check, contiguous, wide
from torch.nn import functional

from ligermodels.errors import InputError
from ligermodels.ops import geglu, geglu_reference, glu_linear, swiglu, swiglu_reference

Op = Callable[..., torch.Tensor]


def plain(activation: Callable[[torch.Tensor], torch.Tensor]) -> Op:
    """As eager models write it: the activation is rounded, then the product; of two tensors or of a packed one."""

    def glu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        return activation(wide(gate)).to(gate.dtype) * up

    return glu


OPS = {
    "silu": (swiglu, swiglu_reference, plain(lambda g: g * torch.sigmoid(g))),
    "gelu_tanh": (geglu, geglu_reference, plain(partial(functional.gelu, approximate="tanh"))),
    "gelu": (partial(geglu, approximate="none"), partial(geglu_reference, approximate="none"), plain(functional.gelu)),
}
SHAPES = [(1, 1), (5,), (3, 100), (2, 3, 2050), (2, 0, 6), (4, 0)]


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> tuple[Op, Op, Op]:
    """An op, its reference and the same computation in plain torch."""
    return OPS[request.param]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_glu(where: Where, ops: tuple[Op, Op, Op], shape: tuple[int, ...], layout: Callable) -> None:
    op, _, expected = ops
    gate, up, packed = (
        layout(3 * torch.randn(*shape[:-1], n * shape[-1], dtype=where.dtype, device=where.device)) for n in (1, 1, 2)
    )
    check(op, expected, [gate, up], frozen=layout is contiguous)
    check(op, expected, [packed])


@pytest.mark.parametrize("activation", OPS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 70), (2, 0, 6)], ids=str)
def test_glu_linear(where: Where, activation: str, biased: bool, shape: tuple[int, ...]) -> None:
    """With the projection after it, of which nothing but the packed gate and up are kept."""
    expected = OPS[activation][2]
    gate_up, weight, bias = (
        torch.randn(size, dtype=where.dtype, device=where.device)
        for size in ((*shape[:-1], 2 * shape[-1]), (9, shape[-1]), (9,))
    )

    def op(x: torch.Tensor, *projection: torch.Tensor) -> torch.Tensor:
        return glu_linear(x, *projection, activation=activation)

    def plain_op(x: torch.Tensor, *projection: torch.Tensor) -> torch.Tensor:
        return functional.linear(expected(x), *projection)

    check(op, plain_op, [gate_up, weight, bias] if biased else [gate_up, weight], frozen=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(9, 7)}, r"weight must be torch.float32 \(9, 6\) on cpu"),
        ({"weight": torch.ones(6)}, "weight must be"),
        ({"weight": torch.ones(9, 6).double()}, "weight must be"),
        ({"bias": torch.ones(8)}, r"bias must be torch.float32 \(9,\)"),
        ({"gate_up": torch.ones(3, 11)}, "even last dimension"),
        ({"activation": "relu"}, "activation must be one of silu, gelu_tanh, gelu, got 'relu'"),
    ],
)
def test_bad_input_of_glu_linear(change: dict[str, object], message: str) -> None:
    given = {"gate_up": torch.ones(3, 12), "weight": torch.ones(9, 6), "bias": torch.ones(9), "activation": "silu"}
    with pytest.raises(InputError, match=message):
        glu_linear(**{**given, **change})


def test_great_and_small_values(where: Where, ops: tuple[Op, Op, Op]) -> None:
    gate = torch.tensor([[-1e4, -90.0, -1e-4, 0.0, 1e-4, 90.0, 1e4]], dtype=where.dtype, device=where.device)
    check(ops[0], ops[2], [gate, torch.randn_like(gate)])
    check(ops[0], ops[2], [1e-3 * torch.randn_like(gate), torch.randn_like(gate)])
    check(ops[0], ops[2], [-3 - torch.rand_like(gate), torch.randn_like(gate)])


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("shape", [(4096, 14336), (1003, 8960), (70000, 768)], ids=str)
def test_large(ops: tuple[Op, Op, Op], shape: tuple[int, int]) -> None:
    check(ops[0], ops[2], [torch.randn(shape[0], 2 * shape[1], dtype=torch.bfloat16, device="cuda")])


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


def test_reference_gradients(ops: tuple[Op, Op, Op]) -> None:
    gate, up, packed = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (3, 4), (2, 6)))
    assert torch.autograd.gradcheck(ops[1], (gate, up))
    assert torch.autograd.gradcheck(ops[1], (packed,))


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
    with pytest.raises(InputError, match=f"^swiglu: .*{message}"):
        swiglu(gate, up)
    with pytest.raises(InputError, match=f"^geglu: .*{message}"):
        geglu(gate, up)


def test_unknown_approximation() -> None:
    with pytest.raises(InputError, match="approximate must be"):
        geglu(torch.ones(2), approximate="erf")  # type: ignore[arg-type]
