from collections.abc import Callable

import pytest
import torch
from conftest import Where
from op_harness import LAYOUTS, check, contiguous, plain_rms_norm, run, strided_rows

from ligermodels.errors import InputError
from ligermodels.ops import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference, set_backend
from ligermodels.ops.norm.norm_rows import MAX_KERNEL_WIDTH

EPS = 1e-5


def plain(offset: float = 0.0, casting_mode: str = "llama") -> Callable[..., torch.Tensor]:
    return lambda x, weight=None: plain_rms_norm(x, weight, EPS, offset, casting_mode)


def plain_add(offset: float = 0.0, casting_mode: str = "llama") -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The same of a sum, and the sum."""
    norm = plain(offset, casting_mode)
    return lambda x, residual, weight=None: (norm(x + residual, weight), x + residual)


SHAPES = [(3,), (1, 4100), (3, 5, 64), (7, 100), (70, 96), (2, 3, 0, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_llama(where: Where, shape: tuple[int, ...], layout: Callable) -> None:
    x = layout(torch.randn(shape, dtype=where.dtype, device=where.device) * 3)
    weight = torch.randn(shape[-1], dtype=where.dtype, device=where.device)
    check(lambda x, w: rms_norm(x, w, EPS), plain(), [x, weight], frozen=layout is contiguous)
    assert rms_norm(x, weight, EPS).is_contiguous()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sum(where: Where, shape: tuple[int, ...], layout: Callable) -> None:
    x, residual = (layout(torch.randn(shape, dtype=where.dtype, device=where.device) * n) for n in (1, 3))
    weight = torch.randn(shape[-1], dtype=where.dtype, device=where.device)
    inputs = [x, residual, weight]
    check(lambda x, r, w: add_rms_norm(x, r, w, EPS), plain_add(), inputs, frozen=layout is contiguous)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sum_after(where: Where, shape: tuple[int, ...], layout: Callable) -> None:
    """The residual is added to what is normalised."""
    x, residual = (layout(torch.randn(shape, dtype=where.dtype, device=where.device) * n) for n in (3, 1))
    weight = torch.randn(shape[-1], dtype=where.dtype, device=where.device)
    check(
        lambda x, r, w: rms_norm(x, w, EPS, offset=0.5, casting_mode="gemma", residual=r),
        lambda x, r, w: plain(0.5, "gemma")(x, w) + r,
        [x, residual, weight],
        frozen=layout is contiguous,
    )
    check(lambda x: rms_norm(x, None, EPS, residual=x), lambda x: plain()(x) + x, [x])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_handed_on(where: Where, shape: tuple[int, ...]) -> None:
    """Without a residual the sum is x, and the gradient of what becomes of it joins that of the norm."""
    x = strided_rows(torch.randn(shape, dtype=where.dtype, device=where.device))
    weight = torch.randn(shape[-1], dtype=where.dtype, device=where.device)
    check(lambda x, w: add_rms_norm(x, None, w, EPS), lambda x, w: (plain()(x, w), x), [x, weight], frozen=True)


def test_sum_with_other_options(where: Where) -> None:
    x, residual = (strided_rows(torch.randn(9, 130, dtype=where.dtype, device=where.device)) for _ in range(2))
    weight = torch.randn(130, dtype=where.dtype, device=where.device) / 4
    check(
        lambda x, r, w: add_rms_norm(x, r, w, EPS, offset=1.0, casting_mode="gemma"),
        plain_add(1.0, "gemma"),
        [x, residual, weight],
        frozen=True,
    )
    check(lambda x, r: add_rms_norm(x, r, None, EPS), plain_add(), [x, residual])
    check(lambda x: add_rms_norm(x, x, None, EPS), lambda x: plain_add()(x, x), [x])
    wide_rows = torch.randn(2, MAX_KERNEL_WIDTH + 1, dtype=where.dtype, device=where.device)
    check(lambda x, r: add_rms_norm(x, r, None, EPS), plain_add(), [wide_rows, wide_rows / 2])


@pytest.mark.parametrize("used", [0, 1], ids=["normalised", "sum"])
def test_only_one_result_used(where: Where, used: int) -> None:
    x, residual = (torch.randn(5, 33, dtype=where.dtype, device=where.device) for _ in range(2))
    weight = torch.randn(33, dtype=where.dtype, device=where.device)
    inputs = [x, residual] if used else [x, residual, weight]
    check(
        lambda x, r, w=weight: add_rms_norm(x, r, w, EPS)[used],
        lambda x, r, w=weight: plain_add()(x, r, w.to(x.dtype))[used],
        inputs,
    )


def test_gemma_no_weight_and_a_strided_weight(where: Where) -> None:
    x = strided_rows(torch.randn(9, 130, dtype=where.dtype, device=where.device))
    weight = torch.randn(130, dtype=where.dtype, device=where.device) / 4
    check(
        lambda x, w: rms_norm(x, w, EPS, offset=1.0, casting_mode="gemma"),
        plain(1.0, "gemma"),
        [x, weight],
        frozen=True,
    )
    check(lambda x: rms_norm(x, None, EPS), plain(), [x])
    check(lambda x, w: rms_norm(x, w[::2], EPS), lambda x, w: plain()(x, w[::2]), [x, torch.cat([weight, weight])])


def test_great_and_small_rows(where: Where) -> None:
    x = torch.randn(4, 64, dtype=where.dtype, device=where.device)
    x = x * torch.tensor([[1e-4], [1.0], [100.0], [0.0]], device=where.device).to(where.dtype)
    check(lambda x: rms_norm(x, None, EPS), plain(), [x])


def test_rows_too_wide_for_the_kernel(where: Where) -> None:
    x = torch.randn(2, MAX_KERNEL_WIDTH + 1, dtype=where.dtype, device=where.device)
    check(lambda x: rms_norm(x, None, EPS), plain(), [x])


@pytest.mark.parametrize("casting_mode", ["llama", "gemma"])
def test_weight_of_another_dtype(where: Where, casting_mode: str) -> None:
    """A float32 weight beside 16-bit activations: the result has the activations' dtype, the gradient the weight's."""
    x = torch.randn(5, 33, dtype=where.dtype, device=where.device)
    weight = torch.randn(33, device=where.device)
    (y,), (dx, dw) = run(lambda x, w: rms_norm(x, w, EPS, casting_mode=casting_mode), [x, weight], [0, 1])
    assert (y.dtype, dx.dtype, dw.dtype) == (where.dtype, where.dtype, torch.float32)
    with set_backend("reference"):
        (expected,), _ = run(lambda x, w: rms_norm(x, w, EPS, casting_mode=casting_mode), [x, weight], [0, 1])
    torch.testing.assert_close(y, expected)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.kernels
@pytest.mark.parametrize(
    "shape", [(16384, 4096), (4099, 2304), (3, 20000), (9, MAX_KERNEL_WIDTH), (65537, 128)], ids=str
)
def test_large(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(shape[1], dtype=torch.bfloat16, device="cuda")
    check(lambda x, w: rms_norm(x, w, EPS), plain(), [x, weight])
    check(lambda x, r, w: add_rms_norm(x, r, w, EPS), plain_add(), [x, torch.randn_like(x), weight])
    check(lambda x, r, w: rms_norm(x, w, EPS, residual=r), lambda x, r, w: plain()(x, w) + r, [x, x.flip(0), weight])


def test_a_float32_reference_has_the_bits_of_the_formula() -> None:
    """It is one op of torch."""
    x, w = torch.randn(7, 129), torch.randn(129)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    assert torch.equal(rms_norm_reference(x, w, EPS), y * w)
    assert torch.equal(rms_norm_reference(x, w, EPS, offset=0.5, casting_mode="gemma"), y * (w + 0.5))


def test_reference_gradients() -> None:
    x, r, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 7), (3, 7), (7,)))
    assert torch.autograd.gradcheck(
        lambda x, w: rms_norm_reference(x, w, EPS, offset=0.5, casting_mode="gemma"), (x, w)
    )
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS), (x, w))
    assert torch.autograd.gradcheck(lambda x, r, w: add_rms_norm_reference(x, r, w, EPS, offset=0.5), (x, r, w))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.ones(2, 3), "weight": torch.ones(4)}, "weight must be floating of shape \\(3\\)"),
        ({"x": torch.ones(2, 3, dtype=torch.int64), "weight": None}, "x must be floating"),
        ({"x": torch.ones(2, 0), "weight": None}, "N > 0"),
        ({"x": torch.ones(2, 3), "weight": None, "casting_mode": "never"}, "casting_mode must be"),
        ({"x": torch.ones(2, 3), "weight": None, "residual": torch.ones(3)}, "residual must be torch.float32 of shape"),
        ({"x": torch.ones(2, 3), "weight": torch.ones(3, device="meta")}, "weight must be .* on cpu; got .* on meta"),
    ],
)
def test_bad_input(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rms_norm(**arguments, eps=EPS)


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (torch.ones(3), "residual must be torch.float32 of shape \\(2, 3\\) on cpu"),
        (torch.ones(2, 3, dtype=torch.float16), "got torch.float16"),
        (torch.ones(2, 3, device="meta"), "on meta"),
    ],
)
def test_bad_residual(residual: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        add_rms_norm(torch.ones(2, 3), residual, None, EPS)
    with pytest.raises(InputError, match=r"^add_rms_norm: weight must be floating"):
        add_rms_norm(torch.ones(2, 3), torch.ones(2, 3), torch.ones(4), EPS)
