"""Experts of tokens and their weights: against Python and float64, by the reference and by the kernels."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from conftest import Where
from op_harness import LAYOUTS, check, wide
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.ops import NOT_ROUTED, RouterOptions
from ligermodels.ops.moe import route_tokens as module

NAN = float("nan")
SIZES = (  # experts, top_k, num_groups, top_k_groups, scores_per_group
    (5, 1, 1, 1, 2),
    (5, 5, 1, 1, 2),
    (5, 2, 5, 3, 1),
    (60, 4, 1, 1, 2),
    (60, 7, 3, 1, 3),
    (60, 3, 12, 2, 2),
    (128, 8, 1, 1, 2),
    (160, 6, 8, 3, 1),
    (256, 8, 8, 4, 2),
    (256, 2, 1, 1, 2),
    (600, 3, 1, 1, 2),
)
WEIGHING: tuple[dict[str, Any], ...] = (
    {},
    {"normalize": False},
    {"normalize": False, "scale": 0.5},
    {"eps": 0.1, "scale": 2.5},
    {"min_sum": 0.3},
    {"min_sum": 30.0, "eps": 1e-20},
)
GIVEN = (None, torch.int64, torch.int32, torch.int16, torch.uint16, torch.uint8)


def options_of(sizes: tuple[int, ...], **others: Any) -> RouterOptions:
    _, top_k, *groups = sizes
    names = "num_groups", "top_k_groups", "scores_per_group"
    return RouterOptions(top_k, **dict(zip(names, groups, strict=True)), **others)


def route(x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return ops.route_tokens(x, *args, options=RouterOptions(**options))


def choice_in_python(row: list[float], bias: list[float], options: RouterOptions) -> list[int]:
    """The experts of a token in falling order: NaN is the largest, and equal ones are ordered by number."""

    def fallen(numbers: dict[int, float], count: int) -> list[int]:
        return sorted(numbers, key=lambda i: (not math.isnan(numbers[i]), -numbers[i], i))[:count]

    if not any(bias) and options.top_k_groups == options.num_groups:
        return fallen(dict(enumerate(row)), options.top_k)
    logits = torch.tensor(row, dtype=torch.float64)
    scores = logits.softmax(0) if options.scores == "softmax" else logits.sigmoid()
    choice = dict(enumerate((scores + torch.tensor(bias, dtype=torch.float64)).tolist()))
    size = len(row) // options.num_groups
    groups = {g: {e: choice[e] for e in range(g * size, (g + 1) * size)} for g in range(options.num_groups)}
    sums = {g: sum(each[e] for e in fallen(each, options.scores_per_group)) for g, each in groups.items()}
    best = fallen(sums, options.top_k_groups) if len(sums) > options.top_k_groups else list(sums)
    return fallen({e: value for g in best for e, value in groups[g].items()}, options.top_k)


def plain_route(x: Tensor, bias: Tensor | None, given: Tensor | None, options: RouterOptions) -> tuple[Tensor, Tensor]:
    no_bias = [0.0] * x.shape[1]
    rows = [choice_in_python(row, no_bias if bias is None else bias.tolist(), options) for row in x.tolist()]
    experts = torch.tensor(rows, device=x.device)
    if given is not None:
        given = given.long()
        experts = experts.where(given == NOT_ROUTED, given)
    scores = wide(x).softmax(-1) if options.scores == "softmax" else wide(x).sigmoid()
    weights = scores.gather(1, experts)
    if options.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + options.eps).clamp(min=options.min_sum)
    return weights * options.scale, experts


def distinct(where: Where, rows: int, experts: int) -> Tensor:
    """Logits that all differ in a row, in any dtype."""
    octave = 1 + torch.arange(128) / 128  # all that bfloat16 has from 1 to 2
    values = torch.cat([sign * 2**power * octave for sign in (-1, 1) for power in range(3)])
    values = values[torch.linspace(0, len(values) - 1, experts).long()]
    return torch.stack([values[torch.randperm(experts)] for _ in range(rows)]).to(where.device, where.dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize("weighing", WEIGHING, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_float64(
    where: Where, sizes: tuple[int, ...], scores: Any, biased: bool, weighing: dict[str, Any], given: Any, layout: Any
) -> None:
    """Weights, experts and the gradient of the logits; also of an expert that is given twice."""
    experts, options = sizes[0], options_of(sizes, scores=scores, **weighing)
    x = layout(distinct(where, 6, experts))
    bias = torch.randn(experts, device=where.device) if biased else None
    own = None
    if given is not None:
        unknown = NOT_ROUTED if given.is_signed else 0
        own = torch.randint(unknown, min(experts, 256), (6, options.top_k))
        own[1], own[2] = unknown, 3
        own = own.to(where.device, given)
    plain = partial(plain_route, bias=bias, given=own, options=options)
    check(lambda x: ops.route_tokens(x, bias, own, options=options), plain, [x])


@pytest.mark.kernels
@pytest.mark.parametrize("special", [(), (NAN,), (NAN, math.inf, -math.inf)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("sizes", SIZES[:-1], ids=str)
def test_ties(
    kernels_device: torch.device, sizes: tuple[int, ...], scores: Any, biased: bool, special: tuple[float, ...]
) -> None:
    """Few values, so that many are equal, signs of zero among them; NaN and infinities."""
    values = torch.tensor([-0.0, 0.0, 1.5, -1.5, 1e-3, *special])
    x = values[torch.randint(len(values), (20, sizes[0]))]
    x[0] = 1.0
    bias = torch.tensor([0.0, 0.25, -0.125])[torch.randint(3, sizes[:1])] if biased else None
    options = options_of(sizes, scores=scores)
    _, experts = ops.route_tokens(
        x.to(kernels_device), None if bias is None else bias.to(kernels_device), options=options
    )
    no_bias = [0.0] * sizes[0]
    wanted = [choice_in_python(row, no_bias if bias is None else bias.tolist(), options) for row in x.tolist()]
    assert experts.tolist() == wanted


@pytest.mark.parametrize("groups", [(1, 1, 2), (4, 2, 2)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_nan(where: Where, scores: Any, biased: bool, groups: tuple[int, ...]) -> None:
    """It is chosen first, in place of an expert that does not exist; weights with it are NaN, other tokens' are not."""
    x = torch.randn(4, 20, device=where.device, dtype=where.dtype)
    x[1, 7], x[2] = NAN, NAN
    bias = torch.randn(20, device=where.device) if biased else None
    weights, experts = ops.route_tokens(x, bias, options=options_of((20, 3, *groups), scores=scores))
    assert bool(((experts >= 0) & (experts < 20)).all()) and all(len(set(row)) == 3 for row in experts.tolist())
    assert bool(weights[1:3].isnan().all()) and bool(weights[[0, 3]].isfinite().all())
    if scores == "sigmoid":
        assert experts[1, 0] == 7
        alone, _ = ops.route_tokens(x, bias, options=options_of((20, 3, *groups), scores=scores, normalize=False))
        assert alone[1].isnan().tolist() == [True, False, False]


def test_large_logits(where: Where) -> None:
    """The order of logits where scores are 0 or 1, and gradients that stay finite."""
    x = torch.tensor([[60.0, 64.0, 68.0, 72.0], [-9e3, -8e3, -7e3, 2.0]], device=where.device, dtype=where.dtype)
    x.requires_grad_()
    for scores in ("softmax", "sigmoid"):
        weights, experts = route(x, top_k=3, scores=scores, eps=1e-20)
        if scores == "sigmoid" or where.place != "reference":
            assert experts.tolist() == [[3, 2, 1], [3, 2, 1]]
        assert bool(weights.isfinite().all())
        (gradient,) = torch.autograd.grad(weights.square().sum(), x)
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_one_expert(where: Where, scores: Any) -> None:
    """Its normalised weight is exactly 1; the kernels give no gradient, where torch leaves rounding errors."""
    x = torch.randn(200, 9, device=where.device).to(where.dtype).requires_grad_()
    weights, _ = route(x, top_k=1, scores=scores)
    (gradient,) = torch.autograd.grad(weights.sum() * 3, x)
    assert bool((weights == 1).all()) and float(gradient.abs().max()) <= (1e-6 if where.place == "reference" else 0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int16])
def test_unsigned_experts(where: Where, dtype: torch.dtype) -> None:
    """255 of uint8 is an expert; torch takes it for -1."""
    x = torch.randn(2, 300, device=where.device, dtype=where.dtype)
    given = torch.tensor([[255, 3], [7, 250]], device=where.device)
    assert torch.equal(route(x, None, given.to(dtype), top_k=2)[1], given)
    assert torch.equal(route(x, None, given.to(dtype), top_k=2)[0], route(x, None, given, top_k=2)[0])


def test_not_routed(where: Where) -> None:
    """-1 keeps the choice of the router, in place; all of them change no bit."""
    x = distinct(where, 3, 12)
    weights, experts = route(x, top_k=4)
    given = torch.full((3, 4), NOT_ROUTED, device=where.device)
    for one, two in zip(route(x, None, given, top_k=4), (weights, experts), strict=True):
        assert torch.equal(one, two)
    given[1, 2] = 5
    found = route(x, None, given, top_k=4)[1]
    experts[1, 2] = 5
    assert torch.equal(found, experts)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_batch_invariant(where: Where, scores: Any) -> None:
    """The bits of a token's choice, weights and gradient, alone and in any batch."""
    logits, bias = torch.randn(30, 45).to(where.device, where.dtype), torch.randn(45, device=where.device)
    for options in (RouterOptions(5, scores, eps=0.1), RouterOptions(5, scores, num_groups=3, top_k_groups=2)):

        def of(rows: slice, options: RouterOptions = options) -> list[Tensor]:
            x = logits[rows].detach().requires_grad_()
            weights, experts = ops.route_tokens(x, bias, options=options)
            return [weights.detach(), experts, *torch.autograd.grad(weights.square().sum(), x)]

        with ops.set_batch_invariant(True):
            every = of(slice(None))
            for rows in (slice(0, 1), slice(3, 10), slice(11, 30)):
                assert all(torch.equal(one, two[rows]) for one, two in zip(of(rows), every, strict=True))


def test_no_tokens(where: Where) -> None:
    x = torch.empty(0, 12, device=where.device, dtype=where.dtype, requires_grad=True)
    bias, given = torch.ones(12, device=where.device), torch.ones(0, 4, dtype=torch.long, device=where.device)
    weights, experts = route(x, bias, given, top_k=4, num_groups=3, top_k_groups=1)
    assert weights.shape == experts.shape == (0, 4)
    assert weights.dtype == torch.float32 and experts.dtype == torch.long
    weights.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape and x.grad.dtype == x.dtype


@pytest.mark.parametrize("sizes", [(module.MAX_EXPERTS + 1, 3), (200, module.MAX_K + 1)])
def test_beyond_the_kernels(where: Where, sizes: tuple[int, int]) -> None:
    """The reference serves them, and the largest that the kernels take agree with it."""
    for experts, top_k in (sizes, (min(sizes[0], module.MAX_EXPERTS), min(sizes[1], module.MAX_K))):
        x = torch.stack([torch.randperm(experts) for _ in range(2)]).to(where.device) / experts
        for one, two in zip(
            route(x, top_k=top_k), ops.route_tokens_reference(x, options=RouterOptions(top_k)), strict=True
        ):
            torch.testing.assert_close(one, two)


def test_the_bias_and_the_experts_have_no_gradient(where: Where) -> None:
    x = torch.randn(3, 8, device=where.device, dtype=where.dtype)
    bias = torch.randn(8, device=where.device, requires_grad=True)
    weights, experts = route(x, bias, top_k=2)
    assert not weights.requires_grad and not experts.requires_grad
    weights, experts = route(x.requires_grad_(), bias, top_k=2)
    weights.sum().backward()
    assert not experts.requires_grad and bias.grad is None and x.grad is not None


def test_float64_stays(where: Where) -> None:
    x = torch.randn(3, 8, device=where.device, dtype=torch.float64, requires_grad=True)
    weights, _ = route(x, torch.randn(8, device=where.device), top_k=2, scores="sigmoid")
    weights.sum().backward()
    assert weights.dtype == x.grad.dtype == torch.float64


@pytest.mark.kernels
def test_kernels_save_the_logits_and_the_experts(kernels_device: torch.device) -> None:
    x, saved = torch.randn(7, 40, device=kernels_device, requires_grad=True), list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        weights, experts = route(x, top_k=3)
    assert [each.data_ptr() for each in saved] == [x.data_ptr(), experts.data_ptr()]
    (weights * torch.randn_like(weights)).sum().backward()


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_reference_launches_nothing_for_numbers_without_effect() -> None:
    x, launched = torch.randn(3, 8), dict[str, list[str]]()
    for name, numbers in {"none": {}, "all": {"eps": 0.1, "min_sum": 0.1, "scale": 2.0}}.items():
        with Seen() as seen:
            ops.route_tokens_reference(x, options=RouterOptions(2, **numbers))  # type: ignore[arg-type]
        launched[name] = seen.names
    more = {"aten.add.Tensor", "aten.clamp.default", "aten.mul.Tensor"}
    assert more <= {*launched["all"]} and more.isdisjoint(launched["none"])


def test_under_autocast(where: Where) -> None:
    x = torch.randn(3, 8, device=where.device, dtype=where.dtype)
    wanted = route(x, top_k=2, eps=0.1)
    with torch.autocast(where.device.type, torch.bfloat16):
        found = route(x, top_k=2, eps=0.1)
    assert all(map(torch.equal, found, wanted))


def test_meta() -> None:
    x = torch.empty(5, 12, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weights, experts = route(x, torch.empty(12, device="meta"), top_k=3)
    assert weights.shape == experts.shape == (5, 3) and weights.is_meta and weights.dtype == torch.float32
    weights.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("given", [[[0, 8]], [[-2, 1]]])
def test_given_experts_that_do_not_exist(where: Where, given: list[list[int]]) -> None:
    x = torch.randn(1, 8, device=where.device, dtype=where.dtype)
    own = torch.tensor(given, device=where.device)
    with (
        ops.set_host_checks(True),
        pytest.raises(InputError, match=r"given_experts must lie in \[0, 8\), or be -1, but \["),
    ):
        route(x, None, own, top_k=2)


@pytest.mark.kernels
def test_kernels_read_no_logits_of_experts_that_do_not_exist(
    kernels_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the values are not read on the host: their weights are NaN."""
    monkeypatch.setattr(module, "checked_on_host", lambda experts: False)
    x = torch.randn(2, 8, device=kernels_device)
    own = torch.tensor([[2, 1 << 40], [2, 3]], device=kernels_device)
    weights, experts = route(x, None, own, top_k=2, normalize=False)
    assert torch.equal(experts, own) and weights.isnan().tolist() == [[False, True], [False, False]]


X = torch.ones(3, 12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: route(X.long(), top_k=2), r"logits must be floating of shape \(N, E\)"),
        (lambda: route(X[0], top_k=2), r"logits must be floating of shape \(N, E\)"),
        (lambda: route(X[:, :0], top_k=2), "needs E > 0"),
        (lambda: route(X, X[0, :3], top_k=2), r"selection_bias must be floating of shape \(12\)"),
        (lambda: route(X, None, X[:, :2], top_k=2), r"given_experts must be .*int64 .* of shape \(3, 2\)"),
        (lambda: route(X, None, X.long(), top_k=2), r"given_experts must be .*int64 .* of shape \(3, 2\)"),
        (lambda: route(X, top_k=0), "top_k: must be a whole number of at least 1, got 0"),
        (lambda: route(X, top_k=2.0), "top_k: must be a whole number"),
        (lambda: route(X, top_k=13), "top_k: must be at most 12, got 13"),
        (lambda: route(X, top_k=5, num_groups=3), "top_k: must be at most 4, got 5"),
        (lambda: route(X, top_k=2, num_groups=5), "num_groups 5 does not divide the number of experts, 12"),
        (lambda: route(X, top_k=2, num_groups=3, top_k_groups=4), "top_k_groups: must be at most 3, got 4"),
        (lambda: route(X, top_k=1, num_groups=12), "scores_per_group: must be at most 1, got 2"),
        (lambda: route(X, top_k=2, scores="relu"), 'scores must be "softmax" or "sigmoid", got .relu.'),
        (lambda: route(X, top_k=2, normalize=1), "normalize: must be True or False, got 1"),
        (lambda: route(X, top_k=2, eps=-1.0), "eps: must be a number of at least 0, got -1.0"),
        (lambda: route(X, top_k=2, min_sum=NAN), "min_sum: must be a number of at least 0, got nan"),
        (lambda: route(X, top_k=2, scale=NAN), "scale must be a finite number, got nan"),
        (lambda: route(X, top_k=2, scale="x"), "scale must be a finite number, got 'x'"),
        (lambda: route(X, top_k=[2]), r"top_k: must be a whole number of at least 1, got \[2\]"),
        (lambda: ops.route_tokens(X, options=cast(Any, (2,))), r"options must be RouterOptions, got \(2,\)"),
    ],
)
def test_errors(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^route_tokens: {message}"):
        call()
