"""The lower bound of a step: it counts the model's work, and times every part of it."""

import dataclasses
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from benching import SIZES, without_a_device

import ligermodels as lm
from benchmarks.cases import attention, peers, projections, roofline, training
from benchmarks.cases import medusa as medusa_benchmark
from benchmarks.cases.models import CONFIGS
from benchmarks.cases.projections import Products
from benchmarks.timing import measure


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_device(monkeypatch)


def _at(rate: float) -> Callable[..., list[float]]:
    """GEMMs as their milliseconds, at so many FLOP each."""
    return lambda shape, gradients=roofline.BOTH: [2 * math.prod(shape) * (1 + len(gradients)) / rate]


def _attention_ms(case: attention.Case, backward: bool) -> float:
    return 4e-9 * case.pairs * case.head_dim * (1 / 496 + 2.5 / 481 if backward else 1 / 626)


BF16, FLOAT8 = Products(_at(675e9)), Products(_at(1270e9), layout=1)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one H200, in place of what a floor measures."""
    monkeypatch.setattr(roofline, "gemms", BF16.calls)
    monkeypatch.setattr(roofline, "fastest_attention", _attention_ms)
    monkeypatch.setattr(roofline, "copies", lambda count: [count / 4.28e9])
    monkeypatch.setattr(roofline, "step_ms", sum)


@pytest.mark.usefixtures("rates")
def test_a_floor_counts_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3.2-1B at 4 x 4096, and Medusa on Llama-3-8B."""
    found = roofline.training_roofline(CONFIGS["llama-3.2-1b"], 4, 4096, 0.0, BF16)
    assert 4 * 4096 / found * 1e3 == pytest.approx(70e3, rel=0.03)
    half = roofline.training_roofline(CONFIGS["llama-3.2-1b"], 4, 4096, 0.5, BF16)
    weights = 128256 * 2048 + 2048 * 2048 + 3 * 8192 * 2048  # of the head, and of o and the MLP of the last block
    moved = 4 * 128256 + 16 * (2048 + 2048 + 8192)
    assert found - half == pytest.approx(8192 * (6 * weights / 675e9 + moved / 4.28e9), rel=1e-3)
    monkeypatch.setattr(roofline, "ADAMW_BYTES", 0)
    without = roofline.training_roofline(CONFIGS["llama-3.2-1b"], 4, 4096, 0.0, BF16)
    assert found - without == pytest.approx(1.2358e9 * 14 / 4.28e9, rel=0.01)
    monkeypatch.setattr(roofline, "ADAMW_BYTES", 14)
    found = roofline.medusa_roofline(CONFIGS["llama-3-8b"], 5, 4, 4096, 0.0, BF16)
    assert 4 * 4096 / found * 1e3 == pytest.approx(20.4e3, rel=0.03)
    half = roofline.medusa_roofline(CONFIGS["llama-3-8b"], 5, 4, 4096, 0.5, BF16)
    of_a_head = (6 * 128256 * 4096 + 4 * 4096**2) / 675e9 + 4 * 128256 / 4.28e9
    assert found - half == pytest.approx(5 * 8192 * of_a_head, rel=1e-3)


@pytest.mark.usefixtures("rates")
def test_a_floor_in_float8() -> None:
    """Beside that in bf16, of Llama-3-8B at 4 x 4096: in a full step, of LoRA, and of Medusa."""
    model, tokens, hidden, size = CONFIGS["llama-3-8b"], 4 * 4096, 4096, 14336
    qkv, o, mlp = 6144 * hidden, hidden * hidden, 3 * size * hidden
    block, faster = qkv + o + mlp, 1 / 675e9 - 1 / 1270e9

    def gained(gradients: Sequence[str]) -> float:
        found = [roofline.training_roofline(model, 4, 4096, 0.0, products, gradients) for products in (BF16, FLOAT8)]
        return found[0] - found[1]

    more = 2 * 2 * tokens * hidden + 2 * block  # the gradients of o and down; both layouts of the weights
    assert gained(roofline.BOTH) == pytest.approx(32 * (6 * tokens * block * faster - more / 4.28e9), rel=1e-9)
    # A byte less: both norms' results, q and k's gradients, the activation's result and the gradients of its pairs; a
    # byte more: the gradients of o and down.
    less = tokens * (2 * hidden + 40 * 128 + 3 * size - 2 * hidden)
    flops = 32 * 4 * tokens * block - 2 * tokens * qkv  # the first block's input needs no gradient
    assert gained(roofline.FROZEN) == pytest.approx(flops * faster + 32 * less / 4.28e9, rel=1e-9)

    full, frozen = (
        roofline.training_roofline(model, 4, 4096, 0.0, BF16, gradients)
        for gradients in (roofline.BOTH, roofline.FROZEN)
    )
    parameters = 32 * (block + 2 * hidden) + 2 * 128256 * hidden + hidden
    flops = 2 * tokens * (32 * block + qkv + 128256 * hidden)
    moved = 14 * parameters + 16 * tokens * hidden  # the optimizer; the first block's norms, backward
    assert full - frozen == pytest.approx(flops / 675e9 + moved / 4.28e9, rel=1e-9)

    found = [roofline.medusa_roofline(model, 5, 4, 4096, 0.0, products) for products in (BF16, FLOAT8)]
    less = tokens * (2 * hidden + size)
    assert found[0] - found[1] == pytest.approx(32 * (2 * tokens * block * faster + less / 4.28e9), rel=1e-9)


def test_blocks_of_a_floor() -> None:
    """Of Gemma 2 every other one has a window, and in the last one few tokens go past attention. Where weights are
    frozen the first one's q, k and v need no gradient of their input."""
    model = lm.from_config(CONFIGS["gemma-2-2b"], dtype=torch.bfloat16, device="meta")
    for gradients, first in ((roofline.BOTH, 0), (roofline.FROZEN, 1)):
        found = Counter[tuple[int | None, int, int]]()
        for work, count in roofline._blocks(model, 2, 8192, 100, gradients).items():
            late = sum(shape[0] == 100 for shape, _ in work.projections)
            found[work.attention.window, late, sum(not needed for _, needed in work.projections)] += count
            assert work.attention.batch * work.attention.length == 2 * 8192
        last = (None, 3, 0)  # o, gate_up and down
        assert found == Counter({(4096, 0, 0): 13 - first, (None, 0, 0): 12, last: 1}) + Counter({(4096, 0, 1): first})


@pytest.mark.parametrize(
    ("gradients", "results"), [(roofline.BOTH, 3), (("weight",), 2), (roofline.FROZEN, 2), ((), 1)], ids=str
)
@pytest.mark.parametrize("products", [projections.IN_BF16, projections.IN_FLOAT8], ids=["bf16", "float8"])
def test_what_a_floor_measures(
    products: Products, gradients: tuple[str, ...], results: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GEMMs of projections, attention, and copies of as many bytes as it is told."""
    shapes, passes = ((6, 32, 48), (6, 16, 32)), list[bool]()
    case = attention.Case(1, 6, 2, 1, 16)
    assert isinstance(roofline.fastest_attention(case, bool(gradients))(), tuple) == bool(gradients)
    monkeypatch.setattr(roofline, "fastest_attention", lambda case, backward: lambda: passes.append(backward))
    calls = roofline.block(
        roofline.Work(case, tuple(roofline.Projection(shape, gradients) for shape in shapes)), products
    )
    made = [tuple(result.shape) for result in (call() for call in calls) if isinstance(result, torch.Tensor)]
    of = {"input": lambda rows, size, width: (rows, width), "weight": lambda rows, size, width: (size, width)}
    assert made == [each for m, n, k in shapes for each in ((m, n), *(of[name](m, n, k) for name in gradients))]
    assert len(made) == results * len(shapes)
    assert passes == [bool(gradients)] and roofline.step_ms(calls) > 0
    monkeypatch.setattr(roofline, "PASS", 320)
    assert [call().nbytes for call in roofline.copies(2 * 320 + 96)] == [160, 160, 48]
    assert [call().nbytes for call in roofline.copies(96)] == [48]


@pytest.mark.parametrize("products", [projections.IN_BF16, projections.IN_FLOAT8], ids=["bf16", "float8"])
def test_a_floor_of_a_tiny_model(products: Products) -> None:
    """Each step runs whole, of odd numbers of tokens too."""
    config = CONFIGS["llama-3-8b"] | SIZES
    for gradients in (roofline.BOTH, roofline.FROZEN):
        assert roofline.training_roofline(config, 1, 23, 0.3, products, gradients) > 0
    assert roofline.medusa_roofline(config, 2, 1, 23, 0.3, products) > 0


def test_the_fastest_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that can serve the case and be captured."""

    def provider(name: str) -> Any:
        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            if name == "broken":
                raise RuntimeError(name)
            return name

        return call

    names = ["slow", "broken", "fast", "slower"]
    monkeypatch.setattr(attention, "providers", lambda case: {name: provider(name) for name in names})
    times = {"slow": 3.0, "fast": 2.0, "slower": 4.0}
    monkeypatch.setattr(measure, "in_a_row", lambda calls: times[calls[0]()])
    case = attention.Case(1, 6, 2, 1, 16)
    assert roofline.fastest_attention(case, backward=False)() == "fast"
    names[:] = ["broken"]
    with pytest.raises(RuntimeError, match=r"no backend of attention.*broken"):
        roofline.fastest_attention(case, backward=False)


def test_a_case_without_a_lower_bound() -> None:
    with pytest.raises(ValueError, match="no lower bound is known for GatedDeltaNet"):
        roofline.training_roofline(CONFIGS["qwen3.5-9b"], 2, 64, 0.0)


def test_products_of_a_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both precisions of the same x, weight and gradient: y, that of x and that of the weight."""
    x, weight, gradient = torch.randn(6, 48), torch.randn(32, 48), torch.randn(6, 32)
    for products, limit in ((projections.IN_BF16, 0.01), (projections.IN_FLOAT8, 0.1)):
        given = iter((x, weight * 48**0.5, gradient))
        monkeypatch.setattr(projections, "random", lambda *shape, given=given: next(given).bfloat16())
        found = [cast(torch.Tensor, call()) for call in products.calls((6, 32, 48), projections.BOTH)]
        for ours, exact in zip(found, (x @ weight.T, gradient @ weight, gradient.T @ x), strict=True):
            assert measure.relative_error(ours, exact) < limit


def test_floors_of_the_precisions_of_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once; of LoRA that of frozen weights."""
    made: list[Any] = []

    def least(config: Any, batch: int, length: int, ignored: float, products: Any, gradients: Any) -> float:
        made.append((products, gradients))
        if length == 8:
            raise ValueError("unknown")
        return 2.0

    monkeypatch.setattr(training, "training_roofline", least)
    full, lora, unknown = (training.Case("llama-3-8b", 1, *rest) for rest in ((4, 0.0), (4,), (8,)))
    lora = dataclasses.replace(lora, lora_rank=16)
    found = training.rooflines_of([full, lora, unknown], [peers.FLOAT8, "ligermodels", peers.TORCHAO, "transformers"])
    both = (projections.IN_FLOAT8, projections.IN_BF16)
    assert found == {(case, products): {"floor_ms": 2.0} for case in (full, lora) for products in both}
    needed = (roofline.BOTH, roofline.FROZEN, roofline.BOTH)
    assert made == [(products, gradients) for gradients in needed for products in both]


def test_a_medusa_step_beside_its_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the backbone's precision, where lm_heads are its own."""
    monkeypatch.setitem(CONFIGS, "llama-3-8b", CONFIGS["llama-3-8b"] | SIZES)
    least = {projections.IN_BF16: 3.0, projections.IN_FLOAT8: 2.0}
    monkeypatch.setattr(medusa_benchmark, "medusa_roofline", lambda *arguments: least[arguments[-1]])
    monkeypatch.setattr(medusa_benchmark, "timed", lambda *arguments: {"step_ms": 4.0})
    providers = ["ligermodels", "ligermodels float8", "ligermodels shared"]
    out = tmp_path / "out.jsonl"
    command = ["medusa", "--ignored", "0", "--floor", "--out", str(out), "--providers", *providers]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(medusa_benchmark, "make", lambda *arguments: (print, print))
    medusa_benchmark.main()
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["provider"], r.get("floor_ms"), r.get("of_floor")) for r in records] == [
        ("ligermodels", 3.0, 0.75), ("ligermodels float8", 2.0, 0.5), ("ligermodels shared", None, None)
    ]  # fmt: skip
