"""The benchmark of quantised decoding, as far as a CPU goes: its records, and that a wrong result ends it."""

import json
import sys
from pathlib import Path

import pytest
import torch
from benching import without_a_device
from zoo import BASE

from benchmarks.cases import quantized_decoding
from benchmarks.timing import measure

SMALL = {
    **BASE,
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "vocab_size": 199,
    "num_hidden_layers": 1,
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_device(monkeypatch)
    monkeypatch.setattr(measure, "in_a_row", lambda calls, verify=None: 1.0 if [call() for call in calls] else 0.0)
    monkeypatch.setattr(quantized_decoding, "CONFIGS", {"llama-3-8b": SMALL})
    monkeypatch.setattr(quantized_decoding, "ROWS", (1, 3))
    monkeypatch.setattr(quantized_decoding, "PROMPT", 3)
    monkeypatch.setattr("benchmarks.cases.decoding.SHORT", 2)
    monkeypatch.setattr("benchmarks.cases.decoding.LONG", 5)


def test_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "records.jsonl"
    monkeypatch.setattr(sys, "argv", ["", "--out", str(out), "--batches", "1", "2", "--nodes", "5"])
    quantized_decoding.main()
    records = [json.loads(line) for line in out.read_text().splitlines()]
    timed = [each for each in records if "linear" in each and "failed" not in each]
    assert {(e["linear"], e["provider"], e["rows"]) for e in timed} >= {
        (name, way, rows)
        for name in ("mixer.qkv", "mixer.o", "mlp.gate_up", "mlp.down", "head")
        for way in ("bf16", "ligermodels float8", "ligermodels int4")
        for rows in (1, 3)
    }
    assert all(each["provider"].startswith("torchao") for each in records if "failed" in each)
    # The bytes of what is read: those of int4 are a little more than a quarter of bf16's.
    shares = {e["provider"]: e["of_limit"] for e in timed if e["linear"] == "mlp.gate_up"}
    assert 0.25 < shares["ligermodels int4"] / shares["bf16"] < 0.6 and shares["ligermodels float8"] < shares["bf16"]
    steps = [each for each in records if "step_ms" in each]
    assert [e.get("batch", "tree") for e in steps] == 6 * [1, 2, "tree"]
    formats = ("bf16", "float8", "int4", "float8, head float8", "int4, head float8", "int4, head int4")
    assert [e["provider"] for e in steps[::3]] == [f"ligermodels {kind}" for kind in formats]
    # Times at the rate of a copy, so bytes. A row of the head has 2 * 64 in bf16, 64 + 4 in float8 and in int4, whose
    # groups 64 inputs fill by half.
    limits = [e["of_limit"] * e["step_ms"] for e in steps[::3]]
    saved = [limits[1] - limits[3], limits[2] - limits[4], limits[2] - limits[5]]
    assert saved[0] > 0 and saved == pytest.approx(3 * saved[:1])


def test_a_wrong_result_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = quantized_decoding.ops.quantized_linear
    wrong = lambda x, **weight: right(x, **weight) * 1.1  # noqa: E731
    monkeypatch.setattr(quantized_decoding.ops, "quantized_linear", wrong)
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match=r"ligermodels float8, mixer.qkv, 1 rows: relative error"):
        list(quantized_decoding.linears(SMALL, 1e12))
