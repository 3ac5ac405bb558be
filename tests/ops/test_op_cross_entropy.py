import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from conftest import Where
from loss_cases import OPTIONS, RETURNS, TERMS, options_for, plain_loss, targets
from op_harness import LAYOUTS, check

from ligermodels.errors import InputError
from ligermodels.ops import cross_entropy, cross_entropy_reference, linear_cross_entropy, linear_cross_entropy_reference


def compare(logits: torch.Tensor, y: torch.Tensor, **options: object) -> None:
    check(lambda x: cross_entropy(x, y, **options), lambda x: plain_loss(x, y, **options), [logits])


@pytest.mark.parametrize("name", OPTIONS | TERMS)
@pytest.mark.parametrize(("shape", "V"), [((2, 3), 50), ((5,), 8300)], ids=str)
def test_options(where: Where, name: str, shape: tuple[int, ...], V: int) -> None:
    logits = 3 * torch.randn(*shape, V, dtype=where.dtype, device=where.device)
    y = targets(shape, V, where.device)
    options = options_for(name, y, V)
    compare(logits, y.masked_fill(y == -100, options.get("ignore_index", -100)), **options)


REDUCTIONS, SMOOTHINGS = ("mean", "sum", "none"), (0.0, 0.2, 1.0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_every_combination(reduction: str, smoothing: float) -> None:
    """Losses, what else is returned, and gradients, of both ops and their references, in float64. Half of the
    combinations, in which any four of the five other options meet in every way; of the next case the other half."""
    parity = (REDUCTIONS.index(reduction) + SMOOTHINGS.index(smoothing)) % 2
    hidden, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((6, 3), (7, 3)))
    y = targets((6,), 7, hidden.device)
    tokens, classes = torch.rand(6), torch.rand(7).bfloat16()
    for scaling, z_loss, softcap, by_token, by_class in product((False, True), (0.0, 0.1), (None, 2.0), *[(0, 1)] * 2):
        if (scaling + bool(z_loss) + (softcap is None) + by_token + by_class) % 2 != parity:
            continue
        options = dict(
            token_scaling=scaling, z_loss=z_loss, softcap=softcap, label_smoothing=smoothing, reduction=reduction,
            token_weights=tokens if by_token else None, class_weights=classes if by_class else None, **RETURNS,
        )  # fmt: skip
        logits = hidden @ weight.t()
        wanted = plain_loss(logits, y, **options)
        expected = torch.autograd.grad(wanted[0].square().sum(), (hidden, weight), retain_graph=True)
        for op, inputs in (
            (cross_entropy, (logits,)),
            (cross_entropy_reference, (logits,)),
            (linear_cross_entropy, (hidden, weight)),
            (linear_cross_entropy_reference, (hidden, weight)),
        ):
            found = op(*inputs, y, **options)
            torch.testing.assert_close(found, wanted)
            assert not found[2].requires_grad
            gradients = torch.autograd.grad(found[0].square().sum(), (hidden, weight), retain_graph=True)
            torch.testing.assert_close(gradients, expected)


def test_class_weights_as_torch_takes_them(where: Where) -> None:
    """The reduced loss is torch's own, and its mean over the weights of the targets."""
    logits = torch.randn(6, 40, dtype=where.dtype, device=where.device)
    y, weight = targets((6,), 40, where.device), torch.rand(40, device=where.device)
    for reduction, smoothing in product(("mean", "sum", "none"), (0.0, 0.3)):
        wanted = torch.nn.functional.cross_entropy(
            logits.double(), y, weight.double(), reduction=reduction, label_smoothing=smoothing
        )
        found = cross_entropy(logits, y, class_weights=weight, reduction=reduction, label_smoothing=smoothing)
        torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "V"), [((), 7), ((1,), 1), ((1,), 2049), ((3, 2), 100), ((0,), 5)], ids=str)
def test_layouts_and_sizes(where: Where, layout: Callable, shape: tuple[int, ...], V: int) -> None:
    logits = layout(torch.randn(*shape, V, dtype=where.dtype, device=where.device))
    compare(logits, targets(shape, V, where.device, ignored=0.0), return_rank=True)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_great_logits(where: Where, softcap: float | None) -> None:
    """Targets on the greatest, on the least and in the middle of logits of +-1e4, and nearly equal great logits."""
    logits = torch.randn(6, 70, dtype=torch.float32)
    logits[:3] = torch.where(logits[:3] > 0, 1e4, -1e4)
    logits[3:] = (1e4 + 8 * logits[3:]).round()
    y = torch.stack([logits[0].argmax(), logits[1].argmin(), *[torch.tensor(i) for i in (5, 6, 7, 69)]])
    compare(logits.to(where.device, where.dtype), y.to(where.device), softcap=softcap, return_rank=True)


def test_softcap_near_zero(where: Where) -> None:
    """Where tanh taken from exp would cancel: by 6e-5 here, of logits of about 1."""
    logits = torch.randn(4, 300, dtype=where.dtype, device=where.device)
    compare(logits, targets((4,), 300, where.device), softcap=1000.0, reduction="none")


def test_masked_classes(where: Where) -> None:
    """-inf and the least finite logit are classes of probability 0."""
    logits = torch.randn(3, 40, dtype=where.dtype, device=where.device)
    logits[:, 3:20], logits[:, 30:] = float("-inf"), torch.finfo(where.dtype).min
    compare(logits, torch.tensor([0, 25, -100], device=where.device), return_rank=True)


def test_softcap_below_the_logits(where: Where) -> None:
    """What is near 0 is decided after scaling, not before."""
    logits = torch.randn(6, 300, dtype=where.dtype, device=where.device) / 5
    logits[3] *= 10
    compare(logits, targets((6,), 300, where.device), softcap=0.5, logit_scale=3.7, return_rank=True)


@pytest.mark.kernels
def test_gradients_near_the_softcap(kernels_device: torch.device) -> None:
    """1 - tanh^2 is right of itself, not only beside 1."""
    x = torch.linspace(-9, 9, 300, device=kernels_device).repeat(2, 1).requires_grad_()
    y, options = targets((2,), 300, kernels_device, ignored=0.0), {"softcap": 2.0, "logit_scale": 2.0}
    (found,) = torch.autograd.grad(cross_entropy(x * 1, y, reduction="sum", **options), x)
    exact = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(plain_loss(exact, y, reduction="sum", **options), exact)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=0)


def test_not_a_number(where: Where) -> None:
    """A NaN shows in its own row and nowhere else; in an ignored row it does not show."""
    logits = torch.randn(3, 40, dtype=where.dtype, device=where.device)
    logits[0, 7] = logits[1, 7] = float("nan")
    logits.requires_grad_()
    losses = cross_entropy(logits, torch.tensor([3, -100, 5], device=where.device), reduction="none")
    losses.sum().backward()
    assert losses.isnan().tolist() == [True, False, False]
    assert logits.grad.isnan().any(1).tolist() == [True, False, False] and not logits.grad[1].any()


@pytest.mark.parametrize("fill", ["spread", "far", "confident"])
def test_rows_under_a_softcap(where: Where, fill: str) -> None:
    """Each row's loss to float32's own error, all near 0 or not; where one class has nearly all, what is left of it."""
    x = (torch.rand(60, 700) - 0.5) * {"spread": 47.0, "far": 200.0, "confident": 9.0}[fill]
    y = torch.randint(700, (60,))
    if fill == "confident":
        x[torch.arange(60), y] = 15 + 9 * torch.rand(60)
    x, y = x.to(where.device, where.dtype), y.to(where.device)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    found, wanted = (f(a, y, softcap=30.0, reduction="none") for f, a in ((cross_entropy, leaf), (plain_loss, exact)))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=4e-6)
    assert (found > -1e-6).all()
    gradient, expected = (torch.autograd.grad(loss.sum(), a)[0] for loss, a in ((found, leaf), (wanted, exact)))
    torch.testing.assert_close(gradient.double(), expected, rtol=2 * torch.finfo(where.dtype).eps, atol=5e-6)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("softcap", "scale", "size"),
    [(200.0, 1.0, 1e4), (30.0, 3e-4, 6e4), (0.5, 1.0, 3.0), (60.0, 60.0, 1.0), (32.0, 2**-3, 99.0)],
)
def test_softcaps_and_scales_at_their_ends(
    kernels_device: torch.device, softcap: float, scale: float, size: float
) -> None:
    x = (torch.randn(4, 300, device=kernels_device) * size).clamp(-6e4, 6e4).half()
    y = targets((4,), 300, kernels_device)
    options = {"softcap": softcap, "logit_scale": scale, "reduction": "none"}
    torch.testing.assert_close(
        cross_entropy(x, y, **options).double(), plain_loss(x.double(), y, **options), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_ignored(where: Where, reduction: str) -> None:
    logits = torch.randn(2, 3, 20, dtype=where.dtype, device=where.device, requires_grad=True)
    y = torch.full((2, 3), -100, device=where.device)
    loss, rank = cross_entropy(logits, y, reduction=reduction, return_rank=True)
    loss.sum().backward()
    assert not loss.any() and not logits.grad.any() and (rank == -1).all()


def test_rank_counts_ties_by_index(where: Where) -> None:
    logits = torch.tensor([[1.0, 2, 2, 2, 3]] * 5, dtype=where.dtype, device=where.device)
    _, rank = cross_entropy(logits, torch.arange(5, device=where.device), return_rank=True)
    assert rank.tolist() == [4, 1, 2, 3, 0]


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -2.0, float("-inf")])
def test_rank_counts_ties_in_other_tiles(where: Where, value: float) -> None:
    """Rows of several tiles, all but two logits equal to the target's."""
    V = 40_000
    y = torch.tensor([0, 1, 17_000, 20_000, V - 2, V - 1], device=where.device)
    logits = torch.full((len(y), V), value, dtype=where.dtype, device=where.device)
    logits[:, 5], logits[:, 30_000] = 3.0, float("-inf")
    _, rank = cross_entropy(logits, y, return_rank=True)
    order = logits.double().argsort(dim=1, descending=True, stable=True)
    assert torch.equal(rank, (order == y.unsqueeze(1)).int().argmax(1))


def test_rank_beside_nan_and_infinity(where: Where) -> None:
    """NaN is greater than nothing, and nothing is greater than it."""
    nan, inf = float("nan"), float("inf")
    rows = [([1, 2, nan, 0, 5, nan], 3), ([1, 2, nan, 0, 5, nan], 4), ([nan, 1, 2, 3, 4, 5], 0), ([inf, 1, inf, 2], 2)]
    for row, y in rows:
        logits = torch.tensor([row], dtype=where.dtype, device=where.device)
        _, rank = cross_entropy(logits, torch.tensor([y], device=where.device), return_rank=True)
        ahead = sum(x > row[y] or (x == row[y] and i < y) for i, x in enumerate(row))
        assert rank.tolist() == [ahead], (row, y)


def test_repeated_backward(where: Where) -> None:
    logits = torch.randn(4, 33, dtype=where.dtype, device=where.device, requires_grad=True)
    loss = cross_entropy(logits, targets((4,), 33, where.device))
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    (double,) = torch.autograd.grad(2 * loss, logits)
    assert torch.equal(first, second) and torch.equal(double, 2 * first)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("T", "V"), [(4096, 128256), (1000, 32001), (17, 262144)])
def test_large(T: int, V: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    logits, y = 2 * torch.randn(T, V, dtype=dtype, device=device), targets((T,), V, device)
    compare(logits, y)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.kernels
def test_more_than_2_to_the_31_logits() -> None:
    T, V = 16800, 128256
    logits = torch.randn(T, V, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    y = targets((T,), V, logits.device)
    losses, rank = cross_entropy(logits, y, reduction="none", return_rank=True)
    losses.sum().backward()
    ends = torch.cat([torch.arange(2), torch.arange(T - 2, T)]).to("cuda")
    few = logits.detach()[ends].requires_grad_()
    few_losses, few_rank = cross_entropy(few, y[ends], reduction="none", return_rank=True)
    few_losses.sum().backward()
    assert torch.equal(losses[ends], few_losses) and torch.equal(rank[ends], few_rank)
    assert torch.equal(logits.grad[ends], few.grad)


def test_reference_gradients() -> None:
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    y = targets((2, 3), 7, logits.device)
    for name in ("mean", "smoothing", "z-loss", "softcap", "weights"):
        options = options_for(name, y)
        assert torch.autograd.gradcheck(lambda x, o=options: cross_entropy_reference(x, y, **o), (logits,))


@pytest.mark.parametrize("value", [9, -1, -101, 2**40])
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.kernels)])
def test_target_out_of_range(value: int, backend: str) -> None:
    from ligermodels.ops import set_backend
    from ligermodels.ops.runtime import dispatch

    if backend == "triton" and not dispatch.INTERPRETED:
        pytest.skip("a device-side assertion would end the process's use of the GPU")
    y = torch.tensor([[0, 1], [-100, value]])
    with set_backend(backend), pytest.raises(InputError, match=rf"\[0, 9\).*but target\[1, 1\] is {value}"):
        cross_entropy(torch.randn(2, 2, 9), y)
    with pytest.raises(InputError, match=rf"target\[1, 1\] is {value}"):
        cross_entropy_reference(torch.randn(2, 2, 9), y)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": torch.ones(())}, "logits must be floating"),
        ({"target": torch.zeros(2, dtype=torch.int32)}, "target must be torch.int64 of shape \\(2\\)"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, "got torch.int64 \\(3,\\)"),
        ({"token_weights": torch.ones(3)}, "token_weights must be floating of shape \\(2\\)"),
        ({"token_weights": torch.ones(2, device="meta")}, "token_weights must be .* on cpu; got .* on meta"),
        ({"class_weights": torch.ones(4)}, "cross_entropy: class_weights must be floating of shape \\(5\\)"),
        ({"class_weights": torch.ones(5, dtype=torch.int64)}, "class_weights must be floating"),
        ({"class_weights": torch.ones(5, device="meta")}, "class_weights must be .* on cpu; got .* on meta"),
        ({"reduction": "median"}, "reduction must be"),
        ({"label_smoothing": 1.5}, "label_smoothing must be in"),
        ({"label_smoothing": None}, "label_smoothing must be in"),
        ({"label_smoothing": True}, "label_smoothing must be in"),
        ({"z_loss": None}, "z_loss must be 0 or above, and finite, got None"),
        ({"z_loss": math.inf}, "z_loss must be 0 or above, and finite, got inf"),
        ({"logit_scale": None}, "logit_scale must be positive and finite, got None"),
        ({"logit_scale": math.inf}, "logit_scale must be positive and finite, got inf"),
        ({"softcap": math.inf}, "softcap must be positive and finite, or None, got inf"),
        ({"softcap": "30"}, "softcap must be positive and finite, or None, got '30'"),
        ({"ignore_index": None}, "cross_entropy: ignore_index must be a whole number, got None"),
        ({"ignore_index": -100.0}, "ignore_index must be a whole number, got -100.0"),
        ({"token_scaling": "no"}, "cross_entropy: token_scaling: must be True or False, got 'no'"),
        ({"return_rank": 1}, "return_rank: must be True or False, got 1"),
        ({"reduction": None}, "reduction must be"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"logit_scale": -1.0}, "logit_scale must be positive"),
    ],
    ids=str,
)
def test_bad_input(changed: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        cross_entropy(**{"logits": torch.ones(2, 5), "target": torch.zeros(2, dtype=torch.int64)} | changed)
