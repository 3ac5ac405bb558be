from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from conftest import Where
from op_harness import LAYOUTS, check, contiguous, middle_transposed, plain_rms_norm, strided_rows, wide

from ligermodels.errors import InputError
from ligermodels.ops import rms_norm, rope, rope_qkv, rope_qkv_reference, rope_reference


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


Tables = tuple[torch.Tensor, torch.Tensor] | tuple[None, None]


def split(qkv: torch.Tensor, Hkv: int, G: int, D: int) -> tuple[torch.Tensor, ...]:
    groups = qkv.unflatten(-1, (Hkv, G + 2, D))
    return groups[..., :G, :].flatten(2, 3), groups[..., G, :], groups[..., G + 1, :]


def plain_qkv(
    table: Tables, Hkv: int, G: int, D: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama"
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The op in single steps, for a packed projection and the weights of q's and of k's norm, if there are such."""

    def expected(qkv: torch.Tensor, *weights: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        *heads, v = split(qkv, Hkv, G, D)
        for i, weight in enumerate(weights):
            if weight is not None:
                heads[i] = plain_rms_norm(heads[i], weight, eps, offset, casting_mode)
        if table[0] is not None:
            heads = [rotate(x, *table) for x in heads]
        return *heads, v

    return expected


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
    check(lambda qkv: rope_qkv(qkv, cos, sin, Hkv, G, D), plain_qkv((cos, sin), Hkv, G, D), [qkv])
    q, k, v = rope_qkv(qkv, cos, sin, Hkv, G, D)
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()


NORMED = {  # B, T, Hkv, G, D, R: None for no tables; offset, casting_mode
    "Qwen": (1, 2, 2, 3, 64, 64, 0.0, "llama"),
    "Gemma": (1, 1, 1, 2, 96, 96, 1.0, "gemma"),
    "partial": (2, 1, 3, 1, 60, 40, 0.0, "llama"),
    "odd": (1, 2, 1, 3, 37, 20, 0.0, "gemma"),
    "not rotated": (1, 2, 2, 2, 50, None, 0.0, "llama"),
    "none": (2, 0, 1, 1, 4, 4, 0.0, "llama"),
}


@pytest.mark.parametrize("case", NORMED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms(where: Where, case: str, layout: Callable) -> None:
    B, T, Hkv, G, D, R, offset, casting_mode = NORMED[case]
    shape, norm = (Hkv, G, D), {"eps": 1e-5, "offset": offset, "casting_mode": casting_mode}
    qkv = layout(3 * torch.randn(B, T, Hkv * (G + 2) * D, dtype=where.dtype, device=where.device))
    weights = [torch.randn(D, dtype=where.dtype, device=where.device) for _ in range(2)]
    table = (None, None) if R is None else tables(1, T, R // 2, where.device)
    check(
        lambda qkv, q, k: rope_qkv(qkv, *table, *shape, q, k, **norm),
        plain_qkv(table, *shape, **norm),
        [qkv, *weights],
        frozen=case == "Qwen" and layout is contiguous,
    )


def test_programs_of_several_tokens(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights' gradients come from programs with unlike numbers of tokens, and without any."""
    monkeypatch.setattr(import_module("ligermodels.ops.rope.rope"), "num_sms", lambda device: 4)
    monkeypatch.setattr(import_module("ligermodels.ops.rope.rope"), "PROGRAMS", 1)
    for tokens in (5, 7):
        qkv = torch.randn(1, tokens, 192, dtype=where.dtype, device=where.device)
        weights = [torch.randn(64, dtype=where.dtype, device=where.device) for _ in range(2)]
        table = tables(1, tokens, 32, where.device)
        check(lambda x, q, k: rope_qkv(x, *table, 1, 1, 64, q, k), plain_qkv(table, 1, 1, 64), [qkv, *weights])  # noqa: B023


@pytest.mark.parametrize("rotated", [True, False])
def test_one_norm_or_none(where: Where, rotated: bool) -> None:
    shape = 2, 3, 64
    qkv = strided_rows(torch.randn(2, 1, 640, dtype=where.dtype, device=where.device))
    weight = torch.randn(128, dtype=where.dtype, device=where.device)
    table = tables(2, 1, 24, where.device) if rotated else (None, None)
    expected = plain_qkv(table, *shape)
    check(lambda x: rope_qkv(x, *table, *shape), expected, [qkv])
    check(lambda x, w: rope_qkv(x, *table, *shape, w[::2], None), lambda x, w: expected(x, w[::2]), [qkv, weight])
    check(lambda x, w: rope_qkv(x, *table, *shape, None, w[64:]), lambda x, w: expected(x, None, w[64:]), [qkv, weight])


@pytest.mark.parametrize("casting_mode", ["llama", "gemma"])
def test_norms_round_as_the_ops_apart(where: Where, casting_mode: str) -> None:
    """But for a few elements, where another order of a float32 sum decides. The weights may have another dtype."""
    shape, norm = (2, 2, 64), {"eps": 1e-5, "casting_mode": casting_mode}
    qkv = torch.randn(1, 3, 512, dtype=where.dtype, device=where.device)
    weights = [torch.randn(64, device=where.device).requires_grad_() for _ in range(2)]
    cos, sin = tables(1, 3, 32, where.device)
    fused = rope_qkv(qkv, cos, sin, *shape, *weights, **norm)
    normed = [rms_norm(x, w, **norm) for x, w in zip(split(qkv, *shape)[:2], weights, strict=True)]
    for ours, apart in zip(fused[:2], rope(*normed, cos, sin), strict=True):
        assert ours.dtype == where.dtype
        torch.testing.assert_close(ours, apart)
        assert where.dtype == torch.float32 or (ours != apart).float().mean() < 0.05
    gradients = torch.autograd.grad(sum(x.float().square().sum() for x in fused), weights)
    assert all(g.dtype == torch.float32 and g.any() for g in gradients)


def test_no_eps(where: Where) -> None:
    """Then the padding of heads to a power of two has a root of zero, which nobody may see."""
    qkv = torch.randn(1, 1, 5 * 6, dtype=where.dtype, device=where.device)
    weight, table = torch.ones(6, dtype=where.dtype, device=where.device), (None, None)
    expected = plain_qkv(table, 1, 3, 6, 0.0)
    check(lambda x, w: rope_qkv(x, *table, 1, 3, 6, w, w, eps=0.0), lambda x, w: expected(x, w, w), [qkv, weight])


def test_unused_outputs_have_zero_gradients(where: Where) -> None:
    qkv = torch.randn(1, 3, 4 * 8, dtype=where.dtype, device=where.device, requires_grad=True)
    cos, sin = tables(1, 3, 4, where.device)
    rope_qkv(qkv, cos, sin, 1, 2, 8)[1].sum().backward()
    gradient = qkv.grad.view(3, 4, 8)
    assert not gradient[:, [0, 1, 3]].any() and gradient[:, 2].all()


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.kernels
@pytest.mark.parametrize(("Hkv", "G", "D"), [(8, 4, 128), (4, 7, 128), (4, 2, 256), (8, 4, 64), (8, 16, 128)])
def test_large(Hkv: int, G: int, D: int) -> None:
    qkv = torch.randn(3, 1027, Hkv * (G + 2) * D, dtype=torch.bfloat16, device="cuda")
    cos, sin = tables(1, 1027, D // 2, torch.device("cuda"))
    check(lambda qkv: rope_qkv(qkv, cos, sin, Hkv, G, D), plain_qkv((cos, sin), Hkv, G, D), [qkv])


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.kernels
@pytest.mark.parametrize(("Hkv", "G", "D"), [(8, 4, 128), (4, 16, 128), (4, 2, 256), (8, 16, 128)])
def test_large_with_norms(Hkv: int, G: int, D: int) -> None:
    qkv = torch.randn(3, 1531, Hkv * (G + 2) * D, dtype=torch.bfloat16, device="cuda")
    weights = [torch.randn(D, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    table = tables(1, 1531, D // 2, torch.device("cuda"))
    check(lambda x, q, k: rope_qkv(x, *table, Hkv, G, D, q, k), plain_qkv(table, Hkv, G, D), [qkv, *weights])


def test_reference_gradients() -> None:
    q, k, qkv = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 2, 6), (2, 3, 1, 6), (2, 3, 24))
    )
    cos, sin = tables(1, 3, 2, torch.device("cpu"))
    assert torch.autograd.gradcheck(lambda q, k: rope_reference(q, k, cos, sin), (q, k))
    assert torch.autograd.gradcheck(lambda x: rope_qkv_reference(x, cos, sin, 1, 2, 6), (qkv,))
    weights = [torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(
        lambda x, q, k: rope_qkv_reference(x, cos, sin, 1, 2, 6, q, k, offset=0.5), (qkv, *weights)
    )


@pytest.mark.parametrize(
    ("q", "k", "table", "message"),
    [
        ((2, 3, 4), (2, 3, 4, 6), (1, 3, 3), "q must be floating of shape \\(B, T, Hq, D\\)"),
        ((2, 3, 4, 6), (2, 2, 4, 6), (1, 3, 3), "k must be floating of shape \\(2, 3, Hk, 6\\)"),
        ((2, 3, 4, 6), (2, 3, 1, 6), (3, 3, 3), "cos must be of shape \\(2 or 1, 3, at most 3\\)"),
        ((2, 3, 4, 6), (2, 3, 1, 6), (1, 3, 4), "cos must be"),
    ],
)
def test_bad_input(q: tuple[int, ...], k: tuple[int, ...], table: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        rope(torch.ones(q), torch.ones(k), torch.ones(table), torch.ones(table))


def test_heads_on_two_devices() -> None:
    x, table = torch.ones(1, 3, 2, 6), torch.ones(1, 3, 3)
    with pytest.raises(InputError, match=r"rope: k must be .* on cpu; got .* on meta"):
        rope(x, x.to("meta"), table, table)


def test_bad_packed_input() -> None:
    with pytest.raises(InputError, match=r"rope_qkv: qkv must be .*head_dim = 24"):
        rope_qkv(torch.ones(1, 3, 23), torch.ones(1, 3, 3), torch.ones(1, 3, 3), 1, 2, 6)
    qkv, table = torch.ones(1, 3, 24), torch.ones(1, 3, 3)
    with pytest.raises(InputError, match="rope_qkv: cos and sin must be given together"):
        rope_qkv(qkv, None, table, 1, 2, 6)
    with pytest.raises(InputError, match=r"rope_qkv: k_norm must be floating of shape \(6\)"):
        rope_qkv(qkv, table, table, 1, 2, 6, torch.ones(6), torch.ones(12))
    with pytest.raises(InputError, match=r"rope_qkv: q_norm must be .* on cpu; got .* on meta"):
        rope_qkv(qkv, table, table, 1, 2, 6, torch.ones(6, device="meta"))
    with pytest.raises(InputError, match="rope_qkv: casting_mode must be"):
        rope_qkv(qkv, table, table, 1, 2, 6, casting_mode="never")  # type: ignore[arg-type]
