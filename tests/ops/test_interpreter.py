"""What tests/helpers/interpreter.py leaves as Triton has it."""

from typing import Any

import pytest
import torch

from ligermodels.ops.runtime.dispatch import INTERPRETED

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(not INTERPRETED, reason="Triton compiles here")]
triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def twice(x, FAILS: tl.constexpr):
    tl.static_assert(not FAILS)
    return tl.where(x > 0, 2 * x, tl.sum(x, axis=0))


@triton.jit
def kernel(x, n, FAILS: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    tl.store(x + columns, twice(tl.load(x + columns, columns < n, 0.0), FAILS), columns < n)


def language() -> dict[str, Any]:
    owners = {"language": tl, "core": tl.core, "math": tl.math, "tensor": tl.tensor, "dtype": tl.dtype}
    return {f"{owner}.{name}": value for owner, found in owners.items() for name, value in vars(found).items()}


def test_the_language_is_restored_after_a_launch() -> None:
    kernel[(1,)](torch.ones(3), 3, False, 4)
    before, x = language(), torch.tensor([1.0, -3.0, 5.0])
    kernel[(1,)](x, 3, False, 4)
    assert x.tolist() == [2.0, 3.0, 10.0]
    assert language() == before and tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.core.load)
    with pytest.raises(triton.runtime.errors.InterpreterError):
        kernel[(1,)](x, 3, True, 4)
    assert language() == before


@triton.jit
def conversions(x, n, scalars, shifted, out, BLOCK: tl.constexpr):
    """Numbers, scalars and blocks of other shapes beside blocks, each several times; a shift makes its operands signed
    in place."""
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, 2 * BLOCK)[None, :]
    found = tl.zeros([BLOCK, 2 * BLOCK], tl.float32)
    for step in range(2):
        block = tl.load(x + rows * n + columns) + tl.load(scalars + step)
        found += (1 - block * 2) / (rows + 1) + (columns > step) * 0.5 + tl.load(x + columns)
        bits = tl.load(shifted + columns)
        found += (bits >> 1).to(tl.float32) + (bits // 2) * 1.0 + (-1 + rows) + bits
    tl.store(out + rows * n + columns, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_operands_are_converted_as_triton_does_it(dtype: torch.dtype) -> None:
    x, scalars = torch.randn(4, 8).to(dtype), torch.tensor([0.5, -2.0]).to(dtype)
    shifted, found = torch.arange(8).to(torch.uint32), torch.empty(4, 8)
    conversions[(1,)](x, 8, scalars, shifted, found, 4)
    rows, columns = torch.arange(4)[:, None], torch.arange(8)[None, :]
    wanted = torch.zeros(4, 8)
    for step in range(2):
        term = (1 - (x + scalars[step]) * 2).float() / (rows + 1) + (columns > step) * 0.5 + x[:1].float()
        wanted += term + 2 * (columns >> 1) - 1 + rows + columns
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-5 if dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("element", [tl.float32, tl.pointer_type(tl.float16)], ids=str)
def test_types_of_blocks(element: Any) -> None:
    for _ in range(2):  # the second of a kind shares parts with the first
        found = tl.block_type(element, [2, tl.constexpr(4)])
        assert (found.element_ty, found.numel, str(found)) == (element, 8, f"<['2', '4'], {element}>")
        x = tl.tensor(None, found)
        assert ([size.value for size in x.shape], x.numel.value, x.dtype) == ([2, 4], 8, element)
        with pytest.raises(ValueError, match="must be a power of 2"):
            tl.block_type(element, [2, 3])
        with pytest.raises(TypeError, match="must have type"):
            tl.block_type(element, [2, 4.0])
    assert tl.block_type(tl.int32, [2, 4]) != found and tl.tensor(None, element).shape.values == []
