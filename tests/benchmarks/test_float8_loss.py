"""The loss curves of bf16 and float8, at a small size on a CPU: what is trained, what is recorded, what is drawn."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases import float8_loss
from benchmarks.reporting import loss_curves, recording, report, targets
from benchmarks.timing import measure
from ligermodels.demo.corpus import python_sources
from ligermodels.errors import InputError
from ligermodels.layers.float8 import Float8

SMALL = replace(
    float8_loss.SETTINGS, corpus_bytes=400_000, validation_fraction=0.01, vocab_size=300, hidden_size=32, num_layers=2,
    head_dim=16, seq_len=16, batch_size=8, learning_rate=1e-2,
)  # fmt: skip
STEPS = 43


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "DEVICE", "cpu")
    monkeypatch.setattr(float8_loss, "SETTINGS", SMALL)
    monkeypatch.setattr(float8_loss, "POINTS", 4)
    monkeypatch.setattr(float8_loss, "installed_sources", python_sources)


def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart, on tokens that are made once: of one seed alike but for the format, which both learn."""
    built, seen = [], list[torch.Tensor]()
    rows_of, train = float8_loss.rows_of, float8_loss.train

    def main(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["", "--cache", str(tmp_path / "cache"), *arguments])
        float8_loss.main()

    def watched(model: Any, *given: Any, **options: Any) -> int:
        built.append(any(isinstance(module, Float8) for module in model.modules()))
        seen.append(torch.cat([p.detach().float().flatten() for p in model.parameters()]))
        return train(model, *given, **options)

    def rows(*given: Any) -> Any:
        for batch in rows_of(*given):
            seen.append(batch["input_ids"])
            yield batch

    main("--prepare")
    monkeypatch.setattr(float8_loss, "tokenised", lambda s: pytest.fail("the tokens are in the cache"))
    monkeypatch.setattr(float8_loss, "train", watched)
    monkeypatch.setattr(float8_loss, "rows_of", rows)
    found, data = [], []
    for provider, seed, steps in (("bf16", 3, STEPS), ("float8", 3, STEPS), ("adamw8bit", 3, STEPS), ("bf16", 4, 3)):
        tokens = str(steps * 8 * 16 - 5)
        out = tmp_path / f"{provider}-{seed}.jsonl"
        main("--seeds", str(seed), "--providers", provider, "--tokens", tokens, "--out", str(out))
        (line,) = out.read_text().splitlines()
        found.append(json.loads(line))
        data.append(list(seen))
        seen.clear()
    assert built == [False, True, False, False]
    same = [all(map(torch.equal, data[0], other)) for other in data[1:]]
    assert same == [True, True, False] and len(data[0]) == len(data[1]) == 1 + STEPS
    for record in found:
        assert record["case"].endswith(f"seed {record['seed']}") and {"gpu", "commit", "torch"} <= record.keys()
    for record in found[:3]:
        assert record["tokens"] == STEPS * 128 and record["epochs"] > 0
        assert [count for count, *_ in record["points"]] == [128 * step for step in (10, 20, 30, 40, STEPS)]
        assert record["held_out_loss"] == record["points"][-1][2] < math.log(300) - 1  # that of equal odds
        assert record["points"][-1][1] < record["points"][0][1] - 0.3
    bf16, *others = (torch.tensor(record["points"])[:, 1:] for record in found[:3])
    for other in others:
        assert (bf16[0] != other[0]).all() and ((bf16 - other).abs() < 0.1).all()
    names = [f"ligermodels {name}" for name in ("bf16", "float8", "adamw8bit")]
    assert [record["provider"] for record in found[:3]] == names
    assert len({record["data"] for record in found}) == 1


def test_a_run_that_diverges_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_loss, "SETTINGS", replace(SMALL, learning_rate=1e37))
    out = tmp_path / "failed.jsonl"
    monkeypatch.setattr(sys, "argv", ["", "--seeds", "0", "--tokens", "1000", "--out", str(out)])
    with pytest.raises(SystemExit, match="step"):
        float8_loss.main()
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 2 and all("failed" in r and "held_out_loss" not in r for r in records)
    assert loss_curves.of_seeds(records) == {}


def test_rows() -> None:
    """Every row of an epoch once, at another offset in the next; too few tokens are an error, not an endless search."""
    tokens = torch.arange(16 * 40 - 1)
    batches = float8_loss.rows_of(tokens, SMALL)
    (first, second) = (torch.cat([next(batches)["labels"] for _ in range(4)]) for _ in range(2))
    for epoch in (first, second):
        assert (epoch.diff(dim=1) == 1).all() and len(set(epoch[:, 0].tolist())) == 32
        assert len({start % 16 for start in epoch[:, 0].tolist()}) == 1
    assert first[0, 0] % 16 != second[0, 0] % 16
    with pytest.raises(InputError, match="do not fill 8 rows"):
        next(float8_loss.rows_of(tokens[:140], SMALL))


def _records(gap: float, name: str = "float8-loss", **other: Any) -> list[dict[str, Any]]:
    """Of three seeds, whose losses end 0.02 apart; those of the second provider are higher by `gap`."""
    common = {
        "commit": "abcdef1",
        "gpu": "NVIDIA H200",
        "date": "2026-01-01",
        "tokens": 300,
        "parameters": 1,
        "layers": 6,
    }
    return [
        {**common, "data": "0", "case": f"1 M parameters, 300 M tokens, seed {seed}", "seed": seed, "epochs": 5.0,
         "provider": provider, "held_out_loss": 1.5 + seed / 100 + more, **other,
         "points": [[x * 1e8, 3 / x, 1.5 + (3 - x) / 2 + seed / 100 + more] for x in (1, 2, 3)]}
        for seed in (0, 1, 2)
        for provider, more in zip(loss_curves.COMPARISONS[name], (0.0, gap), strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name, gap, met", [("float8-loss", -0.01, True), ("float8-loss", 0.03, False), ("adamw8bit-loss", 0.01, True)]
)
def test_report(tmp_path: Path, name: str, gap: float, met: bool) -> None:
    comparison = loss_curves.COMPARISONS[name]
    records = [*_records(9.0, name, data="other"), *_records(gap, name)]
    recording.write(tmp_path / "float8-loss-h200.jsonl", records)
    found = report.read(tmp_path, "h200")
    (target,) = targets.targets(found)
    assert (target.measured, target.met) == (pytest.approx(abs(gap) / 0.02), met)
    assert [len(curves) for curves in loss_curves.of_seeds(found["float8-loss"], comparison).values()] == [2, 2, 2]
    names = [path.name for path in report.write(tmp_path, "h200", tmp_path / "out")]
    assert names == ["benchmark-tables.md", "results.md", f"{name}.png"]
    assert (tmp_path / "out" / names[2]).stat().st_size > 20_000
    page = (tmp_path / "out" / names[0]).read_text(encoding="utf-8")
    assert f"![{name}]({name}.png)" in page and "| 1 M parameters, 300 M tokens, seed 2 | " in page


def test_what_is_not_a_result() -> None:
    """Two seeds have no spread to judge by; a seed whose last run failed has no curve."""
    records = _records(0.01)
    assert loss_curves.of_spread(records[:4]) is None and len(loss_curves.of_seeds(records[:4])) == 2
    assert loss_curves.of_seeds(records[:5]).keys() == {0, 1}
    failed = {**records[1], "points": [], "failed": "step 7: the loss is nan"}
    assert loss_curves.of_seeds([*records, failed]).keys() == {1, 2}
    assert loss_curves.of_seeds([]) == {} and loss_curves.of_spread([]) is None
