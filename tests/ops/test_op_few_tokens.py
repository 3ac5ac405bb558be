"""Experts of few tokens, with plain and quantised weights, against float64 of the dequantised weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import BackendError, InputError
from ligermodels.ops import GLUOptions, QuantizedWeight
from ligermodels.ops.glu.glu import ACTIVATIONS

pytestmark = pytest.mark.kernels
OPTIONS = (GLUOptions("silu"), GLUOptions("gelu_tanh", 1.702, 1 / 1.702, 1.0, 1.0))
SIZES = (  # tokens, choices, experts, channels, intermediate channels
    (1, 3, 5, 130, 20),
    (2, 2, 9, 150, 12),  # fewer rows than experts
    (7, 3, 4, 48, 40),  # more rows than experts
    (24, 2, 3, 34, 8),  # tiles of one expert after another
)
KINDS = (None, "float8", "int4", "nf4", "mxfp4")


class Experts:
    """Experts in the dtype that the kernels have here, and their weights in float64; biases may be None."""

    def __init__(self, device: torch.device, sizes: tuple[int, ...], kind: Any, bias: bool, dtype: Any = None) -> None:
        N, k, E, H, size = self.sizes = sizes
        # The interpreter has no bfloat16.
        dtype = dtype or (torch.float16 if device.type == "cpu" else torch.bfloat16)

        def rand(*shape: int) -> Tensor:
            return torch.randn(shape, device=device)

        shapes = (E, 2 * size, H), (E, H, size)
        weights = [(rand(*shape) * shape[2] ** -0.5).to(dtype) for shape in shapes]
        self.biases = [rand(*shape[:2]).to(dtype) if bias else None for shape in shapes]
        self.x, self.weights = rand(N, H).to(dtype), torch.rand(N, k, device=device)
        self.experts = torch.rand(N, E, device=device).topk(k).indices
        self.own: Any = weights
        self.wide = [weight.double() for weight in weights]
        if kind is not None:
            self.own = [ops.quantize_weight(weight.flatten(0, 1), kind) for weight in weights]
            self.wide = [
                ops.dequantize_weight(*own, w.shape[2], torch.float64).view(w.shape)
                for own, w in zip(self.own, weights, strict=True)
            ]

    def mix(self, options: GLUOptions, **others: Any) -> Tensor:
        inputs = self.x, self.weights, self.experts, *self.own
        if isinstance(self.own[0], QuantizedWeight):
            return ops.quantized_mix_experts(*inputs, self.sizes[2], *self.biases, activation=options)
        return ops.mix_experts(*inputs, *self.biases, activation=options, **others)

    def plain(self, options: GLUOptions, dtype: torch.dtype) -> Tensor:
        """In `dtype`: each choice times its own expert."""
        x, (gate_up, down), experts = self.x.to(dtype), [w.to(dtype) for w in self.wide], self.experts
        biases = [None if b is None else b.to(dtype)[experts] for b in self.biases]
        z = (gate_up[experts] @ x[:, None, :, None])[..., 0] + (0 if biases[0] is None else biases[0])
        gate, up = z.double()[..., ::2], z.double()[..., 1::2]
        if options.limit is not None:
            gate, up = gate.clamp(max=options.limit), up.clamp(-options.limit, options.limit)
        h = ACTIVATIONS[options.activation](gate * options.gate_multiplier) * (up + options.up_offset)
        h = (h * options.down_multiplier).to(dtype)
        y = (down[experts] @ h[..., None])[..., 0] + (0 if biases[1] is None else biases[1])
        return (y.double() * self.weights.double()[..., None]).sum(1).to(dtype)


@pytest.mark.every_case
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(kernels_device: torch.device, kind: Any, with_bias: bool) -> None:
    """Each kind of weights with tiles of one expert after another, and with the other sizes by turns of the kinds; on a
    GPU with all sizes, and equal bits in a second run."""
    number = KINDS.index(kind)
    one = SIZES[3] if with_bias else SIZES[number % 3]
    for sizes in SIZES if kernels_device.type == "cuda" else (one,):
        check_against_float64(kernels_device, kind, sizes, with_bias, OPTIONS[(number + with_bias) % 2])


def check_against_float64(
    device: torch.device, kind: Any, sizes: tuple[int, ...], bias: bool, options: GLUOptions
) -> None:
    experts = Experts(device, sizes, kind, bias)
    with ops.set_experts_backend("few_tokens"):
        found = experts.mix(options)
        assert found.dtype == experts.x.dtype
        assert device.type == "cpu" or torch.equal(found, experts.mix(options))  # the interpreter has no races
    wanted = experts.plain(options, torch.float64)
    # The levels of nf4 are rounded before scales multiply them.
    allowed = (experts.plain(options, found.dtype) - wanted).norm()
    assert (found - wanted).norm() <= (2 if kind == "nf4" else 1.5) * allowed, ((found - wanted).norm(), allowed)


@pytest.mark.parametrize("kind", [None, "int4"])
def test_rows(kernels_device: torch.device, kind: Any) -> None:
    """All tokens to one expert; the same expert twice; experts without tokens are not read; NaN stays in its token."""
    experts = Experts(kernels_device, (20, 2, 3, 64, 16), kind, bias=False)
    experts.experts = experts.experts.clone()
    experts.experts[:] = torch.tensor([1, 1])
    found = experts.mix(OPTIONS[0])
    torch.testing.assert_close(found.double(), experts.plain(OPTIONS[0], torch.float64), rtol=2e-2, atol=2e-2)
    for own in experts.own:
        if kind is None:
            own[[0, 2]] = float("nan")
        else:
            own.scales.unflatten(0, (3, -1))[[0, 2]] = float("nan")
    assert torch.equal(found, experts.mix(OPTIONS[0]))
    experts.x[3] = float("nan")
    is_nan = experts.mix(OPTIONS[0]).isnan()
    assert is_nan[3].all() and not is_nan[:3].any() and not is_nan[4:].any()


@pytest.mark.parametrize("kind", [None, "int4"])
@pytest.mark.parametrize("num_experts", [5, 16])
def test_an_expert_with_more_rows_than_a_tile(kernels_device: torch.device, kind: Any, num_experts: int) -> None:
    """Listed by a kernel, or found by programs where there are more experts than rows."""
    experts = Experts(kernels_device, (12, 1, num_experts, 144, 72), kind, bias=True)
    experts.experts = torch.tensor([[1]] * 10 + [[4], [0]], device=kernels_device)
    found = experts.mix(OPTIONS[1])
    torch.testing.assert_close(found.double(), experts.plain(OPTIONS[1], torch.float64), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["float8", "int4", "nf4", "mxfp4"])
@pytest.mark.parametrize("rows", [1, 13])
def test_quantized_grouped_mm(kernels_device: torch.device, kind: Any, rows: int) -> None:
    """Rows that are sorted by expert, as experts with LoRA have them, read the codes too; dx is as ever."""
    experts = Experts(kernels_device, (rows, 1, 4, 150, 12), kind, bias=True)
    x = experts.x.clone().requires_grad_()
    ends = torch.tensor([rows // 2, rows // 2, rows, rows], dtype=torch.int32, device=kernels_device)
    group = torch.bucketize(torch.arange(rows, device=kernels_device), ends, right=True)
    y = ops.quantized_grouped_mm(x, *experts.own[0], ends, experts.biases[0])
    weight = experts.wide[0][group]
    wanted = (weight @ experts.x.double()[..., None])[..., 0] + experts.biases[0].double()[group]
    torch.testing.assert_close(y.double(), wanted, rtol=2e-2, atol=2e-2)
    y.sum().backward()
    torch.testing.assert_close(x.grad.double(), weight.sum(1), rtol=2e-2, atol=5e-2)


def test_refusals(kernels_device: torch.device) -> None:
    """A call that it cannot serve runs on another backend, or by name is an error."""
    for sizes, kind, dtype, message in (
        ((65, 1, 4, 16, 8), None, None, "65 choices of experts are more than 64"),
        ((257, 1, 4, 16, 8), "int4", None, "257 choices of experts are more than 256"),
        ((3, 2, 4, 16, 8), None, torch.float32, "bfloat16 and float16"),
        ((3, 2, 4, 16, 8), "int4", torch.float32, "bfloat16 and float16"),
    ):
        experts = Experts(kernels_device, sizes, kind, bias=False, dtype=dtype)
        with pytest.raises(BackendError, match=message), ops.set_experts_backend("few_tokens"):
            experts.mix(OPTIONS[0])
        assert experts.mix(OPTIONS[0]).shape == experts.x.shape
    with pytest.raises(BackendError, match="bfloat16 and float16"):
        Experts(kernels_device, sizes, None, bias=False, dtype=dtype).mix(OPTIONS[0], backend="few_tokens")
    experts = Experts(kernels_device, SIZES[0], None, bias=False)
    experts.x.requires_grad_()
    with pytest.raises(BackendError, match="no gradients"):
        experts.mix(OPTIONS[0], backend="few_tokens")
    experts = Experts(kernels_device, SIZES[0], None, bias=False)
    experts.own[0] = experts.own[0].transpose(1, 2).contiguous().transpose(1, 2)  # as gpt-oss has them in transformers
    with pytest.raises(BackendError, match="not contiguous"):
        experts.mix(OPTIONS[0], backend="few_tokens")


def test_operands_that_do_not_fit(kernels_device: torch.device) -> None:
    experts = Experts(kernels_device, (3, 2, 4, 128, 32), "int4", bias=True)
    given: dict[str, Any] = {
        "x": experts.x, "weights": experts.weights, "experts": experts.experts, "gate_up": experts.own[0],
        "down": experts.own[1], "num_experts": 4, "gate_up_bias": experts.biases[0], "down_bias": experts.biases[1],
    }  # fmt: skip
    for name, value, message in (
        ("num_experts", 2, "codes of 2 experts"),
        ("weights", experts.weights[:, :1], "experts must be"),
        ("experts", experts.experts.float(), "experts must be"),
        ("experts", experts.experts[:2], "experts must be"),
        ("gate_up_bias", experts.biases[0][:, :-1], "gate_up_bias must be"),
        ("down_bias", experts.biases[1][:3], "down_bias must be"),
    ):
        with pytest.raises(InputError, match=f"quantized_mix_experts: .*{message}"):
            ops.quantized_mix_experts(**{**given, name: value}, activation=OPTIONS[0])


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 200])
def test_under_graphs(kind: Any, tokens: int) -> None:
    """Real sizes: nothing waits for the GPU, and a recorded step computes the experts of new tokens."""
    experts = Experts(torch.device("cuda"), (tokens, 8, 128, 2048, 768), kind, bias=True)
    experts.mix(OPTIONS[0])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            found = experts.mix(OPTIONS[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(2):
        experts.x.normal_()
        experts.experts.copy_(torch.rand(tokens, 128, device="cuda").topk(8).indices)
        graph.replay()
        assert torch.equal(found, experts.mix(OPTIONS[0]))
        wanted = experts.plain(OPTIONS[0], torch.float64)
        assert (found - wanted).norm() <= 1.5 * (experts.plain(OPTIONS[0], found.dtype) - wanted).norm()
