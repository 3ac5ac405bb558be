"""The demo from end to end, at sizes of a few seconds: its checks, its files, its refusals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ligermodels as lm
from benchmarks.cases import demo
from benchmarks.reporting import report
from ligermodels.demo import (
    END,
    DemoSettings,
    GpuDemoSettings,
    follower_baseline,
    frequency_baseline,
    run_demo,
    run_gpu_demo,
)
from ligermodels.errors import CheckpointError, InputError, LigerModelsError

TINY = DemoSettings(
    corpus_bytes=300_000,
    vocab_size=400,
    hidden_size=64,
    num_layers=2,
    seq_len=64,
    batch_size=2,
    steps=20,
    num_heads=2,
    head_steps=5,
    joint_steps=5,
    tree_nodes=5,
    prompts=5,
    prompt_tokens=9,
    new_tokens=12,
    validation_fraction=0.4,
    validation_tokens=256,
    chat_steps=30,
    lora_rank=4,
    lora_learning_rate=2e-2,
    tokens_per_step=0.0,
    check_accuracy=False,
)


def test_demo_does_the_whole_job_and_repeats_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    state = torch.random.get_rng_state()
    results = run_demo(folder, TINY)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert json.loads((folder / "demo.json").read_text())["decoding"] == results["decoding"]
    assert results["decoding"]["same"] == results["decoding"]["prompts"] == 2  # Three were predicted from.
    assert len(results["checks"]) == 3 and all(results["checks"].values())
    captured = capfd.readouterr()
    assert str(folder / "medusa") in captured.out and "top-5" in captured.out
    assert f"ligermodels generate {folder}/model --medusa {folder}/medusa" in captured.err

    model = lm.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    text = "def f(x):\n    return 'é 漢' + x"
    assert tokenizer.eos_token == END and tokenizer.decode(tokenizer(text).input_ids) == text
    ids = tokenizer(text, return_tensors="pt").input_ids
    for name in ("model", "exported"):
        oracle = AutoModelForCausalLM.from_pretrained(folder / name)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, oracle(ids).logits, rtol=1e-5, atol=1e-5)
        assert AutoTokenizer.from_pretrained(folder / name).decode(ids[0]) == text
    medusa = lm.MedusaModel.from_pretrained(model, folder / "medusa")
    assert torch.equal(medusa.generate(ids, 20), model.generate(ids, 20))
    # A sample of text, as the model continues it without heads.
    sample, ours = results["sample"], lm.Tokenizer.from_pretrained(folder / "model")
    prompt = ours.encode(sample["prompt"])
    new = model.generate([prompt], 80, do_sample=False)[0, len(prompt) :].tolist()
    assert len(prompt) >= 5 and sample["continuation"] == ours.continuation(prompt, new)
    assert f"«{sample['continuation'].rstrip()}»" in captured.out.replace("\n  ", "\n")
    joint = lm.from_pretrained(folder / "joint")
    assert all(not torch.equal(a, b) for a, b in zip(joint.parameters(), model.parameters(), strict=True))
    chat, adapter = results["fine_tuning"]["chat"], results["fine_tuning"]["adapter"]
    assert chat["first_loss"] == adapter["first_loss"] > max(1.3 * chat["loss"], 1.05 * adapter["loss"])
    assert AutoModelForCausalLM.from_pretrained(folder / "chat").dtype == torch.float32
    lm.load_adapter(lm.from_pretrained(folder / "model"), folder / "adapter")
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines()]
    rendered = tokenizer.apply_chat_template(chats[0], tokenize=False)
    assert rendered == f"user:\n{chats[0][0]['content']}{END}assistant:\n{chats[0][1]['content']}{END}"
    assert results["joint"]["kl"] > 0 and "stage 2: top-1" in captured.out
    lm.MedusaModel.from_pretrained(joint, folder / "joint")

    # The same again in the same place, but for a bar that it cannot pass: an error after the work, not before.
    # So little training cannot pass for much either.
    with pytest.raises(LigerModelsError, match=r"tokens per step.*than the best guess from the current token alone"):
        run_demo(folder, replace(TINY, tokens_per_step=99.0, check_accuracy=True))
    again = json.loads((folder / "demo.json").read_text())
    assert again["loss"] == results["loss"] and again["checks"]["it gives more than 99.0 tokens per step"] is False
    assert len(again["checks"]) == 13 and again["joint"] == results["joint"]


TINY_GPU = GpuDemoSettings(
    dtype="float32",
    device="cpu",
    corpus_bytes=400_000,
    validation_fraction=0.3,
    vocab_size=400,
    hidden_size=64,
    num_layers=1,
    head_dim=16,
    seq_len=64,
    batch_size=2,
    steps=8,
    num_heads=2,
    head_steps=4,
    joint_steps=2,
    prompts=6,
    prompt_tokens=9,
    new_tokens=12,
    batch_sizes=(1, 2),
    tree_sizes=(2, 5),
)


def test_the_demo_on_a_gpu_measures_decoding(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a size for a CPU; what it measures there is no speed that anyone wants. Its results become records, a picture
    and a page."""
    results = run_gpu_demo(tmp_path / "out", TINY_GPU)
    path = tmp_path / "out" / "demo.json"
    written = json.loads(path.read_text())
    assert written["decoding"] == results["decoding"] and written["finished"] is True
    said = capfd.readouterr().err
    printed = [line for line in said.splitlines() if line.lstrip().startswith("{")]
    assert [json.loads(line) for line in printed] == results["decoding"]
    assert results["float32"]["prompts"] == results["float32"]["same"] == 3 and results["float32"]["tokens"] <= 3 * 12
    assert "in float32 the same tokens for 3 of 3 prompts" in said
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
    model = lm.from_pretrained(tmp_path / "out" / "model")
    assert lm.MedusaModel.from_pretrained(model, tmp_path / "out" / "medusa").num_heads == 2
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA GPU"):
            run_gpu_demo(tmp_path / "none")
        assert not (tmp_path / "none").exists()


def test_a_demo_on_a_gpu_that_is_cut_off_leaves_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ligermodels.demo.gpu.learn_jointly", cut_off)
    with pytest.raises(KeyboardInterrupt):
        run_gpu_demo(tmp_path, TINY_GPU)
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["finished"] is False and found["seconds"].keys() == {"tokenizer", "training", "heads"}
    assert [(each["stage"], each["batch"]) for each in found["decoding"]] == [(1, 1), (1, 1), (1, 2), (1, 2)]
    assert all(record["gpu"] == "CPU" and record["speed_up"] > 0 for record in demo.records_of(found))


def test_baselines_by_hand() -> None:
    training = [[1, 2, 3, 1, 2, 4, 1, 2, 3], [1, 5]]
    validation = [[1, 9, 3, 2, 4], [2], [1, 2, 3]]
    # Two after 1, 9, 3 and 1: after 1 it is 3 in two of three cases, after 3 it is 2, after 9 unknown.
    assert [follower_baseline(training, validation, 2, k) for k in (1, 2)] == [2 / 4, 2 / 4]
    assert frequency_baseline(training, validation, 1) == 2 / 9
    assert all(not follower_baseline(training, [[7, 3, 9, 9]], ahead, 1) for ahead in (1, 2, 3))


def test_demo_leaves_other_peoples_files_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for taken in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(CheckpointError, match="something other than a demo's"):
            run_demo(taken, TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert (tmp_path / "thesis.txt").read_text() == "mine"
