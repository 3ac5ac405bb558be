"""Runs that train DFlash and DSpark heads, their metrics, their commands, and that what they train drafts."""

import json
import math
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from runs import equal_heads, losses
from typer.testing import CliRunner

import ligermodels as lm
from ligermodels.arguments import Divergence
from ligermodels.cli import app
from ligermodels.data.batches import Batch
from ligermodels.errors import ConfigError
from ligermodels.speculative import block_draft
from ligermodels.speculative.evaluation import evaluate_heads
from ligermodels.speculative.load import load_multi_head
from ligermodels.training import (
    Callback,
    Console,
    DFlashRecipe,
    DSparkRecipe,
    StepMetrics,
    adamw,
    dry_run,
    graph_step,
    train_dflash,
    train_dspark,
)
from ligermodels.training.draft_recipe import BlockRecipe
from ligermodels.training.dspark import PackedBlocks
from ligermodels.training.heads import draft_metrics
from ligermodels.training.recipe_file import shipped_recipes
from ligermodels.training.reports import OutputMetrics
from ligermodels.training.step import EagerStep

pytestmark = pytest.mark.usefixtures("one_thread")

TRAIN: dict[str, Any] = {"dflash": (DFlashRecipe, train_dflash), "dspark": (DSparkRecipe, train_dspark)}
SMALL = {"num_layers": 1, "num_anchors": 8, "seq_len": 16, "batch_tokens": 64, "micro_batch_tokens": 32}


def recipe_for(kind: str, base: Path, data: Path, **changes: Any) -> BlockRecipe:
    settings = {
        **SMALL,
        "base": str(base),
        "data": (str(data),),
        "max_bad_lines": 1,
        "validation_fraction": 0.2,
        "block_size": 4,
        "learning_rate": 1e-2,
        "steps": 12,
        "excess_length_strategy": "split",
        "evaluate_every": 5,
        "checkpoint_every": 3,
        "seed": 3,
        "date": "2024-07-26",
    }
    return TRAIN[kind][0]().changed({**settings, **changes})


def lines(out: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if name in line]


def command(*words: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == code, (words, result.output, result.exception)
    return result.stdout if "--json" in words and not code else result.output


@pytest.mark.parametrize("kind, further", [("dflash", {"dpace_alpha": 0.5}), ("dspark", {"markov_rank": 8})])
def test_a_run_and_what_it_writes(kind: str, further: dict[str, Any], base: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    recipe = recipe_for(kind, base, data, steps=20, **further)
    outcome = TRAIN[kind][1](recipe, out)
    found = losses(out)
    assert outcome.finished and len(found) == 20
    assert sum(loss for _, loss, _ in found[-5:]) < 0.95 * sum(loss for _, loss, _ in found[:5])
    slots = 4 if kind == "dspark" else 3
    evaluation = outcome.evaluation.metrics()
    assert len(evaluation["top1"]) == len(evaluation["acceptance"]) == slots
    accepted = [0.0 if math.isnan(share) else share for share in evaluation["agreement"]]  # NaN: a slot without targets
    products = (math.prod(accepted[:k]) for k in range(1, slots + 1))
    assert evaluation["greedy_tau"] == pytest.approx(1 + sum(products))
    report = lines(out, "tau")[-1]
    assert len(report["acceptance"]) == slots and 1 <= report["greedy_tau"] <= slots + 1
    assert bool(lines(out, "confidence_loss")) == (kind == "dspark")
    # The evaluation is that of the written head, on the same validation split.
    model = load_multi_head(lm.from_pretrained(base), out)
    names = [name for name in vars(model.training_options) if hasattr(recipe, name)]  # files of heads have none
    model = type(model).from_pretrained(model.base, out, **{name: getattr(recipe, name) for name in names})
    again = evaluate_heads(model, dry_run(recipe).plan.validation_batches(1))
    torch.testing.assert_close(again.losses, outcome.evaluation.scores.losses, rtol=1e-5, atol=1e-6)
    assert again.tokens_per_step()["agreement"] == pytest.approx(evaluation["greedy_tau"])
    prompt = [[1, 5, 9]]
    assert torch.equal(model.generate(prompt, max_new_tokens=9), model.base.generate(prompt, max_new_tokens=9))


def test_resumed_runs_are_those_without_a_stop(base: Path, data: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    recipe = recipe_for("dspark", base, data, steps=6, markov_rank=8, markov_head_type="gated")
    train_dspark(recipe, whole)
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step-6")
    said: list[str] = []
    train_dspark(recipe, cut, resume=True, console=Console(said.append))
    assert any("resuming after step 3 of 6" in line for line in said)
    assert losses(cut) == losses(whole) and equal_heads(cut, whole)


@pytest.mark.parametrize("kind, block_size", [("dflash", 2), ("dspark", 1)])
def test_each_sequence_of_a_micro_batch_has_its_blocks(kind: str, block_size: int, base: Path, tmp_path: Path) -> None:
    """As many in a step of any micro-batches, whose sequences are packed into one row. A block has one target here."""
    counts, data = list[int](), tmp_path / "texts.jsonl"
    data.write_text(json.dumps({"text": "Hello there, you are a helpful assistant. " * 99}))

    class Count(Callback):
        def on_report(self, metrics: StepMetrics) -> None:
            counts.append(metrics.report_targets)

    for micro in (16, 32, 64):
        sizes = {"block_size": block_size, "num_anchors": 3, "steps": 1, "micro_batch_tokens": micro}
        recipe = recipe_for(kind, base, data, **sizes, validation_fraction=0, evaluate_every=None)
        TRAIN[kind][1](recipe, tmp_path / str(micro), callbacks=[Count()])
    assert counts == [4 * 3] * 3  # 4 sequences of a step

    ids = torch.arange(3, 19).repeat(2, 1)  # rows that are not packed are sequences, as in a plan
    model = lm.DSparkModel.from_base(lm.from_pretrained(base), block_size, num_layers=1, num_anchors=3)
    assert PackedBlocks(model, 4).num_targets(ids)[0] == model.num_targets(ids)[0] == 6


@pytest.mark.parametrize("kind", TRAIN)
def test_an_evaluation_does_not_depend_on_micro_batches(kind: str, base: Path, tmp_path: Path) -> None:
    """It is of the same blocks of each sequence, one by one; so is the evaluation of the command line."""
    data, found = tmp_path / "texts.jsonl", list[Any]()
    data.write_text((json.dumps({"text": "Hello there, you are a helpful assistant. " * 9}) + "\n") * 20)
    for micro in (16, 64):
        options = {"steps": 1, "micro_batch_tokens": micro, "learning_rate": 0.0, "num_anchors": 3}
        found.append(TRAIN[kind][1](recipe_for(kind, base, data, **options), out := tmp_path / str(micro)).evaluation)
    assert torch.equal(found[0].scores.counts, found[1].scores.counts) and found[0].scores.counts[0] % 3 == 0
    assert repr(found[0].metrics()) == repr(found[1].metrics())  # a NaN equals no other
    words = (kind, "eval", base, out, "--validation-of", out, "--prompts", 0, "--batch-size", 2)
    assert "--batch-size" in command(*words, code=2)


def test_what_does_not_fit_is_named(base: Path, data: Path, tmp_path: Path) -> None:
    for kind, change, message in (
        ("dflash", {"seq_len": 3}, "seq_len: sequences of 3 tokens.* at least 4"),
        ("dspark", {"seq_len": 4}, "seq_len: sequences of 4 tokens.* at least 5"),
        ("dspark", {"dpace_alpha": 0.5}, "dpace_alpha: D-PACE weighs the cross entropy"),
        ("dflash", {"mask_token_id": 10**6}, "mask_token_id"),
        ("dflash", {"boundaries": (0, 99)}, "boundaries"),
        ("dspark", {"start_from": "head"}, "block_size: is for a new head"),
        ("dspark", {"activation_checkpointing": "full"}, "activation_checkpointing: is for the backward pass"),
    ):
        with pytest.raises(ConfigError, match=message):
            TRAIN[kind][1](recipe_for(kind, base, data, **change), tmp_path / "bad")
    for recipe in (DFlashRecipe, DSparkRecipe):
        assert get_args(recipe.model_fields["divergence"].annotation) == get_args(Divergence)


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        (DFlashRecipe, {"divergence": "forward_kl"}, r"divergence: has the weight 0 \(divergence_weight\)"),
        (DSparkRecipe, {"divergence": "forward_kl", "divergence_weight": 0.0}, "divergence: has the weight 0"),
        (DSparkRecipe, {"markov_rank": 0, "markov_head_type": "rnn"}, "markov_head_type: is for a Markov head, and"),
        (DSparkRecipe, {"confidence": False, "confidence_weight": 2.0}, "confidence_weight: is for confidence, which"),
        (DSparkRecipe, {"confidence": False, "confidence_with_markov": False}, "confidence_with_markov: is for conf"),
        (DSparkRecipe, {"markov_rank": 0, "confidence_with_markov": False}, "confidence_with_markov: is for conf"),
        (DSparkRecipe, {"confidence": False, "ce_weight": 0.0, "divergence_weight": 0.0}, "nothing trains the head"),
    ],
)
def test_a_setting_of_a_part_that_the_head_lacks_is_refused(
    recipe: type[DSparkRecipe], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe().changed(settings)
    assert recipe().changed({"divergence": "forward_kl", "divergence_weight": 0.5}).divergence == "forward_kl"


def test_a_run_with_such_a_setting_of_an_earlier_release_resumes(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ["dspark", "train", "--out", tmp_path / "run", "--device", "cpu"]
    sizes = ["--block-size", 3, "--num-layers", 1, "--seq-len", 128, "--batch-tokens", 256, "--num-anchors", 4]
    more = ["--max-bad-lines", 1, "--checkpoint-every", 1, "--no-confidence", "--confidence-weight", 2.0]
    with monkeypatch.context() as earlier:
        earlier.setattr(DSparkRecipe, "conditions", ())
        earlier.setattr(block_draft, "CONFIDENCE", ())
        command(*run, base, "--data", data, *sizes, *more, "--steps", 1)
    recipe = tmp_path / "run" / "recipe.yaml"
    assert "confidence_weight: 2.0" in recipe.read_text()
    assert "confidence_weight: is for" in command(*run, "--resume", "--steps", 2, "--confidence-weight", 2.0, code=1)
    command(*run, "--resume", "--steps", 2)
    assert "confidence_weight: 1.0" in recipe.read_text()


@pytest.mark.parametrize("kind", TRAIN)
def test_shipped_recipes(kind: str, base: Path, data: Path, tmp_path: Path) -> None:
    """Their settings are those published, which are also the defaults; and they train, smaller."""
    recipe_class, train = TRAIN[kind]
    (name,) = shipped_recipes(kind)
    recipe = recipe_class.read(name)
    assert (recipe.block_size, recipe.num_layers, recipe.num_anchors) == ({"dflash": 16, "dspark": 7}[kind], 5, 512)
    assert (recipe.gamma, recipe.learning_rate) == ({"dflash": 7.0, "dspark": 4.0}[kind], 6e-4)
    for setting in ("block_size", "num_layers", "num_anchors", "gamma", "ce_weight", "divergence_weight",
                    "learning_rate"):  # fmt: skip
        assert getattr(recipe, setting) == recipe_class.model_fields[setting].default, setting
    if kind == "dspark":
        assert (recipe.ce_weight, recipe.divergence, recipe.divergence_weight) == (0.1, "l1", 0.9)
        assert (recipe.markov_rank, recipe.markov_head_type, recipe.confidence) == (256, "vanilla", True)
    sizes = {**SMALL, "seq_len": 32, "block_size": 5, "mask_token_id": None, "steps": 2, "validation_fraction": 0.3}
    changed = recipe.changed({"base": str(base), "data": str(data), **sizes, "dtype": "float32"})
    assert train(changed, tmp_path / "out").finished


@pytest.mark.parametrize("kind", TRAIN)
def test_a_recorded_step_is_the_step(kind: str, base: Path) -> None:
    """On a CPU the function that a CUDA graph records runs itself: same results, metrics included."""
    results = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model_class = {"dflash": lm.DFlashModel, "dspark": lm.DSparkModel}[kind]
        model = model_class.from_base(lm.from_pretrained(base), 4, num_layers=1, num_anchors=9)
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


@pytest.mark.parametrize("kind, profile, shape", [
    ("dflash", "z-lab", ["--block-size", 3]),
    ("dspark", "deepspec", ["--block-size", 2, "--markov-rank", 8]),
])  # fmt: skip
def test_the_commands(kind: str, profile: str, shape: list[Any], base: Path, data: Path, tmp_path: Path) -> None:
    head, exported = tmp_path / "head", tmp_path / "exported"
    sizes = ["--seq-len", 128, "--batch-tokens", 256, "--steps", 3, "--max-bad-lines", 1, "--device", "cpu"]
    shape = [*shape, "--num-layers", 1, "--boundaries", 0, "--boundaries", 1]
    shown = command(kind, "train", base, "--data", data, "--out", head, *sizes, *shape)
    assert "acceptance" in shown and "tokens per step of a chain" in shown
    command(kind, "export", base, head, exported, "--profile", profile)
    for folder in (head, exported):
        about = json.loads(command("info", folder, "--json"))
        assert about[f"{kind}_head"] == str(folder) and about["boundaries"] == [0, 1] and about["layers"] == 1
    options = ["--max-new-tokens", 9, "--device", "cpu", "--json", "--prompt", "Hi there"]
    plain = json.loads(command("generate", base, "--greedy", *options))["completions"]
    for folder in (head, exported):
        found = json.loads(command("generate", base, "--heads", folder, *options))
        assert found["completions"] == plain and found["tokens_per_step"] >= 1
        assert "holds heads and no model" in command("generate", folder, "--prompt", "x", code=1)
        with pytest.raises(ConfigError, match=r"head, without a model: open their base model.*D(Flash|Spark)Model"):
            lm.from_pretrained(folder)
    scored = ["--seq-len", 128, "--device", "cpu", "--json"]
    found = json.loads(command(kind, "eval", base, head, "--validation-of", head, "--prompts", 0, *scored))
    assert len(found["acceptance"]) == len(found["agreement"]) == 2
    decoded = ["--prompts", 4, "--max-new-tokens", 4, "--max-bad-lines", 1, *scored[:-1]]
    command(kind, "eval", base, head, "--data", data, *decoded)
    command(kind, "train", base, "--data", data, "--out", tmp_path / "more", *sizes, "--start-from", exported)
    assert "qwen3" in command(kind, "recipe")
