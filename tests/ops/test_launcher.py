"""Launches of kernels: each kind of arguments finds the kernel that was compiled for it."""

import ast
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch

from ligermodels import ops
from ligermodels.ops.runtime import dispatch
from ligermodels.ops.runtime.devices import GPU
from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import MAX_KNOWN, Kernel, kernel


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
        def __init__(self, kind: Any) -> None:
            self.kind = kind

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            assert grid == (4, 1, 1)
            return self.launch

        def launch(self, argument: Any) -> None:
            assert kind_of(argument) == self.kind, argument

    class Jitted:
        arg_names = ("argument",)
        result: Any = Compiled
        compiled = 0

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self.run

        def run(self, argument: Any, num_warps: int) -> Any:
            self.compiled += 1
            return self.result(kind_of(argument))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton.compiler, "CompiledKernel", Compiled)
    arguments = [*INTEGERS, *Target, True, False, None, 1.0, 0.0, 2.5, float("nan")]
    for order in (arguments, arguments[::-1]):
        jitted = Jitted()
        known = Kernel(jitted)
        for argument in order * 2:
            known[(4,)](argument, num_warps=4)
        assert jitted.compiled < 20
    jitted.result = lambda kind: None  # a hook of Triton's that compiles nothing
    for _ in range(2):
        known[(5,)](7, num_warps=4)


@pytest.mark.parametrize("hip", [None, "7.0"])
def test_launches_on_amd(monkeypatch: pytest.MonkeyPatch, hip: str | None) -> None:
    """Each by Triton, which compiles other code for tensors of 2 GiB; and of at most 16 warps of 64 threads."""
    pytest.importorskip("triton")
    launched: list[Any] = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *arguments: launched.append("cached")

    class Jitted:
        arg_names = ("x",)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda x, num_warps: launched.append(num_warps) or Compiled()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton.compiler, "CompiledKernel", Compiled)
    monkeypatch.setattr(torch.version, "hip", hip)
    launches = Kernel(Jitted())
    for num_warps in (4, 32):
        launches[(1,)](7, num_warps=num_warps)
        launches[(1,)](7, num_warps=num_warps)
    assert launched == ([4, 4, 16, 16] if hip else [4, "cached", 32, "cached"])


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("capability", "hip", "early"), [((8, 9), False, False), ((9, 0), False, True), ((9, 4), True, False)]
)
def test_kernels_that_may_start_early(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: bool, early: bool
) -> None:
    """They are told so, and launched so, at the first launch and at later ones; other kernels never are."""
    launched: list[Any] = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *given: launched.append(given)

    class Jitted:
        arg_names = ("x", "BLOCK", "PDL")

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda x, **constants: launched.append(constants) or Compiled()

    class Plain(Jitted):
        arg_names = ("x", "BLOCK")

    monkeypatch.setattr(triton.compiler, "CompiledKernel", Compiled)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "pretended", GPU("a GPU", capability, 2**16, 4, hip))
    for jitted, wanted in ((Jitted, {"PDL": early} | ({"launch_pdl": True} if early else {})), (Plain, {})):
        known = Kernel(jitted())
        for _ in range(2):
            known[(1,)](7, BLOCK=16, num_warps=4)
        first = {"BLOCK": 16, "num_warps": 4} | wanted
        assert launched == [first, first if hip else (7, 16, early)[: len(jitted.arg_names)]]
        launched.clear()


def test_early_kernels_wait_before_all_else() -> None:
    """A kernel that read or wrote memory before its wait would race with the kernel before it, now and then."""
    early = 0
    for path in sorted(Path(ops.__path__[0]).rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or function.name == "wait_for_previous":
                continue
            body = function.body[ast.get_docstring(function) is not None :]
            waits = [ast.unparse(statement) == "wait_for_previous(PDL)" for statement in body]
            arguments = [ast.unparse(each) for each in function.args.args]
            assert any(waits) == waits[0] == (arguments[-1:] == ["PDL: tl.constexpr"]), (path, function.name)
            early += waits[0]
    assert early > 15


def _add_hook(monkeypatch: pytest.MonkeyPatch, name: str, hook: Any) -> None:
    knobs = triton.knobs.runtime
    chain = type(getattr(knobs, name))
    monkeypatch.setattr(knobs, name, hook if chain is type(None) else chain())  # Triton 3.4 has no chains of hooks
    if chain is not type(None):
        getattr(knobs, name).add(hook)


HOOKS = ("launch_enter_hook", "launch_exit_hook")


@pytest.mark.kernels
def test_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anew for each device, grid and constants."""
    launched: list[Any] = []

    class Compiled:
        def __init__(self, constants: dict[str, Any]) -> None:
            self.constants = constants

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *given: launched.append((grid, given))

    class Jitted:
        arg_names = ("x", "factor", "BLOCK", "ADD")

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **constants: launched.append("compiled") or Compiled(constants)

    monkeypatch.setattr(triton.compiler, "CompiledKernel", Compiled)
    known = Kernel(Jitted())
    for device in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        for grid in ((4,), (4, 2), (5, 2, 3)):
            for add in (True, False):
                for wanted in ("compiled", ((*grid, 1, 1)[:3], (7, 2.5, 16, add))):
                    known[grid](7, 2.5, BLOCK=16, ADD=add, num_warps=1)
                    assert launched.pop() == wanted
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
    torch.cuda._sleep(2**33)  # seconds, so that it lasts while other processes share the GPU
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
