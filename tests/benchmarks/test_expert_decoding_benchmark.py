"""The benchmark of the experts of a decoding step, as far as a CPU goes."""

import json
import sys
from pathlib import Path

import pytest
from benching import without_a_device

from benchmarks.cases import expert_decoding
from benchmarks.cases.experts import Layer
from benchmarks.timing import measure


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_device(monkeypatch)
    monkeypatch.setattr(measure, "in_a_row", lambda calls, verify=None: 1.0 if [call() for call in calls] else 0.0)
    monkeypatch.setattr(expert_decoding, "NAMES", {name: Layer(name, 2, 4, 256, 128) for name in ("one", "two")})


def test_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits are the bytes of the chosen experts: those of int4 with scales are 0.2656 of bf16's, of mxfp4 the same."""
    out = tmp_path / "records.jsonl"
    monkeypatch.setattr(sys, "argv", ["", "--layers", "two", "--tokens", "1", "9", "--out", str(out)])
    expert_decoding.main()
    records = [json.loads(line) for line in out.read_text().splitlines()]
    kinds = ("bf16", "float8", "int4", "nf4", "mxfp4")
    assert [(e["case"], e["provider"], e["tokens"]) for e in records] == [
        ("experts of two", f"ligermodels {kind}", tokens) for kind in kinds for tokens in (1, 9)
    ]
    one_token = {kind: each["of_limit"] for kind, each in zip(kinds, records[::2], strict=True)}
    bits = {"bf16": 16, "int4": 4 + 32 / 128, "nf4": 4 + 32 / 64, "mxfp4": 4 + 8 / 32}
    for kind, count in bits.items():
        assert one_token[kind] / one_token["bf16"] == pytest.approx(count / 16)
    assert 0.5 < one_token["float8"] / one_token["bf16"] < 0.52
    assert records[0]["of_limit"] == pytest.approx(2 * 3 * 256 * 128 * 2 / 1e10 * 1e3)
    assert records[1]["of_limit"] == pytest.approx(2 * records[0]["of_limit"])


def test_a_wrong_result_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = expert_decoding.ops.quantized_mix_experts
    monkeypatch.setattr(expert_decoding.ops, "quantized_mix_experts", lambda *a, **k: 1.1 * right(*a, **k))
    monkeypatch.setattr(sys, "argv", ["", "--layers", "one", "--formats", "int4"])
    with pytest.raises(RuntimeError, match="one, int4, 1 tokens: relative error"):
        expert_decoding.main()
