from typing import Any

import pytest
import torch
from conftest import Where
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops import lora_linear, lora_linear_reference

NAMES = ("x", "weight", "a", "b", "bias", "dropped")


def operands(where: Where, rows: tuple[int, ...] = (3, 5), **without: None) -> dict[str, Any]:
    shapes = {"x": (*rows, 24), "weight": (40, 24), "a": (3, 24), "b": (40, 3), "bias": (40,), "dropped": (*rows, 24)}
    generator = torch.Generator().manual_seed(0)
    made = {
        name: torch.randn(shape, generator=generator).to(where.device, where.dtype) for name, shape in shapes.items()
    }
    return made | without


def results(op: Any, given: dict[str, Any], trained: tuple[str, ...], scaling: float) -> list[Tensor]:
    inputs = {n: None if t is None else t.clone().requires_grad_(n in trained) for n, t in given.items()}
    dropped = inputs.pop("dropped")
    y = op(**inputs, dropped=dropped, scaling=scaling)
    along = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype)
    y.backward(along)
    assert all((t.grad is not None) == (n in trained) for n, t in inputs.items() if t is not None)
    return [y.detach(), *(t.grad for t in (*inputs.values(), dropped) if t is not None and t.grad is not None)]


def compare(given: dict[str, Any], trained: tuple[str, ...], scaling: float) -> None:
    """Against float64, to a few units in the last place."""
    found = results(lora_linear, given, trained, scaling)
    double = {name: None if t is None else t.double() for name, t in given.items()}
    for one, two in zip(found, results(lora_linear_reference, double, trained, scaling), strict=True):
        tolerance = 4 * torch.finfo(one.dtype).eps
        assert one.dtype == given["x"].dtype
        greatest = two.abs().max().item() if two.numel() else 0.0
        torch.testing.assert_close(one.double(), two, rtol=tolerance, atol=tolerance * greatest)


@pytest.mark.parametrize(
    "trained", [NAMES, ("x", "a", "b"), ("a", "b", "dropped"), ("x",), ("b",), ("weight", "a")], ids=str
)
@pytest.mark.parametrize("without", [(), ("bias",), ("dropped",), ("bias", "dropped")], ids=str)
def test_against_float64(where: Where, trained: tuple[str, ...], without: tuple[str, ...]) -> None:
    given = operands(where, **dict.fromkeys(without))
    trained = tuple(name for name in trained if name not in without)
    compare(given, trained, 0.7)


@pytest.mark.parametrize("rows", [(), (1,), (0,), (2, 0)], ids=str)
def test_few_rows(where: Where, rows: tuple[int, ...]) -> None:
    compare(operands(where, rows, bias=None, dropped=None), ("x", "a", "b"), 2.0)


def test_gradcheck() -> None:
    given = [t.requires_grad_() for t in operands(Where(torch.device("cpu"), torch.float64), (3,)).values()]
    assert torch.autograd.gradcheck(lambda *t: lora_linear(*t[:5], dropped=t[5], scaling=0.3), given)


def test_autocast() -> None:
    given = operands(Where(torch.device("cpu"), torch.float32), bias=None, dropped=None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(lora_linear, given, ("x", "a", "b"), 1.0)
    rounded = {name: None if t is None else t.bfloat16() for name, t in given.items()}
    for one, two in zip(found, results(lora_linear, rounded, ("x", "a", "b"), 1.0), strict=True):
        torch.testing.assert_close(one.float(), two.float(), rtol=0, atol=0)


BAD = {"weight": (40, 23), "a": (3, 25), "b": (40, 4), "bias": (39,), "dropped": (3, 4, 24)}


@pytest.mark.parametrize("name", BAD)
def test_bad_tensors(name: str) -> None:
    given = operands(Where(torch.device("cpu"), torch.float32))
    for bad in (torch.zeros(BAD[name]), given[name].double()):
        with pytest.raises(InputError, match=f"lora_linear: {name} must be"):
            lora_linear(**given | {name: bad})
