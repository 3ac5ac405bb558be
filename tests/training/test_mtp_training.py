"""Runs that train a head of multi-token prediction, their commands, and that what they train drafts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_oracle import add_head
from runs import equal_heads, losses, scores
from safetensors.torch import load_file
from typer.testing import CliRunner
from zoo import CONFIGS, LLAMA, make_checkpoint

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.data.corpus import Corpus
from ligermodels.data.documents import Documents, TokenDocuments
from ligermodels.data.packing import PackedBatches
from ligermodels.demo.corpus import END, python_sources, train_tokenizer
from ligermodels.errors import ConfigError
from ligermodels.speculative.evaluation import evaluate_heads
from ligermodels.training import Console, MTPRecipe, train, train_mtp, warmup_cosine
from ligermodels.training.recipe_file import shipped_recipes

pytestmark = pytest.mark.usefixtures("one_thread")


def recipe_for(base: Path, data: Path, **changes: Any) -> MTPRecipe:
    settings = {
        "base": str(base),
        "data": (str(data),),
        "max_bad_lines": 1,
        "validation_fraction": 0.2,
        "learning_rate": 1e-2,
        "steps": 12,
        "seq_len": 16,
        "batch_tokens": 64,
        "micro_batch_tokens": 32,
        "evaluate_every": 5,
        "checkpoint_every": 3,
        "seed": 3,
        "date": "2024-07-26",
    }
    return MTPRecipe().changed(settings).changed(changes)


def command(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == code, (words, result.output, result.exception)
    return result.output


def test_a_run_and_what_it_writes(base: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = train_mtp(recipe_for(base, data, steps=20), out)
    found = losses(out)
    assert outcome.finished and len(found) == 20
    assert sum(loss for _, loss, _ in found[-5:]) < 0.9 * sum(loss for _, loss, _ in found[:5])
    assert scores(out)[-1][1] == outcome.evaluation.scores.accuracy(1).tolist() and len(scores(out)[-1][1]) == 3
    model = lm.MTPModel.from_pretrained(base, out)
    # A checkpoint with the head in it, by the same recipe, is the model and that head.
    train_mtp(recipe_for(base, data, steps=20, write="checkpoint"), tmp_path / "whole")
    whole = lm.MTPModel.from_pretrained(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), whole.state_dict().values(), strict=True))
    # Trained further from there, by default from the model's own head.
    train_mtp(recipe_for(tmp_path / "whole", data, steps=1), tmp_path / "more")
    train_mtp(recipe_for(base, data, steps=1, start_from=str(out)), tmp_path / "same")
    train_mtp(recipe_for(tmp_path / "whole", data, steps=1, start_from="new"), tmp_path / "new")
    first = [losses(tmp_path / name)[0][1] for name in ("more", "same", "new")]
    assert first[0] == first[1] < first[2] == found[0][1]


def test_a_stopped_run_resumes_with_the_same_losses(base: Path, data: Path, tmp_path: Path) -> None:
    train_mtp(recipe_for(base, data), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-12")
    said: list[str] = []
    train_mtp(recipe_for(base, data), tmp_path / "cut", resume=True, console=Console(said.append))
    assert any("resuming after step 9 of 12" in line for line in said)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole") and equal_heads(tmp_path / "cut", tmp_path / "whole")


def test_a_head_of_two_layers(base: Path, data: Path, tmp_path: Path) -> None:
    """New, then trained further by a run that is stopped and resumed: both layers learn."""
    train_mtp(recipe_for(base, data, num_layers=2, steps=4), tmp_path / "first")
    first = lm.MTPModel.from_pretrained(base, tmp_path / "first")
    recipe = recipe_for(base, data, start_from=str(tmp_path / "first"))
    train_mtp(recipe, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-12")
    train_mtp(recipe, tmp_path / "cut", resume=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole") and equal_heads(tmp_path / "cut", tmp_path / "whole")
    model = lm.MTPModel.from_pretrained(base, tmp_path / "whole")
    assert model.head.num_layers == first.head.num_layers == 2
    before = dict(first.head.named_parameters())
    assert not any(torch.equal(parameter, before[name]) for name, parameter in model.head.named_parameters())
    with pytest.raises(ConfigError, match=r"num_layers: is 3, but the head to start from.* has 2"):
        train_mtp(recipe.changed({"num_layers": 3}), tmp_path / "bad")
    with pytest.raises(ConfigError, match=r"num_steps: 2 steps do not reach all of 3 layers"):
        recipe_for(base, data, num_layers=3, num_steps=2)
    with pytest.raises(ConfigError, match=r"num_steps: 1 steps do not reach all of the head's 2 layers"):
        train_mtp(recipe.changed({"num_steps": 1, "num_layers": None}), tmp_path / "bad")


def test_bad_recipes_are_named(base: Path, data: Path) -> None:
    for change, name in (({"seq_len": 4}, "seq_len"), ({"num_steps": 0}, "num_steps"), ({"num_heads": 3}, "num_heads")):
        with pytest.raises(ConfigError, match=name):
            recipe_for(base, data, **change)


@pytest.mark.parametrize("name", shipped_recipes("mtp"))
def test_a_shipped_recipe_runs_on_a_small_sample(base: Path, data: Path, tmp_path: Path, name: str) -> None:
    sizes = {"seq_len": 128, "batch_tokens": 256, "micro_batch_tokens": 128, "epochs": 0.01}
    recipe = MTPRecipe.read(name).changed({"base": str(base), "data": str(data), **sizes})
    assert train_mtp(recipe, tmp_path / "out").finished
    lm.MTPModel.from_pretrained(tmp_path / "out")


def test_the_commands(base: Path, data: Path, tmp_path: Path) -> None:
    base, head, whole = str(base), str(tmp_path / "head"), str(tmp_path / "whole")
    sizes = ["--seq-len", "128", "--batch-tokens", "256", "--steps", "3", "--max-bad-lines", "1", "--device", "cpu"]
    command("mtp", "train", base, "--data", str(data), "--out", head, *sizes)
    about = json.loads(command("info", head, "--json"))
    assert about["hidden_size"] == 32 and about["base_model_type"] == "llama" and about["parameters"] > 0
    command("mtp", "export", base, head, whole)
    inside = json.loads(command("info", whole, "--json"))
    assert inside["mtp_head"]["tensors"] == about["tensors"] and inside["mtp_head"]["parameters"] == about["parameters"]
    assert "mtp_head" not in json.loads(command("info", base, "--json"))
    options = ["--max-new-tokens", "9", "--device", "cpu", "--json", "--prompt", "Hi there"]
    plain = json.loads(command("generate", base, "--greedy", *options))["completions"]
    for path, heads in ((base, head), (whole, whole)):
        found = json.loads(command("generate", path, "--heads", heads, *options))
        assert found["completions"] == plain and found["tokens_per_step"] >= 1
    # `export` keeps a head that is there, or adds one.
    command("export", whole, str(tmp_path / "again"))
    command("export", base, str(tmp_path / "added"), "--heads", head)
    for name in ("again", "added"):
        one, other = (load_file(folder / "model.safetensors") for folder in (Path(whole), tmp_path / name))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    scored = command(
        "mtp",
        "eval",
        base,
        head,
        "--data",
        str(data),
        "--prompts",
        "4",
        "--max-new-tokens",
        "4",
        *sizes[:2],
        *sizes[6:],
    )
    assert "4 of 4" in scored or "2 of 2" in scored
    scored = command("mtp", "eval", base, head, "--validation-of", head, "--prompts", "0", "--device", "cpu")
    assert "top-1" in scored
    assert "holds heads and no model" in command("generate", head, "--prompt", "x", code=1)
    assert "qwen3.5" in command("mtp", "recipe")


def test_stock_heads_in_a_command(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "in", CONFIGS["qwen3_5_text"])
    added = add_head(tmp_path / "in", oracle)
    about = json.loads(command("info", str(tmp_path / "in"), "--json"))
    assert about["mtp_head"]["parameters"] == sum(tensor.numel() for tensor in added.values())


def test_training_raises_acceptance_at_every_step_of_the_head(tmp_path: Path) -> None:
    """On Python's own sources: a small Llama trained on them, and a head of three steps on it."""
    corpus = Corpus(python_sources(250_000))
    training, validation = corpus.split(0.1, 0)
    tokenizer = train_tokenizer((corpus.read(i)[0].decode() for i in training), 320, tmp_path)
    documents = Documents(corpus, tokenizer, eos_token_id=tokenizer.backend.token_to_id(END))
    tokens, unseen = ([found.ids for found in documents.read(part) if found] for part in (training, validation))
    texts = TokenDocuments.chunks(tokens, 128)

    def fit(model: Any, parameters: Any, steps: int, seed: int) -> None:
        optimizer = torch.optim.AdamW(list(parameters), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
        schedule = warmup_cosine(optimizer, steps, warmup_steps=10)
        batches = PackedBatches(texts, seq_len=128, batch_size=4, seed=seed)
        train(model, batches, steps=steps, optimizer=optimizer, schedule=schedule)

    def accuracy() -> list[float]:
        parts = PackedBatches(TokenDocuments(ids[:512] for ids in unseen), seq_len=128, batch_size=4, epochs=1)
        return evaluate_heads(model, parts).accuracy(1).tolist()

    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1, "head_dim": 16}
    base = lm.from_config({**LLAMA, **sizes, "num_attention_heads": 4, "num_key_value_heads": 2})
    fit(base, base.parameters(), 100, 0)
    model = lm.MTPModel.from_base(base.eval())
    start = accuracy()
    fit(model, model.head_parameters(), 60, 1)
    found = accuracy()
    assert all(after > before + 0.05 for before, after in zip(start, found, strict=True)), (start, found)
    prompts = [ids[at : at + 24] for ids in unseen for at in range(64, len(ids) - 64, 60)][:16]
    options: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}
    out = model.generate(prompts, 40, return_stats=True, **options)
    assert out.sequences.tolist() == base.generate(prompts, 40, do_sample=False, **options).tolist()
    assert len(prompts) == 16 and out.tokens_per_step > 1.5
