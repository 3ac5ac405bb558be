"""Runs that train an EAGLE-3 head, their metrics, their commands, and that what they train drafts."""

import json
import math
import shutil
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from runs import equal_heads, losses, scores
from safetensors.torch import load_file
from typer.testing import CliRunner

import ligermodels as lm
from ligermodels.arguments import Divergence
from ligermodels.cli import app
from ligermodels.data.batches import Batch
from ligermodels.errors import ConfigError
from ligermodels.speculative.evaluation import evaluate_heads
from ligermodels.speculative.load import load_multi_head
from ligermodels.training import Console, EagleRecipe, adamw, dry_run, graph_step, train_eagle
from ligermodels.training.heads import draft_metrics
from ligermodels.training.inputs import packed
from ligermodels.training.recipe_file import shipped_recipes
from ligermodels.training.reports import OutputMetrics
from ligermodels.training.step import EagerStep

pytestmark = pytest.mark.usefixtures("one_thread")


def recipe_for(base: Path, data: Path, **changes: Any) -> EagleRecipe:
    settings = {
        "base": str(base),
        "data": (str(data),),
        "max_bad_lines": 1,
        "validation_fraction": 0.2,
        "num_steps": 3,
        "draft_vocab_size": 40,
        "learning_rate": 1e-2,
        "steps": 12,
        "seq_len": 16,
        "excess_length_strategy": "split",
        "batch_tokens": 64,
        "micro_batch_tokens": 32,
        "evaluate_every": 5,
        "checkpoint_every": 3,
        "seed": 3,
        "date": "2024-07-26",
    }
    return EagleRecipe().changed(settings).changed(changes)


def lines(out: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if name in line]


def command(*words: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == code, (words, result.output, result.exception)
    return result.stdout if "--json" in words and not code else result.output


def test_a_run_and_what_it_writes(base: Path, data: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "out", list[str]()
    outcome = train_eagle(recipe_for(base, data, steps=20), out, console=Console(said.append))
    found = losses(out)
    assert outcome.finished and len(found) == 20
    assert sum(loss for _, loss, _ in found[-5:]) < 0.9 * sum(loss for _, loss, _ in found[:5])
    evaluation = outcome.evaluation.metrics()
    assert scores(out)[-1][1] == evaluation["top1"] and len(evaluation["top1"]) == 3
    a, b, c = evaluation["acceptance"]
    assert 0 < a < 1 and evaluation["tau"] == pytest.approx(1 + a + a * b + a * b * c)
    a, b, c = evaluation["agreement"]
    assert evaluation["greedy_tau"] == pytest.approx(1 + a + a * b + a * b * c)
    assert lines(out, "validation_tau")[-1]["validation_tau"] == evaluation["tau"]
    report = lines(out, "tau")[-1]
    assert report["tau"] == pytest.approx(1 + sum(math.prod(report["acceptance"][:k]) for k in (1, 2, 3)))
    assert len(report["agreement"]) == 3 and 1 <= report["greedy_tau"] <= 4
    # The draft tokens are those that the packed labels of an epoch have most often, counted here by other means.
    told = next(line for line in said if line.startswith("draft vocabulary"))
    plan = dry_run(recipe_for(base, data, steps=20)).plan
    batches = packed(plan.recipe, plan.documents, plan.training, batch_size=1, seed=3, epochs=1)
    labels = [label for batch in batches for label in batch["labels"].flatten().tolist() if label != -100]
    order = sorted(range(462), key=lambda t: (-labels.count(t), t))
    chosen = sorted(order[:40])
    d2t = load_file(out / "model.safetensors")["d2t"]
    assert (d2t + torch.arange(40)).tolist() == chosen
    assert f"40 of 462 tokens, {sum(map(labels.count, chosen)) / len(labels):.2%}" in told


def test_streamed_data_is_counted_up_to_the_buffer_size(base: Path, data: Path, tmp_path: Path) -> None:
    """The draft tokens are the most frequent ones of the first documents in the run's order, here counted alone."""
    many, said = tmp_path / "many.jsonl", list[str]()
    words = Path(data).read_text().split("{}\n")[0]
    many.write_text(words * 8)
    recipe = recipe_for(base, many, streaming=True, shuffle_buffer_size=70, steps=1, evaluate_every=None)
    plan = dry_run(recipe).plan
    first = [index for index, _ in islice(plan.training.documents(3, 0, 0), 70)]
    batches = packed(recipe, plan.documents, np.array(first), batch_size=1, epochs=1)
    labels = [label for batch in batches for label in batch["labels"].flatten().tolist() if label != -100]
    chosen = sorted(sorted(range(462), key=lambda t: (-labels.count(t), t))[:40])
    train_eagle(recipe, tmp_path / "out", console=Console(said.append))
    d2t = load_file(tmp_path / "out" / "model.safetensors")["d2t"]
    assert (d2t + torch.arange(40)).tolist() == chosen
    share = f"{sum(map(labels.count, chosen)) / len(labels):.2%}"
    assert f"draft vocabulary: 40 of 462 tokens, {share} of the tokens trained on in the first 70 documents" in said


def test_a_stopped_run_resumes_with_the_same_losses(base: Path, data: Path, tmp_path: Path) -> None:
    train_eagle(recipe_for(base, data), tmp_path / "first")
    for name, start in (("new", None), ("further", str(tmp_path / "first"))):
        changes = {"start_from": start, "draft_vocab_size": 40 if start is None else 32000}
        recipe = recipe_for(base, data, **changes, steps=6)
        whole, cut = tmp_path / name / "whole", tmp_path / name / "cut"
        train_eagle(recipe, whole)
        shutil.copytree(whole, cut)
        shutil.rmtree(cut / "checkpoints" / "step-6")
        said: list[str] = []
        train_eagle(recipe, cut, resume=True, console=Console(said.append))
        assert any("resuming after step 3 of 6" in line for line in said)
        assert losses(cut) == losses(whole) and equal_heads(cut, whole)
    first, further = (losses(tmp_path / name)[0][1] for name in ("first", "further/whole"))
    assert further < 0.9 * first
    assert dry_run(recipe).trained == dry_run(recipe_for(base, data)).trained
    with pytest.raises(ConfigError, match=r"draft_vocab_size: is for a new head; the head in start_from has its own"):
        recipe_for(base, data, start_from=str(tmp_path / "first"), draft_vocab_size=41)


def test_bad_recipes_are_named(base: Path, data: Path, tmp_path: Path) -> None:
    for change, name in (
        ({"seq_len": 4}, "seq_len"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_heads": 3}, "num_heads"),
        ({"divergence": "kl"}, "divergence"),
        ({"quantize_exclude": ("mlp",)}, "quantize_exclude"),
        ({"activation_checkpointing": "full"}, "activation_checkpointing"),
    ):
        with pytest.raises(ConfigError, match=name):
            recipe_for(base, data, **change)
    for change, message in (
        ({"boundaries": (0, 9)}, "boundaries: must be at most 1, got 9"),
        ({"boundaries": (1, 0)}, "ascending order"),
        ({"fc_norm": True, "norm_before_fc": True}, "norm_before_fc: excludes fc_norm"),
    ):
        with pytest.raises(ConfigError, match=message):
            train_eagle(recipe_for(base, data, **change), tmp_path / "bad")
    with pytest.raises(ConfigError, match="names no EAGLE-3 head"):
        train_eagle(recipe_for(base, data, start_from=str(base), draft_vocab_size=32000), tmp_path / "bad")
    assert get_args(EagleRecipe.model_fields["divergence"].annotation) == get_args(Divergence)


@pytest.mark.parametrize("name", shipped_recipes("eagle"))
def test_a_shipped_recipe_runs_on_a_small_sample(base: Path, data: Path, tmp_path: Path, name: str) -> None:
    sizes = {"seq_len": 128, "batch_tokens": 256, "micro_batch_tokens": 128, "epochs": 0.01, "evaluate_every": None}
    recipe = EagleRecipe.read(name).changed({"base": str(base), "data": str(data), **sizes})
    assert train_eagle(recipe, tmp_path / "out").finished
    stored = lm.Eagle3Model.from_pretrained(lm.from_pretrained(base), tmp_path / "out")
    assert stored.num_heads == 7 and stored.vocabulary.is_whole  # the model has fewer tokens


@pytest.mark.parametrize("kind", ["int4", "float8"])
def test_a_quantised_base(base: Path, data: Path, tmp_path: Path, kind: Any) -> None:
    """The run's loss is that of a model loaded with the same quantisation; the frozen weights stay as they are."""
    model = lm.from_pretrained(base, quantize=kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    out = tmp_path / "out"
    outcome = train_eagle(recipe_for(base, data, quantize=kind, steps=4, validation_fraction=0.3), out)
    eagle = load_multi_head(model, out)
    plan = dry_run(recipe_for(base, data, validation_fraction=0.3)).plan
    again = evaluate_heads(eagle, plan.validation_batches())
    torch.testing.assert_close(again.losses, outcome.evaluation.scores.losses, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    prompt = [[1, 5, 9]]
    assert torch.equal(eagle.generate(prompt, max_new_tokens=9), model.generate(prompt, max_new_tokens=9))


def test_a_base_with_an_adapter(base: Path) -> None:
    """The head is trained for the model with its adapter, which is frozen with the model."""
    model = lm.from_pretrained(base)
    lm.add_lora(model, 2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_(0, 0.1)
    eagle = lm.Eagle3Model.from_base(model, 2)
    ids = torch.arange(3, 40)[None]
    eagle(ids, labels=ids).loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in eagle.head_parameters())


def test_a_recorded_step_is_the_step(base: Path) -> None:
    """On a CPU the function that a CUDA graph records runs itself: same results, metrics included."""
    results = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model = lm.Eagle3Model.from_base(lm.from_pretrained(base), 2)
        optimizer = adamw(model.head_parameters(), lr=1e-2)
        found = []
        for seed in range(3):
            ids = torch.randint(3, 400, (1, 64), generator=torch.Generator().manual_seed(seed))
            parts = [
                Batch({"input_ids": ids, "labels": ids, "cu_seqlens": torch.tensor([0, 20, 64], dtype=torch.int32)})
            ]
            options = {"num_items_in_batch": model.num_targets(ids, cu_seqlens=parts[0]["cu_seqlens"])}
            if recorded:
                step = step if seed else graph_step(model, optimizer, output_metrics=draft_metrics)  # noqa: F821
                result = step(parts, **options)
            else:
                result = EagerStep(model, optimizer, 1.0, draft_metrics)(parts, options)
            found.append((result.losses[0], OutputMetrics.sum([result[1]]).ratios["acceptance"][0]))
        results.append(found)
    torch.testing.assert_close(results[1], results[0])


def test_the_commands(base: Path, data: Path, tmp_path: Path) -> None:
    head, forge = tmp_path / "head", tmp_path / "forge"
    sizes = ["--seq-len", 128, "--batch-tokens", 256, "--steps", 3, "--max-bad-lines", 1, "--device", "cpu"]
    shape = ["--num-steps", 2, "--draft-vocab-size", 50, "--boundaries", 0, "--boundaries", 1]
    shown = command("eagle", "train", base, "--data", data, "--out", head, *sizes, *shape)
    assert "acceptance" in shown and "tokens per step of a chain" in shown
    command("eagle", "export", base, head, forge, "--profile", "specforge")
    config = json.loads((forge / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 50
    for folder in (head, forge):
        about = json.loads(command("info", folder, "--json"))
        assert about["eagle3_head"] == str(folder) and about["draft_vocab_size"] == 50 and about["boundaries"] == [0, 1]
    medusa = tmp_path / "medusa"
    lm.MedusaModel.from_base(lm.from_pretrained(base), 2).save_pretrained(medusa)
    batches = ["--decode-batch-size", 1, "--decode-batch-size", 2, "--draft-tree", "2,2,4", "--compare", medusa]
    scored = ["eagle", "eval", base, head, "--data", data, "--max-bad-lines", 1, "--device", "cpu", "--prompts", 6]
    scored += ["--max-new-tokens", 5, "--seq-len", 64, *batches]
    shown = command(*scored, "--json")
    rows = json.loads(shown[shown.index("{") :])["benchmarks"]
    named = [(row["kind"], row["drafts"], row["batch_size"]) for row in rows]
    ways = [
        ("EAGLE-3", "default"),
        ("EAGLE-3", "fitted tree"),
        ("EAGLE-3", "dynamic tree 2,2,4"),
        ("Medusa", "default"),
    ]
    assert named == [(*way, batch) for batch in (1, 2) for way in ways]
    assert all(row["same"] == row["prompts"] == 3 and row["tokens_per_step"] >= 1 for row in rows)
    assert all(row["speed_up"] == row["plain_seconds"] / row["medusa_seconds"] for row in rows)
    for first, second in zip(rows[:4], rows[4:], strict=True):  # a batch takes as many steps as its prompts alone
        assert (first["steps"], first["tokens"]) == (second["steps"], second["tokens"])
    options = ["--max-new-tokens", 9, "--device", "cpu", "--json", "--prompt", "Hi there"]
    assert "three whole numbers" in command("generate", base, "--heads", head, *options, "--draft-tree", "3,2", code=2)
    assert "needs --heads" in command("generate", base, *options, "--draft-tree", "3,2,6", code=2)
    plain = json.loads(command("generate", base, "--greedy", *options))["completions"]
    for folder in (head, forge):
        found = json.loads(command("generate", base, "--heads", folder, *options))
        assert found["completions"] == plain and found["tokens_per_step"] >= 1
        tree = json.loads(command("generate", base, "--heads", folder, *options, "--draft-tree", "3,2,6"))
        assert tree["completions"] == plain and tree["tokens_per_step"] >= found["tokens_per_step"]
        assert "holds heads and no model" in command("generate", folder, "--prompt", "x", code=1)
        with pytest.raises(
            ConfigError, match=r"describes an EAGLE-3 head, without a model: open their base model.*Eagle3Model"
        ):
            lm.from_pretrained(folder)
    scored = ["--seq-len", 128, "--device", "cpu", "--json"]
    found = json.loads(command("eagle", "eval", base, head, "--validation-of", head, "--prompts", 0, *scored))
    assert len(found["acceptance"]) == len(found["agreement"]) == 2
    decoded = ["--prompts", 4, "--max-new-tokens", 4, "--max-bad-lines", 1, *scored[:-1]]
    shown = command("eagle", "eval", base, head, "--data", data, *decoded)
    assert "2 of 2" in shown
    further = ["--start-from", forge, "--num-steps", 2]
    command("eagle", "train", base, "--data", data, "--out", tmp_path / "more", *sizes, *further)
    assert "llama-3" in command("eagle", "recipe")
