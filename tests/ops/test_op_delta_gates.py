"""The gates of Gated DeltaNet and Kimi Delta Attention against float64, with their gradients."""

from functools import partial

import pytest
import torch
from conftest import Where
from op_harness import assert_as_good, check, middle_transposed, strided_rows
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError

SIZES = [  # sequences, tokens, heads; and key channels with a decay of their own
    (1, 1, 1),
    (2, 7, 5),
    (1, 300, 3),
    (1, 1, 1, 1),
    (2, 1, 3, 40),
    (2, 70, 3, 5),
    (1, 3, 11, 100),
]
BOUND = pytest.mark.parametrize("bound", [None, -2.5], ids=["no bound", "bounded"])


def operands(where: Where, sizes: tuple[int, ...], scale: float = 3.0) -> list[Tensor]:
    """a, b, log_rate and bias."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=where.device)

    a, b = (normal(*shape).mul(scale).to(where.dtype) for shape in (sizes, sizes[:3]))
    return [strided_rows(a), middle_transposed(b), normal(sizes[2]), strided_rows(normal(*sizes[2:]))]


@BOUND
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gates(where: Where, sizes: tuple[int, ...], bound: float | None) -> None:
    """Both gates and all gradients, of any strides; on a GPU, equal bits in a second run."""
    given = operands(where, sizes)
    check(partial(ops.delta_gates, lower_bound=bound), partial(ops.delta_gates_reference, lower_bound=bound), given)


@BOUND
@pytest.mark.parametrize("sizes", [(2, 5, 3), (2, 5, 3, 20)], ids=str)
def test_frozen_operands(where: Where, sizes: tuple[int, ...], bound: float | None) -> None:
    """Each gradient, whichever others are needed."""
    given = operands(where, sizes)
    plain = partial(ops.delta_gates_reference, lower_bound=bound)
    check(partial(ops.delta_gates, lower_bound=bound), plain, given, frozen=True)


@pytest.mark.parametrize("channels", [(), (6,)], ids=["of heads", "of channels"])
@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_any_decay(where: Where, tokens: int, channels: tuple[int, ...]) -> None:
    """Of projections that are slices of wider rows, from the smallest decay to overflowing ones."""
    x = torch.randn(2, tokens, 5 * 7 + 8, device=where.device).mul(30).to(where.dtype)
    count = 5 * (channels or (1,))[0]
    a, b = x[..., 1 : 1 + count].unflatten(-1, (5, *channels)), x[..., 37:42]
    log_rate, bias = torch.randn(5, device=where.device), torch.randn(5, *channels, device=where.device)
    with torch.no_grad():
        found = ops.delta_gates(a, b, log_rate, bias)
    wanted = ops.delta_gates_reference(a, b, log_rate, bias)
    exact = ops.delta_gates_reference(*(t.double() for t in (a, b, log_rate, bias)))
    for name, ours, other, true in zip(("g", "beta"), found, wanted, exact, strict=True):
        assert ours.dtype == torch.float32 and ours.is_contiguous()
        torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-37)
        assert_as_good(name, ours, other, true)


@pytest.mark.parametrize("channels", [(), (4,)], ids=["of heads", "of channels"])
def test_no_tokens(where: Where, channels: tuple[int, ...]) -> None:
    given = [t.requires_grad_() for t in operands(where, (2, 0, 3, *channels))]
    g, beta = ops.delta_gates(*given)
    assert g.shape == given[0].shape and beta.shape == given[1].shape
    for gradient in torch.autograd.grad(g.sum() + beta.sum(), given):
        assert not gradient.any()


@pytest.mark.gpu
@pytest.mark.kernels
def test_a_cuda_graph() -> None:
    """A replay reads new operands, without a sync."""
    where = Where(torch.device("cuda"), torch.bfloat16, "cuda")
    given, more = operands(where, (2, 9, 4, 32)), operands(where, (2, 9, 4, 32))
    leaves = [t.contiguous().requires_grad_() for t in given]

    def run() -> tuple[Tensor, ...]:
        g, beta = ops.delta_gates(*leaves)
        return g.detach(), beta.detach(), *torch.autograd.grad((g, beta), leaves, (torch.ones_like(g), beta.detach()))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    with torch.no_grad():
        for tensor, other in zip(leaves, more, strict=True):
            tensor.copy_(other)
    graph.replay()
    for ours, wanted in zip(found, run(), strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("channels", [(), (4,)], ids=["of heads", "of channels"])
def test_bounded_gates(where: Where, channels: tuple[int, ...]) -> None:
    """In float64 with its gradients, and in narrow dtypes, where rates overflow."""
    a, b = (torch.randn(2, 7, 3, *size, dtype=torch.float64) for size in (channels, ()))
    log_rate, bias = torch.randn(3, dtype=torch.float64), torch.randn(3, *channels, dtype=torch.float64)
    given = [tensor.to(where.device).requires_grad_() for tensor in (a, b, log_rate, bias)]
    rate = given[2].exp().view(3, *(1 for _ in channels))
    wanted = -2.5 / (1 + (-rate * (given[0] + given[3])).exp()), 1 / (1 + (-given[1]).exp())
    for bound in (0.0, float("nan"), -float("inf")):
        with pytest.raises(InputError, match="lower_bound: must be a finite number below 0"):
            ops.delta_gates(*given, lower_bound=bound)
    found = ops.delta_gates(*given, lower_bound=-2.5)
    for ours, true in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, true)
    sums = [gates[0].square().sum() + gates[1].square().sum() for gates in (found, wanted)]
    for ours, true in zip(*(torch.autograd.grad(total, given) for total in sums), strict=True):
        torch.testing.assert_close(ours, true)
    narrow = [tensor.detach().mul(60).to(where.dtype) for tensor in given[:2]]
    g, beta = ops.delta_gates(*narrow, given[2].detach().float() + 90, given[3].detach().float(), lower_bound=-2.5)
    assert g.dtype == beta.dtype == torch.float32
    assert (g >= -2.5).all() and (g <= 0).all() and g.min() == -2.5 and g.max() == 0
