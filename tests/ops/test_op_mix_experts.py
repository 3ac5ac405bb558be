from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from conftest import Where
from op_harness import LAYOUTS, check, contiguous, copies, strided_rows, wide
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import BackendError, InputError
from ligermodels.ops import GLUOptions
from ligermodels.ops.glu.glu import ACTIVATIONS
from ligermodels.ops.moe import mix

SILU = GLUOptions("silu")
OPTIONS = (
    SILU,
    GLUOptions("silu", 1.702, 1 / 1.702, 1.0, 1.0),
    GLUOptions("gelu"),
    GLUOptions("gelu_tanh", 0.5, 2.0),
    GLUOptions("clamped_silu", limit=0.75),
)
SIZES = (  # tokens, choices, experts, channels, intermediate channels
    (1, 1, 1, 1, 1),
    (7, 3, 5, 12, 10),
    (33, 2, 4, 80, 48),  # aligned, with tiles that are not full
    (70, 2, 6, 64, 160),
    (150, 1, 2, 16, 16),
)


def route(kind: str, tokens: int, k: int, num_experts: int) -> Tensor:
    """Experts (tokens, k), different ones for each token."""
    scores = torch.rand(tokens, num_experts)
    if kind == "one":  # all tokens to the same experts, none to the others
        scores[:] = scores[:1]
    elif kind == "skewed":  # Zipf's law, as routers that no loss balances
        scores = scores.log() * torch.arange(1, num_experts + 1)
    return scores.topk(k).indices


def inputs_of(where: Where, sizes: tuple[int, ...], bias: bool = True) -> list[Tensor]:
    """x, weights, gate_up, down and with `bias` both biases; weights in float32."""
    tokens, k, num_experts, channels, size = sizes
    shapes = [(tokens, channels), (tokens, k), (num_experts, 2 * size, channels), (num_experts, channels, size)]
    shapes += [(num_experts, 2 * size), (num_experts, channels)] if bias else []
    made = [torch.randn(shape, device=where.device) for shape in shapes]
    for weight in made[2:4]:
        weight /= weight.shape[-1] ** 0.5
    return [x if i == 1 else x.to(where.dtype) for i, x in enumerate(made)]


def plain(
    x: Tensor, weights: Tensor | None, gate_up: Tensor, down: Tensor, *biases: Tensor, experts: Tensor,
    options: GLUOptions,
) -> Tensor:  # fmt: skip
    """Each choice against a copy of its own expert; with no weights the rows (N, k, H)."""
    experts = experts.to(x.device)
    z = (gate_up[experts] @ x[:, None, :, None]).squeeze(-1)
    z = z + biases[0][experts] if biases else z
    gate, up = wide(z[..., ::2]), wide(z[..., 1::2])
    clamps_silu = options.activation == "clamped_silu"
    if options.limit is not None:
        gate, up = gate if clamps_silu else gate.clamp(max=options.limit), up.clamp(-options.limit, options.limit)
    activated = ACTIVATIONS[options.activation.removeprefix("clamped_")](gate * options.gate_multiplier)
    h = (activated.clamp(max=options.limit) if clamps_silu else activated) * (up + options.up_offset)
    h = (h * options.down_multiplier).to(x.dtype)
    y = (down[experts] @ h[..., None]).squeeze(-1)
    y = y + biases[1][experts] if biases else y
    return y if weights is None else (wide(y) * weights[..., None]).sum(1).to(y.dtype)


def mixed(x: Tensor, weights: Tensor, *others: Tensor, experts: Tensor, options: GLUOptions) -> Tensor:
    return ops.mix_experts(x, weights, experts.to(x.device), *others, activation=options, backend="grouped_mm")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("routing", ["random", "one", "skewed"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_mix_experts(where: Where, sizes: tuple[int, ...], routing: str, options: GLUOptions, bias: bool) -> None:
    """Forward and all gradients against float64, and equal bits in a second run."""
    if sizes[0] == 1 and where.dtype.itemsize < 4:
        sizes = SIZES[1]  # single numbers are right by luck in 16 bits
    known = {"experts": route(routing, *sizes[:3]), "options": options}
    slack = 1.0 if options.limit is None else 3.0  # rounding decides whether a gradient near the limit is 0
    check(partial(mixed, **known), partial(plain, **known), inputs_of(where, sizes, bias), slack=slack)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(where: Where, layout: Callable[[Tensor], Tensor]) -> None:
    """Of tokens, weights and biases, between NaN that nothing reads; weights may be transposed as in gpt-oss."""
    known = {"experts": route("random", 9, 2, 5), "options": OPTIONS[1]}
    inputs = [layout(x) for x in inputs_of(where, (9, 2, 5, 16, 32))]
    check(partial(mixed, **known), partial(plain, **known), inputs)


@pytest.mark.kernels
def test_frozen_operands(kernels_device: torch.device) -> None:
    """Each gradient has the same bits whichever other operands need one."""
    inputs = inputs_of(Where(kernels_device, torch.float32), (5, 2, 3, 8, 6))
    known = {"experts": route("random", 5, 2, 3), "options": OPTIONS[1]}

    def gradients(trained: tuple[int, ...]) -> list[Tensor | None]:
        leaves = [x.clone().requires_grad_(i in trained) for i, x in enumerate(inputs)]
        mixed(*leaves, **known).square().sum().backward()
        return [x.grad for x in leaves]

    wanted = gradients(tuple(range(6)))
    for trained in (trained for n in (1, 2, 5) for trained in combinations(range(6), n)):
        for i, (one, two) in enumerate(zip(gradients(trained), wanted, strict=True)):
            assert torch.equal(one, two) if i in trained else one is None, (trained, i)


@pytest.mark.parametrize(
    ("counts", "layout"), [((3, 0, 40, 0), contiguous), ((0, 0, 1), strided_rows), ((130,), contiguous)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_grouped_mlp(where: Where, counts: tuple[int, ...], layout: Callable[[Tensor], Tensor], bias: bool) -> None:
    """Rows that are sorted already, as expert parallelism receives them."""
    x, _, *others = inputs_of(where, (sum(counts), 1, len(counts), 24, 20), bias)
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[:, None]
    offsets = torch.tensor(counts, device=where.device).cumsum(0).int()

    def op(x: Tensor, *others: Tensor) -> Tensor:
        return ops.grouped_mlp(x, offsets, *others, activation=SILU)

    def truth(x: Tensor, *others: Tensor) -> Tensor:
        return plain(x, None, *others, experts=experts, options=SILU).squeeze(1)

    check(op, truth, [layout(x), *others], frozen=layout is strided_rows)


def test_experts_without_tokens_are_not_read(where: Where) -> None:
    known = {"experts": route("random", 6, 2, 3), "options": SILU}
    inputs = inputs_of(where, (6, 2, 5, 16, 16))
    wanted = mixed(*copies(inputs), **known)
    for x in inputs[2:]:
        x[3:] = float("nan")
    leaves = [x.requires_grad_() for x in inputs]
    y = mixed(*leaves, **known)
    y.sum().backward()
    assert torch.equal(y, wanted)
    assert torch.isfinite(leaves[0].grad).all()
    for x in leaves[2:]:
        assert not x.grad[3:].any() and torch.isfinite(x.grad).all()


def test_a_token_alone_is_not_a_number(where: Where) -> None:
    """NaN in one token stays in its row, although tiles hold rows of other tokens."""
    known = {"experts": route("random", 20, 2, 3), "options": SILU}
    x, *others = inputs_of(where, (20, 2, 3, 16, 16))
    x[4] = float("nan")
    is_nan = mixed(x, *others, **known).isnan()
    assert is_nan[4].all() and not is_nan[:4].any() and not is_nan[5:].any()


def test_no_tokens(where: Where) -> None:
    leaves = [x.requires_grad_() for x in inputs_of(where, (0, 2, 3, 8, 4))]
    y = mixed(*leaves, experts=torch.zeros(0, 2).long(), options=SILU)
    y.sum().backward()
    assert y.shape == (0, 8) and not any(x.grad.any() for x in leaves)


@pytest.mark.kernels
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.float16])
def test_under_autocast(kernels_device: torch.device, weights_dtype: torch.dtype) -> None:
    x, weights, *others = (t.requires_grad_() for t in inputs_of(Where(kernels_device, torch.float32), (7, 2, 3, 8, 6)))
    known = {"experts": route("random", 7, 2, 3), "options": SILU}
    weights = weights.detach().to(weights_dtype).requires_grad_()
    half = torch.float16 if kernels_device.type == "cuda" else torch.bfloat16
    with torch.autocast(kernels_device.type, half):
        y = mixed(x, weights, *others, **known)
    assert torch.equal(y, mixed(x.to(half), weights, *(t.to(half) for t in others), **known))
    y.sum().backward()
    assert all(t.grad.dtype == t.dtype for t in (x, weights, *others))


def test_meta() -> None:
    inputs = [
        x.to("meta").requires_grad_() for x in inputs_of(Where(torch.device("cpu"), torch.bfloat16), (7, 2, 3, 8, 6))
    ]
    experts = torch.zeros(7, 2, dtype=torch.long, device="meta")
    with ops.set_backend(None):
        y = ops.mix_experts(*inputs[:2], experts, *inputs[2:], activation=SILU)
    y.sum().backward()
    assert y.shape == (7, 8) and y.dtype == torch.bfloat16
    assert all(x.grad.shape == x.shape and x.grad.dtype == x.dtype for x in inputs)


@pytest.mark.kernels
def test_compiled_with_varying_sizes(kernels_device: torch.device) -> None:
    """No graph break, one graph for all sizes, and equal bits."""
    torch._dynamo.reset()

    def op(x: Tensor, weights: Tensor, experts: Tensor, *others: Tensor) -> Tensor:
        return ops.mix_experts(x, weights, experts, *others, activation=SILU)

    compiled = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 3, 9):
        x, weights, *others = inputs_of(Where(kernels_device, torch.float32), (tokens, 2, 4, 8, 6))
        leaves = [t.requires_grad_() for t in (x, weights, *others)]
        experts = route("random", tokens, 2, 4).to(kernels_device)
        with torch._dynamo.config.patch(error_on_recompile=tokens != 5):
            results = [f(*leaves[:2], experts, *leaves[2:]) for f in (op, compiled)]
        gradients = [torch.autograd.grad(y.square().sum(), leaves) for y in results]
        for one, two in zip(*([y, *g] for y, g in zip(results, gradients, strict=True)), strict=True):
            assert torch.equal(one, two)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.kernels
@pytest.mark.parametrize(
    "sizes", [(2048, 8, 128, 512, 768), (4096, 2, 8, 1024, 1792), (3000, 4, 32, 2880, 2880)], ids=str
)
@pytest.mark.parametrize("routing", ["random", "one", "skewed"])
def test_real_sizes_in_a_graph(sizes: tuple[int, ...], routing: str) -> None:
    """Against float64, without a synchronisation, and equal in a CUDA graph."""
    where = Where(torch.device("cuda"), torch.bfloat16)
    activation = OPTIONS[1]._replace(limit=7.0)  # near a limit, whether a gradient is 0 depends on rounding
    experts, inputs = route(routing, *sizes[:3]).cuda(), inputs_of(where, sizes)
    leaves = [x.requires_grad_() for x in inputs]

    def passes() -> list[Tensor]:
        y = ops.mix_experts(*leaves[:2], experts, *leaves[2:], activation=activation)
        return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    found = passes()
    wide_leaves = [x.detach().double().requires_grad_() for x in inputs]
    y = ops.mix_experts(*wide_leaves[:2], experts, *wide_leaves[2:], activation=activation)
    for one, two in zip(found, [y.detach(), *torch.autograd.grad(y, wide_leaves, torch.ones_like(y))], strict=True):
        assert (one.double() - two).norm() < 1e-2 * two.norm()  # biases: sums of rounded rows, which cancel
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = passes()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = passes()
    graph.replay()
    for one, two, three in zip(found, again, recorded, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_the_default_is_grouped_mm() -> None:
    assert [*mix.BACKENDS] == ["few_tokens", "grouped_mm"] and mix.set_experts_backend.value == "auto"
    inputs = inputs_of(Where(torch.device("cpu"), torch.float32), (3, 2, 4, 8, 6))
    call: Callable[..., Tensor] = partial(
        ops.mix_experts, *inputs[:2], route("random", 3, 2, 4), *inputs[2:], activation=SILU
    )
    with pytest.raises(BackendError, match="'few_tokens' cannot serve this call"):
        call(backend="few_tokens")
    with ops.set_experts_backend("few_tokens"), pytest.raises(BackendError, match="grouped_mm alone"):
        ops.grouped_mlp(inputs[0], torch.tensor([1, 1, 2, 3], dtype=torch.int32), *inputs[2:], activation=SILU)
    for name in ("cutlass", "triton"):
        with pytest.raises(BackendError, match=f"'{name}' is unknown; there are: auto, few_tokens, grouped_mm"):
            ops.set_experts_backend(name)
    assert torch.equal(call(), call(backend="grouped_mm"))


X, W, EXPERTS = torch.ones(4, 3), torch.ones(4, 2), torch.zeros(4, 2).long()
GATE_UP, DOWN = torch.ones(2, 10, 3), torch.ones(2, 3, 5)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((X[0], W, EXPERTS, GATE_UP, DOWN), r"x must be floating of shape \(N, H\)"),
        ((X, W[:3], EXPERTS, GATE_UP, DOWN), r"weights must be floating of shape \(4, k\)"),
        ((X, W, EXPERTS.float(), GATE_UP, DOWN), "experts must be torch.int64 or torch.int32"),
        ((X, W, EXPERTS, GATE_UP.transpose(1, 2), DOWN), r"gate_up must be .* of shape \(E, M, 3\)"),
        ((X, W, EXPERTS, GATE_UP[:, :9], DOWN), "pairs of channels"),
        ((X, W, EXPERTS, GATE_UP[:, :8], DOWN), "gate_up has 8 rows for each expert, .* 5 columns of down are 10"),
        ((X, W, EXPERTS, GATE_UP, DOWN.double()), "must be of x's dtype"),
        ((X, W, EXPERTS, GATE_UP, DOWN, torch.ones(2, 5)), r"gate_up_bias must be .* \(2, 10\)"),
    ],
)
def test_bad_input(inputs: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ops.mix_experts(*inputs, activation=SILU)


@pytest.mark.parametrize("kind", [None, "int4"])
@pytest.mark.parametrize("backend", ["auto", "grouped_mm"])
def test_an_activation_that_is_not_there(kind: Any, backend: str) -> None:
    """A kernel would compute another."""
    weights = [torch.randn(shape, dtype=torch.float16) for shape in ((4, 16, 128), (4, 128, 8))]
    inputs = torch.randn(3, 128, dtype=torch.float16), torch.rand(3, 2), torch.tensor([[0, 3], [2, 1], [1, 0]])
    options = GLUOptions("tanh")
    with ops.set_experts_backend(backend), pytest.raises(InputError, match="mix_experts: activation must be one of"):
        if kind is None:
            ops.mix_experts(*inputs, *weights, activation=options)
        else:
            quantized = [ops.quantize_weight(weight.flatten(0, 1), kind) for weight in weights]
            ops.quantized_mix_experts(*inputs, *quantized, 4, activation=options)


@pytest.mark.parametrize("kind", [None, "int4"])
@pytest.mark.parametrize("backend", ["auto", "grouped_mm"])
@pytest.mark.parametrize("expert", [-1, 4])
def test_an_expert_that_is_not_there(kind: Any, backend: str, expert: int) -> None:
    """It would take the rows of another, or of none."""
    weights = [torch.randn(shape, dtype=torch.float16) for shape in ((4, 16, 128), (4, 128, 8))]
    experts = torch.tensor([[0, 3], [2, expert], [1, 0]])
    inputs = torch.randn(3, 128, dtype=torch.float16), torch.rand(3, 2), experts
    message = rf"mix_experts: experts must lie in \[0, 4\), but \[1, 1\] is {expert}"
    with ops.set_experts_backend(backend), pytest.raises(InputError, match=message):
        if kind is None:
            ops.mix_experts(*inputs, *weights, activation=SILU)
        else:
            codes = [ops.quantize_weight(weight.flatten(0, 1), kind) for weight in weights]
            ops.quantized_mix_experts(*inputs, *codes, 4, activation=SILU)
