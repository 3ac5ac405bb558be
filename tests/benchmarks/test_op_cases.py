"""Benchmarks of ops: every provider computes the same function, and a wrong one gets no time."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benching import without_a_device
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cases import attention, causal_conv, chunked_log_probs, experts, losses, ops, ssd
from benchmarks.reporting import recording
from benchmarks.timing import measure
from benchmarks.timing import op as ops_benchmark
from benchmarks.timing.case import Case, Passes


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_device(monkeypatch)


TINY: dict[str, Callable[[], list[Case]]] = {
    "rms_norm": lambda: [ops.rms_norm(7, 48)],
    "add_rms_norm": lambda: [ops.add_rms_norm(7, 48)],
    "layer_norm": lambda: [ops.layer_norm(7, 48)],
    "swiglu": lambda: [ops.glu("swiglu", 5, 24), ops.glu("swiglu", 5, 24, packed=False)],
    "geglu": lambda: [ops.glu("geglu", 5, 24)],
    "rope": lambda: [ops.rope(6, 4, 2, 16)],
    "qk_norm_rope": lambda: [ops.qk_norm_rope(6, 4, 2, 16)],
    "block_context_attention": lambda: [ops.block_context_attention(40, 6, 3, 4, 2, 16)],
    "causal_conv": lambda: [
        causal_conv.causal_conv(70, 6, 3, activation=None),
        causal_conv.causal_conv(70, 6, 4, bias=True),
    ],
    "ssd": lambda: [ssd.ssd(70, 6, 8, 16, groups) for groups in (1, 2)],
    "experts": lambda: [experts.mix_experts(experts.Layer("tiny", 2, 4, 32, 16, bias), 9) for bias in (False, True)],
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
                wanted |= {"both_row_of_copy_at_size"} if case.bytes else set()
            assert wanted <= record.keys()
        json.dumps(records)


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
        recording.end([ours])


def test_inputs_that_a_call_overwrites_are_written_anew() -> None:
    case = losses.cross_entropy(9, 33)
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
