"""Objectives of `train`: references, accumulation, resuming, adapters, losses of users, and errors with names."""

import json
import math
import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import equal_heads, losses, make_pairs
from typer.testing import CliRunner

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.errors import CheckpointError, ConfigError, GraphWarning, InputError
from ligermodels.ops.runtime.dispatch import as_recorded
from ligermodels.training import Console, FineTuningRecipe, FusedAdamW, cuda_graph, dry_run, fine_tune, reference, run
from ligermodels.training import step as training_step
from ligermodels.training.cuda_graph import GraphStep, refusal
from ligermodels.training.example_padding import ExamplePadding
from ligermodels.training.folder import REFERENCE
from ligermodels.training.objectives import check_objective, objective_of
from ligermodels.training.step import EagerStep

pytestmark = pytest.mark.usefixtures("one_thread")

PREFERENCES = ("dpo", "ipo", "orpo", "simpo", "cpo", "kto")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    make_pairs(path)
    return path


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """Another model with the same tokens."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(base, folder)
    torch.manual_seed(0)
    model = lm.from_pretrained(base)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder, overwrite=True)
    return folder


def recipe_for(base: Path, data: Path, **changes: Any) -> FineTuningRecipe:
    settings = {
        "base": base,
        "data": data,
        "validation_fraction": 0.2,
        "learning_rate": 2e-3,
        "steps": 6,
        "seq_len": 96,
        "batch_tokens": 768,
        "micro_batch_tokens": 384,
        "checkpoint_every": 2,
        "report_every": 1,
        "date": "2024-07-26",
    }
    return FineTuningRecipe(**{**settings, **changes})


def metrics(out: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.mark.parametrize("objective", PREFERENCES)
def test_an_objective_is_learned(objective: str, base: Path, pairs: Path, tmp_path: Path) -> None:
    """By the command; the policy starts as the reference, and then prefers the chosen completions."""
    flags = ["--objective", objective, "--seq-len", 96, "--batch-tokens", 768, "--lr", 4e-3, "--steps", 12]
    arguments = ["train", base, "--data", pairs, "--out", tmp_path / "out", *flags, "--set", "report_every=1"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    first, last = (metrics(tmp_path / "out", "loss")[i] for i in (0, -1))
    assert last < 0.8 * first
    margins = [metrics(tmp_path / "out", f"rewards/{side}") for side in ("chosen", "rejected")]
    assert margins[0][-1] - margins[1][-1] > margins[0][0] - margins[1][0]
    if objective in ("dpo", "ipo", "kto"):
        start = {"dpo": math.log(2), "ipo": 25.0, "kto": 0.5}[objective]  # of a log-ratio of 0
        assert first == pytest.approx(start, rel=1e-4)
        assert margins[0][0] == pytest.approx(0, abs=1e-4)
        assert (tmp_path / "out" / REFERENCE).is_file()
    assert "validation loss" in result.stderr and "rewards/margins" in result.stderr
    lm.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "dpo", "loss_type": ("hinge", "sft")},
        {"objective": "orpo"},
        {"objective": "cpo", "cpo_alpha": 3.0},
        {"objective": "kto", "loss_type": "apo_zero_unpaired", "desirable_weight": 2.0},
        {"objective": "kto"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_the_size_of_micro_batches_changes_nothing(
    settings: dict[str, Any], base: Path, pairs: Path, tmp_path: Path
) -> None:
    """Terms by token and by pair each have their own divisor. KTO's KL is of a micro-batch, so only its first step,
    in which it is 0, is the same."""
    recipe = recipe_for(base, pairs, dtype="float64", steps=2, **settings)
    for name, size in (("small", 192), ("large", 768)):
        fine_tune(recipe.changed({"micro_batch_tokens": size}), tmp_path / name)
    count = 1 if settings == {"objective": "kto"} else 2
    one, two = ([loss for loss, *_ in losses(tmp_path / name)][:count] for name in ("small", "large"))
    found = [each[1:] for each in losses(tmp_path / "small")][:count]
    wanted = [each[1:] for each in losses(tmp_path / "large")][:count]
    assert one == two and np.asarray(found) == pytest.approx(np.asarray(wanted), rel=1e-9)


@pytest.mark.parametrize("settings", [{"objective": "kto"}, {"objective": "dpo", "lora_rank": 3}])
def test_a_run_resumes_with_the_reference_of_its_start(
    settings: dict[str, Any], base: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and without another pass of the reference; with other settings it is computed again."""
    recipe, out, said = recipe_for(base, pairs, **settings), tmp_path / "out", list[str]()
    fine_tune(recipe, tmp_path / "whole")
    count, on_device = 0, training_step.on_device

    def stops(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 8:
            raise KeyboardInterrupt
        return on_device(*arguments)

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(training_step, "on_device", stops)
        fine_tune(recipe, out)
    with monkeypatch.context() as broken:
        broken.setattr(reference, "completion_log_probs", None)
        assert fine_tune(recipe, out, resume=True, console=Console(said.append)).finished
    assert "reference log-probabilities: as computed at the start of the run" in said
    assert losses(out) == losses(tmp_path / "whole") and equal_heads(out, tmp_path / "whole")
    assert metrics(out, "validation_rewards/margins") == metrics(tmp_path / "whole", "validation_rewards/margins")

    values = np.load(out / REFERENCE)["log_probs"]
    (out / REFERENCE).write_bytes(b"PK damaged")
    fine_tune(recipe.changed({"steps": 8}), out, resume=True)
    np.testing.assert_array_equal(np.load(out / REFERENCE)["log_probs"], values)
    if "lora_rank" in settings:  # the adapter that is trained has no part in the reference
        plain = tmp_path / "plain"
        fine_tune(recipe_for(base, pairs, steps=1, objective="dpo"), plain)
        np.testing.assert_allclose(np.load(plain / REFERENCE)["log_probs"], values, rtol=1e-6)
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "whole", other)
    fine_tune(recipe.changed({"seq_len": 64, "batch_tokens": 512, "micro_batch_tokens": 256}), other, overwrite=True)
    assert not np.array_equal(np.load(other / REFERENCE)["log_probs"], values, equal_nan=True)


def test_a_run_that_ended_before_its_first_step_may_start_again(
    base: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that is wrong is an error before the reference is computed; a reference that is there is used."""
    recipe, out, said = recipe_for(base, pairs, objective="dpo", steps=1), tmp_path / "out", list[str]()
    with pytest.raises(InputError, match="matches no trained parameter"):
        fine_tune(recipe.changed({"learning_rate_patterns": {"nothing": 1.0}}), out)
    assert not out.exists()
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(run, "prepare", interrupted)
        fine_tune(recipe, out)
    assert [path.name for path in out.iterdir()] == [REFERENCE]
    assert fine_tune(recipe, out, console=Console(said.append)).finished
    assert "reference log-probabilities: as computed at the start of the run" in said
    with pytest.raises(CheckpointError, match="holds checkpoints of a run"):
        fine_tune(recipe, out)


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("settings", [{"optimizer": "muon8bit"}, {"objective": "dpo", "lora_rank": 2}], ids=str)
def test_another_default_device(settings: dict[str, Any], base: Path, pairs: Path, data: Path, tmp_path: Path) -> None:
    """Runs make their data and numbers on the CPU; meta stands for a GPU here."""
    recipe = recipe_for(base, pairs if "objective" in settings else data, steps=2, max_bad_lines=1, **settings)
    fine_tune(recipe, tmp_path / "plain", device="cpu")
    torch.set_default_device("meta")
    try:
        dry_run(recipe, device="cpu")
        fine_tune(recipe, tmp_path / "out", device="cpu")
        assert torch.zeros(()).is_meta
    finally:
        torch.set_default_device(None)
    assert losses(tmp_path / "out") == losses(tmp_path / "plain") and equal_heads(tmp_path / "out", tmp_path / "plain")


def test_the_reference_is_of_the_dtype_of_its_computation(base: Path, pairs: Path) -> None:
    """A run that starts over with another one does not take the values that are there."""
    recipe, found = recipe_for(base, pairs, objective="dpo", date="2026-01-01"), list[str]()
    for parallel in ({}, {"shard": 2}, {"param_dtype": "bfloat16"}, {"param_dtype": "float32"}):
        found.append(reference._fingerprint(dry_run(recipe.changed({"parallel": parallel}), gpus=2).plan))
    assert found[0] == found[1] and len({*found}) == 3


def test_the_reference_of_random_weights_is_of_their_seed(base: Path, pairs: Path, tmp_path: Path) -> None:
    """A run that starts over with another seed does not take the log-probabilities of the first one's weights."""
    config, values = tmp_path / "config", list[Any]()
    shutil.copytree(base, config, ignore=shutil.ignore_patterns("*.safetensors*"))
    for seed in (0, 1):
        recipe = recipe_for(config, pairs, objective="dpo", steps=1, seed=seed)
        fine_tune(recipe, tmp_path / "out", overwrite=seed > 0)
        values.append(np.load(tmp_path / "out" / REFERENCE)["log_probs"])
    assert metrics(tmp_path / "out", "loss") == pytest.approx([math.log(2)], rel=1e-4)
    assert not np.array_equal(*values, equal_nan=True)


def test_distillation(base: Path, data: Path, teacher: Path, tmp_path: Path) -> None:
    """The loss is the divergence of whole distributions, by torch alone; the student becomes the teacher."""
    settings: dict[str, Any] = {"objective": "distill", "teacher": teacher, "max_bad_lines": 1, "temperature": 2.0}
    recipe = recipe_for(base, data, **settings, beta=0.0, steps=60, learning_rate=1e-2)
    outcome = fine_tune(recipe, tmp_path / "out")
    found = metrics(tmp_path / "out", "loss")
    evaluation: Any = outcome.evaluation
    assert found[-1] < 0.3 * found[0] and evaluation.loss < 0.3 * found[0]

    model, other = lm.from_pretrained(base), lm.from_pretrained(teacher)
    objective: Any = objective_of(recipe, model)
    ids = torch.randint(3, 40, (1, 12))
    labels, bounds = ids.clone(), torch.tensor([0, 5, 12], dtype=torch.int32)
    labels[0, :3] = -100
    loss = objective.trainable(input_ids=ids, labels=labels, cu_seqlens=bounds).loss
    p, q = (
        (each(ids, cu_seqlens=bounds).logits[0] / 2.0).log_softmax(-1) for each in (model, other)
    )  # fmt: skip
    kept = [2, 3, *range(5, 11)]  # tokens whose next token has a label, in the same document
    assert loss.item() == pytest.approx((q.exp() * (q - p)).sum(-1)[kept].mean().item(), rel=1e-5)


def test_a_quantised_head_cannot_be_distilled(base: Path, data: Path, teacher: Path) -> None:
    recipe = recipe_for(base, data, objective="distill", teacher=teacher)
    student = lm.from_pretrained(base, quantize="int4", quantize_head="int4")
    with pytest.raises(InputError, match="distill: the student's head is a LMHead"):
        objective_of(recipe, student)


def test_a_teacher_with_other_tokens_is_an_error(base: Path, data: Path, teacher: Path, tmp_path: Path) -> None:
    other = shutil.copytree(teacher, tmp_path / "teacher")
    path = other / "tokenizer.json"
    text = json.loads(path.read_text())
    token, index = next(iter(text["model"]["vocab"].items()))
    text["model"]["vocab"] = {**text["model"]["vocab"], token: index + 1}
    path.write_text(json.dumps(text))
    recipe = recipe_for(base, data, objective="distill", teacher=other, max_bad_lines=1)
    with pytest.raises(ConfigError, match=r"teacher: token .* has id \d+ in the student's tokenizer"):
        fine_tune(recipe, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is the run's teacher, which its result would replace"):
        fine_tune(recipe, other, overwrite=True)


LOSSES = """
import torch

def margin(log_probs, mask, ref_log_probs, beta=0.1):
    chosen, rejected = ((log_probs * mask).sum(1) - ref_log_probs).chunk(2)
    return -torch.nn.functional.logsigmoid(beta * (chosen - rejected)), {"own": chosen - rejected}

def noisy(log_probs, mask):
    return -log_probs * torch.rand_like(log_probs)

def mean(log_probs, mask, **fields):
    return -(log_probs * mask).sum() / mask.sum()

def tokens(log_probs, mask):
    return -log_probs

def asks(log_probs, advantages):
    return log_probs

def detached(log_probs, mask):
    return -log_probs.detach().mean()

def flat(log_probs):
    return -log_probs.flatten()

def number(log_probs):
    return 0.5

def wide(log_probs):
    return -log_probs.mean(), {"wide": log_probs.sum(1)}

def word(log_probs):
    return -log_probs.mean(), {"word": "good"}

def taken(log_probs):
    return -log_probs.mean(), {"loss": 1.0}

calls = 0

def sometimes(log_probs):
    global calls
    calls += 1
    return -log_probs.mean(), {"first": 1.0} if calls == 1 else {"later": torch.tensor(2)}

constant = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of losses in the current folder."""
    name = f"losses_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(LOSSES)
    (tmp_path / f"{name}_broken.py").write_text("raise RuntimeError('no')")
    monkeypatch.chdir(tmp_path)
    return name


def test_a_loss_of_a_user(own: str, base: Path, pairs: Path, data: Path, tmp_path: Path) -> None:
    """DPO and cross entropy, written as a user does: the same runs."""
    runs = {
        "dpo": recipe_for(base, pairs, objective="dpo"),
        "margin": recipe_for(base, pairs, objective="dpo", loss=f"{own}:margin"),
        "sft": recipe_for(base, data, max_bad_lines=1),
        "tokens": recipe_for(base, data, max_bad_lines=1, loss=f"{own}:tokens"),
        "mean": recipe_for(base, data, max_bad_lines=1, loss=f"{own}:mean"),
    }
    for name, recipe in runs.items():
        fine_tune(recipe, tmp_path / name)
    for one, other in (("margin", "dpo"), ("tokens", "sft"), ("mean", "sft")):
        assert metrics(tmp_path / one, "loss") == pytest.approx(metrics(tmp_path / other, "loss"), rel=1e-5)
    margins = np.array(metrics(tmp_path / "dpo", "validation_rewards/margins"))
    assert np.array(metrics(tmp_path / "margin", "validation_own")) * 0.1 == pytest.approx(margins, rel=1e-4)


def test_random_numbers_of_a_loss_are_those_of_the_seed(own: str, base: Path, data: Path, tmp_path: Path) -> None:
    """The same recipe and data give the same run, whatever has drawn numbers before it; another seed another one."""
    found = []
    for seed in (0, 0, 1):
        torch.rand(len(found))
        recipe = recipe_for(base, data, loss=f"{own}:noisy", seed=seed, max_bad_lines=1, steps=2)
        state = torch.get_rng_state()
        fine_tune(recipe, tmp_path / str(len(found)))
        assert torch.equal(torch.get_rng_state(), state)  # those of the program go on
        found.append(losses(tmp_path / str(len(found))))
    assert found[0] == found[1] != found[2]


def test_metrics_of_some_micro_batches(own: str, base: Path, pairs: Path, tmp_path: Path) -> None:
    """They are means over the micro-batches that have them."""
    recipe = recipe_for(base, pairs, objective="orpo", loss=f"{own}:sometimes", validation_fraction=0, steps=2)
    fine_tune(recipe, tmp_path / "out")
    assert metrics(tmp_path / "out", "first") == [1.0] and metrics(tmp_path / "out", "later") == [2.0, 2.0]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("margin", "loss: must be module:name"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("{own}_broken:f", "importing .*_broken failed: RuntimeError: no"),
        ("{own}:nothing", "nothing does not exist in"),
        ("sys:nothing", "sys:nothing: nothing does not exist in sys"),  # a module without a file
        ("{own}:constant", ":constant: is not a function"),
        ("{own}:asks", "has a parameter 'advantages'; it is called by name with log_probs, mask, "),
        ("{own}:detached", "returns a loss without a gradient"),
        ("{own}:flat", r"must return a loss for each item, \(\d+,\), or their mean"),
        ("{own}:number", "must return a tensor"),
        ("{own}:wide", r"the metric 'wide' must be a number, or one for each item, \((\d+),\); got shape \(\d+,\)"),
        ("{own}:word", r"the metric 'word' must be a number, .*; got 'good'"),
        ("{own}:taken", "returns a metric 'loss', a name of the run's own; give it another name"),
    ],
)
def test_a_loss_that_cannot_be_used_is_an_error(
    loss: str, message: str, own: str, base: Path, pairs: Path, tmp_path: Path
) -> None:
    recipe = recipe_for(base, pairs, objective="orpo", loss=loss.format(own=own), validation_fraction=0)
    with pytest.raises((ConfigError, InputError), match=message):
        fine_tune(recipe, tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "dpo", "beta": 0.3}, ""),
        ({"objective": "dpo", "label_smoothing": 0.3}, "^label_smoothing: has no effect with the loss .*:margin"),
        ({"objective": "cpo", "loss_type": "hinge"}, "^loss_type: has no effect with the loss .*:margin"),
        ({"objective": "kto", "loss_type": "apo_zero_unpaired"}, ""),  # the records that are read depend on it
        ({"objective": "orpo"}, ""),
    ],
)
def test_settings_that_a_loss_of_a_user_does_not_take(
    settings: dict[str, Any], message: str, own: str, base: Path, pairs: Path, tmp_path: Path
) -> None:
    """They are an error, except in a run of an earlier version that resumes."""
    recipe = recipe_for(base, pairs, loss=f"{own}:margin", **settings)
    for new in (None, tmp_path / "new"):
        with pytest.raises(ConfigError, match=message) if message else nullcontext():
            check_objective(recipe, resumed=new)
    (tmp_path / "recipe.yaml").touch()
    check_objective(recipe, resumed=tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"objective": "orpo", "simpo_gamma": 1.0},
            "simpo_gamma: is a setting of the objective simpo; otherwise leave it out",
        ),
        ({"beta": 0.1}, "beta: is a setting of the objectives dpo, ipo, "),
        ({"objective": "dpo", "loss_type": "sigmoidal"}, "loss_type must be one of sigmoid, "),
        ({"objective": "dpo", "discopop_tau": 0.1}, "loss_type 'sigmoid' has no discopop_tau"),
        ({"objective": "dpo", "loss_weights": (1.0, 2.0)}, "loss_weights: has 2 numbers for 1 loss_type"),
        ({"objective": "dpo", "f_divergence_type": "kl"}, "f_divergence_type must be one of reverse_kl"),
        ({"objective": "cpo", "loss_type": ("hinge", "ipo")}, "loss_type: the objective cpo has one loss type"),
        ({"objective": "kto", "loss_type": "sigmoid"}, "loss_type must be one of kto, apo_zero_unpaired"),
        ({"objective": "dpo", "beta": 0.0}, "beta must be positive"),
        ({"objective": "distill", "teacher": "x", "beta": 2.0}, "beta: must be from 0 to 1"),
        ({"objective": "distill"}, "teacher: the objective distill needs a teacher"),
        ({"objective": "dpo", "excess_length_strategy": "split"}, "preference data cannot be split"),
        ({"objective": "dpo", "packing_strategy": "bfd"}, "packing_strategy: is for texts and chats"),
        ({"objective": "dpo", "batch_tokens": 96, "micro_batch_tokens": 96}, "twice seq_len .* sequences of a pair"),
        ({"objective": "sft"}, '"chosen" is a field of preference data: .* --objective dpo'),
    ],
)
def test_settings_that_contradict_one_another(
    settings: dict[str, Any], message: str, base: Path, pairs: Path, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, InputError), match=message):
        fine_tune(recipe_for(base, pairs, **settings), tmp_path / "out")


def test_the_learning_rate_of_preference_data() -> None:
    """TRL's, if none is given; whatever the order of settings."""
    recipe = FineTuningRecipe().changed({"objective": "dpo"})
    assert recipe.learning_rate == 1e-6 and recipe.changed({"objective": "sft"}).learning_rate == 2e-5
    assert recipe.changed({"lora_rank": 4}).learning_rate == pytest.approx(1e-5)
    assert recipe.changed({"learning_rate": 2e-5}).changed({"steps": 3}).learning_rate == 2e-5
    assert FineTuningRecipe(**recipe.settings()).learning_rate == 1e-6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=(pytest.mark.gpu, pytest.mark.kernels))])
@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto", "distill"])
def test_steps_in_cuda_graphs(
    objective: str, device: str, base: Path, pairs: Path, data: Path, teacher: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With a reference, without one, by completion, and by tokens. Bit for bit those of the same padded batches without
    a graph; and, but for the order of sums, of batches without
    padding. On a CPU the recorded function runs itself."""
    graphs: list[GraphStep] = []

    def graphed(step: EagerStep, *_: Any) -> GraphStep:
        graphs.append(GraphStep(step))
        return graphs[-1]

    def padded(step: EagerStep, *_: Any) -> Any:
        pad = GraphStep(step)._pad

        def take(parts: Any, **options: Any) -> Any:
            with as_recorded():  # all tokens go through the head, as in a graph
                return step(pad(parts), options)

        return take

    make_step: dict[str, Any] = {"plain": cuda_graph.make_step, "padded": padded, "graph": graphed}
    source = {"teacher": str(teacher), "max_bad_lines": 1} if objective == "distill" else {}
    options: dict[str, Any] = {"objective": objective, "learning_rate": 5e-3, "steps": 2, "validation_fraction": 0.0}
    options |= {"batch_tokens": 384, "micro_batch_tokens": 192, **source}

    def run(way: str, dtype: str) -> Any:
        monkeypatch.setattr("ligermodels.training.loop.make_step", make_step[way])
        recipe = recipe_for(base, data if source else pairs, dtype=dtype, cuda_graph="off", **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error", GraphWarning)
            fine_tune(recipe, tmp_path / dtype / way, device=device)
        return losses(tmp_path / dtype / way)

    found = run("graph", "bfloat16")
    assert len(found) == 2 and found[0] != found[-1] and found == run("padded", "bfloat16")
    assert equal_heads(tmp_path / "bfloat16/graph", tmp_path / "bfloat16/padded")
    if device == "cpu":
        plain, graph = (np.asarray([each[1:3] for each in run(way, "float64")]) for way in ("plain", "graph"))
        assert graph == pytest.approx(plain, rel=1e-7)
    assert all(len(each._graphs) >= 1 for each in graphs)
    if objective != "distill":
        assert all(len(each._graphs) == 1 for each in graphs)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"objective": "dpo", "loss_type": ("sigmoid", "aot")}, "loss_type aot sorts the pairs of a batch"),
        ({"objective": "orpo", "loss": "own:margin"}, "a loss of your own may do what a graph cannot record"),
    ],
)
def test_objectives_without_cuda_graphs_are_named(
    settings: dict[str, Any], reason: str, own: str, base: Path, pairs: Path
) -> None:
    settings = {name: f"{own}:margin" if name == "loss" else value for name, value in settings.items()}
    model = objective_of(recipe_for(base, pairs, **settings), lm.from_pretrained(base)).trainable
    assert refusal(EagerStep(model, FusedAdamW(model.parameters())), []).startswith(reason)


def test_padding_of_preference_data() -> None:
    """By hand: two pairs of 2, 3, 1 and 2 tokens; sizes grow and never shrink."""
    pad = ExamplePadding(2)
    part = {
        "input_ids": torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]),
        "labels": torch.tensor([[-100, 2, -100, 4, 5, -100, -100, 8]]),
        "cu_seqlens": torch.tensor([0, 2, 5, 6, 8], dtype=torch.int32),
        "targets": torch.tensor([[0, -1], [2, 3], [-1, -1], [6, -1]]),
        "completion_mask": torch.tensor([[True, False], [True, True], [False, False], [True, False]]),
        "examples": torch.tensor([[0, 0], [1, 0]]),
        "ref_log_probs": torch.tensor([0.1, 0.2, 0.3, 0.4]),
    }
    longer = {**part, "input_ids": torch.zeros(1, 17, dtype=torch.long), "labels": torch.full((1, 17), -100)}
    longer["cu_seqlens"] = torch.tensor([0, 2, 5, 6, 17], dtype=torch.int32)
    assert pad([part])[0]["input_ids"].tolist() == part["input_ids"].tolist()
    found = pad([longer, part])[1]
    assert found["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8] + 10 * [0]]
    assert found["labels"].tolist() == [[-100, 2, -100, 4, 5, -100, -100, 8] + 10 * [-100]]
    assert found["cu_seqlens"].tolist() == [0, 2, 5, 5, 5, 6, 8, 8, 18] and found["cu_seqlens"].dtype == torch.int32
    no, none = [False, False], [-1, -1]
    assert found["targets"].tolist() == [[0, -1], [2, 3], none, none, none, [6, -1], none, none]
    assert found["completion_mask"].tolist() == [[True, False], [True, True], no, no, no, [True, False], no, no]
    assert found["ref_log_probs"].tolist() == pytest.approx([0.1, 0.2, 0, 0, 0.3, 0.4, 0, 0])
    assert found["examples"].tolist() == [[0, 0], [1, 0], [0, 0], [0, 0]]
