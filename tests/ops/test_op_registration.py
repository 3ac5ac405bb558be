"""What all ops have in common: the choice of backends, torch.compile, and schemas that tell the truth."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode

from ligermodels import ops
from ligermodels.errors import BackendError
from ligermodels.ops.runtime import dispatch

HEAD_LOSSES = {"linear_loss", "linear_rows", "linear_gradients", "linear_distillation"}
"""Opaque ops that compute logits from hidden states."""
TARGET = (3, -100, 49, 0, 12, 7)


class Case(NamedTuple):
    op: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    nodes: tuple[str, ...]  # the opaque ops that a graph of its forward and backward passes must hold


def table(x: torch.Tensor, half: int) -> torch.Tensor:
    return torch.linspace(-1, 1, half, device=x.device).expand(1, x.shape[1], half)


def target(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(TARGET, device=x.device)[: x.shape[0]]


def bounds(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, 3, 7], dtype=torch.int32, device=x.device)


def int4(x: torch.Tensor, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a weight (features, up to 128)."""
    codes = torch.full((features, 64), 0x67, dtype=torch.uint8, device=x.device)
    return codes, torch.ones(features, 1, device=x.device)


CASES = {
    "rms_norm": Case(
        lambda x, w: ops.rms_norm(x, w, 1e-6), ((5, 70), (70,)), ("rms_norm_forward", "rms_norm_backward")
    ),
    "rms_norm and a sum": Case(
        lambda x, r, w: ops.rms_norm(x, w, 1e-6, residual=r),
        ((5, 70), (5, 70), (70,)),
        ("rms_norm_forward", "rms_norm_backward"),
    ),
    "add_rms_norm": Case(
        lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-6),
        ((5, 70), (5, 70), (70,)),
        ("rms_norm_forward", "rms_norm_backward"),
    ),
    "add_rms_norm of no sum": Case(
        lambda x, w: ops.add_rms_norm(x, None, w, 1e-6), ((5, 70), (70,)), ("rms_norm_forward", "rms_norm_backward")
    ),
    "gated_rms_norm": Case(
        lambda x, z, w: ops.gated_rms_norm(x, z, w, 1e-6),
        ((5, 3, 70), (5, 3, 70), (70,)),
        ("gated_rms_norm_forward", "gated_rms_norm_backward"),
    ),
    "causal_conv": Case(
        lambda x, w: ops.causal_conv(x, w), ((2, 5, 70), (70, 4)), ("causal_conv_forward", "causal_conv_backward")
    ),
    "gated_delta_rule": Case(
        lambda q, k, v, g, beta: ops.gated_delta_rule(q, k, v, -g * g, beta, final_state=False)[0],
        ((1, 5, 1, 4), (1, 5, 1, 4), (1, 5, 2, 3), (1, 5, 2), (1, 5, 2)),
        ("gated_delta_chunks_forward", "gated_delta_chunks_backward"),
    ),
    "gated_delta_rule by channel": Case(
        lambda q, k, v, g, beta: ops.gated_delta_rule(q, k, v, -g * g, beta, final_state=False)[0],
        ((1, 5, 1, 4), (1, 5, 1, 4), (1, 5, 2, 3), (1, 5, 2, 4), (1, 5, 2)),
        ("channel_delta_forward", "channel_delta_backward"),
    ),
    "delta_gates": Case(
        lambda a, b, rate, bias: ops.delta_gates(a, b, rate, bias),
        ((2, 5, 3), (2, 5, 3), (3,), (3,)),
        ("delta_gates_forward", "delta_gates_backward"),
    ),
    "delta_gates by channel": Case(
        lambda a, b, rate, bias: ops.delta_gates(a, b, rate, bias, -5.0),
        ((2, 5, 3, 6), (2, 5, 3), (3,), (3, 6)),
        ("delta_gates_forward", "delta_gates_backward"),
    ),
    "ssd": Case(
        lambda x, dt, a, b, c, d: ops.ssd(x, dt * dt, -a * a, b, c, d, final_state=False)[0],
        ((1, 5, 2, 3), (1, 5, 2), (2,), (1, 5, 1, 4), (1, 5, 1, 4), (2,)),
        ("ssd_chunks_forward", "ssd_chunks_backward"),
    ),
    "ssd of a wide state": Case(
        lambda x, dt, a, b, c, d: ops.ssd(x, dt * dt, -a * a, b, c, d, final_state=False)[0],
        ((1, 3, 1, 2), (1, 3, 1), (1,), (1, 3, 1, 130), (1, 3, 1, 130), (1,)),
        ("ssd_chunks_forward",) * 2 + ("ssd_chunks_backward",) * 2,
    ),
    "layer_norm": Case(
        lambda x, w, b: ops.layer_norm(x, w, b, 1e-6),
        ((5, 70), (70,), (70,)),
        ("layer_norm_forward", "layer_norm_backward"),
    ),
    "rope": Case(
        lambda q, k: ops.rope(q, k, table(q, 4), table(q, 4)), ((2, 5, 4, 10), (2, 5, 2, 10)), ("rope_rotate",) * 2
    ),
    "rope_qkv": Case(
        lambda x: ops.rope_qkv(x, table(x, 4), table(x, 4), 2, 3, 8), ((2, 5, 80),), ("rope_split", "rope_merge")
    ),
    "rope_qkv with norms": Case(
        lambda x, q, k: ops.rope_qkv(x, table(x, 4), table(x, 4), 2, 3, 8, q, k),
        ((1, 3, 80), (8,), (8,)),
        ("rope_split", "rope_merge"),
    ),
    "rope_qkv without rotation": Case(
        lambda x: ops.rope_qkv(x, None, None, 2, 3, 8), ((1, 3, 80),), ("rope_split", "rope_merge")
    ),
    "swiglu": Case(ops.swiglu, ((4, 30), (4, 30)), ("glu_forward", "glu_backward")),
    "swiglu packed": Case(ops.swiglu, ((4, 60),), ("glu_forward", "glu_backward")),
    "geglu": Case(ops.geglu, ((4, 30), (4, 30)), ("glu_forward", "glu_backward")),
    "lora_linear": Case(
        lambda x, w, a, b, bias: ops.lora_linear(x, w, a, b, bias, scaling=0.5),
        ((2, 5, 12), (20, 12), (3, 12), (20, 3), (20,)),
        ("lora_linear_forward", "lora_linear_backward"),
    ),
    "lora_linear with dropout": Case(
        lambda x, w, a, b: ops.lora_linear(x, w, a, b, dropped=x * 0.5),
        ((5, 12), (20, 12), (3, 12), (20, 3)),
        ("lora_linear_forward", "lora_linear_backward"),
    ),
    "quantized_linear": Case(
        lambda x, bias: ops.quantized_linear(x, *int4(x, 20), bias),
        ((2, 5, 70), (20,)),
        ("quantized_linear_forward", "quantized_linear_backward"),
    ),
    "swiglu with multipliers": Case(
        lambda x: ops.swiglu(x, gate_multiplier=0.7, down_multiplier=2.0, limit=1.0, up_offset=1.0),
        ((4, 60),),
        ("glu_forward", "glu_backward"),
    ),
    "route_tokens": Case(
        lambda x: ops.route_tokens(x, options=ops.RouterOptions(3)),
        ((4, 12),),
        ("route_tokens_forward", "route_tokens_backward"),
    ),
    "route_tokens with a bias, groups and given experts": Case(
        lambda x: ops.route_tokens(
            x,
            x[0].detach(),
            torch.tensor([[-1, 3]] * 4, device=x.device),
            options=ops.RouterOptions(2, "sigmoid", 4, 2, eps=0.1, min_sum=0.2, scale=2.5),
        ),
        ((4, 12),),
        ("route_tokens_forward", "route_tokens_backward"),
    ),
    "linear_distillation": Case(
        lambda h, w, b: ops.linear_distillation(h, w, h.flip(0), w.flip(0), h[:, 0] > 0, b, divergence="jsd"),
        ((4, 8), (50, 8), (50,)),
        ("linear_distillation",),
    ),
    "linear_distillation, each row": Case(
        lambda h, w: ops.linear_distillation(h, w, h.flip(0), w.flip(0), softcap=5.0, reduction="none"),
        ((4, 8), (50, 8)),
        ("linear_distillation", "linear_distillation"),
    ),
    "linear_distillation and more": Case(
        lambda h, w: [
            x.float()
            for x in ops.linear_distillation(
                h,
                w,
                h.flip(0),
                w.flip(0),
                divergence="lk",
                token_weights=h[:, 0].detach().abs(),
                return_acceptance=True,
                return_agreement=True,
            )
        ],
        ((4, 8), (50, 8)),
        ("linear_distillation",),
    ),
    "cross_entropy": Case(
        lambda x: ops.cross_entropy(x, target(x), return_rank=True, label_smoothing=0.1),
        ((4, 50),),
        ("loss_weights", "cross_entropy_forward", "cross_entropy_backward"),
    ),
    "cross_entropy of all terms": Case(
        lambda x: ops.cross_entropy(
            x,
            target(x),
            class_weights=x[0].detach().abs(),
            label_smoothing=0.1,
            z_loss=0.1,
            token_scaling=True,
            return_z_loss=True,
            return_predicted=True,
        ),
        ((4, 50),),
        ("loss_weights", "cross_entropy_forward", "cross_entropy_backward"),
    ),
    "linear_cross_entropy of all terms": Case(
        lambda h, w: ops.linear_cross_entropy(
            h,
            w,
            target(h),
            class_weights=w[:, 0].detach().abs(),
            label_smoothing=0.1,
            z_loss=0.1,
            token_scaling=True,
            return_z_loss=True,
            return_predicted=True,
        ),
        ((4, 8), (50, 8)),
        ("loss_weights", "linear_rows", "linear_gradients"),
    ),
    "linear_cross_entropy and more": Case(
        lambda h, w: ops.linear_cross_entropy(h, w, target(h), z_loss=0.1, return_z_loss=True, return_predicted=True),
        ((4, 8), (50, 8)),
        ("loss_weights", "linear_rows"),
    ),
    "linear_cross_entropy": Case(
        lambda h, w, b: ops.linear_cross_entropy(h, w, target(h), b, softcap=5.0, memory_budget=1),
        ((4, 8), (50, 8), (50,)),
        ("loss_weights", "linear_loss"),
    ),
    "linear_cross_entropy, each row": Case(
        lambda h, w: ops.linear_cross_entropy(h, w, target(h), reduction="none"),
        ((4, 8), (50, 8)),
        ("loss_weights", "linear_loss", "linear_loss"),
    ),
    "linear_log_probs": Case(
        lambda h, w, b: ops.linear_log_probs(h, w, target(h), b, softcap=5.0, memory_budget=1),
        ((4, 8), (50, 8), (50,)),
        ("loss_weights", "linear_rows", "linear_gradients"),
    ),
    "attention": Case(
        lambda q, k, v, s: ops.attention(q, k, v, window=4, softcap=5.0, sinks=s, backend="triton"),
        ((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 8), (4,)),
        ("triton_attention_forward", "triton_attention_backward"),
    ),
    "block_context_attention": Case(
        lambda q, k, v, x, y: ops.block_context_attention(
            q, k, v, x, y, torch.tensor([[1, 6]], device=q.device), cu_seqlens=bounds(q), window=4, causal=True
        ),
        ((1, 2, 3, 4, 16), (1, 2, 3, 2, 16), (1, 2, 3, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16)),
        ("context_starts", "block_context_forward", "block_context_backward"),
    ),
    "private_key_attention": Case(
        lambda q, k, v, x, y: ops.private_key_attention(q, k, v, [x], [y], cu_seqlens=bounds(q)),
        ((1, 7, 4, 16), *((1, 7, 2, 16),) * 4),
        ("triton_attention_forward", "merge_private_keys", "triton_attention_backward", "private_key_gradients"),
    ),
    "linear_log_probs and more": Case(
        lambda h, w: ops.linear_log_probs(
            h,
            w,
            target(h),
            return_entropy=True,
            return_lse=True,
            return_predicted=True,
            return_rank=True,
            return_log_kept_mass=True,
            temperature=torch.full_like(h[:, 0], 0.7).detach(),
            min_p=1e-30,
        ),
        ((4, 8), (50, 8)),
        ("loss_weights", "linear_rows", "linear_gradients"),
    ),
}


def results(op: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs, and the gradients of those inputs that require one."""
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    outputs = op(*inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    sum(x.square().sum() for x in outputs if x.requires_grad).backward()
    return [*outputs, *(x.grad for x in inputs if x.requires_grad)]


def make(case: Case, device: torch.device, frozen: Sequence[int] = ()) -> list[torch.Tensor]:
    return [torch.randn(s, device=device, requires_grad=i not in frozen) for i, s in enumerate(case.shapes)]


def assert_same(case: Case, one: torch.Tensor, two: torch.Tensor) -> None:
    """Equal bits; but a CPU's GEMMs may add up in another order where their operands lie at other addresses, and a loss
    of a head that is compiled computes logits again that it keeps otherwise."""
    is_exact = one.is_cuda and HEAD_LOSSES.isdisjoint(case.nodes)
    few = 0 if is_exact else 8 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(one, two, rtol=few, atol=few * one.abs().max().item() if one.numel() else 0)


def graphs() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of cases and frozen operands: of the cases with certain opaque ops the first with none, the others with
    every second one, from the first or the second; so is the first again where there are no others and the op is a
    loss, which computes gradients otherwise if it is compiled. The tests of each op freeze every subset, without a
    compiled graph."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, case in CASES.items():
        names.setdefault(case.nodes, []).append(name)
    for number, (first, *others) in enumerate(names.values()):
        yield first, ()
        is_loss = not {"loss_weights", "linear_distillation"}.isdisjoint(CASES[first].nodes)
        for name in others or [first] * is_loss:
            operands = range(len(CASES[name].shapes))
            yield name, tuple(operands[number % 2 :: 2]) if len(operands) > 1 else ()


@pytest.mark.kernels
@pytest.mark.every_case
@pytest.mark.parametrize(("name", "frozen"), list(graphs()), ids=str)
def test_compiled_graphs_hold_the_opaque_ops(name: str, frozen: tuple[int, ...], kernels_device: torch.device) -> None:
    """Without a graph break, forward and backward, with the same results; each op is one node."""
    case, nodes = CASES[name], []

    def record(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        nodes.extend(n.target.name() for n in graph.graph.nodes if "ligermodels" in str(n.target))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(case.op, fullgraph=True, backend=aot_autograd(fw_compiler=record, bw_compiler=record))
    inputs = make(case, kernels_device, frozen)
    for one, two in zip(results(case.op, inputs), results(compiled, inputs), strict=True):
        assert_same(case, one, two)
    expected = [f"ligermodels::{n}" for n in case.nodes]
    if frozen:  # some are not needed
        assert nodes[:1] == expected[:1] and set(nodes) <= set(expected)
    else:
        assert nodes == expected


@pytest.mark.parametrize(
    "name", ["cross_entropy", "linear_cross_entropy", "linear_log_probs", "rms_norm", "route_tokens"]
)
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.kernels)])
def test_compiled_with_varying_sizes(name: str, backend: str) -> None:
    """One graph for all sizes: no recompilation after the first change."""
    device = torch.device("cuda" if backend == "triton" and not dispatch.INTERPRETED else "cpu")
    case = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(case.op, fullgraph=True, backend="aot_eager", dynamic=True)
    with ops.set_backend(backend):
        for rows in (4, 3, 6):
            inputs = make(case, device)
            inputs[0] = torch.randn(rows, *case.shapes[0][1:], device=device, requires_grad=True)
            with torch._dynamo.config.patch(error_on_recompile=rows != 4):
                for one, two in zip(results(case.op, inputs), results(compiled, inputs), strict=True):
                    assert_same(case, one, two)


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("name", CASES)
def test_compiled_by_inductor(name: str) -> None:
    torch._dynamo.reset()
    inputs = make(CASES[name], torch.device("cuda"))
    for one, two in zip(
        results(CASES[name].op, inputs), results(torch.compile(CASES[name].op, fullgraph=True), inputs), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


class Spy(TorchDispatchMode):
    """Sees every opaque op that is called, as dispatch modes and tensor subclasses of users do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch._ops.OpOverload, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ligermodels":
            self.seen.append((func, args))
        return func(*args, **(kwargs or {}))


@cache
def opaque_calls(name: str, device: torch.device) -> list[tuple[torch._ops.OpOverload, tuple[Any, ...]]]:
    """The opaque ops that a case calls, with their arguments; computed once."""
    torch.manual_seed(0)
    with Spy() as spy:
        results(CASES[name].op, make(CASES[name], device))
    return [(op, torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)) for op, args in spy.seen]


@pytest.mark.kernels
@pytest.mark.parametrize("name", CASES)
def test_schemas_and_fakes(name: str, kernels_device: torch.device) -> None:
    """Every opaque op that a case calls: no input changed or returned, and the fake's results like the real ones."""
    seen = opaque_calls(name, kernels_device)
    assert {op.name() for op, _ in seen} == {f"ligermodels::{n}" for n in CASES[name].nodes}
    for op, args in seen:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def test_force_nests_and_restores() -> None:
    x = torch.ones(1)
    with ops.set_backend(None):
        chosen = ops.use_kernels(x)
        with ops.set_backend("reference"):
            assert not ops.use_kernels(x)
            with pytest.raises(RuntimeError, match="inner"), ops.set_backend(None):
                raise RuntimeError("inner")
            assert not ops.use_kernels(x)
        assert ops.use_kernels(x) == chosen == dispatch.INTERPRETED
    with pytest.raises(BackendError, match="backend must be"), ops.set_backend("cuda"):  # type: ignore[arg-type]
        pass


@pytest.mark.kernels
def test_float64_goes_to_the_reference(kernels_device: torch.device) -> None:
    assert ops.use_kernels(torch.ones(1, device=kernels_device), None)
    assert not ops.use_kernels(torch.ones(1, device=kernels_device), torch.ones(1, dtype=torch.float64))


CHILD = """
import os, sys
import torch.distributed.fsdp, torch.fx.experimental.symbolic_shapes  # once, for both; they do not import Triton
assert "triton" not in sys.modules
if not os.fork():
    sys.modules["triton"] = None
elif os.wait()[1]:
    sys.exit("without Triton")
from ligermodels import ops
from ligermodels.errors import BackendError
x = torch.ones(2, 4, requires_grad=True)
ops.swiglu(ops.rms_norm(x, None, 1e-6)).sum().backward()
ops.linear_cross_entropy(x, torch.ones(3, 4), torch.tensor([0, 1])).backward()
assert not ops.use_kernels(x)
try:
    with ops.set_backend("triton"):
        ops.swiglu(x)
except BackendError as error:
    print(error)
"""


def test_on_the_cpu_without_the_interpreter() -> None:
    """The references serve, with or without Triton installed; asking for the kernels is an error that says why."""
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("TRITON_INTERPRET=1") == 2
