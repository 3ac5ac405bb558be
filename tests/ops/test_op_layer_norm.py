from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import Where
from op_harness import LAYOUTS, check, contiguous, middle_transposed, run, strided_rows, wide

from ligermodels.errors import InputError
from ligermodels.ops import layer_norm, layer_norm_reference, set_backend
from ligermodels.ops.norm.norm_rows import MAX_KERNEL_WIDTH

EPS = 1e-5


def op(x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> torch.Tensor:
    return layer_norm(x, weight, bias, EPS)


def plain(x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = wide(x) - wide(x).mean(-1, keepdim=True)
    y = y / (y.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    y = y if weight is None else y * wide(weight)
    return (y if bias is None else y + wide(bias)).to(x.dtype)


def make(where: Where, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=where.dtype, device=where.device)


@pytest.mark.parametrize("shape", [(3,), (1, 4100), (3, 5, 64), (7, 100), (70, 96), (4, 3), (2, 3, 0, 8)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_and_bias(where: Where, shape: tuple[int, ...], layout: Callable) -> None:
    x, weight, bias = layout(make(where, *shape) * 3 + 1), make(where, shape[-1]), make(where, shape[-1])
    check(op, plain, [x, weight, bias], frozen=layout is contiguous)
    assert op(x, weight, bias).is_contiguous()


def test_weight_or_bias_alone_or_neither(where: Where) -> None:
    x, weight, bias = strided_rows(make(where, 9, 130)), make(where, 130), make(where, 130)
    check(op, plain, [x])
    check(op, plain, [x, weight], frozen=True)
    check(lambda x, b: op(x, None, b), lambda x, b: plain(x, None, b), [x, bias], frozen=True)


def test_other_strides(where: Where) -> None:
    x, weight, bias = middle_transposed(make(where, 2, 3, 5, 34)), make(where, 68), make(where, 68)
    check(lambda x, w, b: op(x, w[::2], b[::2]), lambda x, w, b: plain(x, w[::2], b[::2]), [x, weight, bias])
    check(lambda x, w: op(x, w, w), lambda x, w: plain(x, w, w), [x, weight[:34]])


def test_great_and_small_rows(where: Where) -> None:
    scale = torch.tensor([[1e-4], [1.0], [100.0], [0.0]], device=where.device).to(where.dtype)
    check(op, plain, [make(where, 4, 64) * scale])


@pytest.mark.parametrize("offset", [100.0, 1e4, -3e4])
def test_rows_far_from_zero(where: Where, offset: float) -> None:
    """What they have in common is no error of what they differ in."""
    x, weight, bias = make(where, 50, 100) + offset, make(where, 100), make(where, 100)
    check(op, plain, [x, weight, bias])
    few = 16 * torch.finfo(where.dtype).eps
    torch.testing.assert_close(op(x).double(), plain(x.double()), atol=few, rtol=few)


@pytest.mark.parametrize("width", [1, 100])
@pytest.mark.parametrize("value", [0.1, -7777.0, 3e4])
def test_equal_elements_become_the_bias(where: Where, value: float, width: int) -> None:
    x, weight, bias = torch.full_like(make(where, 3, width), value), make(where, width), make(where, width)
    (y,), (dx, dw, db) = run(op, [x, weight, bias], [0, 1, 2])
    torch.testing.assert_close(y, bias.expand_as(y), atol=1e-6, rtol=0)
    assert not dw.any() and db.any() and dx.isfinite().all()


@pytest.mark.parametrize("place", [0, 70])
def test_a_value_far_from_all_others(where: Where, place: int) -> None:
    """Wherever it stands, it takes no more from the others' precision than rounding does."""
    x = make(where, 6, 100)
    x[:, place] = torch.tensor([0.0, 40.0, -300.0, 1000.0, 6e4, -6e4], device=where.device)
    weight, bias = make(where, 100), make(where, 100)
    check(op, plain, [x, weight, bias])
    few = 16 * torch.finfo(where.dtype).eps
    torch.testing.assert_close(op(x).double(), plain(x.double()), atol=few * 1e-2, rtol=few)


@pytest.mark.parametrize("width", [100, 128, 1000])
@pytest.mark.parametrize("deviations", [0.45, 0.55, 3.9, 4.1, 9.0])
def test_one_row_whose_first_value_is_so_far(where: Where, width: int, deviations: float) -> None:
    """On either side of where a second reduction begins, and alone in its tile."""
    x = make(where, 1, width).double()
    x = (x - x.mean()) / x[:, 1:].std()
    x[:, 0] = deviations
    x = (3 * x + 5).to(where.dtype)
    check(op, plain, [x, make(where, width), make(where, width)])


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_is_the_same_among_others(kernels_device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(40, 96, dtype=dtype, device=kernels_device)
    x[::3, 0] += 50
    assert torch.equal(op(x), torch.cat([op(row) for row in x.split(1)]))


def test_squares_beyond_float32(where: Where) -> None:
    """A great first value is no reason to lose what can be held."""
    few, great = 64 * torch.finfo(where.dtype).eps, min(1e19, torch.finfo(where.dtype).max / 2)
    for place in (0, 7):
        x = make(where, 1, 1024) * (great * 1e-4)
        x[0, place] = great
        torch.testing.assert_close(op(x).double(), plain(x.double()), rtol=few, atol=few)
    x = torch.full((1, 8), great / 10, dtype=where.dtype, device=where.device)
    x[0, 0] = 0
    torch.testing.assert_close(op(x).double(), plain(x.double()), rtol=few, atol=few)


def test_not_a_number(where: Where) -> None:
    """What is not finite shows in all of its row and nowhere else."""
    x = make(where, 7, 50)
    for row, (place, value) in enumerate([(0, "nan"), (9, "nan"), (0, "inf"), (9, "inf"), (0, "-inf"), (49, "-inf")]):
        x[row, place] = float(value)
    y = op(x)
    assert y[:6].isnan().all() and y[6].isfinite().all()


def test_rows_too_wide_for_the_kernel(where: Where) -> None:
    x, weight, bias = (make(where, *shape) for shape in ((2, MAX_KERNEL_WIDTH + 1), *[(MAX_KERNEL_WIDTH + 1,)] * 2))
    check(op, plain, [x, weight, bias])


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_weights_of_other_dtypes(where: Where, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """The result has the activations' dtype, each gradient that of what it belongs to."""
    x, weight, bias = make(where, 5, 33), *(torch.randn(33, device=where.device).to(dtype) for dtype in dtypes)
    (y,), gradients = run(op, [x, weight, bias], [0, 1, 2])
    assert [t.dtype for t in (y, *gradients)] == [where.dtype, where.dtype, *dtypes]
    with set_backend("reference"):
        (expected,), others = run(op, [x, weight, bias], [0, 1, 2])
    torch.testing.assert_close([y, *gradients], [expected, *others])


def test_a_retained_graph(where: Where) -> None:
    """It gives the same again, and there is none where nothing needs a gradient."""
    x, weight, bias = make(where, 30, 8), make(where, 8), make(where, 8)
    assert not op(x, weight, bias).requires_grad
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = op(*leaves)
    once, again = (torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True) for _ in range(2))
    for one, two in zip(once, again, strict=True):
        assert torch.equal(one, two)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.kernels
@pytest.mark.parametrize(
    "shape", [(16384, 4096), (4099, 2304), (3, 20000), (9, MAX_KERNEL_WIDTH), (65537, 128)], ids=str
)
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_large(shape: tuple[int, int], offset: float) -> None:
    x = torch.randn(shape, dtype=torch.float32 if offset else torch.bfloat16, device="cuda") + offset
    weight, bias = (torch.randn(shape[1], dtype=x.dtype, device="cuda") for _ in range(2))
    check(op, plain, [x, weight, bias], frozen=shape[0] < 16384)


def test_as_torchs() -> None:
    x, weight, bias = (torch.randn(s, dtype=torch.float64) for s in ((3, 5, 7), (7,), (7,)))
    for w in (weight, None):
        for b in (bias, None):
            torch.testing.assert_close(layer_norm(x, w, b, 0.1), F.layer_norm(x, (7,), w, b, 0.1))


def test_reference_gradients() -> None:
    x, w, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 7), (7,), (7,)))
    assert torch.autograd.gradcheck(lambda x, w, b: layer_norm_reference(x, w, b, EPS), (x, w, b))
    assert torch.autograd.gradcheck(op, (x, w, b))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.ones(2, 3), "weight": torch.ones(4)}, "weight must be floating of shape \\(3\\)"),
        ({"x": torch.ones(2, 3), "bias": torch.ones(2, 3)}, "bias must be floating of shape \\(3\\)"),
        ({"x": torch.ones(2, 3), "bias": torch.ones(3).long()}, "bias must be floating"),
        ({"x": torch.ones(2, 3, dtype=torch.int64)}, "x must be floating"),
        ({"x": torch.ones(())}, "x must be floating"),
        ({"x": torch.ones(2, 0)}, "N > 0"),
        ({"x": torch.ones(2, 3), "weight": torch.ones(3, device="meta")}, "weight must be .* on cpu; got .* on meta"),
        (
            {"x": torch.ones(2, 3), "weight": torch.ones(3), "bias": torch.ones(3, device="meta")},
            "bias must be .* on cpu; got .* on meta",
        ),
    ],
)
def test_bad_input(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=f"^layer_norm: .*{message}"):
        layer_norm(**{"weight": None, "bias": None, **arguments}, eps=EPS)
