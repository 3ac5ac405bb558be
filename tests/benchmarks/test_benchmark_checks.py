"""Providers that cheat are caught by the benchmarks: each in the way that `benchmarks.timing.checks` names."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benching import without_a_device
from torch import Tensor

from benchmarks.cases import attention, losses, ops
from benchmarks.reporting import recording
from benchmarks.timing import checks, measure
from benchmarks.timing import op as ops_benchmark
from benchmarks.timing.case import Case, Passes, random

Compute = Callable[[], Tensor]


class Provider:
    """Computes x * w; a cheat answers in place of the computation."""

    def __init__(self, cheat: "Cheat | None" = None) -> None:
        self.cheat = cheat or (lambda name, inputs, compute: compute())

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        found: Tensor = _Product.apply(x, w, self.cheat)
        return found


Cheat = Callable[[str, tuple[Tensor, ...], Compute], Tensor]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, cheat: Cheat) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.cheat = cheat
        return cheat("y", (x, w), lambda: x * w)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx = ctx.cheat("dx", (x, w, dy), lambda: dy * w)
        return dx, ctx.cheat("dw", (x, w, dy), lambda: (dy * x).float().sum(0).to(w.dtype)), None


def the_same_tensor() -> Cheat:
    """The first result for ever, in the very memory that it was returned in."""
    kept: dict[Any, Tensor] = {}
    return lambda name, inputs, compute: kept.setdefault((name, inputs[0].shape), compute()).view_as(compute())


def by_address() -> Cheat:
    """The result that was found for tensors of these addresses."""
    kept: dict[Any, Tensor] = {}

    def answer(name: str, inputs: tuple[Tensor, ...], compute: Compute) -> Tensor:
        key = (name, *(x.data_ptr() for x in inputs))
        if key not in kept:
            kept[key] = compute()
        return kept[key].clone()

    return answer


def by_content() -> Cheat:
    """The very tensors that were returned for inputs that begin alike, which only poison makes wrong."""
    kept: dict[Any, Tensor] = {}

    def answer(name: str, inputs: tuple[Tensor, ...], compute: Compute) -> Tensor:
        key = (name, *(x.shape for x in inputs), *(x.flatten()[:8].float().sum().item() for x in inputs))
        found = kept.setdefault(key, compute())
        return found.view_as(found)

    return answer


def once_warm(calls: int, part: slice = slice(None)) -> Cheat:
    """Right in the first calls; then `part` of the last result is returned again."""
    count, kept = dict[str, int](), dict[str, Tensor]()

    def answer(name: str, inputs: tuple[Tensor, ...], compute: Compute) -> Tensor:
        count[name], found = count.get(name, 0) + 1, compute()
        if count[name] <= calls or found.shape != kept[name].shape:
            kept[name] = found.clone()
        found[part] = kept[name][part]
        return found

    return answer


def nothing() -> Cheat:
    """Memory as it is, which may still hold the last result, after a first call."""
    seen: set[str] = set()

    def answer(name: str, inputs: tuple[Tensor, ...], compute: Compute) -> Tensor:
        if name not in seen:
            seen.add(name)
            return compute()
        return torch.empty_like(inputs[1] if name == "dw" else inputs[0])

    return answer


def one_shape() -> Cheat:
    """Right for the shape of the first call alone."""
    first: dict[str, torch.Size] = {}

    def answer(name: str, inputs: tuple[Tensor, ...], compute: Compute) -> Tensor:
        found = compute()
        return found if first.setdefault(name, inputs[0].shape) == inputs[0].shape else torch.zeros_like(found)

    return answer


def product(provider: Any, rows: int = 24, small: bool = False) -> Case:
    """A case of the product, its other shape by the same provider."""
    return Case(
        f"product {rows}x40",
        lambda: (random(rows, 40), random(40)),
        (4 * rows * 40, 10 * rows * 40),
        {"torch": lambda x, w: x * w, "ligermodels": provider},
        small=small,
        other=lambda: replace(product(provider, 7), other=None),
    )


def measured(case: Case) -> dict[str, Any]:
    """Ours, after torch's, which must do."""
    theirs, ours = ops_benchmark.measured(case, None, 1e10)
    assert "failed" not in theirs, theirs["failed"]
    return ours


CHEATS: dict[str, tuple[Callable[[], Cheat], str]] = {
    "the same tensor": (the_same_tensor, "once its inputs have changed"),
    "by address": (by_address, "once its inputs have changed"),
    "by content": (by_content, "once its inputs have changed"),
    "nothing": (nothing, "once its inputs have changed"),
    "once warm": (lambda: once_warm(4), "in a timed call"),
    "a part, once warm": (lambda: once_warm(4, slice(12, None)), "in a timed call"),
    "warm late": (lambda: once_warm(8), "(in a timed call|when its CUDA graph is replayed)"),
    "one shape": (one_shape, "for another shape, product 7x40"),
}
"""Name -> what makes a cheat, and where a large case finds it out."""


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_device(monkeypatch)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("small", [False, True], ids=["large", "small"])
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_has_no_time(name: str, small: bool) -> None:
    make, found_out = CHEATS[name]
    record = measured(product(Provider(make()), small=small))
    where = "(once its inputs|in a timed|when its CUDA graph|after it was timed|for another shape)"
    with pytest.raises(SystemExit, match=rf"wrong by .* {where if small else found_out}"):
        recording.end([record])
    assert not [key for key in record if key in ops.COLUMNS and key != "error"]


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("small", [False, True], ids=["large", "small"])
def test_an_honest_provider_has_a_time(small: bool) -> None:
    record = measured(product(Provider(), small=small))
    assert "failed" not in record and record["graph_us" if small else "both_row_ms"] > 0


@pytest.mark.usefixtures("on_the_cpu")
def test_a_cheat_in_attention() -> None:
    case = attention.Case(1, 40, 4, 2, 16)
    right = attention._ours(case, "reference")
    kept: list[Tensor] = []

    def first_again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = right(q, k, v)
        kept.append(found.detach().clone())
        return found + (kept[0] - found).detach()

    calls = {"ligermodels": right, "sdpa flash": first_again}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "providers", lambda case: calls)
        records = {r["provider"]: r for r in attention.measured(case)}
        assert len(kept) == 3  # It was not timed.
        (alone,) = attention.measured(case, ["sdpa flash"])
    for record in (alone, records["sdpa flash"]):
        assert "wrong by" in record["failed"] and "both_ms" not in record
    assert "failed" not in records["ligermodels"] and records["ligermodels"]["both_ms"] > 0


@pytest.mark.usefixtures("on_the_cpu")
def test_no_op_has_one_result_for_both_inputs() -> None:
    """The changed inputs give other outputs, by more than the samples' limit."""
    for case in (
        ops.rms_norm(7, 48), ops.add_rms_norm(7, 48), ops.layer_norm(7, 48), ops.glu("swiglu", 5, 24),
        ops.rope(6, 4, 2, 16), ops.qk_norm_rope(6, 4, 2, 16), losses.cross_entropy(64, 500),
        losses.linear_cross_entropy(64, 64, 500), losses.linear_log_probs(64, 64, 500),
    ):  # fmt: skip
        known = checks.truth(case, case.inputs())
        first = (known.samples[changed][0] for changed in (False, True))
        assert measure.relative_error(*first) > checks.SAMPLE_LIMIT, case.name
        assert case.other is not None and case.other().name != case.name


class Device:
    """A clock, and two streams that are busy until some time."""

    def __init__(self) -> None:
        self.now, self.busy = 0.0, {"current": 0.0, "side": 0.0}

    def work(self, stream: str, milliseconds: float) -> None:
        self.busy[stream] = max(self.busy[stream], self.now) + milliseconds

    def synchronize(self) -> None:
        self.now = max(self.now, *self.busy.values())


@pytest.mark.parametrize(("waits", "trusted"), [(True, True), (False, False)])
def test_work_on_a_side_stream_is_waited_for(waits: bool, trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.time = 0.0

        def record(self) -> None:
            self.time = max(device.busy["current"], device.now)

        def synchronize(self) -> None:
            device.now = max(device.now, self.time)

        def elapsed_time(self, end: "Event") -> float:
            return end.time - self.time

    def call() -> None:
        device.work("current", 0.5)
        device.work("side", 20.0)
        if waits:
            device.busy["current"] = max(device.busy.values())

    monkeypatch.setattr(measure, "DEVICE", "cpu")
    monkeypatch.setattr(measure, "CACHE_BYTES", 16)
    monkeypatch.setattr(measure, "synchronize", device.synchronize)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: device.now / 1e3))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    if trusted:
        assert measure.milliseconds(call) == pytest.approx(20.0)
    else:
        with pytest.raises(measure.Untrusted, match=r"works for 19\.5 ms after the events"):
            measure.milliseconds(call)


@pytest.fixture
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls in a CUDA graph; and other tests on the same GPU may delay the host."""
    monkeypatch.setattr(measure, "IN_A_ROW", 2**20)
    monkeypatch.setattr(measure, "LATE", 100.0)


@pytest.mark.gpu
@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_on_the_gpu(name: str) -> None:
    record = measured(product(Provider(CHEATS[name][0]()), rows=512))
    assert "wrong by" in record["failed"] and "both_ms" not in record


@pytest.mark.gpu
@pytest.mark.usefixtures("short_rows")
def test_an_honest_provider_on_the_gpu() -> None:
    record = measured(product(Provider(), rows=512))
    assert "failed" not in record and record["both_row_ms"] > 0


@pytest.mark.gpu
@pytest.mark.usefixtures("short_rows")
def test_a_result_of_the_capture_is_not_one_of_the_graph() -> None:
    """A provider that launches nothing into a graph."""

    def idle_in_graphs(name: str, inputs: tuple[Tensor, ...], compute: Compute) -> Tensor:
        if not torch.cuda.is_current_stream_capturing():
            kept[name, inputs[0].shape] = compute()
        found: Tensor = kept[name, inputs[0].shape]
        return found.view_as(found)

    kept: dict[Any, Tensor] = {}
    record = measured(product(Provider(idle_in_graphs), rows=512))
    assert "when its CUDA graph is replayed" in record["failed"]


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [True, False])
def test_a_side_stream_on_the_gpu(waits: bool) -> None:
    a, side = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16), torch.cuda.Stream()

    def call() -> None:
        with torch.cuda.stream(side):
            for _ in range(20):
                a @ a
        if waits:
            torch.cuda.current_stream().wait_stream(side)

    if waits:
        assert measure.milliseconds(call) > 1
    else:
        with pytest.raises(measure.Untrusted, match="after the events"):
            measure.milliseconds(call)


@pytest.mark.gpu
@pytest.mark.usefixtures("short_rows")
def test_our_ops_hold_to_the_rules() -> None:
    for case in (ops.rms_norm(512, 1024), losses.linear_cross_entropy(512, 256, 1000), ops.small(32, 512)[0]):
        for record in ops_benchmark.measured(case, ["ligermodels", "torch"], 1e12):
            assert "failed" not in record, record
    assert Passes(case, case.providers["torch"], case.inputs()).trained
