"""The objective grpo: samples, rewards, forms of prompts, resuming, references, and errors with names."""

import json
import shutil
import sys
from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import equal_heads, losses, with_decoder
from typer.testing import CliRunner

import ligermodels as lm
from ligermodels.adapt.quantize import quantize
from ligermodels.cli import app
from ligermodels.data.packing import Prefetcher
from ligermodels.data.prompt_batches import PromptBatches, PromptDocuments
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.generation.sampling import sample, warp
from ligermodels.training import Console, FineTuningRecipe, dry_run, fine_tune
from ligermodels.training import step as training_step
from ligermodels.training.objectives import Objective, objective_of
from ligermodels.training.preference import by_sequence
from ligermodels.training.prepare_base import prepare_lora
from ligermodels.training.rewards import Reward

pytestmark = pytest.mark.usefixtures("one_thread")

USER, TOKEN = {"role": "user", "content": "Hi"}, 60
REWARDS = f"""
CALLS = []

def share(completion_ids, **fields):
    return [ids.count({TOKEN}) / len(ids) for ids in completion_ids]

def length(completions, completion_ids):
    return [len(ids) % 5 - 0.1 * ids[0] for ids in completion_ids]

def seen(prompts, completions, completion_ids, answer, **columns):
    CALLS.append(dict(prompts=prompts, completions=completions, answer=answer, **columns))
    return [float(len(ids)) for ids in completion_ids]

def sometimes(prompts, answer):
    return [None if a is None else float(i % 3) for i, a in enumerate(answer)]

async def later(prompts): ...
def of_trl(prompts, trainer_state): ...
def by_place(prompts, /): ...
def two(prompts): return [1.0, 2.0]
def nan(prompts): return [float("nan")] * len(prompts)
def large(prompts): return [1e39] * len(prompts)
def words(prompts): return ["good"] * len(prompts)
def number(prompts): return 1.0
def fails(prompts): return 1 / 0
def tensor(prompts): return __import__("torch").arange(len(prompts))
class Class: ...
constant = 3
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of a module of reward functions that can be imported."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "rewards_of_test.py").write_text(REWARDS)
    sys.path.insert(0, str(folder))
    yield "rewards_of_test"
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def spoken(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_decoder(base, tmp_path_factory.mktemp("spoken") / "model")


@pytest.fixture(scope="module")
def ending(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model in which every third token ends a text, so that completions have all lengths."""
    folder = shutil.copytree(base, tmp_path_factory.mktemp("ending") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [*range(0, config["vocab_size"], 3)]}))
    return folder


def written(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def texts(path: Path, count: int = 12) -> Path:
    """Prompts of unequal lengths; every third has no answer."""
    records = [{"prompt": "Hello there" + " you" * (i % 5), "answer": i if i % 3 else None} for i in range(count)]
    return written(path, records)


def recipe_for(base: Path, data: Path, functions: Any, **changes: Any) -> FineTuningRecipe:
    """Four prompts with three completions in a step, in two micro-batches."""
    settings = {
        "base": base, "data": data, "objective": "grpo", "reward": functions, "num_generations": 3, "seq_len": 48,
        "max_completion_length": 6, "batch_tokens": 12 * 48, "micro_batch_tokens": 6 * 48, "validation_fraction": 0.0,
        "learning_rate": 5e-3, "steps": 6, "report_every": 1, "checkpoint_every": 1, "date": "2024-07-26",
    }  # fmt: skip
    return FineTuningRecipe(**{**settings, **changes})


def batches_of(recipe: FineTuningRecipe, model: lm.CausalLM, count: int) -> tuple[Objective, list[Any]]:
    """The objective, and its first micro-batches; the model is not trained."""
    room = recipe.seq_len - recipe.max_completion_length
    documents = PromptDocuments.of_checkpoint(Path(str(recipe.base)), recipe.data, most_tokens=room)
    prompts: Any = PromptBatches(documents, seq_len=recipe.row_tokens, batch_size=recipe.micro_batch_size)
    prefetcher, objective = Prefetcher(prompts), objective_of(recipe, model)
    rollouts = objective.batches(prefetcher)
    found = list(islice(rollouts, count))
    rollouts.close()
    return objective, found


def metrics(out: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def test_rewards_rise(base: Path, rewards: str, tmp_path: Path) -> None:
    """By the command, for a reward that asks for a token; metrics go to the console and to the folder."""
    flags = [
        "--objective", "grpo", "--reward", f"{rewards}:share", "--num-generations", 8, "--max-completion-length", 5,
        "--seq-len", 32, "--batch-tokens", 512, "--lr", 2e-2, "--steps", 24, "--set", "report_every=1",
        "--validation-fraction", 0.2, "--beta", 0.01,
    ]  # fmt: skip
    arguments = ["train", base, "--data", texts(tmp_path / "prompts.jsonl"), "--out", tmp_path / "out", *flags]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    found = metrics(tmp_path / "out", "reward")
    assert len(found) == 24 and sum(found[:3]) / 3 < 0.1 and sum(found[-3:]) / 3 > 0.5
    assert metrics(tmp_path / "out", "validation_reward")[-1] > 0.4
    assert metrics(tmp_path / "out", "kl")[0] == 0 < metrics(tmp_path / "out", "kl")[-1]
    for name in ("completions/mean length", "completions/clipped ratio", "reward std", "kl", "clip ratio/region mean"):
        assert name in result.stderr, name
    assert "12 sequences" not in result.stderr and "2 sequences of a prompt, with 8 completions each" in result.stderr
    lm.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.1), (torch.float32, 5e-6), (torch.float64, 1e-13)])
def test_log_probabilities_of_sampling_are_those_of_training(
    dtype: torch.dtype, most: float, ending: Path, rewards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding with a cache and left padding, and the packed pass of training, at a temperature; and the ratio of the
    first step is 1."""
    steps: list[torch.Tensor] = []

    def recorded(logits: torch.Tensor, **options: Any) -> torch.Tensor:
        tokens = sample(logits, **options)
        kept = logits / 0.7 if dtype == torch.float64 else warp(logits.float(), temperature=options["temperature"])
        steps.append(kept.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
        return tokens

    monkeypatch.setattr(sys.modules["ligermodels.generation.generate"], "sample", recorded)
    data = texts(tmp_path / "prompts.jsonl")
    settings: dict[str, Any] = {"max_completion_length": 12, "micro_batch_tokens": None, "num_iterations": 2}
    recipe = recipe_for(ending, data, f"{rewards}:length", temperature=0.7, **settings)
    model = lm.from_pretrained(ending, dtype=dtype)
    objective, (batch, _) = batches_of(recipe, model, 2)
    sampled = torch.stack(steps, 1)
    row = {name: batch[name] for name in ("input_ids", "labels", "cu_seqlens", "targets")}
    trainable: Any = objective.trainable
    found, mask, _ = trainable.token_log_probs(**row)
    assert found.dtype == torch.promote_types(dtype, torch.float32) and len({*batch["cu_seqlens"].diff().tolist()}) > 3
    difference = (found - sampled[:, : mask.shape[1]])[mask].abs().max().item()
    print(f"largest difference of log-probabilities, {dtype}: {difference:.1e}")
    assert difference < most
    assert torch.equal(batch["old_log_probs"][mask].to(found.dtype), found.detach()[mask])  # the ratio is exactly 1


@pytest.mark.parametrize(
    "settings",
    [
        {"num_iterations": 3, "beta": 0.1, "validation_fraction": 0.3, "evaluate_every": 2},
        {"num_iterations": 2, "beta": 0.1, "lora_rank": 2, "temperature": 0.8, "lora_dropout": 0.1},
        {"num_iterations": 2, "sampling_quantize": "int4", "dtype": "float32"},
    ],
    ids=["iterations", "lora", "quantised"],
)
def test_a_run_resumes_with_the_same_samples(
    settings: dict[str, Any], base: Path, rewards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, also between two steps on the same samples."""
    recipe = recipe_for(base, texts(tmp_path / "prompts.jsonl"), f"{rewards}:length", **settings)
    out, count, on_device = tmp_path / "out", 0, training_step.on_device
    fine_tune(recipe, tmp_path / "whole")

    def stops(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 8:  # of the fourth step
            raise KeyboardInterrupt
        return on_device(*arguments)

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(training_step, "on_device", stops)
        fine_tune(recipe, out)
    said: list[str] = []
    torch.manual_seed(1)
    assert fine_tune(recipe, out, resume=True, console=Console(said.append)).finished
    assert "resuming after step 3 of 6" in said
    assert losses(out) == losses(tmp_path / "whole") and equal_heads(out, tmp_path / "whole")
    for name in ("reward", "validation_reward"):
        assert metrics(out, name) == metrics(tmp_path / "whole", name)
    assert len({loss for _, loss, _ in losses(out)}) == 6


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_the_size_of_micro_batches_changes_nothing(loss_type: str, ending: Path, rewards: str, tmp_path: Path) -> None:
    data = texts(tmp_path / "prompts.jsonl")
    settings: dict[str, Any] = {"loss_type": loss_type, "num_iterations": 2, "mask_truncated_completions": True}
    recipe = recipe_for(ending, data, f"{rewards}:length", dtype="float64", steps=2, **settings)
    for name, size in (("small", 3 * 48), ("large", 12 * 48)):
        fine_tune(recipe.changed({"micro_batch_tokens": size}), tmp_path / name)
    small, large = (torch.tensor(losses(tmp_path / name)) for name in ("small", "large"))
    torch.testing.assert_close(small, large, rtol=1e-9, atol=1e-12)
    assert small[0, 1].abs() > 1e-3 and 0 < metrics(tmp_path / "small", "completions/clipped_ratio")[0] < 1
    assert metrics(tmp_path / "small", "reward") == metrics(tmp_path / "large", "reward")


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 3, "learning_rate": 0.1}], ids=["all", "lora"])
def test_the_reference_is_the_base(settings: dict[str, Any], base: Path, rewards: str, tmp_path: Path) -> None:
    """Also after training, when the policy has left it."""
    recipe = recipe_for(base, texts(tmp_path / "prompts.jsonl"), f"{rewards}:length", beta=0.1, **settings)
    model = lm.from_pretrained(base, dtype=torch.float64)
    plain: Any = objective_of(recipe, lm.from_pretrained(base, dtype=torch.float64)).trainable
    prepare_lora(recipe, model)
    objective = objective_of(recipe, model)  # the reference is taken here
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    documents = PromptDocuments.of_checkpoint(base, recipe.data, most_tokens=42)
    prompts: Any = PromptBatches(documents, seq_len=recipe.row_tokens, batch_size=2)
    batch = next(objective.batches(Prefetcher(prompts)))
    row = {name: batch[name] for name in ("input_ids", "labels", "cu_seqlens", "targets")}
    wanted, mask, _ = plain.token_log_probs(**row)
    torch.testing.assert_close(batch["ref_log_probs"][mask], wanted.detach()[mask], rtol=1e-12, atol=1e-12)
    trainable: Any = objective.trainable
    out = trainable(**batch)
    total, number = out.metrics["kl"]
    assert (total / number).item() > 1e-4 and out.loss.requires_grad


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("int4", {}),
        ("float8", {"temperature": 0.7, "top_k": 9}),
        ("int4", {"lora_rank": 2}),
        ("int4", {"quantize_exclude": ["mlp.down", "decoder.blocks.0.mixer"]}),
    ],
)
def test_sampling_from_quantised_weights(
    kind: Any, settings: dict[str, Any], ending: Path, rewards: str, tmp_path: Path
) -> None:
    """The log-probabilities with which tokens were drawn are those of the current weights, rounded, also after an
    update; the trained model is not changed."""
    data = texts(tmp_path / "prompts.jsonl")
    recipe = recipe_for(ending, data, f"{rewards}:length", sampling_quantize=kind, **settings)
    model = lm.from_pretrained(ending, dtype=torch.float32)
    prepare_lora(recipe, model)
    objective = objective_of(recipe, model)
    documents = PromptDocuments.of_checkpoint(ending, recipe.data, most_tokens=42)
    prompts: Any = PromptBatches(documents, seq_len=recipe.row_tokens, batch_size=2)
    rollouts, before = objective.batches(Prefetcher(prompts)), list[torch.Tensor]()
    trainable: Any = objective.trainable
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        batch, _ = next(rollouts), next(rollouts)  # two micro-batches
        row = {name: batch[name] for name in ("input_ids", "labels", "cu_seqlens", "targets")}
        rounded = quantize(deepcopy(model), kind, exclude=recipe.quantize_exclude)
        found, mask = batch["sampler_log_probs"], row["targets"] >= 0
        wanted, _ = by_sequence(
            rounded.log_probs(
                row["input_ids"], row["labels"], cu_seqlens=row["cu_seqlens"], temperature=recipe.temperature or 1.0
            ).log_probs, row["labels"], row["targets"],
        )  # fmt: skip
        torch.testing.assert_close(found.float()[mask], wanted.detach()[mask], rtol=1e-5, atol=5e-6)
        plain, _, _ = trainable.token_log_probs(**row)
        assert (found - plain.detach())[mask].abs().max() > 1e-3 and "old_log_probs" not in batch
        before.append(found)
        out = trainable(**batch)
        total, number = out.metrics["sampling/sampling_logp_difference/mean"]
        assert (total / number).item() == pytest.approx((plain.detach() - found)[mask].abs().mean().item(), rel=1e-5)
    assert before[0].shape != before[1].shape or not torch.equal(*before)
    rollouts.close()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_iterations": 2, "beta": 0.1, "importance_sampling_clip_max": 1.01},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "mask_truncated_completions": True},
    ],
    ids=["dapo", "iterations", "cispo", "sequence"],
)
def test_truncated_importance_sampling(settings: dict[str, Any], ending: Path, rewards: str, tmp_path: Path) -> None:
    """Loss and gradients by the formula, in float64, on log-probabilities of the trained model."""
    data = texts(tmp_path / "prompts.jsonl")
    settings = {"importance_sampling_clip_max": 1.05, "micro_batch_tokens": None, **settings}
    recipe = recipe_for(ending, data, f"{rewards}:length", sampling_quantize="int4", **settings)
    model = lm.from_pretrained(ending, dtype=torch.float64)
    objective, (batch,) = batches_of(recipe, model, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    trainable: Any = objective.trainable
    out = trainable(**batch)
    out.loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()

    row = {name: batch[name] for name in ("input_ids", "labels", "cu_seqlens", "targets")}
    new, mask, _ = trainable.token_log_probs(**row)
    old = batch.get("old_log_probs", new.detach())
    exact = (old - batch["sampler_log_probs"]).exp()
    weights = exact.clamp(max=settings["importance_sampling_clip_max"])
    assert (weights[mask] < exact[mask]).any() and (weights[mask] < 1).any()
    advantages, count = batch["advantages"][:, None], mask.sum(1, keepdim=True)
    ratio = (new - old).exp()
    if settings.get("loss_type") == "cispo":
        losses = -weights * ratio.detach() * advantages * new
    else:
        if "importance_sampling_level" in settings:
            ratio = (((new - old) * mask).sum(1, keepdim=True) / count.clamp(min=1)).exp().expand_as(new)
        losses = -weights * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    if "beta" in settings:
        difference = batch["ref_log_probs"] - new
        losses = losses + 0.1 * (difference.exp() - difference - 1) * (new - old).exp()  # not weighted
    losses = torch.where(mask, losses, 0.0)
    of_sequences = (losses / count.clamp(min=1)).sum() / len(losses)
    wanted = of_sequences if settings.get("loss_type") == "grpo" else losses.sum() / count.sum()
    wanted.backward()
    torch.testing.assert_close(out.loss, wanted, rtol=1e-10, atol=1e-12)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-12)
    total, number = out.metrics["sampling/importance_sampling_ratio/mean"]
    assert (total / number).item() == pytest.approx(weights[mask].mean().item())


def test_truncated_completions_are_left_out(base: Path, rewards: str, tmp_path: Path) -> None:
    """With none left there is no gradient, and no error."""
    data = texts(tmp_path / "prompts.jsonl")
    options = {"mask_truncated_completions": True, "max_completion_length": 1, "loss_type": "grpo", "beta": 0.1}
    options |= {"sampling_quantize": "float8"}
    recipe = recipe_for(base, data, f"{rewards}:length", **options)
    objective, (batch, _) = batches_of(recipe, lm.from_pretrained(base), 2)
    trainable: Any = objective.trainable
    assert (batch["labels"] == -100).all() and batch["advantages"].any()
    assert trainable.num_targets(batch["labels"], cu_seqlens=batch["cu_seqlens"]).tolist() == [6, 0]
    fine_tune(recipe.changed({"steps": 1}), tmp_path / "out")
    assert [values[1:] for values in losses(tmp_path / "out")] == [(0.0, 0.0)]
    assert metrics(tmp_path / "out", "completions/clipped_ratio") == [1.0]


def test_texts_and_their_columns(spoken: Path, rewards: str, tmp_path: Path) -> None:
    module = __import__(rewards)
    module.CALLS.clear()
    data = texts(tmp_path / "prompts.jsonl", 4)
    recipe = recipe_for(spoken, data, f"{rewards}:seen", seed=1)
    _, batches = batches_of(recipe, lm.from_pretrained(spoken), 2)
    (call,) = module.CALLS
    assert call.keys() == {"prompts", "completions", "answer"}
    assert call["prompts"][:6] == ["Hello there"] * 3 + ["Hello there you"] * 3
    assert call["answer"] == [None] * 3 + [1] * 3 + [2] * 3 + [None] * 3
    tokenizer, bounds = lm.Tokenizer(spoken), batches[0]["cu_seqlens"].tolist()
    for number, completion in enumerate(call["completions"][:6]):
        ids = batches[0]["input_ids"][0, bounds[number] : bounds[number + 1]].tolist()
        prompt = tokenizer.encode(call["prompts"][number])
        assert ids[: len(prompt)] == prompt and completion == tokenizer.decode(ids[len(prompt) :])


def test_chats(spoken: Path, rewards: str, tmp_path: Path) -> None:
    """Completions are turns of the assistant, and end at the end of a turn; a record has the fields of a chat."""
    module = __import__(rewards)
    module.CALLS.clear()
    records: list[dict[str, Any]] = [
        {"prompt": [USER], "answer": "a"},
        {"prompt": [USER, {"role": "assistant", "content": "Hello"}, USER], "system": "be brief", "answer": "b"},
    ]
    data = written(tmp_path / "chats.jsonl", records)
    recipe = recipe_for(spoken, data, f"{rewards}:seen", seq_len=96, micro_batch_tokens=576)
    _, (batch,) = batches_of(recipe, lm.from_pretrained(spoken), 1)
    (call,) = module.CALLS
    assert call["prompts"] == [record["prompt"] for record in records for _ in range(3)]
    assert call["system"] == [None] * 3 + ["be brief"] * 3
    assert all(len(turns) == 1 and turns[0]["role"] == "assistant" for turns in call["completions"])
    documents = PromptDocuments.of_checkpoint(spoken, [data], most_tokens=90)
    text = documents.template.render(
        [{"role": "system", "content": "be brief"}, *records[1]["prompt"]], add_generation_prompt=True
    )
    ids, bounds = batch["input_ids"][0].tolist(), batch["cu_seqlens"].tolist()
    prompt = documents.tokenizer.encode_with_offsets(text)[0]
    assert text.rstrip().endswith("assistant") and ids[bounds[3] : bounds[3] + len(prompt)] == prompt
    end = documents.tokenizer.backend.token_to_id("<|im_end|>")
    assert end in documents.end_ids


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"text": "Hi"}], 'prompts.jsonl:1: has no "prompt", a text or a list of turns.*its fields are: text'),
        ([{"prompt": ""}], 'has no "prompt"'),
        ([{"prompt": "Hi"}, {"prompt": [USER]}], '"prompt" is a text, and other records have chats'),
        ([{"prompt": [USER, {"role": "assistant", "content": "Hi"}]}], "ends with a turn of the assistant"),
        ([{"prompt": "Hi", "system": "be brief"}], '"system" is for chats, and "prompt" is a text'),
        ([{"prompt": "Hi", "image": "a.png"}], '"image" is not text'),
        ([{"prompt": "Hi" * 99}], "nothing to learn in any of the 1 documents: give shorter prompts"),
    ],
)
def test_unusable_prompts_are_named(
    records: list[dict[str, Any]], message: str, base: Path, rewards: str, tmp_path: Path
) -> None:
    recipe = recipe_for(base, written(tmp_path / "prompts.jsonl", records), f"{rewards}:share")
    with pytest.raises(InputError, match=message):
        fine_tune(recipe.changed({"epochs": 1}), tmp_path / "out")


def test_long_prompts(base: Path, rewards: str, tmp_path: Path) -> None:
    """They are left out and counted, or are an error; they are never cut."""
    data = written(tmp_path / "prompts.jsonl", [{"prompt": "Hello" * count} for count in (1, 60, 2)])
    recipe, said = recipe_for(base, data, f"{rewards}:share").changed({"epochs": 1}), list[str]()
    run = dry_run(recipe, console=Console(said.append))
    assert run.epoch.sequences == 2 and run.plan.steps == 1
    assert any("more than seq_len less max_completion_length (42) tokens: left out" in message for message in said)
    with pytest.raises(InputError, match=r"prompts.jsonl:2: the prompt has 60 tokens, more than .* is 'raise'"):
        dry_run(recipe.changed({"excess_length_strategy": "raise", "max_bad_lines": 3}))
    text = tmp_path / "book.txt"
    text.write_text("Hello")
    with pytest.raises(InputError, match='is a text, and the objective is for prompts: give records with a "prompt"'):
        dry_run(recipe.changed({"data": text}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "none does not exist in"),
        ("later", "is asynchronous"),
        ("of_trl", "parameter 'trainer_state' of TRL is not supported"),
        ("by_place", "has a parameter 'prompts' that cannot be given by name"),
        ("Class", "is not a function"),
        ("constant", "is not a function"),
    ],
)
def test_functions_that_cannot_be_called_are_named(name: str, message: str, rewards: str) -> None:
    with pytest.raises(ConfigError, match=f"reward: {rewards}:{name}.*{message}"):
        Reward(f"{rewards}:{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two", "returned 2 rewards for 12 completions; return one for each"),
        ("nan", "returned nan for completion 1 of 12; return a finite number of float32, or None"),
        ("large", "returned 1e.39 for completion 1 of 12; return a finite number of float32, or None"),
        ("words", "returned 'good' for completion 1 of 12"),
        ("number", "must return a list of numbers, got 1.0"),
        ("fails", "failed: ZeroDivisionError: division by zero"),
    ],
)
def test_results_that_are_no_rewards_are_named(
    name: str, message: str, base: Path, rewards: str, tmp_path: Path
) -> None:
    recipe = recipe_for(base, texts(tmp_path / "prompts.jsonl"), f"{rewards}:{name}")
    with pytest.raises(InputError, match=f"reward: {rewards}:{name} {message}"):
        batches_of(recipe, lm.from_pretrained(base), 1)


def test_several_rewards(base: Path, rewards: str, tmp_path: Path) -> None:
    """A weighted sum of those that apply; a completion without any has the advantage 0, and a warning says so."""
    paths = [f"{rewards}:{name}" for name in ("sometimes", "tensor")]
    data = texts(tmp_path / "prompts.jsonl", 4)
    recipe = recipe_for(base, data, paths, reward_weights=(1.0, 0.5), scale_rewards="none", micro_batch_tokens=None)
    objective, (batch,) = batches_of(recipe, lm.from_pretrained(base), 1)
    total = torch.tensor([float(i % 3 if i // 3 in (1, 2) else 0) + 0.5 * i for i in range(12)])
    wanted = (total.view(4, 3) - total.view(4, 3).mean(1, keepdim=True)).flatten().double()
    torch.testing.assert_close(batch["advantages"], wanted)
    trainable: Any = objective.trainable
    values = dict(zip(trainable.metric_names, batch["sampled"].tolist(), strict=True))
    assert values["reward"] == [pytest.approx(total.mean().item()), 1.0]
    assert values["rewards/sometimes/mean"] == [1.0, 1.0]  # of six completions
    recipe = recipe.changed({"reward": paths[0], "reward_weights": ()})
    told = r"reward: rewards_of_test:sometimes returned None for 6 of 12 completions.*'prompt': 'Hello there"
    with pytest.warns(UserWarning, match=told):
        objective, (batch,) = batches_of(recipe, lm.from_pretrained(base), 1)
    assert batch["advantages"].tolist() == [0.0] * 3 + [-1.0, 0.0, 1.0] * 2 + [0.0] * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward": ()}, "reward: the objective grpo needs a function"),
        ({"reward_weights": (1.0, 2.0)}, "reward_weights: has 2 numbers for 1 reward"),
        (
            {"max_completion_length": 48},
            "max_completion_length: is 48, which leaves no room for a prompt within seq_len",
        ),
        ({"batch_tokens": 96, "micro_batch_tokens": 96}, r"that of 3 times seq_len \(48\), for the completions"),
        ({"cuda_graph": "on"}, "cuda_graph: steps of the objective grpo are not recorded"),
        ({"loss": "a:b"}, "loss: has no effect with the objectives distill and grpo"),
        ({"loss_type": ("grpo", "dapo")}, "loss_type: the objective grpo has one"),
        ({"streaming": True}, "streaming: is for texts and chats"),
        ({"packing_strategy": "bfd"}, "packing_strategy: is for texts and chats"),
        ({"teacher": "model"}, "teacher: is a setting of the objective distill"),
        ({"use_bias_correction_kl": False}, "use_bias_correction_kl: .* reference; give beta; otherwise leave it out$"),
        (
            {"sampling_quantize": "int4", "lora_rank": 2, "quantize": "int4"},
            "sampling_quantize: is for plain weights, and `quantize` keeps them quantised",
        ),
        ({"importance_sampling_clip_max": 2.0}, "importance_sampling_clip_max: is for samples of quantised weights"),
        ({"sampling_quantize": "nf4"}, "sampling_quantize: "),
        ({"num_generations": 1}, "num_generations: must be greater than or equal to 2"),
        ({"objective": "sft", "reward": ()}, "num_generations: is a setting of the objective grpo"),
    ],
)
def test_settings_are_refused_by_name(settings: dict[str, Any], message: str, base: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_for(base, base, "module:function", **settings)


def test_runs_are_refused_by_name(base: Path, rewards: str, tmp_path: Path) -> None:
    """Before a model is loaded: what only the loss, the functions or the processes tell."""
    data = texts(tmp_path / "prompts.jsonl")
    recipe = recipe_for(base, data, f"{rewards}:share")
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"loss_type": "luspo"}, InputError, "loss_type must be one of grpo"),
        ({"loss_type": "sapo", "epsilon": 0.1}, InputError, "loss_type 'sapo' has no epsilon"),
        ({"loss_type": "cispo"}, InputError, "needs epsilon_high"),
        ({"delta": 1.1}, InputError, "delta must be above 1"),
        ({"reward": "no_such_module:f"}, ConfigError, "reward: no_such_module:f: there is no module"),
    ]
    for settings, error, message in refused:
        with pytest.raises(error, match=message):
            fine_tune(recipe.changed({**settings, "base": "nowhere"}), tmp_path / "out")
    arguments = ["train", base, "--data", data, "--objective", "grpo", "--reward", f"{rewards}:share", "--gpus", 2]
    arguments += ["--tensor", 2, "--out", tmp_path / "out"]
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code and "parallel.tensor: is not supported with the objective grpo" in result.stderr
    other = written(tmp_path / "other.jsonl", [{"prompt": "Hi", "solution": "you"}] * 4)
    with pytest.raises(ConfigError, match=r"has a parameter 'answer', which is no field .* completion_ids, solution"):
        fine_tune(recipe.changed({"data": other, "reward": f"{rewards}:seen"}), tmp_path / "out")
    with pytest.raises((CheckpointError, ConfigError), match="resume with another recipe: num_iterations was 1"):
        fine_tune(recipe.changed({"steps": 1}), tmp_path / "run")
        fine_tune(recipe.changed({"num_iterations": 2, "steps": 2}), tmp_path / "run", resume=True)


def test_a_dry_run(base: Path, rewards: str, tmp_path: Path) -> None:
    recipe = recipe_for(base, texts(tmp_path / "prompts.jsonl"), f"{rewards}:share", beta=0.1, num_iterations=2)
    run = dry_run(recipe.changed({"epochs": 2}))
    assert run.plan.steps == 12 and run.epoch.targets == 0 and run.sequences == 4
    assert not isinstance(run.memory, str) and run.memory.reference > 0
    result = CliRunner().invoke(app, ["train", "--recipe", str(_yaml(recipe, tmp_path)), "--dry-run"])
    assert "12 prompts," in result.output and "3 completions of each are sampled" in result.output, result.output
    result = CliRunner().invoke(
        app, ["data", str(recipe.data[0]), "--model", str(base), "--objective", "grpo", "--json"]
    )
    assert json.loads(result.stdout)["documents"] == 12


def _yaml(recipe: FineTuningRecipe, folder: Path) -> Path:
    import yaml

    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.settings()))
    return path


def test_the_best_model_has_the_highest_reward(base: Path, rewards: str, tmp_path: Path) -> None:
    """With a learning rate that is far too high, rewards fall after the first evaluation."""
    settings: dict[str, Any] = {"validation_fraction": 0.3, "evaluate_every": 2, "load_best_model_at_end": True}
    said: list[str] = []
    recipe = recipe_for(base, texts(tmp_path / "prompts.jsonl"), f"{rewards}:length", learning_rate=3e-2, **settings)
    outcome = fine_tune(recipe, tmp_path / "out", console=Console(said.append))
    values = metrics(tmp_path / "out", "validation_reward")
    assert outcome.best_step == 2 * (1 + values.index(max(values)))
    assert any("which has the highest validation reward" in message for message in said)
