"""The benchmarks, as far as a CPU goes: what is timed computes the right thing, and results become a report."""

import argparse
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parents[2]


from benching import without_a_device  # noqa: E402
from zoo import GEMMA4  # noqa: E402

import ligermodels as lm  # noqa: E402
from benchmarks import __main__ as ops_benchmark  # noqa: E402
from benchmarks import all as whole  # noqa: E402
from benchmarks import (  # noqa: E402  # noqa: E402
    attention,
    chunked_log_probs,
    cpu_decoding,
    float8_loss,
    floor,
    losses,
    measure,
    ops,
    peers,
    profile,
    projections,
    training,
)
from benchmarks import medusa as medusa_benchmark  # noqa: E402
from benchmarks import needed_tokens as needed_tokens_benchmark  # noqa: E402
from benchmarks.case import Case, Passes  # noqa: E402
from benchmarks.measure import one_after_another, sustained  # noqa: E402
from benchmarks.models import CONFIGS  # noqa: E402
from benchmarks.projections import Products  # noqa: E402

TINY: dict[str, Callable[[], list[Case]]] = {
    "rms_norm": lambda: [ops.rms_norm(7, 48)],
    "add_rms_norm": lambda: [ops.add_rms_norm(7, 48)],
    "layer_norm": lambda: [ops.layer_norm(7, 48)],
    "swiglu": lambda: [ops.glu("swiglu", 5, 24), ops.glu("swiglu", 5, 24, packed=False)],
    "geglu": lambda: [ops.glu("geglu", 5, 24)],
    "rope": lambda: [ops.rope(6, 4, 2, 16)],
    "qk_norm_rope": lambda: [ops.qk_norm_rope(6, 4, 2, 16)],
    "small": lambda: ops.small(3, 512),
    "cross_entropy": lambda: [losses.cross_entropy(9, 33)],
    "linear_cross_entropy": lambda: [
        losses.linear_cross_entropy(16, 32, 40),
        losses.linear_cross_entropy(16, 32, 40, ignored=0.5),
        losses.linear_cross_entropy(16, 32, 40, frozen="head"),
        losses.linear_cross_entropy(16, 32, 40, frozen="hidden"),
    ],
    "linear_log_probs": lambda: [
        losses.linear_log_probs(16, 32, 40),
        losses.linear_log_probs(16, 32, 40, frozen=True, logged=True),
        losses.linear_log_probs(16, 32, 40, frozen=True, entropy=False),
    ],
}

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 16, "vocab_size": 128, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_device(monkeypatch)


@pytest.mark.parametrize("op", ops.CASES)
def test_ops_agree_with_torch(op: str) -> None:
    """Outputs and gradients of ours in bf16 against torch in fp32, and every time that a case is to have."""
    for case in TINY[op]():
        records = {r["provider"]: r for r in ops_benchmark.measured(case, ["ligermodels", "torch"], 1e10)}
        assert records.keys() == {"ligermodels", "torch"}
        for provider in ("ligermodels", "torch"):
            record = records[provider]
            assert "failed" not in record, record["failed"]
            assert record["error"] < 0.01
            if case.small:
                wanted = {"eager_us", "graph_us"}
            else:
                wanted = {"forward_ms", "both_ms", "peak_mib"} | ({"both_of_limit"} if case.limit else set())
                wanted |= {"both_of_copy", "both_of_copy_at_size"} if case.bytes else set()
                wanted |= {"both_row_of_copy_at_size"} if case.bytes and not case.overwritten else set()
            assert wanted <= record.keys()
        json.dumps(records)


def test_decoding_on_a_cpu_is_measured_beside_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens are compared: a run of other weights fails."""
    monkeypatch.setitem(cpu_decoding.NEW_TOKENS, "tiny", 6)
    monkeypatch.setitem(cpu_decoding.ROUNDS, "tiny", 2)
    for case in ("tiny greedy batch 4", "tiny sampled batch 1"):
        ours, theirs = cpu_decoding.run(case)
        assert ours["ratio"] == pytest.approx(ours["tokens_per_s"] / theirs["tokens_per_s"])
        assert theirs["provider"] == "transformers" and min(ours["halves"]) > 0
    theirs, other = cpu_decoding.models("tiny")
    other.decoder.norm.weight.data.neg_()
    monkeypatch.setattr(cpu_decoding, "models", lambda size: (theirs, other))
    with pytest.raises(RuntimeError, match="tokens are not those of transformers"):
        cpu_decoding.run("tiny greedy batch 1")


def test_chunked_log_probs_agree_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of TRL, over several tiles, the last of them smaller."""
    monkeypatch.setattr(chunked_log_probs, "TOKENS", 7)
    monkeypatch.setattr(chunked_log_probs, "CLASSES", 16)
    for case in TINY["linear_log_probs"]():
        (record,) = ops_benchmark.measured(case, ["torch_chunked"], 1e10)
        assert "failed" not in record, record["failed"]
        assert record["error"] < 0.01


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch before 2.13")
def test_the_fused_loss_of_torch_is_a_peer() -> None:
    """By chunks, of both linear losses, where it gives what is asked for."""
    cases = [losses.linear_cross_entropy(16, 32, 40, ignored=0.5), losses.linear_log_probs(16, 32, 40, entropy=False)]
    for case in cases:
        (record,) = ops_benchmark.measured(case, ["torch_fused"], 1e10)
        assert record.get("error", 1.0) < 0.01, record
        assert "failed" not in record, record


def test_facts_name_every_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version, where it is installed."""
    installed = {"torch": "2.13.0", "peft": "0.19", "trl": "1.16", "fla-core": "0.4", "torchao": "0.15"}

    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(measure.metadata, "version", version)
    found = measure.facts()
    assert installed == {key: found[key] for key in measure.PACKAGES if key in found}
    assert found["measure"] == measure.MEASURE


def test_times_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has tensors of its own, enough of them; each pass is compared to copies timed in the same way."""
    monkeypatch.setattr(measure, "IN_A_ROW", 2**30)
    assert [measure.row_length(count) for count in (2**20, 2**29, 2**29 + 1, 2**30, 2**33)] == [1024, 2, 2, 2, 2]
    monkeypatch.setattr(measure, "row_length", lambda count: count // 100)
    rows: list[tuple[str, list[Passes]]] = []

    def in_a_row(calls: Sequence[Any], verify: Any) -> float:
        rows.append((calls[0].call.__name__, [call.call.__self__ for call in calls]))
        return {"forward": 2.0, "both": 8.0}[calls[0].call.__name__]

    monkeypatch.setattr(measure, "in_a_row", in_a_row)
    monkeypatch.setattr(measure, "copy_milliseconds", lambda count: count / 1e3)
    monkeypatch.setattr(measure, "copy_in_a_row_milliseconds", lambda count: count / 1e2)
    case = Case("twice", lambda: (torch.randn(3, 5),), (200, 500), {"torch": lambda x: 2 * x})
    (record,) = ops_benchmark.measured(case, None, 1e6)
    assert [(name, len(every)) for name, every in rows] == [("forward", 2), ("both", 5)]
    for _, every in rows:
        for tensors in zip(*([*one.leaves, *one.seeds] for one in every), strict=True):
            assert len({x.data_ptr() for x in tensors}) == len(every)
            assert all(torch.equal(x, tensors[0]) for x in tensors)
    assert record["forward_row_of_copy"] == pytest.approx(200 / 2.0 * 1e3 / 1e6)
    assert record["both_row_of_copy"] == pytest.approx(500 / 8.0 * 1e3 / 1e6)
    assert record["forward_row_of_copy_at_size"] == pytest.approx(200 / 1e2 / 2.0)
    assert record["both_row_of_copy_at_size"] == pytest.approx(500 / 1e2 / 8.0)
    assert record["forward_of_copy_at_size"] == pytest.approx(200 / 1e3 / record["forward_ms"])


def test_one_of_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made once in a row, and the time is that of one of them."""
    made: list[str] = []
    monkeypatch.setattr(measure, "milliseconds", lambda call: call() and 12.0)
    monkeypatch.setattr(measure, "graphed", lambda call: call)
    assert measure.in_a_row([lambda: made.append("a"), lambda: made.append("b")]) == 6.0 and made == ["a", "b"]
    monkeypatch.setattr(measure, "sustained", lambda call: call() or 7.0)
    assert floor.step_ms([lambda: made.append("c")] * 2) == 7.0 and made[2:] == ["c", "c"]


def test_sustained(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on for a while before it is timed."""
    times: list[float] = []
    monkeypatch.setattr(measure, "one_after_another", lambda call, count: call() or 3.0)
    assert sustained(lambda: times.append(time.perf_counter()), seconds=0.05) == 3.0
    assert len(times) > 2 and times[-1] - times[0] >= 0.04


@pytest.mark.parametrize(
    ("ignored", "frozen", "count"), [(0.0, None, 3), (0.5, None, 3), (0.0, "head", 2), (0.0, "hidden", 2)]
)
def test_the_limit_of_a_loss_is_its_gemms(ignored: float, frozen: str | None, count: int) -> None:
    """As many as there are gradients, and the logits; of rows with a target."""
    case = losses.linear_cross_entropy(16, 32, 40, ignored, frozen)
    assert case.limit is not None
    inputs = case.inputs()
    with FlopCounterMode(display=False) as counter:
        case.limit[1](*inputs)
    assert counter.get_total_flops() == count * 2 * int((inputs[2] >= 0).sum()) * 32 * 40
    trained = Passes(case, case.providers["ligermodels"], inputs).trained
    assert [tuple(x.shape) for x in trained] == [
        shape for name, shape in (("hidden", (16, 32)), ("head", (40, 32))) if name != frozen
    ]


class _InPlace(torch.autograd.Function):
    """2 x, whose passes write over what they are given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        x.detach().zero_()
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy.mul_(2).clone()


def test_a_peer_that_writes_over_its_inputs_harms_nobody() -> None:
    rough: dict[str, Any] = {"rough": _InPlace.apply, "torch": lambda x: x * 2, "ligermodels": lambda x: x + x}
    case = Case("double", lambda: (torch.randn(4, 8),), (64, 128), rough, small=True)
    for record in ops_benchmark.measured(case, None, 1e10):
        assert record["error"] < 0.01, record


def test_a_wrong_op_gets_no_time() -> None:
    (case,) = TINY["rms_norm"]()
    case.providers["ligermodels"] = lambda x, w: 1.1 * case.providers["torch"](x, w)
    _, ours = ops_benchmark.measured(case, ["ligermodels", "torch"], 1e10, turn=1)
    assert ours["provider"] == "ligermodels"
    assert "wrong by 0.1" in ours["failed"]
    assert "both_ms" not in ours
    with pytest.raises(SystemExit, match="wrong by"):
        measure.end([ours])


def test_inputs_that_a_call_overwrites_are_written_anew() -> None:
    case = dataclasses.replace(losses.cross_entropy(9, 33), overwritten=True)
    right = case.providers["torch"]

    def destructive(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = right(x.clone(), y)
        x.detach().zero_()
        return loss

    case.providers["ligermodels"] = destructive
    assert all("failed" not in record for record in ops_benchmark.measured(case, ["ligermodels", "torch"], 1e10))


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 8}, {"softcap": 50.0, "window": 8}, {"documents": (20, 1, 19)}],
    ids=["causal", "window", "softcap", "packed"],
)
def test_attention_agrees_with_the_reference(options: dict[str, Any]) -> None:
    case = attention.Case(1, 40, 4, 2, 16, **options)
    records = {r["provider"]: r for r in attention.measured(case, ["ligermodels", "sdpa flash"])}
    assert ("sdpa flash" in records) == (not {"window", "softcap"} & options.keys())
    for record in records.values():
        assert "failed" not in record, record["failed"]
        assert record["error"] < 0.01
    ours, times = records["ligermodels"], [record["both_ms"] for record in records.values()]
    assert ours["best_both"] == min(times) / ours["both_ms"] and ours["backend"] not in records

    named = records | {ours["backend"]: {"forward_ms": 1e-9, "both_ms": 1e-9}}
    assert attention.shares_of_best(named) == {"best_forward": 1, "best_both": 1}, "the same calls, by their own name"

    # And the reference with the definition, of one head: who sees whom, and how scores are capped.
    q, k, v, seed = case.inputs()
    query, key = torch.arange(40)[:, None], torch.arange(40)
    seen = (key <= query) & (key > query - options.get("window", 40))
    if "documents" in options:
        document = torch.repeat_interleave(torch.arange(3), torch.tensor(options["documents"]))
        seen &= document[:, None] == document
    scores = q[0, :, 0].float() @ k[0, :, 0].float().T / 4
    scores = 50 * torch.tanh(scores / 50) if "softcap" in options else scores
    out = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[0, :, 0].float()
    assert measure.relative_error(attention.truth(case, (q, k, v, seed))[0][0, :, 0], out) < 1e-5


def test_attention_counts_pairs_that_see_each_other() -> None:
    assert attention.Case(2, 5, 3, 1, 16).pairs == 2 * 3 * 15
    assert attention.Case(2, 5, 3, 1, 16, window=2).pairs == 2 * 3 * 9
    assert attention.Case(1, 5, 3, 1, 16, documents=(3, 2)).pairs == 3 * (6 + 3)
    names = [case.name for case in attention.cases()]
    assert len(set(names)) == len(names) == 25


def _at(rate: float) -> Callable[..., list[float]]:
    """GEMMs as their milliseconds, at so many FLOP each."""
    return lambda shape, gradients=floor.BOTH: [2 * math.prod(shape) * (1 + len(gradients)) / rate]


def _attention_ms(case: attention.Case, backward: bool) -> float:
    return 4e-9 * case.pairs * case.head_dim * (1 / 496 + 2.5 / 481 if backward else 1 / 626)


BF16, FLOAT8 = Products(_at(675e9)), Products(_at(1270e9), layout=1)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one H200, in place of what a floor measures."""
    monkeypatch.setattr(floor, "gemms", BF16.calls)
    monkeypatch.setattr(floor, "fastest_attention", _attention_ms)
    monkeypatch.setattr(floor, "copies", lambda count: [count / 4.28e9])
    monkeypatch.setattr(floor, "step_ms", sum)


@pytest.mark.usefixtures("rates")
def test_a_floor_counts_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3.2-1B at 4 x 4096, and Medusa on Llama-3-8B."""
    found = floor.floor(CONFIGS["llama-3.2-1b"], 4, 4096, 0.0, BF16)
    assert 4 * 4096 / found * 1e3 == pytest.approx(70e3, rel=0.03)
    half = floor.floor(CONFIGS["llama-3.2-1b"], 4, 4096, 0.5, BF16)
    weights = 128256 * 2048 + 2048 * 2048 + 3 * 8192 * 2048  # of the head, and of o and the MLP of the last block
    moved = 4 * 128256 + 16 * (2048 + 2048 + 8192)
    assert found - half == pytest.approx(8192 * (6 * weights / 675e9 + moved / 4.28e9), rel=1e-3)
    monkeypatch.setattr(floor, "ADAMW_BYTES", 0)
    without = floor.floor(CONFIGS["llama-3.2-1b"], 4, 4096, 0.0, BF16)
    assert found - without == pytest.approx(1.2358e9 * 14 / 4.28e9, rel=0.01)
    monkeypatch.setattr(floor, "ADAMW_BYTES", 14)
    found = floor.medusa_floor(CONFIGS["llama-3-8b"], 5, 4, 4096, 0.0, BF16)
    assert 4 * 4096 / found * 1e3 == pytest.approx(20.4e3, rel=0.03)
    half = floor.medusa_floor(CONFIGS["llama-3-8b"], 5, 4, 4096, 0.5, BF16)
    of_a_head = (6 * 128256 * 4096 + 4 * 4096**2) / 675e9 + 4 * 128256 / 4.28e9
    assert found - half == pytest.approx(5 * 8192 * of_a_head, rel=1e-3)


@pytest.mark.usefixtures("rates")
def test_a_floor_in_float8() -> None:
    """Beside that in bf16, of Llama-3-8B at 4 x 4096: in a full step, of LoRA, and of Medusa."""
    model, tokens, hidden, size = CONFIGS["llama-3-8b"], 4 * 4096, 4096, 14336
    qkv, o, mlp = 6144 * hidden, hidden * hidden, 3 * size * hidden
    block, faster = qkv + o + mlp, 1 / 675e9 - 1 / 1270e9

    def gained(gradients: Sequence[str]) -> float:
        found = [floor.floor(model, 4, 4096, 0.0, products, gradients) for products in (BF16, FLOAT8)]
        return found[0] - found[1]

    more = 2 * 2 * tokens * hidden + 2 * block  # the gradients of o and down; both layouts of the weights
    assert gained(floor.BOTH) == pytest.approx(32 * (6 * tokens * block * faster - more / 4.28e9), rel=1e-9)
    # A byte less: both norms' results, q and k's gradients, the activation's result and the gradients of its pairs; a
    # byte more: the gradients of o and down.
    less = tokens * (2 * hidden + 40 * 128 + 3 * size - 2 * hidden)
    flops = 32 * 4 * tokens * block - 2 * tokens * qkv  # the first block's input needs no gradient
    assert gained(floor.FROZEN) == pytest.approx(flops * faster + 32 * less / 4.28e9, rel=1e-9)

    full, frozen = (floor.floor(model, 4, 4096, 0.0, BF16, gradients) for gradients in (floor.BOTH, floor.FROZEN))
    parameters = 32 * (block + 2 * hidden) + 2 * 128256 * hidden + hidden
    flops = 2 * tokens * (32 * block + qkv + 128256 * hidden)
    moved = 14 * parameters + 16 * tokens * hidden  # the optimizer; the first block's norms, backward
    assert full - frozen == pytest.approx(flops / 675e9 + moved / 4.28e9, rel=1e-9)

    found = [floor.medusa_floor(model, 5, 4, 4096, 0.0, products) for products in (BF16, FLOAT8)]
    less = tokens * (2 * hidden + size)
    assert found[0] - found[1] == pytest.approx(32 * (2 * tokens * block * faster + less / 4.28e9), rel=1e-9)


def test_blocks_of_a_floor() -> None:
    """Of Gemma 2 every other one has a window, and in the last one few tokens go past attention. Where weights are
    frozen the first one's q, k and v need no gradient of their input."""
    model = lm.from_config(CONFIGS["gemma-2-2b"], dtype=torch.bfloat16, device="meta")
    for gradients, first in ((floor.BOTH, 0), (floor.FROZEN, 1)):
        found = Counter[tuple[int | None, int, int]]()
        for work, count in floor._blocks(model, 2, 8192, 100, gradients).items():
            late = sum(shape[0] == 100 for shape, _ in work.projections)
            found[work.attention.window, late, sum(not needed for _, needed in work.projections)] += count
            assert work.attention.batch * work.attention.length == 2 * 8192
        last = (None, 3, 0)  # o, gate_up and down
        assert found == Counter({(4096, 0, 0): 13 - first, (None, 0, 0): 12, last: 1}) + Counter({(4096, 0, 1): first})


@pytest.mark.parametrize(
    ("gradients", "results"), [(floor.BOTH, 3), (("weight",), 2), (floor.FROZEN, 2), ((), 1)], ids=str
)
@pytest.mark.parametrize("products", [projections.IN_BF16, projections.IN_FLOAT8], ids=["bf16", "float8"])
def test_what_a_floor_measures(
    products: Products, gradients: tuple[str, ...], results: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GEMMs of projections, attention, and copies of as many bytes as it is told."""
    shapes, passes = ((6, 32, 48), (6, 16, 32)), list[bool]()
    case = attention.Case(1, 6, 2, 1, 16)
    assert isinstance(floor.fastest_attention(case, bool(gradients))(), tuple) == bool(gradients)
    monkeypatch.setattr(floor, "fastest_attention", lambda case, backward: lambda: passes.append(backward))
    calls = floor.block(floor.Work(case, tuple(floor.Projection(shape, gradients) for shape in shapes)), products)
    made = [tuple(result.shape) for result in (call() for call in calls) if isinstance(result, torch.Tensor)]
    of = {"input": lambda rows, size, width: (rows, width), "weight": lambda rows, size, width: (size, width)}
    assert made == [each for m, n, k in shapes for each in ((m, n), *(of[name](m, n, k) for name in gradients))]
    assert len(made) == results * len(shapes)
    assert passes == [bool(gradients)] and floor.step_ms(calls) > 0
    monkeypatch.setattr(floor, "PASS", 320)
    assert [call().nbytes for call in floor.copies(2 * 320 + 96)] == [160, 160, 48]
    assert [call().nbytes for call in floor.copies(96)] == [48]


@pytest.mark.parametrize("products", [projections.IN_BF16, projections.IN_FLOAT8], ids=["bf16", "float8"])
def test_a_floor_of_a_tiny_model(products: Products) -> None:
    """Each step runs whole, of odd numbers of tokens too."""
    config = CONFIGS["llama-3-8b"] | SIZES
    for gradients in (floor.BOTH, floor.FROZEN):
        assert floor.floor(config, 1, 23, 0.3, products, gradients) > 0
    assert floor.medusa_floor(config, 2, 1, 23, 0.3, products) > 0


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

    monkeypatch.setattr(training, "floor", least)
    full, lora, unknown = (training.Case("llama-3-8b", 1, *rest) for rest in ((4, 0.0), (4,), (8,)))
    lora = dataclasses.replace(lora, lora_rank=16)
    found = training.floors_of([full, lora, unknown], [peers.FLOAT8, "ligermodels", peers.TORCHAO, "transformers"])
    both = (projections.IN_FLOAT8, projections.IN_BF16)
    assert found == {(case, products): {"floor_ms": 2.0} for case in (full, lora) for products in both}
    needed = (floor.BOTH, floor.FROZEN, floor.BOTH)
    assert made == [(products, gradients) for gradients in needed for products in both]


def test_a_medusa_step_beside_its_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the backbone's precision, where lm_heads are its own."""
    monkeypatch.setitem(CONFIGS, "llama-3-8b", CONFIGS["llama-3-8b"] | SIZES)
    least = {projections.IN_BF16: 3.0, projections.IN_FLOAT8: 2.0}
    monkeypatch.setattr(medusa_benchmark, "medusa_floor", lambda *arguments: least[arguments[-1]])
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
    assert floor.fastest_attention(case, backward=False)() == "fast"
    names[:] = ["broken"]
    with pytest.raises(RuntimeError, match=r"no backend of attention.*broken"):
        floor.fastest_attention(case, backward=False)


def test_training_steps_of_ours_and_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "llama-3-8b", CONFIGS["llama-3-8b"] | SIZES)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    case = training.Case("llama-3-8b", 2, 24, ignored=0.5, activation_checkpointing="selective", in_backward=True)
    verifier = training.Verifier(tmp_path)
    for provider in ("ligermodels", "transformers"):
        record = training.record_of(case, provider, verifier, {"floor_ms": 1.0}, profiled=False)
        assert "failed" not in record, record["failed"]
        assert record["of_floor"] == pytest.approx(1 / record["step_ms"])
    wrong = peers.PROVIDERS["ligermodels"](CONFIGS["llama-3-8b"], None)
    monkeypatch.setitem(training.PROVIDERS, "transformers + liger", lambda config, folder: wrong)
    record = training.record_of(case, "transformers + liger", verifier, {}, profiled=False)
    assert "wrong by" in record["failed"]


def test_the_peer_in_float8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's, on the large linear layers of compiled blocks, alone; beside LoRA too."""
    pytest.importorskip("torchao.float8")
    sizes = SIZES | {"hidden_size": 1040, "intermediate_size": 1056, "num_attention_heads": 65, "head_dim": 16}
    sizes |= {"num_key_value_heads": 5}
    monkeypatch.setitem(CONFIGS, "llama-3-8b", CONFIGS["llama-3-8b"] | sizes)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    left_out: dict[str, bool] = {}
    monkeypatch.setattr(peers, "_with_liger", lambda model, **kernels: (model, left_out.update(kernels))[0])
    model = peers.PROVIDERS[peers.TORCHAO](CONFIGS["llama-3-8b"], None)
    kinds = {name.rpartition(".")[2]: type(m).__name__ for name, m in model.named_modules() if hasattr(m, "weight")}
    projections = {name for name, kind in kinds.items() if kind == "Float8Linear"}
    assert projections == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} and kinds["lm_head"] == "Linear"
    assert left_out == dict.fromkeys(("rope", "rms_norm", "swiglu", "geglu"), False)
    assert all(block._compiled_call_impl is not None for block in cast(Any, model).model.layers)
    case, verifier = training.Case("llama-3-8b", 2, 24), training.Verifier(tmp_path)
    ranks = (None, 4) if importlib.util.find_spec("peft") else (None,)
    for rank in ranks:
        record = training.record_of(dataclasses.replace(case, lora_rank=rank), peers.TORCHAO, verifier, {}, False)
        assert "failed" not in record, record["failed"]
        assert 0.02 < record["error"] < 0.3  # of float8, not of bf16


def test_a_peer_that_is_missing_is_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "llama-3-8b", CONFIGS["llama-3-8b"] | SIZES)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    case, verifier = training.Case("llama-3-8b", 2, 24), training.Verifier(tmp_path)
    record = training.record_of(case, peers.TORCHAO, verifier, {}, False)
    assert record["failed"].startswith("ModuleNotFoundError") and "step_ms" not in record
    with pytest.raises(ModuleNotFoundError, match="torchao"):
        medusa_benchmark.make("liger + torchao float8", CONFIGS["llama-3-8b"], 2)


def test_a_case_is_chosen_by_its_name_or_by_parts() -> None:
    def names(*parts: str) -> list[str]:
        return [case.name for case in training.chosen(parts)]

    assert names("llama-3-8b 4x4096") == ["llama-3-8b 4x4096"]  # not that with LoRA
    assert names("1b", "LoRA") == [
        *("llama-3.2-1b 4x4096", "llama-3.2-1b 4x4096 50% ignored", "llama-3-8b 4x4096 LoRA 16")
    ]
    assert len(names()) == len(training.CASES) and names("gpt-5") == []


def test_steps_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of what follows a first call, which the device may have to wait for."""
    durations, clock = iter([100.0, 1.0, 9.0, 2.0]), [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            (self.time,) = clock

        def elapsed_time(self, end: "Event") -> float:
            return end.time - self.time

        def synchronize(self) -> None: ...

    def call() -> None:
        clock[0] += next(durations)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock[0] / 1e3))
    assert one_after_another(call, 3) == 2.0 and next(durations, None) is None

    def wait() -> None:
        clock[0] += 1.3 * 4.0  # for another stream

    durations = iter([4.0] * 4)
    monkeypatch.setattr(measure, "synchronize", wait)
    with pytest.raises(measure.Untrusted, match=r"works for 5\.2 ms after the last of calls that take 4 ms"):
        one_after_another(call, 3)


def test_a_profile_counts_every_moment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(name: str, start: float, end: float, on: DeviceType = DeviceType.CUDA, annotation: bool = False) -> Any:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, device_type=on, is_user_annotation=annotation, time_range=span)

    events = [
        event("aten::mm", 0, 10, DeviceType.CPU),
        event("nvjet", 0, 5000),
        event("_rms_norm_backward_kernel", 6000, 6200),
        event("_sum_rows_kernel", 6010, 6250),  # launched early
        event("_glu_forward_kernel", 5100, 5400),
        event("kernel_cutlass_kernel_flash_attncuteflash_fwd", 7000, 7900),
        event("Memset", 7100, 7101),  # on another stream
        event("_adamw_step_kernel", 8000, 8070),
        event("Optimizer.step#FusedAdamW.step", 7990, 8080, annotation=True),
        event("Memset", 8100, 8101),
    ]

    class Profile:
        def __init__(self, **options: Any) -> None: ...

        def __enter__(self) -> "Profile":
            return self

        def __exit__(self, *error: object) -> None: ...

        def events(self) -> list[Any]:
            return events

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    wanted = {"gemm": 5, "attention": 0.9, "activation": 0.3, "norm": 0.25, "optimizer": 0.07, "other": 0.001}
    assert profile.profile(lambda: None) == pytest.approx(wanted)


def test_a_case_without_a_lower_bound() -> None:
    with pytest.raises(ValueError, match="no lower bound is known of GatedDeltaNet"):
        floor.floor(CONFIGS["qwen3.5-9b"], 2, 64, 0.0)


def test_every_command_of_the_whole_is_one_that_its_benchmark_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, parsed = argparse.ArgumentParser.parse_args, []

    def stop(self: argparse.ArgumentParser) -> None:
        parsed.append(parse(self))
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    lines = [line for of_one in whole.COMMANDS.values() for line in of_one]
    for line in lines:
        module, *arguments = shlex.split(line.format(folder="folder"))
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(KeyboardInterrupt):
            importlib.import_module("benchmarks.__main__" if module == "benchmarks" else module).main()
    assert len(parsed) == len(lines)
    known = {
        *peers.PROVIDERS,
        *medusa_benchmark.PEERS,
        *float8_loss.PROVIDERS,
        "ligermodels shared",
        "ligermodels stage 2",
        "ligermodels float8",
    }
    assert all(set(getattr(found, "providers", None) or ()) <= known for found in parsed)


@pytest.mark.parametrize(
    ("name", "in_training", "in_prefill"), [("gemma-4-e2b", 0.531, 0.708), ("gemma-4-e4b", 0.328, 0.438)]
)
def test_needed_tokens_save_the_rest_of_the_layers_past_the_last_keys(
    name: str, in_training: float, in_prefill: float
) -> None:
    """By the sizes of the linear layers that get fewer tokens; and the shares that the documentation gives."""
    model = lm.from_config(CONFIGS[name], device="meta")
    blocks = list(model.decoder.blocks)
    last = len(blocks) - CONFIGS[name]["num_kv_shared_layers"] - 1
    spared = [blocks[last].mlp, blocks[last].after, *blocks[last + 1 :]]
    weights = sum(m.weight.numel() for part in spared for m in part.modules() if isinstance(m, torch.nn.Linear))
    length = 4096
    for needed, share in ((length // 4, in_training), (1, in_prefill)):
        fewer, every = needed_tokens_benchmark.linear_flops(CONFIGS[name], length, needed)
        assert every - fewer == 2 * (length - needed) * weights
        assert 1 - fewer / every == pytest.approx(share, abs=5e-4)


def test_needed_tokens_with_and_without_compute_the_same() -> None:
    torch.manual_seed(0)
    model = lm.from_config(GEMMA4["gemma4_text-per-layer-inputs"])
    ids = torch.randint(3, 131, (1, 29))
    labels = ids.masked_fill(torch.arange(29) < 21, -100)
    prefill, training_step = needed_tokens_benchmark.prefill_ways, needed_tokens_benchmark.training_ways
    for ways in (prefill(model, ids), training_step(model, ids, labels)):
        found, wanted = (way() for way in ways)
        torch.testing.assert_close(found, wanted)
