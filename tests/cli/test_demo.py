"""The demo from end to end, at sizes of a few seconds: its files, its results, its checks, its refusals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import ligermodels as lm
from benchmarks.cases import demo
from benchmarks.reporting import report
from ligermodels.cli import app
from ligermodels.demo import END, DemoSettings, GpuDemoSettings, run_demo, workflow
from ligermodels.errors import CheckpointError, InputError, LigerModelsError

SIZES = {
    "corpus_bytes": 300_000,
    "vocab_size": 400,
    "hidden_size": 64,
    "num_layers": 1,
    "head_dim": 16,
    "seq_len": 64,
    "batch_size": 2,
    "steps": 10,
    "num_heads": 2,
    "head_steps": 5,
    "joint_steps": 5,
    "prompts": 4,
    "prompt_tokens": 9,
    "new_tokens": 8,
    "validation_tokens": 256,
    "check": False,
}
TINY = DemoSettings(**SIZES, tree_sizes=(5,), chat_steps=10, lora_rank=4)
TINY_GPU = GpuDemoSettings(
    **SIZES, dtype="bfloat16", device="cpu", installed=False, batch_sizes=(1, 2), tree_sizes=(2, 5), draft_seconds=0.5,
    draft_steps=2,
)  # fmt: skip


def test_demo_does_the_whole_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my demo"
    state = torch.random.get_rng_state()
    results = run_demo(folder, TINY)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert json.loads((folder / "demo.json").read_text()) == json.loads(json.dumps(results))
    assert [(each["stage"], each["same"], each["prompts"]) for each in results["decoding"]] == [(1, 2, 2), (2, 2, 2)]
    assert results["checks"] == {"decoding with the heads gives the same tokens": True} and results["finished"]
    captured = capfd.readouterr()
    assert str(folder / "medusa-vllm") in captured.out and "stage 2: top-1" in captured.out
    assert f"ligermodels generate '{folder}/model' --medusa '{folder}/medusa'" in captured.err  # for a shell

    model = lm.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    text = "def f(x):\n    return 'é 漢' + x"
    assert tokenizer.eos_token == END and tokenizer.decode(tokenizer(text).input_ids) == text
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder / "model")(ids).logits
        torch.testing.assert_close(model(ids).logits, theirs, rtol=1e-5, atol=1e-5)
    for name in ("medusa", "medusa-vllm"):
        medusa = lm.MedusaModel.from_pretrained(model, folder / name)
        assert torch.equal(medusa.generate(ids, 20), model.generate(ids, 20))
    # The sample is the text of the model without heads.
    sample, ours = results["sample"], lm.Tokenizer.from_pretrained(folder / "model")
    prompt = ours.encode(sample["prompt"])
    new = model.generate([prompt], 80, do_sample=False)[0, len(prompt) :].tolist()
    assert len(prompt) >= 5 and sample["continuation"] == ours.continuation(prompt, new)
    assert f"«{sample['continuation'].rstrip()}»" in captured.out.replace("\n  ", "\n")
    joint = lm.from_pretrained(folder / "joint")
    assert all(not torch.equal(a, b) for a, b in zip(joint.parameters(), model.parameters(), strict=True))
    assert results["joint"]["kl"] > 0
    lm.MedusaModel.from_pretrained(joint, folder / "joint")
    assert AutoModelForCausalLM.from_pretrained(folder / "chat").dtype == torch.float32
    lm.load_adapter(lm.from_pretrained(folder / "model"), folder / "adapter")
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines()]
    rendered = tokenizer.apply_chat_template(chats[0], tokenize=False)
    assert rendered == f"user:\n{chats[0][0]['content']}{END}assistant:\n{chats[0][1]['content']}{END}"

    # In the same folder again, with checks that so little training cannot pass: the error comes after the work.
    with pytest.raises(LigerModelsError, match="answers are right"):
        run_demo(folder, replace(TINY, check=True))
    again = json.loads((folder / "demo.json").read_text())
    assert again["loss"] == results["loss"] and again["joint"] == results["joint"] and len(again["checks"]) == 6


def test_the_demo_on_a_gpu_measures_decoding(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a size for a CPU; the speeds mean nothing there. The results become records, a picture and a page."""
    results = run_demo(tmp_path / "out", replace(TINY_GPU, draft_seconds=0.0))
    path = tmp_path / "out" / "demo.json"
    printed = [line for line in capfd.readouterr().err.splitlines() if line.lstrip().startswith("{")]
    assert [json.loads(line) for line in printed] == results["decoding"]
    assert results["float32"]["prompts"] == results["float32"]["same"] == 2 and results["float32"]["tokens"] <= 2 * 8
    assert not results["fine_tuning"] and not (tmp_path / "out" / "chat").exists()
    monkeypatch.setenv("COMMIT", "abcdef1")
    monkeypatch.setattr("sys.argv", ["demo", "--json", str(path), "--out", str(tmp_path / "results/demo-tiny.jsonl")])
    demo.main()
    pages = report.write(tmp_path / "results", "tiny", tmp_path / "docs")
    assert (tmp_path / "docs" / "demo.png") in pages
    assert "| stage 2 greedy batch 1 | ligermodels |" in (tmp_path / "docs" / "benchmark-tables.md").read_text()
    cases = [(each["stage"], each["batch"], each["acceptance"]) for each in results["decoding"]]
    assert cases == [(stage, batch, kind) for stage in (1, 2) for batch in (1, 2) for kind in ("greedy", "typical")]
    for each in results["decoding"]:
        assert each["speed_up"] == pytest.approx(each["plain_seconds"] / each["seconds"])
        assert 1 <= each["tokens_per_step"] <= 3 and each["tree"] in (2, 5)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA GPU"):
            run_demo(tmp_path / "none", GpuDemoSettings())
        assert not (tmp_path / "none").exists()


def test_the_comparison_of_draft_heads_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = replace(TINY_GPU, medusa_stages=False, draft_seconds=0.1, batch_sizes=(2,), steps=3)
    (tmp_path / "out/medusa").mkdir(parents=True)  # of an earlier demo, on another model
    for name in ("demo.json", "medusa/config.json", "own.txt"):
        (tmp_path / "out" / name).write_text("{}")
    results = run_demo(tmp_path / "out", sizes)
    found = [(each["batch"], each["decoding"], each["kind"]) for each in results["drafts"]]
    kinds = ("Medusa", "EAGLE-3", "DSpark")
    assert found == [(2, way, kind) for way in ("greedy", "sampled") for kind in kinds]
    for each in results["drafts"]:
        assert each["speed_up"] == pytest.approx(each["plain_seconds"] / each["seconds"])
        assert 1 <= each["tokens_per_step"] <= 4 and (each["same"] is None) == (each["decoding"] == "sampled")
    for each in results["draft_training"].values():
        assert each["steps"] == max(1, int(0.1 / each["step_seconds"]))
    assert [record["provider"] for record in demo.drafts_of(results)] == [kind for *_, kind in found]
    assert results["seconds"].keys() == {"tokenizer", "training", "drafts"} and results["finished"]
    captured = capfd.readouterr()
    printed = [line for line in captured.err.splitlines() if line.lstrip().startswith("{")]
    assert [json.loads(line) for line in printed] == results["drafts"]
    assert "tokens per step" in captured.out and not (tmp_path / "out/medusa").exists()
    assert (tmp_path / "out/own.txt").exists()
    result = CliRunner().invoke(app, ["demo", "--only-drafts", "--out", str(tmp_path / "none")])
    assert result.exit_code == 1 and "draft_seconds" in capfd.readouterr().err + result.output


def test_a_demo_that_is_cut_off_leaves_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workflow, "decoding_speeds", cut_off)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path, TINY_GPU)
    results = json.loads((tmp_path / "demo.json").read_text())
    assert results["finished"] is False and results["loss"]["model"] > 0 and results["gpu"] == "CPU"
    assert results["seconds"].keys() == {"tokenizer", "training", "heads", "joint"}


def test_demo_leaves_other_peoples_files_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for taken in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(CheckpointError, match="something other than a demo's"):
            run_demo(taken, TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert (tmp_path / "thesis.txt").read_text() == "mine"
