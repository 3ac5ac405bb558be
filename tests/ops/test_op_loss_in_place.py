"""The loss of a chunk of logits whose gradient takes their place, as `linear_cross_entropy` computes it."""

from typing import Any

import pytest
import torch
from conftest import Where
from loss_cases import OPTIONS, options_for, plain_loss, targets
from op_harness import check

from ligermodels.ops import set_backend
from ligermodels.ops.loss.row_statistics import rows_in_place
from ligermodels.ops.loss.token_losses import LogitRows, LossOptions, RowOutputs, loss_weights
from ligermodels.ops.loss.token_losses_kernels import launch_rows


class InPlace(torch.autograd.Function):
    """The loss of logits (M, V) that lie `before` elements into longer rows, nothing of which may be written."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, before: int, after: int, options: dict[str, Any]) -> Any:
        options = dict(options)
        reduction, token_weights = options.pop("reduction", "mean"), options.pop("token_weights", None)
        outputs = RowOutputs(ranks=options.pop("return_rank", False))
        loss_options = LossOptions(**options)
        weights = loss_weights(y, loss_options.ignore_index, reduction, token_weights, x.dtype)
        padded = torch.nn.functional.pad(x, (before, after), value=7.0)
        logits = padded[:, before : before + x.shape[1]]
        rows = LogitRows.empty(y, weights.dtype, outputs)._replace(weights=weights)
        rows_in_place(logits, rows, loss_options)
        assert (padded[:, :before] == 7).all() and (padded[:, before + x.shape[1] :] == 7).all()
        ctx.gradient = logits.contiguous()
        if rows.ranks is not None:
            ctx.mark_non_differentiable(rows.ranks)
        return (rows.losses * weights).sum(), rows.ranks

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        return ctx.gradient * grad.to(ctx.gradient.dtype), None, None, None, None


def compare(logits: torch.Tensor, y: torch.Tensor, before: int = 0, after: int = 0, **options: Any) -> None:
    def op(x: torch.Tensor) -> Any:
        loss, ranks = InPlace.apply(x, y, before, after, options)
        return (loss, ranks) if options.get("return_rank") else loss

    check(op, lambda x: plain_loss(x, y, **options), [logits])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("V", [300, 8300, 20000])
def test_options(where: Where, name: str, V: int) -> None:
    """LogitRows of part of a tile, of a whole tile and a part, and of several."""
    logits = 2 * torch.randn(6, V, dtype=where.dtype, device=where.device)
    y = targets((6,), V, where.device)
    options = options_for(name, y) | ({"reduction": "sum"} if name in ("none", "all") else {})
    compare(logits, y.masked_fill(y == -100, options.get("ignore_index", -100)), **options)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 2), (8, 8)])
@pytest.mark.parametrize("V", [1, 2, 70, 5000])
def test_awkward_rows(where: Where, V: int, before: int, after: int) -> None:
    """Ties, long stretches of -inf, great logits, and rows that begin anywhere."""
    logits = torch.randn(5, V, dtype=where.dtype, device=where.device).mul_(2).round_()
    logits[0, V // 4 : V // 2] = float("-inf")
    logits[1] = torch.where(logits[1] > 0, 1e4, -1e4)
    y = torch.tensor([V - 1, V // 8, 0, -100, V // 2], device=where.device)
    compare(logits, y, before, after, return_rank=True)


def test_targets_at_every_place(where: Where) -> None:
    """The target's own gradient is written last, after all threads have written theirs."""
    V = 4 * 256 + 3
    logits = torch.randn(V, V, dtype=where.dtype, device=where.device)[:: 1 if where.device.type == "cuda" else 64]
    compare(logits, torch.arange(V, device=where.device)[: len(logits)] * (V // len(logits)))


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["softcap", "z-loss", "smoothing"])
def test_softcap_of_bfloat16(kernels_device: torch.device, name: str) -> None:
    """LogitRows near 0, far from it, and both; and -inf, of which the softcap leaves something."""
    options = {"softcap": 30.0, "logit_scale": 0.9, **options_for(name, torch.empty(0))}
    x = torch.randn(6, 1100, device=kernels_device).mul_(4)
    x[1], x[2], x[3, 500:] = 10 * x[1], -60 - x[2].abs(), 9 * x[3, 500:]
    x[4, ::7], x[5, 100:300] = float("-inf"), float("-inf")
    x, y = x.bfloat16(), torch.tensor([0, 1099, 7, 600, 1, -100], device=kernels_device)
    exact = x.double().requires_grad_()
    wanted = plain_loss(exact, y, reduction="none", **options)
    (expected,) = torch.autograd.grad(wanted.sum(), exact)
    losses, ones = torch.empty(6, device=kernels_device), torch.ones(6, device=kernels_device)
    launch_rows(x, LogitRows(y, losses, weights=ones), LossOptions(**options))
    torch.testing.assert_close(losses.double(), wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(x.double(), expected.nan_to_num(), rtol=2**-7, atol=1e-6)


def test_not_a_number(where: Where) -> None:
    """A NaN shows in its own row and nowhere else; in an ignored row it does not show."""
    logits = torch.randn(3, 40, dtype=where.dtype, device=where.device)
    logits[:2, 7] = float("nan")
    y, weights = torch.tensor([3, -100, 5], device=where.device), torch.ones(3, device=where.device)
    losses = torch.empty_like(weights)
    rows_in_place(logits, LogitRows(y, losses, weights=weights), LossOptions())
    assert losses.isnan().tolist() == [True, False, False]
    assert logits.isnan().any(1).tolist() == [True, False, False] and not logits[1].any()


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.kernels
@pytest.mark.parametrize("name", ["mean", "all"])
@pytest.mark.parametrize(("T", "V"), [(40, 150000), (3000, 50257), (17, 262144)])
def test_large(name: str, T: int, V: int) -> None:
    y = targets((T,), V, torch.device("cuda"))
    options = options_for(name, y) | {"reduction": "sum"}
    y = y.masked_fill(y == -100, options.get("ignore_index", -100))
    compare(2 * torch.randn(T, V, dtype=torch.bfloat16, device="cuda"), y, **options)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.kernels
def test_equal_bits_beside_other_kernels() -> None:
    T, V = 3000, 50257
    logits = torch.randn(T, V, dtype=torch.bfloat16, device="cuda")
    y, side, found = targets((T,), V, logits.device), torch.cuda.Stream(), []
    losses, weights = (torch.ones(T, device="cuda") for _ in range(2))
    for run in range(20):
        x = logits.clone()
        if run % 2:
            with torch.cuda.stream(side):
                for _ in range(4):
                    logits.mT @ logits[:, :256]
        launch_rows(x, LogitRows(y, losses, weights=weights), LossOptions(label_smoothing=0.1))
        found.append((losses.clone(), x))
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, found[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_plain_loss_has_the_bits_of_the_loss_with_statistics(dtype: torch.dtype) -> None:
    """In torch they are computed by code of their own."""
    logits, y = 9 * torch.randn(7, 41, dtype=dtype), torch.tensor([40, 0, -100, 7, 7, 1, 3])
    logits[3] *= 1e3
    weights = torch.rand(7, dtype=torch.promote_types(dtype, torch.float32))
    found = []
    with set_backend("reference"):
        for outputs in (RowOutputs(), RowOutputs(entropies=True, lses=True)):
            rows = LogitRows.empty(y, weights.dtype, outputs)._replace(weights=weights)
            rows_in_place(gradient := logits.clone(), rows, LossOptions())
            found.append((rows.losses, gradient))
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(plain, other, rtol=0, atol=0)
