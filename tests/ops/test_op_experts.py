from collections.abc import Callable

import pytest
import torch
from conftest import Where
from op_harness import LAYOUTS, check, contiguous, wide

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.ops.moe import experts
from ligermodels.ops.runtime.devices import GPU

SHAPES = [  # rows of each group, K, M; those of the last two have a grouped GEMM in bfloat16 on a GPU
    ((1,), 1, 1),
    ((3, 0, 7, 1, 0), 5, 3),
    ((0, 0, 4), 8, 17),
    ((0, 129, 1, 0, 300, 0), 72, 40),
    ((1, 0, 0, 0), 16, 8),
]


def ends(counts: tuple[int, ...], device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.tensor(counts, device=device).cumsum(0).int()


def plain(
    x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, biases: torch.Tensor | None = None
) -> torch.Tensor:
    """Each row against a copy of its own weight."""
    group = torch.searchsorted(offsets, torch.arange(len(x), device=x.device), right=True)
    y = torch.cat([w @ row[:, None] for row, w in zip(x, weights[group], strict=True)], dim=1).t()
    return y if biases is None else y + biases[group]


@pytest.mark.parametrize(("counts", "K", "M"), SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_grouped_mm(where: Where, counts: tuple[int, ...], K: int, M: int, layout: Callable) -> None:
    x = torch.randn(sum(counts), K, dtype=where.dtype, device=where.device)
    weights = torch.randn(len(counts), M, K, dtype=where.dtype, device=where.device)
    inputs = [layout(x), layout(weights), ends(counts, where.device)]
    check(ops.grouped_mm, plain, inputs, frozen=layout is contiguous)
    check(ops.grouped_mm_reference, plain, inputs)
    inputs.append(layout(torch.randn(len(counts), M, dtype=where.dtype, device=where.device)))
    check(ops.grouped_mm, plain, inputs, frozen=layout is contiguous)
    check(ops.grouped_mm_reference, plain, inputs)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="torch has no grouped GEMM for the CPU yet")
@pytest.mark.parametrize(
    ("counts", "K", "M"), [shape for shape in SHAPES if shape[1] % 8 == shape[2] % 8 == 0], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capability", [9, 10])
def test_torchs_grouped_gemm(
    counts: tuple[int, ...], K: int, M: int, layout: Callable, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU runs, with torch's implementation for the CPU, which wants the same alignment."""
    monkeypatch.setattr(experts, "gpu_of", lambda device: GPU("any", (capability, 0), 2**16, 100))
    monkeypatch.setattr(experts, "use_kernels", lambda *tensors: True)
    monkeypatch.setattr(experts, "_has_grouped_gemm", lambda x, columns: True)
    monkeypatch.setattr(experts, "grouped_mm_reference", None)
    x, weights = (layout(torch.randn(s).bfloat16()) for s in ((sum(counts), K), (len(counts), M, K)))
    check(ops.grouped_mm, plain, [x, weights, ends(counts)])
    check(ops.grouped_mm, plain, [x, weights, ends(counts), layout(torch.randn(weights.shape[:2]).bfloat16())])
    leaf = x.detach().requires_grad_()
    ops.grouped_mm(leaf, weights, ends(counts)).sum().backward()  # an expanded scalar as gradient
    assert torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize("op", [ops.grouped_mm, ops.grouped_mm_reference])
def test_grouped_mm_gradients(op: Callable) -> None:
    x, weights, biases = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((6, 3), (4, 2, 3), (4, 2)))
    assert torch.autograd.gradcheck(lambda x, w: op(x, w, ends((2, 0, 3, 1))), (x, weights))
    assert torch.autograd.gradcheck(lambda x, w, b: op(x, w, ends((2, 0, 3, 1)), b), (x, weights, biases))


def test_no_rows() -> None:
    x, weights = torch.randn(0, 3, requires_grad=True), torch.randn(2, 5, 3, requires_grad=True)
    y = ops.grouped_mm(x, weights, ends((0, 0)))
    y.sum().backward()
    assert y.shape == (0, 5) and x.grad.shape == (0, 3) and not weights.grad.any()


def test_grouped_mm_under_autocast() -> None:
    x, weights, biases = (torch.randn(s, requires_grad=True) for s in ((4, 3), (2, 5, 3), (2, 5)))
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.grouped_mm(x, weights, ends((1, 3)), biases)
    assert torch.equal(y, ops.grouped_mm(x.bfloat16(), weights.bfloat16(), ends((1, 3)), biases.bfloat16()))
    y.sum().backward()
    assert x.grad.dtype == weights.grad.dtype == biases.grad.dtype == torch.float32


@pytest.mark.parametrize(("tokens", "k", "num_experts"), [(1, 1, 1), (7, 3, 5), (40, 8, 8), (300, 2, 64), (0, 2, 3)])
def test_rows_go_to_their_experts_and_back(where: Where, tokens: int, k: int, num_experts: int) -> None:
    scores = torch.rand(tokens, num_experts, device=where.device)
    scores[:, num_experts // 2] = -1  # nobody's choice, when there is another
    experts = scores.topk(k).indices
    order, inverse, offsets = ops.sort_by_expert(experts, num_experts)
    counts = offsets.diff(prepend=offsets.new_zeros(1)).long()
    assert torch.equal(counts, experts.flatten().bincount(minlength=num_experts)) and offsets.dtype == torch.int32
    assert experts.flatten()[order].tolist() == [e for e, count in enumerate(counts.tolist()) for _ in range(count)]
    assert torch.equal(order[inverse], torch.arange(tokens * k, device=where.device))
    for start, end in zip([0, *offsets.tolist()], offsets.tolist(), strict=False):
        assert torch.equal(order[start:end], order[start:end].sort().values)  # in token order

    x = torch.randn(tokens, 11, dtype=where.dtype, device=where.device)
    with pytest.warns(DeprecationWarning, match="use ops.take_rows"):
        assert torch.equal(ops.gather_rows(x, order, inverse, copies=k), x.repeat_interleave(k, 0)[order])


@pytest.mark.parametrize(("tokens", "k", "width"), [(1, 1, 1), (7, 3, 1030), (40, 8, 64), (0, 2, 5), (9, 2, 0)])
@pytest.mark.parametrize("part", ["all", "some", "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_some_choices(
    where: Where, tokens: int, k: int, width: int, part: str, layout: Callable[..., torch.Tensor]
) -> None:
    """Tokens become rows of some of their choices, which are summed, with weights and without."""
    order = torch.randperm(tokens * k, device=where.device)
    count = {"all": len(order), "some": len(order) // 2, "none": 0}[part]
    chosen = ops.ChosenRows(order[:count], order.argsort().view(tokens, k))
    if part == "some":  # as few bytes as can be, and not contiguous
        chosen = ops.ChosenRows(
            *(each.int().unsqueeze(-1).expand(*each.shape, 2).contiguous()[..., 0] for each in chosen)
        )
    x, weights = torch.randn(tokens, width, device=where.device), torch.randn(tokens, k, device=where.device)
    x, layout = x.to(where.dtype), layout if width else contiguous

    def whole(y: torch.Tensor) -> torch.Tensor:  # rows in the place of their choices
        return torch.zeros(tokens * k, width, dtype=y.dtype, device=y.device).index_copy(0, order[:count], y)

    def summed(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        products = wide(whole(y)).unflatten(0, (tokens, k)) * weights[..., None]
        return products.sum(1).to(y.dtype)

    check(lambda x: ops.take_rows(x, chosen), lambda x: x.repeat_interleave(k, 0)[chosen.choices], [layout(x)])
    y = layout(x.repeat_interleave(k, 0)[chosen.choices])
    check(lambda y, w: ops.sum_rows(y, w, chosen), summed, [y, weights], frozen=layout is contiguous)
    check(lambda y: ops.sum_rows(y, None, chosen), lambda y: summed(y, torch.ones_like(weights).to(wide(y))), [y])


@pytest.mark.kernels
def test_choices_of_any_strides(kernels_device: torch.device) -> None:
    order = torch.randperm(10, device=kernels_device)
    chosen = ops.ChosenRows(order, order.argsort().view(5, 2))
    apart = ops.ChosenRows(*(torch.stack([each, each], dim=-1)[..., 0] for each in chosen))
    x, weights = (torch.randn(5, n, device=kernels_device, requires_grad=True) for n in (3, 2))
    results = []
    for each in (chosen, apart):
        y = ops.sum_rows(ops.take_rows(x, each), weights, each)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, weights))])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_rows_that_do_not_fit() -> None:
    x, order = torch.ones(3, 4), torch.arange(6)
    rows = order.view(3, 2)
    for message, call in (
        (r"take_rows: x must be floating", lambda: ops.take_rows(x.int(), ops.ChosenRows(order, rows))),
        (r"take_rows: rows must be .* \(3, k\)", lambda: ops.take_rows(x, ops.ChosenRows(order, order.view(2, 3)))),
        (r"take_rows: choices must be torch.int64 or", lambda: ops.take_rows(x, ops.ChosenRows(order.float(), rows))),
        (r"sum_rows: choices must be .* \(3\)", lambda: ops.sum_rows(x, None, ops.ChosenRows(order, rows))),
        (r"sum_rows: rows must be .* \(3, 1\)", lambda: ops.sum_rows(x, x[:, :1], ops.ChosenRows(order[:3], rows))),
    ):
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.kernels
@pytest.mark.parametrize("frozen", [(0, 2), (1,)], ids=str)
def test_compiled_with_varying_sizes(frozen: tuple[int, ...], kernels_device: torch.device) -> None:
    """No graph break, one graph for all sizes, and equal bits; each operand is frozen once."""
    torch._dynamo.reset()

    def op(x: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        order, inverse, offsets = ops.sort_by_expert(experts, 4)
        return ops.grouped_mm(ops.take_rows(x, ops.ChosenRows(order, inverse.view(-1, 2))), weights, offsets, biases)

    compiled = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 3, 9):
        experts = torch.rand(tokens, 4, device=kernels_device).topk(2).indices
        inputs = [torch.randn(s, device=kernels_device, requires_grad=True) for s in ((tokens, 6), (4, 7, 6), (4, 7))]
        for operand in frozen:
            inputs[operand].requires_grad_(False)
        with torch._dynamo.config.patch(error_on_recompile=tokens != 5):
            results = [f(*inputs, experts) for f in (op, compiled)]
        needed = [x for x in inputs if x.requires_grad]
        gradients = [torch.autograd.grad(y.square().sum(), needed) for y in results]
        for one, two in zip(*([y, *g] for y, g in zip(results, gradients, strict=True)), strict=True):
            assert torch.equal(one, two)


def test_schemas_and_fakes() -> None:
    x, weights, dy = torch.randn(6, 3), torch.randn(3, 5, 3), torch.randn(6, 5)
    for op, args in (
        (torch.ops.ligermodels.grouped_mm.default, (x, weights, ends((2, 0, 4)), True)),
        (torch.ops.ligermodels.grouped_mm.default, (dy, weights.transpose(1, 2), ends((2, 0, 4)), True)),
        (torch.ops.ligermodels.grouped_outer.default, (dy, x, ends((2, 0, 4)), True)),
    ):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


X, WEIGHTS, OFFSETS = torch.ones(4, 3), torch.ones(2, 5, 3), ends((1, 3))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((X[0], WEIGHTS, OFFSETS), r"x must be floating of shape \(R, K\)"),
        ((X.long(), WEIGHTS, OFFSETS), "x must be floating"),
        ((X, WEIGHTS[0], OFFSETS), r"weights must be .* of shape \(E, M, 3\)"),
        ((X, WEIGHTS.transpose(1, 2), OFFSETS), r"weights must be .* of shape \(E, M, 3\)"),
        ((X, WEIGHTS[:0], OFFSETS[:0]), "needs E > 0"),
        ((X, WEIGHTS.double(), OFFSETS), "weights must be of x's dtype"),
        ((X, WEIGHTS, OFFSETS.long()), "offsets must be torch.int32"),
        ((X, WEIGHTS, OFFSETS[:1]), "offsets must be torch.int32"),
        ((X, WEIGHTS, ends((1, 2))), "end at x's 4 rows"),
        ((X, WEIGHTS, ends((5, -1))), "must not decrease"),
        ((X, WEIGHTS, OFFSETS, torch.ones(2, 3)), r"biases must be torch.float32 of shape \(2, 5\)"),
    ],
)
def test_bad_input(inputs: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ops.grouped_mm(*inputs)
