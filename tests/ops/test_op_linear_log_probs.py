import functools
from typing import Any
from unittest import mock

import peak_memory
import pytest
import torch
from conftest import Where
from loss_cases import gemms, targets, two_roundings
from op_harness import check, contiguous, strided_rows, transposed, wide
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ligermodels.errors import InputError
from ligermodels.ops import linear_cross_entropy, linear_log_probs, linear_log_probs_reference, set_backend

TINY, AMPLE = 1, 2**30  # bytes: one row a chunk (the least), all rows at once
ALL = dict.fromkeys(("return_entropy", "return_lse", "return_predicted", "return_rank"), True)
OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "all": ALL,
    "entropy": {"return_entropy": True},
    "lse": {"return_lse": True, "logit_scale": 0.37},
    "predicted": {"return_predicted": True},
    "rank": {"return_rank": True, "softcap": 3.0},
    "ignore 0": ALL | {"ignore_index": 0},
    "scale": ALL | {"logit_scale": 1.7},
    "softcap": ALL | {"softcap": 2.0, "logit_scale": 1.3, "ignore_index": 2},
}


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None,
    *, ignore_index: int = -100, softcap: float | None = None, logit_scale: float = 1.0, **returns: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """Written by torch's own distributions, over logits upcast as transformers upcasts them."""
    x = wide(torch.nn.functional.linear(hidden, weight, bias)) * logit_scale
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    valid = y != ignore_index
    normal = torch.distributions.Categorical(logits=x, validate_args=False)
    found = [normal.log_prob(y.where(valid, 0)).where(valid, 0.0)]
    if returns.get("return_entropy"):
        found.append(normal.entropy().where(valid, 0.0))
    if returns.get("return_lse"):
        found.append(x.logsumexp(-1).where(valid, 0.0))
    return found


def compare(
    hidden: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None,
    *, memory_budget: int = AMPLE, num_targets: int | None = None, frozen: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Every output and gradient against `plain`, and the integers by the logits as they are rounded."""

    def ours(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> list[torch.Tensor]:
        found = linear_log_probs(h, w, y, b, memory_budget=memory_budget, num_targets=num_targets, **options)
        if isinstance(found, torch.Tensor):
            return [found]
        assert [x is not None for x in found[1:5]] == [bool(options.get(name)) for name in ALL]
        logits = torch.nn.functional.linear(h.detach(), w.detach(), None if b is None else b.detach())
        order, ignored = logits.argsort(dim=-1, descending=True, stable=True), y == options.get("ignore_index", -100)
        if found.predicted is not None:
            assert torch.equal(found.predicted, order[..., 0].masked_fill(ignored, -1))
        if found.rank is not None:
            assert torch.equal(found.rank, (order == y.unsqueeze(-1)).int().argmax(-1).masked_fill(ignored, -1))
        return [x for x in found[:3] if x is not None]

    def theirs(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> list[torch.Tensor]:
        return plain(h, w, y, b, **options)

    inputs = [hidden, weight] if bias is None else [hidden, weight, bias]
    check(ours, theirs, inputs, frozen=frozen, slack=two_roundings(hidden))


def samplers(shape: tuple[int, ...], device: torch.device) -> dict[str, dict[str, Any]]:
    """Options of a sampler."""
    temperature = torch.linspace(0.4, 2.0, torch.Size(shape).numel()).view(shape).to(device)
    return {
        "temperature": {"temperature": 0.7},
        "temperatures": {"temperature": temperature, "softcap": 3.0, "logit_scale": 1.3},
        "top-k": {"top_k": 5},
        "top-p": {"top_p": 0.8, "temperature": 0.5},
        "min-p": {"min_p": 0.2},
        "all": dict(temperature=temperature, top_k=40, top_p=0.9, min_p=0.03, softcap=6.0, logit_scale=1.7),
    }


def dropped(
    logits: torch.Tensor, *, softcap: float | None = None, logit_scale: float = 1.0, temperature: Any = 1.0,
    top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """The classes that transformers' warpers drop, of logits (..., V) as they are rounded."""
    x = logits.detach().double() * logit_scale
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    x = x / (temperature.double().unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature)
    x = x.reshape(-1, x.shape[-1]).cpu()
    with mock.patch.object(torch, "sort", functools.partial(torch.sort, stable=True)):  # equal logits by their class
        for warper, value in ((TopKLogitsWarper, top_k), (TopPLogitsWarper, top_p), (MinPLogitsWarper, min_p)):
            x = x if value is None else warper(value)(None, x)
    return x.isneginf().view(logits.shape).to(logits.device)


def sampled(
    hidden: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, drop: torch.Tensor,
    *, softcap: float | None = None, logit_scale: float = 1.0, temperature: Any = 1.0, **_: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Log-probabilities, entropies, lse and log kept mass, by log_softmax over masked logits."""
    x = wide(torch.nn.functional.linear(hidden, weight, bias)) * logit_scale
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    x = x / (temperature.to(x.dtype).unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature)
    valid, kept = y != -100, x.masked_fill(drop, -torch.inf)
    log_p, mass = kept.log_softmax(-1), (kept.logsumexp(-1) - x.logsumexp(-1)).detach()
    at_y = log_p.gather(-1, y.where(valid, 0).unsqueeze(-1)).squeeze(-1)
    found = [at_y, -(log_p.exp() * log_p.masked_fill(drop, 0.0)).sum(-1), kept.logsumexp(-1), mass]
    return [each.where(valid, 0.0) for each in found]


@pytest.mark.parametrize("name", samplers((1,), torch.device("cpu")))
@pytest.mark.parametrize("memory_budget", [TINY, AMPLE])
def test_samplers(where: Where, name: str, memory_budget: int) -> None:
    """A sampler's log-probabilities and all gradients, with the classes that transformers' warpers keep."""
    hidden, weight, bias = head(where, (2, 5), 12, 300)
    options = samplers((2, 5), where.device)[name]
    drop = dropped(torch.nn.functional.linear(hidden, weight, bias), **options)
    y = torch.multinomial((~drop).double().view(10, -1), 1).view(2, 5)
    y[0, 3] = -100

    def ours(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        asked = dict.fromkeys(("return_entropy", "return_lse", "return_log_kept_mass"), True)
        found = linear_log_probs(h, w, y, b, memory_budget=memory_budget, **asked, **options)
        assert not found.log_kept_mass.requires_grad
        return [*found[:3], found.log_kept_mass]

    with torch.no_grad():
        alone = linear_log_probs(hidden, weight, y, bias, memory_budget=memory_budget, **options)
        assert torch.equal(alone, ours(hidden, weight, bias)[0])
    frozen, slack = name in ("top-p", "temperatures"), 2 * two_roundings(hidden)
    check(
        ours, lambda h, w, b: sampled(h, w, y, b, drop, **options), [hidden, weight, bias], frozen=frozen, slack=slack
    )


@pytest.mark.parametrize(
    "options",
    [{"top_k": 7}, {"top_p": 0.5}, {"top_p": 0.0}, {"top_k": 12, "top_p": 0.7}, {"min_p": 1.0}, {"top_p": 1}],
    ids=str,
)  # fmt: skip
def test_samplers_and_equal_logits(where: Where, options: dict[str, Any]) -> None:
    """Which of equal logits are kept, as by transformers; a target that is not kept; and the reference."""
    V = 41
    logits = torch.randint(-2, 3, (6, V), generator=torch.Generator().manual_seed(1)).to(where.dtype).to(where.device)
    logits[5] = 0.0
    drop, y = dropped(logits, **options), torch.arange(6, device=where.device)
    gradients, outputs = [], []
    for op in (linear_log_probs, linear_log_probs_reference, None):
        h = torch.eye(6, dtype=where.dtype, device=where.device).requires_grad_()
        w = logits.t().contiguous().requires_grad_()
        if op is None:
            found = sampled(h, w, y, None, drop, **options)
        else:
            every = op(h, w, y, return_lse=True, return_entropy=True, return_log_kept_mass=True, **options)
            found = [*every[:3], every.log_kept_mass]
        (torch.where(found[0].isfinite(), found[0] * 2, found[1]) + found[2]).sum().backward()
        outputs.append(torch.stack([x.detach().float() for x in found]))
        gradients.append(w.grad)
        assert torch.equal((w.grad == 0)[:, 5], drop[5])
    for one, gradient in zip(outputs[:2], gradients[:2], strict=True):
        assert torch.equal(one[0].isneginf(), drop.gather(1, y[:, None])[:, 0])
        torch.testing.assert_close(one, outputs[2], rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(gradient, gradients[2], rtol=4e-3, atol=4e-3)


def head(where: Where, T: tuple[int, ...], H: int, V: int) -> list[torch.Tensor]:
    return [torch.randn(s, dtype=where.dtype, device=where.device) for s in ((*T, H), (V, H), (V,))]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("memory_budget", [TINY, AMPLE])
def test_options(where: Where, name: str, memory_budget: int) -> None:
    hidden, weight, bias = head(where, (2, 5), 12, 300)
    y, options = targets((2, 5), 300, where.device), OPTIONS[name]
    y = y.masked_fill(y == -100, options.get("ignore_index", -100))
    compare(hidden, weight, y, bias, memory_budget=memory_budget, **options)


@pytest.mark.parametrize("options", [{}, ALL], ids=["alone", "all"])
@pytest.mark.parametrize("memory_budget", [TINY, AMPLE])
def test_frozen_operands(where: Where, options: dict[str, Any], memory_budget: int) -> None:
    """Each gradient is there, and right, exactly when its own operand needs it."""
    hidden, weight, bias = head(where, (7,), 12, 133)
    compare(hidden, weight, targets((7,), 133, where.device), bias, memory_budget=memory_budget, frozen=True, **options)


@pytest.mark.parametrize("layouts", [(strided_rows, contiguous), (transposed, strided_rows), (contiguous, transposed)])
@pytest.mark.parametrize(("T", "H", "V"), [((3,), 1, 1), ((1,), 9, 2), ((2, 3), 7, 1129), ((0,), 3, 5)], ids=str)
def test_layouts_and_sizes(where: Where, layouts: tuple, T: tuple[int, ...], H: int, V: int) -> None:
    """Among them rows of several tiles, no rows, and a single class, whose entropy is 0."""
    hidden, weight, _ = head(where, T, H, V)
    compare(layouts[0](hidden), layouts[1](weight), targets(T, V, where.device), memory_budget=5000, **ALL)


def test_great_logits(where: Where) -> None:
    """Beside which the entropies, some of them of equal logits, some 0, are small."""
    hidden, weight, _ = head(where, (4,), 6, 1340)
    compare(hidden.sign() * 32, weight.sign() * 64, targets((4,), 1340, where.device, ignored=0.0), **ALL)


@pytest.mark.parametrize("memory_budget", [TINY, AMPLE])
@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
def test_rows_without_targets_are_left_out(where: Where, ignored: float, memory_budget: int) -> None:
    hidden, weight, bias = head(where, (2, 10), 12, 30)
    y = targets((2, 10), 30, where.device, ignored)
    y = torch.full_like(y, -100) if ignored == 1 else y
    options = {"num_targets": int((y != -100).sum()), "memory_budget": memory_budget, **ALL}
    compare(hidden, weight, y, bias, **options)
    if ignored:  # they are not so much as read
        hidden.view(-1, 12)[y.view(-1) == -100] = float("nan")
        for frozen in (False, True):
            inputs = [t.detach().requires_grad_(not frozen or i == 0) for i, t in enumerate((hidden, weight, bias))]
            found = linear_log_probs(inputs[0], inputs[1], y, inputs[2], **options)
            (found.log_probs if frozen else sum(found[:3])).sum().backward()
            assert all(t.isfinite().all() for t in found[:5]) and not inputs[0].grad[y == -100].any()
            assert all(t.grad is None or t.grad.isfinite().all() for t in inputs)


@pytest.mark.parametrize("used", ["log_probs", "entropy", "lse", "log_probs entropy"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained head", "frozen head"])
def test_what_a_loss_does_not_use(where: Where, used: str, trained: bool) -> None:
    """Its gradient is None, not zeros: what is left is right, and what is only logged costs nothing."""
    hidden, weight, bias = head(where, (6,), 12, 90)
    y = targets((6,), 90, where.device)

    def of(found: Any) -> list[torch.Tensor]:
        return [getattr(found, name) for name in used.split()]

    def theirs(h: torch.Tensor, w: torch.Tensor = weight, b: torch.Tensor = bias) -> list[torch.Tensor]:
        if not trained:
            w, b = (t.to(h.dtype) for t in (w, b))
        names = dict(zip(("log_probs", "entropy", "lse"), plain(h, w, y, b, **ALL), strict=True))
        return [names[name] for name in used.split()]

    check(
        lambda h, w=weight, b=bias: of(linear_log_probs(h, w, y, b, **ALL)),
        theirs,
        [hidden, weight, bias] if trained else [hidden],
    )


@pytest.mark.parametrize(
    ("needs", "used", "wanted"),
    [
        ("", "", (1, 0)),
        ("hidden", "log_probs", (2, 0)),
        ("hidden", "log_probs entropy", (2, 2)),
        ("hidden in_loss", "log_probs entropy", (1, 2)),
        ("hidden weight bias", "log_probs entropy lse", (1, 3)),
        ("hidden weight", "log_probs", (1, 3)),
        ("weight", "entropy", (1, 2)),
        ("bias", "lse", (1, 1)),
    ],
)
def test_number_of_gemms(needs: str, used: str, wanted: tuple[int, int]) -> None:
    """Forward and backward, over several chunks."""
    T, H, V = 24, 16, 160
    tensors = head(Where(torch.device("cpu"), torch.float32), (T,), H, V)
    inputs = dict(zip(("hidden", "weight", "bias"), tensors, strict=True))
    in_loss = needs.endswith(" in_loss")
    for name in needs.removesuffix(" in_loss").split():
        inputs[name].requires_grad_()
    y, budget = targets((T,), V, torch.device("cpu"), ignored=0.0), 5 * V * 4
    options = {"memory_budget": budget, "entropy_in_loss": in_loss}
    found, forward = gemms(lambda: linear_log_probs(target=y, **options, **inputs, **ALL), T * H * V)
    loss = sum(getattr(found, name).sum() for name in used.split())
    backward = gemms(loss.backward, T * H * V)[1] if used else 0
    assert (forward, backward) == wanted
    y[:12] = -100
    _, half = gemms(lambda: linear_log_probs(target=y, **options, **inputs, **ALL), T * H * V)
    assert half == forward / 2


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("rows_of_budget", "H", "needs", "kept"),
    [(24, 4, (0, 1), 24), (9, 8, (0, 1), 8), (9, 4, (0, 1), 4), (19, 8, (0, 1), 16), (19, 8, (0,), 8), (9, 8, (0,), 0)],
)
def test_kept_logits_are_not_recomputed(
    kernels_device: torch.device, rows_of_budget: int, H: int, needs: tuple[int, ...], kept: int
) -> None:
    """All rows in the budget; or H rows in the memory of the weight's gradient, and some beside a chunk of 128 classes;
    the gradients are those of recomputed logits."""
    T, V = 24, 300
    inputs = head(Where(kernels_device, torch.float32), (T,), H, V)
    for i, x in enumerate(inputs):
        x.requires_grad_(i in needs)
    y, budget = targets((T,), V, kernels_device), rows_of_budget * 304 * 4

    def call() -> Any:
        asked = {"return_entropy": True, "entropy_in_loss": True}
        return linear_log_probs(*inputs[:2], y, inputs[2], memory_budget=budget, **asked)

    y = y.clamp(min=0)
    found, forward = gemms(call, T * H * V)
    loss = (found.log_probs * torch.linspace(-1, 1, T, device=kernels_device) + found.entropy).sum()
    of = [inputs[i] for i in needs]
    first, backward = gemms(lambda: torch.autograd.grad(loss, of, retain_graph=True), T * H * V)
    assert forward == 1 and backward == pytest.approx(len(needs) + 1 - kept / T)
    again, backward = gemms(lambda: torch.autograd.grad(loss, of), T * H * V)
    assert backward == len(needs) + 1
    for one, two in zip(first, again, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.every_case
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("statistic", [0, 1, 2])
def test_infinite_gradients_of_ignored_rows(where: Where, trained: bool, statistic: int) -> None:
    """Such as of 1 / log_probs, which is infinite there, behind a torch.where."""
    hidden, weight, _ = head(where, (40,), 6, 11)
    y = targets((40,), 11, where.device, ignored=0.0)
    y[5] = -100  # so few that their rows are not left out
    inputs = hidden.requires_grad_(), weight.requires_grad_(trained)
    found = linear_log_probs(*inputs, y, return_entropy=True, return_lse=True)[statistic]
    loss = torch.where(y != -100, 1 / found, 0.0).sum()
    for gradient in torch.autograd.grad(loss, [x for x in inputs if x.requires_grad]):
        assert gradient.isfinite().all()
        assert not gradient[5].any() or len(gradient) == 11


@pytest.mark.kernels
@pytest.mark.parametrize("budget", [20, 40, 64])  # rows of logits
def test_a_backward_pass_on_the_other_backend(budget: int, kernels_device: torch.device) -> None:
    """It has no kernels for the logits that the forward pass has kept for it."""
    T, H, V = 64, 16, 300
    where, gradients = Where(kernels_device, torch.float32), []
    y = targets((T,), V, kernels_device)
    inputs = [x.requires_grad_() for x in head(where, (T,), H, V)]
    for backend in ("triton", "reference"):
        found = linear_log_probs(*inputs[:2], y, inputs[2], return_entropy=True, memory_budget=budget * 304 * 4)
        loss = (found.log_probs * found.entropy).sum()
        with set_backend(backend):
            gradients.append(torch.autograd.grad(loss, inputs))
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_entropy_of_kept_classes_in_the_reference() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4)
    y = torch.tensor([1, 2, -100])
    results = [
        op(hidden, weight, y, top_k=3, return_entropy=True) for op in (linear_log_probs, linear_log_probs_reference)
    ]
    ours, reference = (torch.autograd.grad(4 * found.entropy.sum(), hidden)[0] for found in results)
    torch.testing.assert_close(reference, ours)


@pytest.mark.parametrize("trained", [True, False], ids=["trained head", "frozen head"])
def test_repeated_backward(where: Where, trained: bool) -> None:
    """Over a retained graph, each backward pass with its own gradient: powers of two, so that they compare by bits.

    Not the first one of a trained head: its logits may be those of the forward pass, whose GEMMs round otherwise."""
    if where.dtype == torch.float16:
        pytest.skip("its small values are subnormal, so that scaling by a power of two rounds")
    inputs = [t.requires_grad_(trained or i == 0) for i, t in enumerate(head(where, (6,), 8, 30))]
    found = linear_log_probs(inputs[0], inputs[1], targets((6,), 30, where.device), inputs[2], memory_budget=500, **ALL)
    needed = [t for t in inputs if t.requires_grad]
    for outputs in ([found.log_probs], found[:3]):
        passes = [
            torch.autograd.grad(outputs, needed, [torch.full_like(x, factor) for x in outputs], retain_graph=True)
            for factor in (1, 1, 4, 1)
        ]
        for first, one, four, again in zip(*passes, strict=True):
            assert torch.equal(one, again) and torch.equal(4 * one, four)
            torch.testing.assert_close(first, one, rtol=2e-2 if first.dtype.itemsize == 2 else 1e-5, atol=1e-2)
        assert len({t.data_ptr() for gradients in passes for t in gradients}) == 4 * len(needed)


def test_no_second_derivative(where: Where) -> None:
    hidden, weight, _ = head(where, (3,), 4, 9)
    log_probs = linear_log_probs(hidden.requires_grad_(), weight, targets((3,), 9, where.device))
    with pytest.raises(RuntimeError, match="LinearStatistics has no second derivatives: leave create_graph=True out"):
        torch.autograd.grad(log_probs.sum(), hidden, create_graph=True)


def test_no_grad_computes_no_gradient(where: Where) -> None:
    hidden, weight, _ = head(where, (6,), 8, 30)
    with torch.no_grad():
        found = linear_log_probs(hidden.requires_grad_(), weight.requires_grad_(), targets((6,), 30, where.device))
    assert not found.requires_grad


def test_agrees_with_the_reference_and_with_cross_entropy(where: Where) -> None:
    hidden, weight, bias = head(where, (6,), 8, 30)
    y, options = targets((6,), 30, where.device), dict(softcap=2.0, logit_scale=0.5, return_rank=True)
    found = linear_log_probs(hidden, weight, y, bias, **ALL | options)
    for one, two in zip(found, linear_log_probs_reference(hidden, weight, y, bias, **ALL | options), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    loss, rank = linear_cross_entropy(hidden, weight, y, bias, reduction="none", **options)
    alone = linear_log_probs(hidden, weight, y, bias, **options)
    assert torch.equal(-alone.log_probs, loss) and torch.equal(alone.rank, rank) and torch.equal(found.rank, rank)
    assert torch.equal(found.rank == 0, (found.predicted == y) & (y >= 0))


def test_awkward_logits(where: Where) -> None:
    """Ties, whose first is predicted, -inf, of which an entropy has nothing, and NaN, which shows in its own row."""
    V, lowest = 1100, float("-inf")
    logits = torch.zeros(5, V, dtype=where.dtype, device=where.device)
    logits[0, 300:] = lowest
    logits[1, [7, 1050]] = 3.0
    logits[2], logits[2, 1024] = lowest, 5.0
    logits[3, 5] = float("nan")
    weight, y = logits.t().contiguous(), torch.tensor([299, 1050, 1024, 7, -100], device=where.device)
    hidden = torch.eye(5, dtype=where.dtype, device=where.device)
    bias = torch.zeros(V, dtype=where.dtype, device=where.device)
    for row in range(5):  # 0 times -inf would be NaN: one row at a time, as a bias
        h, b = torch.zeros_like(hidden[:1]).requires_grad_(), (bias + logits[row]).requires_grad_()
        found = linear_log_probs(h, torch.zeros_like(weight), y[row : row + 1], b, **ALL)
        sum(found[:3]).sum().backward()
        wanted = linear_log_probs_reference(h, torch.zeros_like(weight), y[row : row + 1], b, **ALL)
        if row == 3:
            assert found.log_probs.isnan() and found.entropy.isnan() and b.grad.isnan().any()
            continue
        for one, two in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, two, rtol=2e-6, atol=2e-6)
        assert b.grad.isfinite().all() and found.predicted == (0, 7, 1024, None, -1)[row]


def test_autocast() -> None:
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    y = targets((5,), 30, hidden.device)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_log_probs(hidden, weight, y, memory_budget=TINY)
    found.sum().backward()
    h, w = (t.detach().bfloat16().requires_grad_() for t in (hidden, weight))
    expected = linear_log_probs(h, w, y, memory_budget=TINY)
    expected.sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(hidden.grad, h.grad.float()) and torch.equal(weight.grad, w.grad.float())


@pytest.mark.parametrize("options", [{}, dict(softcap=2.0, logit_scale=1.4)], ids=str)
def test_gradients_in_float64(options: dict[str, Any]) -> None:
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (7, 3), (7,))]
    y = targets((4,), 7, inputs[0].device)
    for op in (linear_log_probs, linear_log_probs_reference):

        def outputs(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor, op: Any = op) -> Any:
            return op(h, w, y, b, memory_budget=TINY, **ALL, **options)[:3]

        assert torch.autograd.gradcheck(outputs, inputs)


@pytest.mark.parametrize(("dtype", "head"), [("float32", "trained"), ("bfloat16", "frozen")])
def test_memory_stays_within_the_budget(dtype: str, head: str) -> None:
    """Forward and backward, where the logits would be ten times the budget; twice the budget would show."""
    budget = peak_memory.T * peak_memory.V * getattr(torch, dtype).itemsize // 10
    options = "memory_budget=budget, softcap=5.0, return_entropy=True"
    loss = f"sum(ops.linear_log_probs(hidden, weight, target, {options})[:2]).sum()"
    used = peak_memory.beyond_gradients(loss, dtype, budget, trained=head == "trained", summed=False)
    assert budget / 4 < used < budget + peak_memory.ALLOWANCE, f"{used / 2**20:.1f} MiB of {budget / 2**20:.1f} MiB"


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("T", "H", "V"), [(2048, 1024, 128256), (1000, 512, 32001), (300, 256, 262144)])
@pytest.mark.parametrize("memory_budget", [2**27, 2**31])
def test_large(dtype: torch.dtype, T: int, H: int, V: int, memory_budget: int) -> None:
    hidden, weight, _ = head(Where(torch.device("cuda"), dtype), (T,), H, V)
    y = targets((T,), V, hidden.device)
    compare(hidden, weight / H**0.5, y, memory_budget=memory_budget, return_entropy=True, return_lse=True)


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("trained", [True, False], ids=["trained head", "frozen head"])
def test_memory_and_no_wait_on_the_gpu(trained: bool) -> None:
    T, H, V, budget = 8192, 512, 128256, 2**28
    hidden, weight, _ = head(Where(torch.device("cuda"), torch.bfloat16), (T,), H, V)
    hidden.requires_grad_(), weight.requires_grad_(trained)
    y = targets((T,), V, hidden.device)

    def call(rows: int) -> None:
        found = linear_log_probs(hidden[:rows], weight, y[:rows], memory_budget=budget, return_entropy=True)
        (found.log_probs * 0.3 + found.entropy.detach()).sum().backward()

    call(T)
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(T)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    used = torch.cuda.max_memory_allocated() - before
    gradients = 3 * hidden.nbytes + trained * 2 * weight.nbytes  # of log_probs, kept and multiplied
    assert used < gradients + budget + 40 * 2**20, "beyond cuBLAS's own 32 MiB and change"


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"weight": torch.ones(5, 3)}, InputError, "linear_log_probs: weight must be torch.float32 of shape"),
        ({"weight": torch.ones(0, 4)}, InputError, "linear_log_probs: needs V > 0; got tensors of shape"),
        ({"bias": torch.ones(4)}, InputError, "bias must be torch.float32 of shape \\(5\\)"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, InputError, "target must be torch.int64 of shape \\(2\\)"),
        ({"target": torch.tensor([0, 5])}, InputError, r"target\[1\] is 5"),
        ({"hidden": torch.ones(2, 4, dtype=torch.int64)}, InputError, "hidden must be floating"),
        ({"softcap": 0.0}, InputError, "softcap must be positive"),
        ({"logit_scale": -1.0}, InputError, "logit_scale must be positive"),
        ({"ignore_index": None}, InputError, "ignore_index must be a whole number, got None"),
        ({"return_entropy": "no"}, InputError, "linear_log_probs: return_entropy: must be True or False, got 'no'"),
        ({"entropy_in_loss": 1}, InputError, "entropy_in_loss: must be True or False, got 1"),
        ({"memory_budget": 0}, InputError, "memory_budget must be a positive"),
        ({"temperature": 0.0}, InputError, "temperature must be a positive number or a tensor"),
        ({"temperature": torch.ones(3)}, InputError, r"temperature must be .*of shape \(2\)"),
        ({"temperature": torch.ones(2, dtype=torch.int64)}, InputError, "temperature must be floating"),
        ({"temperature": torch.ones(2, requires_grad=True)}, InputError, "temperature has no gradient"),
        *(
            (
                {"temperature": torch.tensor([1.0, bad])},
                InputError,
                rf"temperature must be .*, but temperature\[1\] is {bad}",
            )
            for bad in (0.0, -1.0, torch.nan, torch.inf)
        ),
        ({"top_k": 1.5}, InputError, "top_k must be a whole number"),
        ({"top_k": torch.ones(2).long()}, InputError, "top_k must be a whole number, .* the same for all rows"),
        ({"top_p": 1.1}, InputError, r"top_p must be a number in \[0, 1\]"),
        ({"min_p": -0.1}, InputError, r"min_p must be a number in \[0, 1\]"),
        ({"num_targets": 1}, RuntimeError, "num_targets is not the number"),
    ],
    ids=str,
)
def test_bad_input(changed: dict, error: type[Exception], message: str) -> None:
    good = {"hidden": torch.ones(2, 4), "weight": torch.ones(5, 4), "target": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(error, match=message):
        linear_log_probs(**good | changed)


@pytest.mark.parametrize("logit_scale", [0.01, 9.0])
def test_kept_masses_near_zero_and_near_one(where: Where, logit_scale: float) -> None:
    """One class of 3000 with nearly equal probabilities, or with nearly all of it: to the last digits of each."""
    hidden = torch.eye(3, dtype=where.dtype, device=where.device)
    weight = torch.randint(-2, 2, (3000, 3), device=where.device).to(where.dtype)
    weight[7] = 3.0
    y = torch.zeros(3, dtype=torch.long, device=where.device)
    options: dict[str, Any] = {"top_k": 1, "return_log_kept_mass": True, "logit_scale": logit_scale}
    found = linear_log_probs(hidden, weight, y, **options).log_kept_mass
    exact = linear_log_probs_reference(hidden.double(), weight.double(), y, **options).log_kept_mass
    assert (found / exact - 1).abs().max() <= 2e-6
