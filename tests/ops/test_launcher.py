"""Launches of kernels: each kind of arguments finds the kernel that was compiled for it."""

import ast
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
    native = pytest.importorskip("triton._C.libtriton").native_specialize_impl

    def kind_of(argument: Any) -> Any:
        return native(triton.backends.compiler.BaseBackend, argument, False, True, True)

    class Compiled:
        function, packed_metadata, hooked = "function", "metadata", 0

        def __init__(self, kind: Any) -> None:
            self.kind = kind

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return self.launch

        def launch(self, argument: Any) -> None:
            Compiled.hooked += 1
            assert kind_of(argument) == self.kind, argument

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
        assert jitted.compiled < 20 and Compiled.hooked == 0
    told, hook = [], triton.knobs.runtime.launch_exit_hook
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", told.append if hook is None else type(hook)())
    if hook is not None:
        triton.knobs.runtime.launch_exit_hook.add(told.append)
    known[(4,)](7)
    assert Compiled.hooked == 1  # with a hook Triton launches it, and tells
    jitted.result = lambda kind: None  # a hook of Triton's that compiles nothing
    for _ in range(2):
        known[(5,)](7)


def _kernels() -> list[ast.FunctionDef]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(launcher.__file__).parent.glob("*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if any(isinstance(d, ast.Name) and d.id == "kernel" for d in f.decorator_list)]


@pytest.mark.parametrize("function", _kernels(), ids=lambda function: function.name)
def test_kernels_wait_before_anything_else(function: ast.FunctionDef) -> None:
    """What a kernel that is launched early did before it waits could miss what the kernel before it writes."""
    first, *rest = function.body[1:] if ast.get_docstring(function) else function.body
    ours = ("after_previous_kernel", "let_next_kernel_start")
    assert isinstance(first, ast.Expr) and ast.unparse(first) in [f"{name}()" for name in ours]
    assert not any(name in ast.unparse(statement) for statement in rest for name in ours)


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
