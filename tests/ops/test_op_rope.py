from collections.abc import Callable

import pytest
import torch
from conftest import Where
from op_harness import LAYOUTS, check, middle_transposed, strided_rows, wide

from ligermodels.errors import InputError
from ligermodels.ops import rope, rope_qkv, rope_qkv_reference, rope_reference


def tables(batch: int, tokens: int, half: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(batch, tokens, half, device=device) * 6.3
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + rotate_half(x) * sin, as transformers writes it."""
    cos, sin = (torch.cat([t, t], -1).unsqueeze(2).to(wide(x).dtype) for t in (cos, sin))
    turning, rest = wide(x[..., : cos.shape[-1]]), x[..., cos.shape[-1] :]
    first, second = turning.chunk(2, -1)
    turned = turning * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned.to(x.dtype), rest], -1)


CASES = {  # B, T, Hq, Hk, D, R, batch of the tables
    "plain": (2, 5, 6, 2, 16, 16, 1),
    "partial": (2, 3, 3, 1, 30, 20, 2),
    "one token": (1, 1, 1, 1, 2, 2, 1),
    "no rotation": (1, 2, 2, 1, 6, 0, 1),
    "none": (2, 0, 2, 1, 6, 6, 1),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", [*LAYOUTS, middle_transposed])
def test_rope(where: Where, case: str, layout: Callable) -> None:
    B, T, Hq, Hk, D, R, batch = CASES[case]
    q, k = (layout(torch.randn(B, T, H, D, dtype=where.dtype, device=where.device)) for H in (Hq, Hk))
    cos, sin = tables(batch, T, R // 2, where.device)
    if layout is strided_rows:
        cos, sin = strided_rows(cos), strided_rows(sin)
    expected = lambda q, k: (rotate(q, cos, sin), rotate(k, cos, sin))  # noqa: E731
    check(lambda q, k: rope(q, k, cos, sin), expected, [q, k], frozen=case == "plain")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("B", "T", "Hkv", "G", "D", "R"), [(2, 3, 2, 3, 10, 10), (1, 4, 1, 1, 8, 4), (1, 1, 3, 7, 16, 16)]
)
def test_rope_qkv(where: Where, layout: Callable, B: int, T: int, Hkv: int, G: int, D: int, R: int) -> None:
    qkv = layout(torch.randn(B, T, Hkv * (G + 2) * D, dtype=where.dtype, device=where.device))
    cos, sin = tables(1, T, R // 2, where.device)

    def expected(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        groups = qkv.view(B, T, Hkv, G + 2, D)
        q, k, v = groups[..., :G, :].reshape(B, T, -1, D), groups[..., G, :], groups[..., G + 1, :]
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    check(lambda qkv: rope_qkv(qkv, cos, sin, Hkv, G, D), expected, [qkv])
    q, k, v = rope_qkv(qkv, cos, sin, Hkv, G, D)
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()


def test_unused_outputs_have_zero_gradients(where: Where) -> None:
    qkv = torch.randn(1, 3, 4 * 8, dtype=where.dtype, device=where.device, requires_grad=True)
    cos, sin = tables(1, 3, 4, where.device)
    rope_qkv(qkv, cos, sin, 1, 2, 8)[1].sum().backward()
    gradient = qkv.grad.view(3, 4, 8)
    assert not gradient[:, [0, 1, 3]].any() and gradient[:, 2].all()


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize(("Hkv", "G", "D"), [(8, 4, 128), (4, 7, 128), (4, 2, 256), (8, 4, 64), (8, 16, 128)])
def test_large(Hkv: int, G: int, D: int) -> None:
    qkv = torch.randn(3, 1027, Hkv * (G + 2) * D, dtype=torch.bfloat16, device="cuda")
    cos, sin = tables(1, 1027, D // 2, torch.device("cuda"))

    def expected(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        groups = qkv.unflatten(-1, (Hkv, G + 2, D))
        q, k, v = groups[..., :G, :].flatten(2, 3), groups[..., G, :], groups[..., G + 1, :]
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    check(lambda qkv: rope_qkv(qkv, cos, sin, Hkv, G, D), expected, [qkv])


def test_reference_gradients() -> None:
    q, k, qkv = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 2, 6), (2, 3, 1, 6), (2, 3, 24))
    )
    cos, sin = tables(1, 3, 2, torch.device("cpu"))
    assert torch.autograd.gradcheck(lambda q, k: rope_reference(q, k, cos, sin), (q, k))
    assert torch.autograd.gradcheck(lambda x: rope_qkv_reference(x, cos, sin, 1, 2, 6), (qkv,))


@pytest.mark.parametrize(
    ("q", "k", "table", "message"),
    [
        ((2, 3, 4), (2, 3, 4, 6), (1, 3, 3), "q must be floating, of shape \\(B, T, heads, D\\)"),
        ((2, 3, 4, 6), (2, 2, 4, 6), (1, 3, 3), "differ in more than their heads"),
        ((2, 3, 4, 6), (2, 3, 1, 6), (3, 3, 3), "cos must be floating, of shape \\(2 or 1, 3, at most 3\\)"),
        ((2, 3, 4, 6), (2, 3, 1, 6), (1, 3, 4), "cos must be"),
    ],
)
def test_bad_input(q: tuple[int, ...], k: tuple[int, ...], table: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        rope(torch.ones(q), torch.ones(k), torch.ones(table), torch.ones(table))


def test_bad_packed_input() -> None:
    with pytest.raises(InputError, match="head_dim = 24"):
        rope_qkv(torch.ones(1, 3, 23), torch.ones(1, 3, 3), torch.ones(1, 3, 3), 1, 2, 6)
