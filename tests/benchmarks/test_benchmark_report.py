"""Recorded results become pages and pictures: what is compared, what is left out, and no number but theirs."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.cases import demo, peers
from benchmarks.reporting import plots, recording, report, speed_ups, summary, targets
from benchmarks.reporting.runs import why_not


def test_the_report_of_the_stored_results(tmp_path: Path) -> None:
    written = report.write(recording.RESULTS, "h200", tmp_path)
    assert all(path.stat().st_size > 500 for path in written)
    page = written[0].read_text(encoding="utf-8")
    assert "| llama-3-8b 4x4096 | ligermodels |" in page
    assert written[1].name == "results.md"
    for picture in (path.name for path in written[2:]):
        assert f"({picture})" in page


def test_the_front_pages_have_the_stored_results() -> None:
    """No number in the README or in docs/results.md but those of the records."""
    found = report.read(recording.RESULTS, "h200")
    assert (report.DOCS / "results.md").read_text(encoding="utf-8") == summary.page(found)
    assert summary.front(found) in (report.DOCS.parent / "README.md").read_text(encoding="utf-8")


def test_only_records_of_one_run_are_compared() -> None:
    """Ours of a later run is not set beside a peer of an earlier one, nor a run of few peers above one of more; the
    best peer of each measure is at 1."""
    case = "llama-3-8b 4x4096"
    runs = {
        "a": {"ligermodels": (90.0, 20.0), "transformers": (45.0, 8.0), "transformers + liger": (60.0, 10.0)},
        "b": {"ligermodels": (100.0, 20.0), "transformers": (50.0, 8.0), "transformers + liger": (80.0, 10.0)},
        "c": {"ligermodels": (200.0, 20.0), "transformers": (40.0, 8.0)},
        "d": {"ligermodels": (300.0, 20.0)},
    }
    records = [
        {"case": case, "provider": p, "commit": run, "tokens_per_s": speed, "peak_gib": memory, "gpu": "G", "date": "1"}
        for run, providers in runs.items()
        for p, (speed, memory) in providers.items()
    ]
    plot = plots.PLOTS["training"]
    (group,) = plots.groups(plot, records)
    speeds, text = plots.ratios(plot, plot.panels[0], group)
    assert (speeds, text) == ({"ligermodels": 1.25, "transformers": 0.625, "transformers + liger": 1.0}, "100 · 80")
    memory, text = plots.ratios(plot, plot.panels[1], group)
    assert (memory, text) == ({"ligermodels": 0.4, "transformers": 1.0, "transformers + liger": 0.8}, "20 · 8")
    (result,) = summary.results({"training": records})
    assert (result.ours["commit"], result.peer["provider"]) == ("b", "transformers + liger")
    assert (result.speed, result.memory) == (1.25, 0.5)


def test_every_provider_has_a_colour_and_every_picture_a_gpu_and_a_date() -> None:
    found = report.read(recording.RESULTS, "h200")
    for name, plot in plots.PLOTS.items():
        shown = plots.groups(plot, found[plot.benchmark])
        assert shown and {r["provider"] for group in shown for r in group.records} <= plots.COLOURS.keys(), name
        assert "NVIDIA H200" in plots.origin(shown) and "2026-" in plots.origin(shown)


def test_a_report_takes_the_last_record_and_misses_no_field(tmp_path: Path) -> None:
    """Of old and new records alike, and of files that are not there."""
    ours, theirs = (
        {"case": "small rms_norm 1x4096", "provider": p, "commit": "bbbbbbb"} for p in ("ligermodels", "torch")
    )
    old = ours | {"eager_us": 90.0, "commit": "aaaaaaa"}
    recording.write(tmp_path / "in" / "ops-h200.jsonl", [old, ours | {"eager_us": 30.0}, theirs | {"eager_us": 20.0}])
    (target,) = targets.targets(report.read(tmp_path / "in", "h200"))
    assert (target.measured, target.met) == (1.5, True)
    recording.write(tmp_path / "in" / "ops-h200.jsonl", [old])
    assert targets.targets(report.read(tmp_path / "in", "h200")) == [target]  # by the last commit that both are of
    failed = [ours | {"failed": "out of memory", "commit": "ccccccc"}, theirs | {"eager_us": 20.0, "commit": "ccccccc"}]
    recording.write(
        tmp_path / "failed" / "ops-h200.jsonl", [ours | {"eager_us": 30.0}, theirs | {"eager_us": 20.0}, *failed]
    )
    assert targets.targets(report.read(tmp_path / "failed", "h200")) == []  # nothing older stands in for it
    recording.write(tmp_path / "apart" / "ops-h200.jsonl", [old, theirs | {"eager_us": 20.0}])
    assert targets.targets(report.read(tmp_path / "apart", "h200")) == []
    names = [path.name for path in report.write(tmp_path / "in", "h200", tmp_path / "out")]
    assert names == ["benchmark-tables.md", "results.md", "small.png"]
    assert report.write(tmp_path / "nothing", "h200", tmp_path / "empty") == [
        tmp_path / "empty" / name for name in names[:2]
    ]


def test_records_of_no_commit_or_of_another_measure_are_not_compared(tmp_path: Path) -> None:
    """Uncommitted code is counted and left out; times of two ways of measuring are two runs; a share of a lower bound
    that was summed up by parts is not reported."""
    case = {"case": "llama-3-8b 4x4096", "gpu": "G", "torch": "2.11", "commit": "abcdef1"}
    ours, theirs = case | {"provider": "ligermodels"}, case | {"provider": "transformers + liger"}
    uncommitted = [r | {"tokens_per_s": 900.0, "commit": "working tree before abcdef1"} for r in (ours, theirs)]
    old = [ours | {"tokens_per_s": 200.0, "of_floor": 0.5, "floor_ms": 3.0, "floor_gemms_ms": 1.0}]
    new = [theirs | {"tokens_per_s": 100.0, "measure": 2}]
    recording.write(tmp_path / "training-h200.jsonl", [*uncommitted, *old, *new])
    found = report.read(tmp_path, "h200")
    assert [r["tokens_per_s"] for r in found["training"]] == [200.0, 100.0]
    assert not {"of_floor", "floor_ms", "floor_gemms_ms"} & found["training"][0].keys()
    assert targets.targets(found) == [] and summary.results(found) == []
    (page, *_) = report.write(tmp_path, "h200", tmp_path)
    assert "- training: 2 records of no commit (working tree before abcdef1)" in page.read_text()
    recording.write(tmp_path / "training-h200.jsonl", [ours | {"tokens_per_s": 250.0, "measure": 2}])
    (result,) = summary.results(report.read(tmp_path, "h200"))
    assert (result.speed, targets.targets(report.read(tmp_path, "h200"))[0].measured) == (2.5, 2.5)


def test_changed_code_is_of_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *names, *arguments], check=True, capture_output=True)

    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("ligermodels/a.py", "benchmarks/results/a.jsonl", "tests/a.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    for line in ("init", "add .", "commit -m a"):
        git(*line.split())
    for name in ("benchmarks/results/a.jsonl", "tests/a.py"):
        (tmp_path / name).write_text("more")
    assert why_not({"commit": recording.commit()}) is None
    (tmp_path / "ligermodels/a.py").write_text("more")
    assert "with changes" in str(why_not({"commit": recording.commit()}))
    assert why_not({}) is not None and why_not({"commit": "unknown"}) is not None


def test_the_report_of_a_gpu_demo(tmp_path: Path) -> None:
    """Targets, picture and tables of its last run."""
    decoding = [
        {"stage": stage, "batch": batch, "acceptance": kind, "tree": 16, "plain_seconds": 4.0, "seconds": 2.0,
         "tokens_per_step": 2.5, "speed_up": speed + stage / 10 - batch / 20, "prompts": 32, "same": same}
        for stage in (1, 2)
        for batch in (16, 1, 4)
        for kind, speed, same in (("greedy", 1.75, 32), ("typical", 2.0, 3))
    ]  # fmt: skip
    in_float32 = {"prompts": 16, "same": 12, "tokens": 16 * 40}
    records = demo.records_of({"decoding": decoding, "parameters": 2e8, "float32": in_float32})
    assert [r["case"] for r in records if "float32_same" in r] == ["stage 1 greedy batch 1"]
    common = {"gpu": "NVIDIA H200", "date": "2026-01-01"}
    old = [{**r, **common, "commit": "0000000", "speed_up": 9.0} for r in records]
    recording.write(tmp_path / "demo-h200.jsonl", [*old, *({**r, **common, "commit": "abcdef1"} for r in records)])
    found = report.read(tmp_path, "h200")
    lines = speed_ups.lines(found["demo"])
    assert len(lines) == 4
    assert [x for point in lines[1, "greedy"] for x in point] == pytest.approx([1, 1.8, 4, 1.65, 16, 1.05])
    speed, lossless, exact = targets.targets(found)
    assert (speed.measured, speed.met, lossless.measured, lossless.met) == (pytest.approx(1.9), True, 1.0, True)
    assert (exact.measured, exact.met) == (0.75, False)
    names = [path.name for path in report.write(tmp_path, "h200", tmp_path / "out")]
    assert names == ["benchmark-tables.md", "results.md", "demo.png"]
    assert (tmp_path / "out" / "demo.png").stat().st_size > 5000
    assert "| stage 2 greedy batch 1 | ligermodels | 1.9 |" in (tmp_path / "out" / names[0]).read_text()
    case = {"case": "llama-3-8b 4x4096", "gpu": "G", "commit": "abcdef1", "tokens_per_s": 1.0}
    found["training"] = [case | {"provider": provider} for provider in ("ligermodels", "transformers")]
    assert "| stage 2, greedy | 1.90 (32 of 32) | 1.75 (32 of 32) | 1.15 (32 of 32) |" in summary.page(found)
    assert "In float32 stage 1, greedy, batch 1, gives them for 12 of 16, over 40 new tokens each.\n" in summary.page(
        found
    )
    found["demo"][-2]["same"] = 31
    assert [target.met for target in targets.targets({**found, "training": []})] == [True, False, False]


def test_float8_is_beside_all_and_bf16_beside_bf16(tmp_path: Path) -> None:
    """In one run with a peer in float8; targets of both speeds and of memory."""
    names = ("ligermodels", "ligermodels + float8", "transformers + liger", peers.TORCHAO)
    speeds = dict(zip(names, (100.0, 150.0, 80.0, 120.0), strict=True))
    case = {"case": "llama-3-8b 4x4096", "commit": "abcdef1", "gpu": "G"}
    records = [case | {"provider": p, "tokens_per_s": 125 * v, "peak_gib": 10.0} for p, v in speeds.items()]
    records[1]["peak_gib"] = 10.25
    recording.write(tmp_path / "training-h200.jsonl", records)
    case = {"case": "llama-3-8b 5 heads 4x4096 0% ignored", "commit": "abcdef1", "provider": "ligermodels float8"}
    recording.write(tmp_path / "medusa-h200.jsonl", [case | {"tokens_per_s": 26_000.0}])
    found = report.read(tmp_path, "h200")
    compared = {r.ours["provider"]: (r.peer["provider"], r.speed) for r in summary.results(found)}
    assert compared == {"ligermodels": ("transformers + liger", 1.25), "ligermodels + float8": (peers.TORCHAO, 1.25)}
    reached = [(t.what.split(", ", 1)[1], t.measured, t.met) for t in targets.targets(found) if "float8" in t.what]
    assert reached == [
        ("tokens/s over bf16", 1.5, True),
        ("tokens/s", 18_750.0, True),
        ("tokens/s", 18_750.0, False),
        ("MiB beyond those of bf16", pytest.approx(256), False),
        ("llama-3-8b 5 heads 4x4096 0% ignored, in float8, tokens/s", 26_000.0, True),
    ]
    shown = {name: plots.groups(plots.PLOTS[name], found["training"]) for name in ("training", "float8")}
    ratios = {name: plots.ratios(plots.PLOTS[name], plots.SPEED, group)[0] for name, (group,) in shown.items()}
    assert plots.ratios(plots.PLOTS["float8"], plots.SPEED, shown["float8"][0])[1] == "18,750 · 12,500"
    assert ratios == {
        "training": {"ligermodels": 1.25, "transformers + liger": 1.0},
        "float8": {"ligermodels": 1.0, "ligermodels + float8": 1.5, peers.TORCHAO: 1.2},
    }


def test_the_limit_of_a_speed_is_its_lower_bound(tmp_path: Path) -> None:
    """In tokens/s, in the table of targets; and of LoRA, whose bound leaves its products out, no share is demanded."""
    facts = {"commit": "abcdef1", "gpu": "G"}
    case = facts | {"case": "llama-3-8b 4x4096", "provider": "ligermodels + float8"}
    case |= {"step_ms": 900.0, "tokens_per_s": 18_000.0}
    lora = facts | {"case": "llama-3-8b 4x4096 LoRA 16", "provider": "ligermodels", "lora_rank": 16}
    lora |= {"tokens_per_s": 16_000.0, "of_floor": 0.8}
    recording.write(tmp_path / "training-h200.jsonl", [case | {"floor_ms": 810.0, "of_floor": 0.9}, lora])
    medusa = facts | {"case": "llama-3-8b 5 heads 4x4096 0% ignored", "provider": "ligermodels float8"}
    recording.write(tmp_path / "medusa-h200.jsonl", [medusa | {"tokens_per_s": 24_000.0, "of_floor": 0.96}])
    found = targets.targets(report.read(tmp_path, "h200"))
    limits = {(t.what.rsplit(", ", 1)[0], t.bound): pytest.approx(t.limit) for t in found}
    assert limits == {
        ("llama-3-8b 4x4096 LoRA 16", 17_000): 20_000,
        ("llama-3-8b 4x4096 in float8", 17_500): 20_000,
        ("llama-3-8b 4x4096 in float8", 18_800): 20_000,
        ("Medusa stage 1, llama-3-8b 5 heads 4x4096 0% ignored, in float8", 25_000): 25_000,
    }
    page = report.write(tmp_path, "h200", tmp_path / "out")[0].read_text()
    assert "| llama-3-8b 4x4096 in float8, tokens/s | ≥ 18800 | 18,000 | **no** | 20,000 |" in page
    recording.write(tmp_path / "training-h200.jsonl", [case])
    assert all(t.limit is None for t in targets.targets(report.read(tmp_path, "h200")) if "4x4096 in float8" in t.what)


def test_decoding_with_quantised_weights(tmp_path: Path) -> None:
    """A case for each batch, tree, and linear layer; a table of the last records; targets; a picture."""
    facts = {"case": "llama-3-8b", "commit": "abcdef1", "gpu": "NVIDIA H200", "date": "2026-01-01"}
    steps = {"ligermodels bf16": 4.0, "ligermodels float8": 2.5, "ligermodels int4": 2.5}
    records = [
        facts | {"provider": p, "batch": n, "step_ms": ms, "tokens_per_s": n / ms * 1e3, "of_limit": 0.75}
        for p, ms in steps.items()
        for n in (1, 8)
    ]
    records.append(facts | {"provider": "ligermodels int4", "tree": 64, "step_ms": 3.0, "of_limit": 0.5})
    linear = facts | {"provider": "torchao int4", "linear": "mlp.down", "shape": [8, 16]}
    records += [linear | {"rows": 4, "ms": 0.02, "of_limit": 0.3}, linear | {"failed": "no torchao"}]
    old = [{**records[0], "commit": "0000000", "tokens_per_s": 9e9}]
    old.append({**records[0], "commit": "0000000", "provider": "ligermodels int4, head int4", "tokens_per_s": 600.0})
    recording.write(tmp_path / "quantized-h200.jsonl", [*old, *records])
    found = report.read(tmp_path, "h200")
    cases = dict.fromkeys(r["case"] for r in found["quantized"])
    assert list(cases) == [
        f"llama-3-8b {size}" for size in ("batch 1", "batch 8", "tree of 64", "mlp.down, 4 tokens", "mlp.down")
    ]
    reached = [(t.what, t.measured, t.met) for t in targets.targets(found)]
    assert reached == [
        ("decoding, llama-3-8b batch 1, float8, tokens/s", 400.0, True),
        ("decoding, llama-3-8b batch 1, int4, tokens/s", 400.0, False),
        ("decoding, llama-3-8b batch 1, int4, head int4, tokens/s", 600.0, True),
    ]
    written = report.write(tmp_path, "h200", tmp_path / "out")
    assert [path.name for path in written] == ["benchmark-tables.md", "results.md", "quantized.png"]
    page = written[0].read_text()
    assert "| llama-3-8b tree of 64 | ligermodels int4 | 3 |" in page
    assert "| llama-3-8b mlp.down | torchao int4 |  |  |  |  | no torchao |" in page
    case = {"case": "llama-3-8b 4x4096", "gpu": "G", "commit": "abcdef1", "tokens_per_s": 1.0}
    found["training"] = [case | {"provider": provider} for provider in ("ligermodels", "transformers")]
    text = summary.page(found)
    assert "weights in | llama-3-8b batch 1 | llama-3-8b batch 8 | llama-3-8b tree of 64 |" in text
    assert "| bf16 | 250 tok/s (0.75) | 2,000 tok/s (0.75) |  |" in text
    assert "| int4, head int4 | 600 tok/s (0.75) |  |  |" in text and "commits abcdef1 and 0000000" in text
    assert "| int4 | 400 tok/s (0.75) | 3,200 tok/s (0.75) | 3 ms (0.50) |" in text


def test_targets_of_newer_families(tmp_path: Path) -> None:
    """Beside plain transformers in training, and beside their GEMMs in decoding."""
    case = {"case": "gemma-4-e4b 1x4096", "commit": "abcdef1"}
    ours = {"provider": "ligermodels", "tokens_per_s": 130.0, "peak_gib": 30.0}
    theirs = {"provider": "transformers", "tokens_per_s": 100.0, "peak_gib": 20.0}
    recording.write(tmp_path / "training-h200.jsonl", [case | ours, case | theirs])
    step = {"case": "qwen3.5-9b", "batch": 1, "commit": "abcdef1"}
    plain = step | {"what": "ligermodels", "step_ms": 5.0, "of_limit": 0.75}
    recording.write(
        tmp_path / "decoding-h200.jsonl", [plain, step | {"what": "medusa tree step", "failed": "no heads"}]
    )
    one = {"case": "step, batch 1", "provider": "ligermodels", "us": 12.0, "of_copy": 0.7, "commit": "abcdef1"}
    recording.write(tmp_path / "delta-h200.jsonl", [one])
    found = [(t.what, t.measured, t.met) for t in targets.targets(report.read(tmp_path, "h200"))]
    assert found == [
        ("gemma-4-e4b 1x4096, tokens/s over transformers", 1.3, True),
        ("gemma-4-e4b 1x4096, memory over its", 1.5, False),
        ("decoding, qwen3.5-9b batch 1, of its GEMMs alone", 0.75, False),
    ]
    page = report.write(tmp_path, "h200", tmp_path / "out")[0].read_text()
    assert "| step, batch 1 | ligermodels | 12 | 0.7 |" in page
    assert "| qwen3.5-9b batch 1 | medusa tree step |  |  |  | no heads |" in page
