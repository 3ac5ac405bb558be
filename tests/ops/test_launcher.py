"""Launches of kernels: each kind of arguments finds the kernel that was compiled for it."""

import ast
import re
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch

from ligermodels.ops import launcher
from ligermodels.ops.dispatch import tl, triton
from ligermodels.ops.launcher import MAX_KNOWN, Kernel, kernel


@kernel
def _multiply_add_kernel(x, more, out, n, stride, factor, ADD: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i * stride, mask=i < n, other=0.0).to(tl.float32) * factor
    if ADD:
        value += tl.load(more + i, mask=i < n, other=0.0)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < n)


@pytest.mark.gpu
@pytest.mark.kernels
def test_every_kind_finds_its_kernel() -> None:
    calls = [
        (dtype, first, n, stride, factor, add)
        for dtype in (torch.float32, torch.bfloat16)
        for first in (0, 1)  # 1: not aligned
        for n, stride in ((1, 1), (1, 2), (2, 1), (16, 1), (16, 16), (17, 3), (33, 1))
        for factor in (1.0, 2.5)
        for add in (False, True)
    ]
    data = torch.randn(600, device="cuda")
    more = torch.randn(64, device="cuda")
    for _ in range(2):  # the second time all are known
        for dtype, first, n, stride, factor, add in calls:
            x, out = data.to(dtype)[first:], torch.full((n + 1,), 7.0, device="cuda", dtype=dtype)
            addend = more if add else None
            _multiply_add_kernel[(-(-n // 16),)](x, addend, out, n, stride, factor, ADD=add, BLOCK=16, num_warps=1)
            wanted = x[: n * stride : stride].float() * factor
            wanted = wanted + more[:n] if add else wanted
            torch.testing.assert_close(out[:n], wanted.to(dtype))
            assert out[n] == 7


@pytest.mark.gpu
@pytest.mark.kernels
def test_long_integers_and_many_sizes() -> None:
    x, out = torch.randn(64, device="cuda"), torch.empty(64, device="cuda")
    for n in (64, 2**31 + 64, 64, 2**33):  # masks, past what 32 bits hold
        out.zero_()
        _multiply_add_kernel[(4,)](x, None, out, n, 1, 1.0, ADD=False, BLOCK=16, num_warps=1)
        assert torch.equal(out, x)
    for programs in range(1, MAX_KNOWN + 10):  # more than are kept
        _multiply_add_kernel[(programs,)](x, None, out, 64, 1, 1.0, ADD=False, BLOCK=16, num_warps=1)
    assert torch.equal(out, x)


class Target(IntEnum):
    ONE, SIXTEEN, IGNORED = 1, 16, -100


BOUNDS = (0, 1, 15, 16, 100, 2**31, 2**32, 2**62, 2**63)
INTEGERS = [n for bound in BOUNDS for n in (bound - 1, bound, bound + 16, -bound, -bound - 1) if n >= -(2**63)]


@pytest.mark.kernels  # they alone may load all of Triton
def test_key_is_as_fine_as_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an argument is launched with was compiled for its kind, as Triton itself tells kinds apart."""
    native = getattr(pytest.importorskip("triton._C.libtriton"), "native_specialize_impl", None)
    if native is None:
        pytest.skip("this Triton tells kinds apart in Python")

    def kind_of(argument: Any) -> Any:
        return native(triton.backends.compiler.BaseBackend, argument, False, True, True)

    class Compiled:
        function, packed_metadata = "function", "metadata"

        def __init__(self, kind: Any) -> None:
            self.kind = kind

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return self.launch

        def launch(self, argument: Any) -> None:
            raise AssertionError("there is no hook")

        def run(self, *given: Any) -> None:
            assert given[:-1] == (4, 1, 1, "stream", "function", "metadata", None, None, None)
            assert kind_of(given[-1]) == self.kind, given[-1]

    class Jitted:
        arg_names = ("argument",)
        result: Any = Compiled
        compiled = 0

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self.run

        def run(self, argument: Any) -> Any:
            self.compiled += 1
            return self.result(kind_of(argument))

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    monkeypatch.setattr(triton.compiler, "CompiledKernel", Compiled)
    arguments = [*INTEGERS, *Target, True, False, None, 1.0, 0.0, 2.5, float("nan")]
    for order in (arguments, arguments[::-1]):
        jitted = Jitted()
        known = Kernel(jitted)
        for argument in order * 2:
            known[(4,)](argument)
        assert jitted.compiled < 20
    jitted.result = lambda kind: None  # a hook of Triton's that compiles nothing
    for _ in range(2):
        known[(5,)](7)


def _add_hook(monkeypatch: pytest.MonkeyPatch, name: str, hook: Any) -> None:
    knobs = triton.knobs.runtime
    chain = type(getattr(knobs, name))
    monkeypatch.setattr(knobs, name, hook if chain is type(None) else chain())  # Triton 3.4 has no chains of hooks
    if chain is not type(None):
        getattr(knobs, name).add(hook)


HOOKS = ("launch_enter_hook", "launch_exit_hook")


@pytest.mark.kernels
def test_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anew for each device, grid and constants; on the device's current stream; by Triton itself where it has hooks."""
    launched: list[Any] = []

    class Compiled:
        function, packed_metadata = "function", "metadata"

        def __init__(self, constants: dict[str, Any]) -> None:
            self.constants = constants

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *given: launched.append(("hooked", grid, given))

        def run(self, *given: Any) -> None:
            launched.append(("direct", *given))

    class Jitted:
        arg_names = ("x", "factor", "BLOCK", "ADD")

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **constants: launched.append("compiled") or Compiled(constants)

    device = 0
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: f"stream {device}", raising=False)
    monkeypatch.setattr(triton.compiler, "CompiledKernel", Compiled)
    known = Kernel(Jitted())

    def launch(grid: tuple[int, ...], add: bool) -> Any:
        known[grid](7, 2.5, BLOCK=16, ADD=add, num_warps=1)
        return launched.pop()

    for device in (0, 1):
        for grid in ((4,), (4, 2), (5, 2, 3)):
            for add in (True, False):
                assert launch(grid, add) == "compiled"
                whole, values = (*grid, 1, 1)[:3], (7, 2.5, 16, add)
                start = (*whole, f"stream {device}", "function", "metadata", None, None, None)
                assert launch(grid, add) == ("direct", *start, *values)
                for hook in HOOKS:
                    with monkeypatch.context() as patch:
                        _add_hook(patch, hook, print)
                        assert launch(grid, add) == ("hooked", whole, values)
    assert launched == []


@pytest.mark.gpu
@pytest.mark.kernels
def test_known_kernels_follow_streams_graphs_and_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = torch.randn(64, device="cuda"), torch.zeros(64, device="cuda")

    def launch() -> None:
        _multiply_add_kernel[(4,)](x, None, out, 64, 1, 1.0, ADD=False, BLOCK=16, num_warps=1)

    launch()
    out.zero_()
    torch.cuda.synchronize()
    side, busy = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda._sleep(2**30)
    busy.record()
    with torch.cuda.stream(side):
        launch()
        found = out.cpu()
    assert not busy.query()  # it did not wait for the other stream
    torch.cuda.synchronize()
    assert torch.equal(found, x.cpu())

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    out.zero_()
    graph.replay()
    assert torch.equal(out, x)

    for name in HOOKS:
        told: list[Any] = []
        with monkeypatch.context() as patch:
            _add_hook(patch, name, lambda *metadata, told=told: told.append(metadata))
            launch()
        launch()
        assert len(told) == 1


def _kernels() -> list[ast.FunctionDef]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(launcher.__file__).parent.glob("*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if any(isinstance(d, ast.Name) and d.id == "kernel" for d in f.decorator_list)]


@pytest.mark.parametrize("function", _kernels(), ids=lambda function: function.name)
def test_kernels_wait_before_anything_else(function: ast.FunctionDef) -> None:
    """What a kernel that is launched early did before it waits could miss what the kernel before it writes: it may ask
    for what it will read, but not read it."""
    statements = [ast.unparse(s) for s in (function.body[1:] if ast.get_docstring(function) else function.body)]
    waits = [s for s in statements if "after_previous_kernel" in s or "let_next_kernel_start" in s]
    assert waits in (["after_previous_kernel()"], ["let_next_kernel_start()"])
    before = "\n".join(statements[: statements.index(waits[0])])
    assert not before or "ask_for" in before
    assert set(re.findall(r"([\w.]+)\(", before)) <= {
        "tl.program_id",
        ".to",
        "tl.static_range",
        "tl.minimum",
        "ask_for",
    }


def test_asking_reads_nothing() -> None:
    """`ask_for` may come before the wait: it computes addresses and prefetches."""
    tree = ast.parse(Path(launcher.__file__).read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "ask_for"]
    calls = {ast.unparse(n.func) for f in functions for n in ast.walk(f) if isinstance(n, ast.Call)}
    ours = {"start.to", "tl.cast", "tl.where", "tl.target_info.cuda_capability_geq", "tl.inline_asm_elementwise"}
    assert len(functions) == 2 and calls == ours


@pytest.mark.parametrize(
    ("waits", "version", "capability", "early"),
    [
        (True, "13.0", (9, 0), True),
        (True, "13.0", (10, 0), True),
        (True, "13.0", (8, 9), False),
        (True, None, (9, 4), False),
        (False, "13.0", (9, 0), False),
    ],
)
def test_only_kernels_that_wait_are_launched_early(
    waits: bool, version: str | None, capability: tuple[int, int], early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Jitted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **constants: constants

    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    found = Kernel(Jitted(), waits)._compiled((1,), (), {"num_warps": 4})
    assert found == {"num_warps": 4} | ({"launch_pdl": True} if early else {})
