"""LoRA on a frozen weight in float8: every product is that of what was cast, whoever cast it."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import Where
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ligermodels.errors import InputError
from ligermodels.ops import Float8Recipe, float8_cast, float8_lora_linear
from ligermodels.ops.float8 import low_rank, tail

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
IN, OUT = 96, 48
NAMES = ("x", "a", "b", "dropped")


def operands(where: Where, rows: tuple[int, ...], rank: int, **without: None) -> dict[str, Any]:
    shapes = {"x": (*rows, IN), "a": (rank, IN), "b": (OUT, rank), "bias": (OUT,), "dropped": (*rows, IN)}
    generator = torch.Generator().manual_seed(0)
    made = {
        name: torch.randn(shape, generator=generator).to(where.device, where.dtype) for name, shape in shapes.items()
    }
    return made | without


def cast_values(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What is left of x (..., N) in float8, with a scale for each row: float64."""
    found = float8_cast(x, dtype, by_row=True)
    assert found.rows is not None
    return (found.rows.double() * found.scale.double().unsqueeze(1)).view(x.shape)


def truth(given: dict[str, Any], w: Tensor, dy: Tensor, scaling: float, recipe: Float8Recipe) -> dict[str, Tensor]:
    """The result and all gradients, in float64, of operands as they are cast."""
    double = {name: None if t is None else t.double() for name, t in given.items()}
    x8, dy8 = cast_values(given["x"], E4M3).flatten(0, -2), cast_values(dy, recipe.gradient_dtype).flatten(0, -2)
    a, b, w = double["a"], double["b"], w.double()
    source = x8 if double["dropped"] is None else double["dropped"].flatten(0, -2)
    d_down = scaling * dy8 @ b
    found = {
        "y": x8 @ w.t() + scaling * source @ a.t() @ b.t() + (0 if double["bias"] is None else double["bias"]),
        "x": dy8 @ w + (d_down @ a if double["dropped"] is None else 0),
        "a": d_down.t() @ source,
        "b": scaling * dy8.t() @ (source @ a.t()),
        "dropped": d_down @ a,
    }
    return {name: t.view(*dy.shape[:-1], -1) if name in ("y", "x", "dropped") else t for name, t in found.items()}


@pytest.fixture
def many_rows(where: Where, monkeypatch: pytest.MonkeyPatch) -> int:
    """More than a program sums over: in the interpreter programs of few rows do."""
    if where.place == "cuda":
        return low_rank.LEAST_ROWS + 18
    monkeypatch.setattr(low_rank, "LEAST_ROWS", 32)
    return 50


@pytest.mark.parametrize(
    ("rank", "trained"),
    [(3, NAMES), (70, NAMES), (3, ("a", "b")), (3, ("x",)), (3, ("b", "x")), (3, ("a", "dropped"))],
    ids=str,
)
@pytest.mark.parametrize("without", [(), ("bias", "dropped")], ids=str)
def test_against_float64(
    where: Where, many_rows: int, trained: tuple[str, ...], without: tuple[str, ...], rank: int
) -> None:
    recipe, scaling = Float8Recipe(forward_fast=False, backward_fast=False), 0.7
    weight = float8_cast((torch.randn(OUT, IN, device=where.device) / 10).to(where.dtype), E4M3, columns=rank == 3)
    for rows in ((1,), (3, 7), (many_rows,)):
        given = operands(where, rows, rank, **dict.fromkeys(without))
        dy = torch.randn(*rows, OUT, device=where.device).to(where.dtype)
        wanted = truth(given, weight.dequantize(), dy, scaling, recipe)
        names = [name for name in trained if name not in without]
        leaves = {n: None if t is None else t.requires_grad_(n in names) for n, t in given.items()}
        y = float8_lora_linear(
            *(leaves[n] if n else weight for n in ("x", "", "a", "b", "bias")),
            recipe=recipe, scaling=scaling, dropped=leaves["dropped"],
        )  # fmt: skip
        found = dict(zip(names, torch.autograd.grad(y, [leaves[n] for n in names], dy), strict=True)) | {
            "y": y.detach()
        }
        again = float8_lora_linear(
            float8_cast(given["x"].detach(), E4M3, by_row=True), weight, leaves["a"], leaves["b"], leaves["bias"],
            recipe=recipe, scaling=scaling, dropped=leaves["dropped"],
        )  # fmt: skip
        assert torch.equal(again, y)
        exact = 1e-5 if where.device.type == "cpu" else 2e-3  # of sums in tensor cores
        limit = max(4 * torch.finfo(where.dtype).eps, exact)
        for name, each in found.items():
            assert each.dtype == where.dtype and each.shape == wanted[name].shape, name
            largest = float(wanted[name].abs().max())
            torch.testing.assert_close(each.double(), wanted[name], rtol=limit, atol=limit * largest, msg=name)


def test_gradients_that_are_float8_and_none_at_all(where: Where, many_rows: int) -> None:
    """A gradient that its producer has cast, equal bits in every run; and no rows."""
    recipe = Float8Recipe()
    weight = float8_cast(torch.randn(OUT, IN, device=where.device).to(where.dtype), E4M3)
    for rows in ((many_rows,), (0,)):
        given = operands(where, rows, 5, bias=None, dropped=None)
        leaves = [given[name].requires_grad_() for name in ("x", "a", "b")]
        dy = torch.randn(*rows, OUT, device=where.device).to(where.dtype)

        def gradients(dy: Tensor, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(float8_lora_linear(x, weight, a, b, recipe=recipe), (x, a, b), dy)

        first = gradients(dy, *leaves)
        for each in (dy, float8_cast(dy, E5M2, by_row=True)):
            assert all(torch.equal(one, two) for one, two in zip(gradients(each, *leaves), first, strict=True))
        assert rows[0] or not any(each.any() for each in first)


def test_what_shares_tails(where: Where) -> None:
    """Two layers that read one input, and a layer that runs twice before its first backward pass."""
    recipe, given = Float8Recipe(), operands(where, (37,), 5, bias=None, dropped=None)
    weights = [float8_cast(torch.randn(OUT, IN, device=where.device).to(where.dtype), E4M3, tail=128) for _ in range(2)]
    a, b = given["a"].requires_grad_(), (given["b"] / 100).requires_grad_()
    inputs = [float8_cast(scale * given["x"].detach(), E4M3, by_row=True, tail=128) for scale in (1, 1e-3)]
    dy = torch.randn(37, OUT, device=where.device).to(where.dtype)
    calls = [(x, weight) for x in inputs for weight in weights]

    def results(y: Tensor) -> list[Tensor]:
        return [y.detach(), *torch.autograd.grad(y, (a, b), dy)]

    alone = [results(float8_lora_linear(x, weight, a, b, recipe=recipe)) for x, weight in calls]
    together = [float8_lora_linear(x, weight, a, b, recipe=recipe) for x, weight in calls]
    for y, wanted in zip(together, alone, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(results(y), wanted, strict=True))


def test_threads_that_share_a_frozen_weight() -> None:
    recipe, given = Float8Recipe(), operands(Where(torch.device("cpu"), torch.float32), (64,), 4)
    weight, a, b = float8_cast(torch.randn(OUT, IN), E4M3, tail=128), given["a"], given["b"] / 100
    inputs = [given["x"] * 10.0**power for power in (-4, 0, 2, 4)]

    def product(x: Tensor) -> Tensor:
        return float8_lora_linear(x, weight, a, b, recipe=recipe)

    wanted = [product(x) for x in inputs]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(product, inputs * 100))
    assert all(torch.equal(y, wanted[index % 4]) for index, y in enumerate(found))


class Changes(TorchDispatchMode):
    """Records the arguments that ops of LoRA change, and those that their schemas declare to be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[set[str], set[str]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "ligermodels" or "float8_lora" not in func.name():
            return func(*args, **(kwargs or {}))
        tensors = {spec.name: t for spec, t in zip(func._schema.arguments, args, strict=True) if isinstance(t, Tensor)}
        before = {name: t.flatten().view(torch.uint8).clone() for name, t in tensors.items()}
        results = func(*args, **(kwargs or {}))
        changed = {
            name for name, old in before.items() if not torch.equal(old, tensors[name].flatten().view(torch.uint8))
        }
        self.calls.append((changed, {spec.name for spec in func._schema.arguments if spec.is_write}))
        return results


def test_ops_declare_the_tails_that_they_overwrite() -> None:
    """Autograd still takes the tensors that it saved for their rows, in a second backward pass too."""
    operand = operands(Where(torch.device("cpu"), torch.float32), (5,), 4)
    x, a, b = leaves = [operand[name].requires_grad_() for name in ("x", "a", "b")]
    weight = float8_cast(torch.randn(OUT, IN), E4M3, tail=128)
    assert weight.wide is not None
    weight.wide.fill_(1)  # in the tail too
    with Changes() as changes:
        y = float8_lora_linear(x, weight, a, b, recipe=Float8Recipe())
        first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
        float8_lora_linear(x, weight, a, b, recipe=Float8Recipe())
        again = torch.autograd.grad(y.sum(), leaves)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    forward, backward, *_ = changes.calls
    assert "w" in forward[0] and forward[1] == {"x", "w"} and backward[1] == {"dy", "w"}
    assert all(changed <= declared for changed, declared in changes.calls)


def test_order_of_streams_that_write_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call waits for the call before if that ran on another stream; under capture it takes no part."""
    log: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: Any) -> None:
            log.append(f"{self.name} waits for {event.stream}")

    class Event:
        def record(self, stream: Stream) -> None:
            self.stream = stream.name

    one, two, device = Stream("one"), Stream("two"), torch.device("cuda", 0)
    monkeypatch.setattr(tail, "_last_products", {})
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for stream, capturing in ((one, False), (one, False), (two, True), (two, False), (two, False), (one, False)):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, stream=stream: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        with tail._own_tails(device):
            log.append(f"{stream.name} writes")
    assert log == [
        "one writes", "one writes", "two writes", "two waits for one", "two writes", "two writes", "one waits for two",
        "one writes",
    ]  # fmt: skip


@pytest.mark.gpu
def test_streams_that_share_a_frozen_weight() -> None:
    """A call waits for the product of the call before, which reads the weight's tail, on whatever stream that runs."""
    where = Where(torch.device("cuda"), torch.bfloat16)
    recipe, given = Float8Recipe(), operands(where, (4096,), 4)
    weight, a, b = float8_cast(torch.randn(OUT, IN, device=where.device), E4M3, tail=128), given["a"], given["b"] / 100
    inputs = [given["x"] * 10.0**power for power in (-4, 0, 2, 4)]
    wanted = [float8_lora_linear(x, weight, a, b, recipe=recipe) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results = []
    for index in range(400):
        with torch.cuda.stream(streams[index % 4]):
            results.append(float8_lora_linear(inputs[index % 4], weight, a, b, recipe=recipe))
    torch.cuda.synchronize()
    assert all(torch.equal(y, wanted[index % 4]) for index, y in enumerate(results))


def test_autocast() -> None:
    """Of float32 parameters; of an input that was cast from float32, whose gradient is float32 too."""
    given = operands(Where(torch.device("cpu"), torch.float32), (5,), 4, dropped=None)
    weight, recipe = float8_cast(torch.randn(OUT, IN), E4M3), Float8Recipe()
    a, b, bias = given["a"], given["b"], given["bias"]
    x8 = float8_cast(given["x"], E4M3, by_row=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = float8_lora_linear(x8, weight, a, b, bias, recipe=recipe)
        plain = float8_lora_linear(given["x"].requires_grad_(), weight, a, b, bias, recipe=recipe)
    wanted = float8_lora_linear(x8, weight, a, b, bias, recipe=recipe)
    assert found.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=0.02, atol=0.05 * float(wanted.abs().max()))
    torch.testing.assert_close(plain.float(), wanted, rtol=0.02, atol=0.1 * float(wanted.abs().max()))
    plain.sum().backward()
    assert given["x"].grad.dtype == torch.float32


BAD: dict[str, tuple[int, ...]] = {"a": (4, 95), "b": (OUT, 3), "bias": (47,), "dropped": (4, IN)}


@pytest.mark.parametrize("name", BAD)
def test_bad_tensors(name: str) -> None:
    given = operands(Where(torch.device("cpu"), torch.float32), (5,), 4)
    weight = float8_cast(torch.randn(OUT, IN), E4M3)
    for bad in (torch.zeros(BAD[name]), given[name].double()):
        with pytest.raises(InputError, match=f"float8_lora_linear: {name} must be"):
            float8_lora_linear(**given | {name: bad}, weight=weight, recipe=Float8Recipe())
    with pytest.raises(InputError, match="weight must be a Float8Tensor"):
        float8_lora_linear(**given, weight=float8_cast(torch.randn(IN, OUT), E4M3), recipe=Float8Recipe())
    with pytest.raises(InputError, match=r"weight must be a Float8Tensor .* with one scale"):
        by_row = float8_cast(torch.randn(OUT, IN), E4M3, by_row=True)
        float8_lora_linear(**given, weight=by_row, recipe=Float8Recipe())
    given["bias"].requires_grad_()
    with pytest.raises(InputError, match="bias must need no gradient"):
        float8_lora_linear(**given, weight=weight, recipe=Float8Recipe())
