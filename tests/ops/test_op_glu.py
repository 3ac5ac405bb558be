import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from conftest import Where
from op_harness import LAYOUTS, check, contiguous, wide
from torch.nn import functional

from ligermodels.errors import InputError
from ligermodels.ops import geglu, geglu_reference, swiglu, swiglu_reference

Op = Callable[..., torch.Tensor]


def plain(activation: Callable[[torch.Tensor], torch.Tensor], limit_activation: bool = False) -> Op:
    """As eager models write it: the activation is rounded, then the product; of two tensors or of packed pairs."""

    def glu(
        gate: torch.Tensor,
        up: torch.Tensor | None = None,
        *,
        gate_multiplier: float = 1,
        down_multiplier: float = 1,
        limit: float | None = None,
        up_offset: float = 0,
    ) -> torch.Tensor:
        gate, up = (gate[..., ::2], gate[..., 1::2]) if up is None else (gate, up)
        if limit is not None:
            gate, up = gate if limit_activation else gate.clamp(max=limit), up.clamp(-limit, limit)
        up = up + up_offset
        activated = activation(wide(gate * gate_multiplier)).to(gate.dtype)
        if limit is not None and limit_activation:
            activated = activated.clamp(max=limit)
        return activated * up * down_multiplier

    return glu


CLAMPED = {"limit_activation": True}
OPS = {
    "silu": (swiglu, swiglu_reference, plain(lambda g: g * torch.sigmoid(g))),
    "gelu_tanh": (geglu, geglu_reference, plain(partial(functional.gelu, approximate="tanh"))),
    "clamped_silu": (
        partial(swiglu, **CLAMPED),
        partial(swiglu_reference, **CLAMPED),
        plain(lambda g: g * torch.sigmoid(g), True),
    ),
    "gelu": (partial(geglu, approximate="none"), partial(geglu_reference, approximate="none"), plain(functional.gelu)),
}
SHAPES = [(1, 1), (5,), (2, 3, 100), (1, 2, 2050), (2, 517), (2, 0, 6), (4, 0)]


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> tuple[Op, Op, Op]:
    """An op, its reference and the same computation in plain torch."""
    return OPS[request.param]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_glu(where: Where, ops: tuple[Op, Op, Op], shape: tuple[int, ...], layout: Callable) -> None:
    op, _, expected = ops
    gate, up, packed = (
        layout(3 * torch.randn(*shape[:-1], n * shape[-1], dtype=where.dtype, device=where.device)) for n in (1, 1, 2)
    )
    check(op, expected, [gate, up], frozen=layout is contiguous)
    check(op, expected, [packed])


OPTIONS = [
    {"gate_multiplier": 0.37},
    {"down_multiplier": -1.7},
    {"gate_multiplier": 3, "down_multiplier": 0.6},
    {"limit": 0.75},  # exact in every dtype, so that all agree on what is beyond it
    {"up_offset": 1},
    {"gate_multiplier": 1.702, "down_multiplier": 1 / 1.702, "limit": 1.25, "up_offset": 1},  # gpt-oss
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(3, 100), (1, 1030)], ids=str)
def test_options(where: Where, ops: tuple[Op, Op, Op], shape: tuple[int, int], options: dict[str, float]) -> None:
    op, reference, expected = (partial(each, **options) for each in ops)
    gate, up, packed = (torch.randn(shape[0], n * shape[1], dtype=where.dtype, device=where.device) for n in (1, 1, 2))
    check(op, expected, [gate, up], frozen=True)
    check(op, expected, [packed])
    torch.testing.assert_close(op(packed), reference(packed))


def test_bounds(where: Where, ops: tuple[Op, Op, Op]) -> None:
    """What is just at a bound has its gradient, as with torch's clamp, and NaN stays."""
    gate = torch.tensor([2.0, 2.25, -1.0, 2.0, float("nan"), 1.0], dtype=where.dtype, device=where.device)
    up = torch.tensor([-2.0, 2.0, -2.25, 9.0, 1.0, float("nan")], dtype=where.dtype, device=where.device)
    found = []
    for op in (ops[0], ops[2]):
        leaves = [each.clone().requires_grad_() for each in (gate, up)]
        y = op(*leaves, limit=2.0, up_offset=1.0)
        found.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours[:4], theirs[:4], rtol=1e-2, atol=1e-2)
        assert torch.equal(ours[:4] == 0, theirs[:4] == 0) and ours[4:].isnan().any()
    assert found[0][0][4:].isnan().all()


def test_columns_of_a_shard_are_a_shard(where: Where, ops: tuple[Op, Op, Op]) -> None:
    """A contiguous part of the packed columns gives a contiguous part of the result, as tensor parallelism cuts it: to
    the bit by the kernels, while torch's own exponential on a CPU rounds by a value's place in its vector."""
    packed = torch.randn(3, 48, dtype=where.dtype, device=where.device)
    parts = [ops[0](part) for part in packed.chunk(4, -1)]
    ulps = 4 if where.place == "reference" else 0
    rtol = ulps * torch.finfo(where.dtype).eps
    torch.testing.assert_close(torch.cat(parts, -1), ops[0](packed), rtol=rtol, atol=0)


def test_great_and_small_values(where: Where, ops: tuple[Op, Op, Op]) -> None:
    gate = torch.tensor([[-1e4, -90.0, -1e-4, 0.0, 1e-4, 90.0, 1e4]], dtype=where.dtype, device=where.device)
    check(ops[0], ops[2], [gate, torch.randn_like(gate)])
    check(ops[0], ops[2], [1e-3 * torch.randn_like(gate), torch.randn_like(gate)])
    check(ops[0], ops[2], [-3 - torch.rand_like(gate), torch.randn_like(gate)])


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from ligermodels.ops.glu import glu_kernels as glu

for dtype, per_thread in (("bf16", 4), ("fp32", 2)):
    pointers = dict.fromkeys(("gate", "out", "dy", "dgate", "dup"), f"*{dtype}")
    shared = {"PACKED": True, "TILES": 4, "BLOCK": 128 * per_thread, "ACTIVATION": "silu", "up": None, "up_stride": 0}
    shared |= dict.fromkeys(("gate_multiplier", "down_multiplier", "limit", "up_offset"))
    backward = {"NEED_GATE": True, "NEED_UP": False}
    for kernel, more in ((glu.glu_forward_kernel, {}), (glu.glu_backward_kernel, backward)):
        constants, names = {**shared, **more}, kernel._jitted.arg_names
        signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants and n != "blocks"}
        source = ASTSource(kernel._jitted, signature, constants, aligned)
        made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        ptx = made.asm["ptx"]
        assert ptx.count("ld.global.v4.b32") == 4, ptx  # one load of 16 bytes a thread for each tile's pairs
        assert made.metadata.shared == 0 and "shfl" not in ptx, ptx  # gate and up part within a thread's registers
"""


def test_pairs_are_loaded_wide_and_split_in_registers() -> None:
    """Compiled for Hopper, which takes no GPU."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.kernels
@pytest.mark.parametrize("shape", [(4096, 14336), (1003, 8960), (70000, 768)], ids=str)
def test_large(ops: tuple[Op, Op, Op], shape: tuple[int, int]) -> None:
    check(ops[0], ops[2], [torch.randn(shape[0], 2 * shape[1], dtype=torch.bfloat16, device="cuda")])


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.kernels
def test_more_than_2_to_the_31_elements() -> None:
    packed = torch.randn(75001, 2 * 14336, dtype=torch.bfloat16, device="cuda")
    ends = torch.cat([packed[:2], packed[-2:]]).requires_grad_()
    packed.requires_grad_()
    y, few = swiglu(packed), swiglu(ends)
    y.backward(torch.ones_like(y))
    few.backward(torch.ones_like(few))
    assert torch.equal(torch.cat([y[:2], y[-2:]]), few)
    assert torch.equal(torch.cat([packed.grad[:2], packed.grad[-2:]]), ends.grad)


def test_reference_gradients(ops: tuple[Op, Op, Op]) -> None:
    gate, up, packed = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (3, 4), (2, 6)))
    assert torch.autograd.gradcheck(ops[1], (gate, up))
    assert torch.autograd.gradcheck(ops[1], (packed,))
    assert torch.autograd.gradcheck(partial(ops[1], gate_multiplier=0.3, down_multiplier=2.0), (packed,))
    assert torch.autograd.gradcheck(partial(ops[1], limit=0.7, up_offset=1.0), (packed,))


@pytest.mark.parametrize(
    ("gate", "up", "message"),
    [
        (torch.ones(3), None, "needs pairs of channels"),
        (torch.ones(2, 4), torch.ones(2, 3), r"up must be torch.float32 of shape \(2, 4\) on cpu"),
        (torch.ones(2, 4), torch.ones(2, 4, dtype=torch.float64), r"up must be torch.float32 of shape \(2, 4\) on cpu"),
        (torch.ones(2, dtype=torch.int64), None, "gate must be floating"),
    ],
)
def test_bad_input(gate: torch.Tensor, up: torch.Tensor | None, message: str) -> None:
    with pytest.raises(InputError, match=f"^swiglu: .*{message}"):
        swiglu(gate, up)
    with pytest.raises(InputError, match=f"^geglu: .*{message}"):
        geglu(gate, up)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_is_above_0(limit: float) -> None:
    with pytest.raises(InputError, match="swiglu: limit must be above 0"):
        swiglu(torch.ones(2), limit=limit)


def test_unknown_approximation() -> None:
    with pytest.raises(InputError, match="approximate must be"):
        geglu(torch.ones(2), approximate="erf")  # type: ignore[arg-type]
