"""`--dry-run`: what a run would do, without training, writing, or reading weights."""

import json
import re
import shutil
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import losses, recipe_for, with_decoder
from test_new_tokens import CHAT, make_base
from typer.testing import CliRunner

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.convert import hub
from ligermodels.data.survey import Epoch, Span
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError, ConfigError, InputError, LigerModelsError
from ligermodels.parallel.memory import StepMemory, step_memory
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.training import (
    Console,
    DSparkRecipe,
    EagleRecipe,
    FineTuningRecipe,
    MedusaRecipe,
    MTPRecipe,
    TrainingRecipe,
    fine_tune,
)
from ligermodels.training.preview import _eager_reason, _on_meta, dry_run
from ligermodels.training.run_plan import RunPlan
from ligermodels.training.run_state import optimizer_of

pytestmark = pytest.mark.usefixtures("one_thread")

SYSTEM = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"


@pytest.fixture
def few(base: Path, tmp_path: Path) -> FineTuningRecipe:
    """A model that decodes its tokens, and four short documents."""
    chats = [
        [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}]
        for answer in ("there", "You are", "brief")
    ]
    lines = [{"text": "Today"}, *({"messages": chat} for chat in chats)]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = with_decoder(base, tmp_path / "model")
    settings: dict[str, Any] = {"base": model, "data": tmp_path / "few.jsonl", "validation_fraction": 0.0}
    return FineTuningRecipe(**settings, seq_len=128, batch_tokens=256)


def test_the_plan_of_a_run(few: FineTuningRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, before = tmp_path / "out", sorted(tmp_path.rglob("*"))
    run = dry_run(few, out)
    assert sorted(tmp_path.rglob("*")) == before
    model = lm.from_config(few.base, dtype=torch.float32, device="meta")
    assert run.parameters == run.trained == sum(p.numel() for p in model.parameters())
    assert run.memory == step_memory(model, 2, 128)
    assert dry_run(few.changed({"micro_batch_tokens": 128})).memory == step_memory(model, 1, 128, passes=2)
    assert (run.micro_batches, run.attention, run.cuda_graph) == ((2, 1), "sdpa", "the model is on cpu")
    # By hand: of a text all but its first token, here EOS ("#" in this config); of a chat the answer and its end.
    prompt = f"{SYSTEM}<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    answers = [f"{answer}<|im_end|>" for answer in ("You are", "brief", "there")]
    chats = [[Span(prompt, False), Span(answer, True), Span("\n", False)] for answer in answers]
    assert sorted(run.first_batch) == [*chats, [Span("Today", False), Span("#", True)]]
    size = len(Tokenizer(few.base).encode(prompt))  # answers have two, one and one tokens
    tokens, targets = 3 * (size + len("\n")) + 3 + 2 + 2 + len("T#"), 3 + 2 + 2 + len("#")
    assert run.epoch == Epoch(documents=4, sequences=2, tokens=tokens, targets=targets)
    outcome = fine_tune(few, out)
    assert run.plan.steps == outcome.steps == len(losses(out)) == 1
    longer = few.changed({"steps": 3})
    resumed = dry_run(longer, out, resume=True)
    assert (resumed.plan.start, resumed.plan.steps) == (1, 3)
    # Its first batch is the next one: of these two sequences in each epoch the other order.
    second = list(islice(resumed.plan.training_batches(), 2))[1]
    assert resumed.sources == second.where() != run.sources
    with pytest.raises(CheckpointError, match="holds checkpoints of a run"):
        dry_run(longer, out)


@pytest.mark.parametrize("quantize", [None, "int4", "nf4", "float8"])
def test_parameters_are_counted_as_in_a_run(few: FineTuningRecipe, tmp_path: Path, quantize: str | None) -> None:
    recipe, said = few.changed({"lora_rank": 2, "quantize": quantize}), list[str]()
    run = dry_run(recipe)
    fine_tune(recipe, tmp_path / "out", console=Console(said.append))
    assert f"training {run.trained:,} of {run.parameters:,} parameters ({run.trained / run.parameters:.2%})" in said
    model = lm.from_config(few.base, dtype=torch.float32, device="meta")
    assert run.parameters - run.trained == sum(p.numel() for p in model.parameters())


def test_what_is_trained_and_its_memory(few: FineTuningRecipe) -> None:
    """LoRA, shards, and heads: new heads have a ResBlock and an lm_head each."""

    def meta() -> lm.CausalLM:
        return lm.from_config(few.base, dtype=torch.float32, device="meta")

    adapted = meta()
    lm.add_lora(adapted, 2, lora_alpha=4)
    run = dry_run(few.changed({"lora_rank": 2}))
    assert run.trained == sum(p.numel() for p in adapted.parameters() if p.requires_grad) < run.parameters
    assert run.memory == step_memory(adapted, 2, 128)

    run = dry_run(few, gpus=2)
    assert (run.micro_batches, run.memory) == ((1, 1), step_memory(meta(), 1, 128, shard=2))
    assert run.sequences == 2
    assert run.cuda_graph == "the model is on cpu"
    with pytest.raises(ConfigError, match="97 cannot be split evenly over 2 ranks"):
        dry_run(few.changed({"parallel": {"tensor": 2}}), gpus=2)
    with pytest.raises(ConfigError, match="tensor 2: does not divide the number of ranks, which is 1"):
        dry_run(few.changed({"parallel": {"tensor": 2}}))

    common = {"base": few.base, "data": few.data, "validation_fraction": 0.0, "seq_len": 128, "batch_tokens": 256}
    base, vocab_size = sum(p.nbytes for p in meta().parameters()), meta().config.vocab_size
    heads = 2 * (32 * 32 + 32 + vocab_size * 32)
    run = dry_run(MedusaRecipe(**common, num_heads=2))
    assert run.trained == heads and isinstance(run.memory, StepMemory)
    assert (run.memory.weights, run.memory.optimizer_states) == (base + 4 * heads, 8 * heads)
    assert dry_run(MedusaRecipe(**common), gpus=2).memory == "not counted for heads on several GPUs"
    alone: Any = dry_run(MedusaRecipe(**common, stage=2)).memory
    block = sum(p.nbytes for p in meta().decoder.blocks[0].parameters())
    for settings, reference in (
        ({"distill": True}, base),
        ({"distill": True, "reference": "cpu_offload"}, base - (len(meta().decoder.blocks) - 1) * block),
        ({"kl_to_reference": True, "validation_fraction": 0.3}, base),
    ):
        found: Any = dry_run(MedusaRecipe(**{**common, "stage": 2, **settings})).memory
        assert isinstance(found, StepMemory), found
        assert (alone.reference, found.reference, found.weights) == (0, reference, alone.weights), settings
    run = dry_run(EagleRecipe(**common, draft_vocab_size=50))
    head = sum(p.numel() for p in lm.Eagle3Model.from_base(meta(), lm_head="shared").head_parameters())
    assert run.trained == head + 50 * 32 and isinstance(run.memory, StepMemory)
    run = dry_run(DSparkRecipe(**common))
    assert run.trained == sum(p.numel() for p in lm.DSparkModel.from_base(meta()).head_parameters())
    run = dry_run(MTPRecipe(**common))
    assert 0 < run.trained < run.parameters and isinstance(run.memory, StepMemory)


def test_memory_of_objectives(few: FineTuningRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a pair has its two sides; the log-probabilities of the reference are computed before the first step; a
    teacher is held. A user's loss is traced too."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": f"{i}", "chosen": " a", "rejected": " b"}) + "\n" for i in range(8)))
    recipe = few.changed({"seq_len": 64, "micro_batch_tokens": 128})
    (tmp_path / "my_own_loss.py").write_text("def loss(log_probs, mask):\n    return -log_probs\n")
    (tmp_path / "my_slow_loss.py").write_text("def loss(log_probs, mask):\n    return -log_probs * float(mask.sum())\n")
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {"sft": dry_run(recipe).memory}
    for objective in ("dpo", "orpo", "kto"):
        run = dry_run(recipe.changed({"objective": objective, "data": pairs}))
        found[objective] = run.memory
        assert run.micro_batches == ((2, 2) if objective == "kto" else (1, 2))  # tokens of a micro-batch are the same
        assert found[objective].activations == pytest.approx(found["sft"].activations, rel=0.25)
    found["distill"] = dry_run(recipe.changed({"objective": "distill", "teacher": few.base})).memory
    assert found["kto"].total >= found["dpo"].total  # the pass of the mismatched sequences
    unpaired = recipe.changed({"objective": "kto", "data": pairs, "loss_type": "apo_zero_unpaired"})
    found["apo"] = dry_run(unpaired).memory  # has no such pass
    assert found["apo"].total <= found["kto"].total
    weights = found["sft"].weights
    assert {name: each.weights for name, each in found.items()} == dict.fromkeys(found, weights)
    assert {name: each.reference for name, each in found.items() if each.reference} == {"distill": weights}
    states = found["distill"].activations - found["sft"].activations  # of the teacher, for the head
    assert 0 <= states <= 4 * 128 * 32 * 4
    own = dry_run(recipe.changed({"loss": "my_own_loss:loss"})).memory
    assert own.weights == weights and own.activations > 0  # type: ignore[union-attr]
    slow = dry_run(recipe.changed({"loss": "my_slow_loss:loss"})).memory
    assert isinstance(slow, str) and slow.startswith("not counted: ")


@pytest.mark.parametrize(
    ("changes", "gpus", "reason"),
    [
        ({}, 1, ""),
        ({"lora_rank": 2}, 1, ""),
        ({"cuda_graph": "off"}, 1, "cuda_graph is off"),
        ({"optimizer": "adafactor"}, 1, "Adafactor does not support it: it has no `recording`"),
        ({}, 2, ""),
        ({"parallel": {"tensor": 2}}, 2, "the plan has tensor parallelism"),
        ({"lora_rank": 2, "lora_dropout": 0.1, "activation_checkpointing": "full"}, 1, "dropout with activation"),
    ],
)
def test_whether_steps_are_recorded(few: FineTuningRecipe, changes: dict[str, Any], gpus: int, reason: str) -> None:
    recipe, one_rank = few.changed(changes), {name: value for name, value in changes.items() if name != "parallel"}
    plan: RunPlan = dry_run(few.changed(one_rank)).plan
    parts = [next(plan.training_batches())]
    job = _on_meta(plan, "auto")[1]
    found = _eager_reason(recipe, job, optimizer_of(recipe, job), parts, "cuda", gpus)
    assert found.startswith(reason) and bool(found) == bool(reason)


@pytest.mark.parametrize("micro", [16, 32, 64])
def test_validation_tokens_do_not_depend_on_micro_batches(base: Path, data: Path, micro: int) -> None:
    """They were rounded to whole micro-batches, up to one at least."""
    recipe = recipe_for(base, data, seq_len=16, batch_tokens=64, micro_batch_tokens=micro, validation_tokens=55)
    plan = dry_run(recipe).plan
    whole, found = (
        torch.cat([batch["input_ids"] for batch in each.validation_batches()], 1)
        for each in (replace(plan, recipe=recipe.changed({"validation_tokens": None})), plan)
    )
    assert 3 * 16 - 8 < found.shape[1] <= 3 * 16 < whole.shape[1] and torch.equal(found, whole[:, : found.shape[1]])
    sizes = [batch["input_ids"].shape[1] for batch in plan.validation_batches()]
    assert len(sizes) == {16: 3, 32: 2, 64: 1}[micro]


@pytest.mark.parametrize("setting", [{"param_dtype": "bfloat16"}, {"reduce_dtype": "float32"}])
def test_mixed_precision_in_one_process_is_an_error_as_in_a_run(
    few: FineTuningRecipe, tmp_path: Path, setting: dict[str, Any]
) -> None:
    recipe = few.changed({"parallel": setting})
    for start in (lambda: dry_run(recipe), lambda: fine_tune(recipe, tmp_path / "out", device="cpu")):
        with pytest.raises(InputError, match="param_dtype, reduce_dtype: mixed precision is FSDP2's"):
            start()
    assert not (tmp_path / "out").exists()
    assert not isinstance(dry_run(recipe, gpus=2).memory, str)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"callback": ["nosuch:Callback"]}, "callback: nosuch:Callback: there is no module 'nosuch'"),
        ({"track": ["wandb"]}, "track: wandb cannot be imported"),
        ({"lm_eval": ["nosuchtask"]}, "lm_eval: lm-evaluation-harness is not installed"),
        ({"objective": "dpo", "loss_type": "nosuch"}, "nosuch"),
        ({"loss": "nosuch:loss"}, "nosuch"),
        ({"optimizer": "muon", "learning_rate_patterns": {"nosuch.*": 1e-3}}, "'nosuch.*' matches no trained"),
        ({"weight_decay_patterns": {"nosuch.*": 0.0}}, "weight_decay_patterns: 'nosuch.*' matches no trained"),
    ],
)
def test_names_that_do_not_exist_are_errors_as_in_a_run(
    few: FineTuningRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    for package in ("wandb", "lm_eval"):  # as if they were not installed; with lm-eval: test_lm_eval_training.py
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(LigerModelsError) as wanted:
        fine_tune(few.changed(changes), tmp_path / "out")
    with pytest.raises(type(wanted.value), match=re.escape(str(wanted.value))):
        dry_run(few.changed(changes))
    assert message in str(wanted.value)


@pytest.mark.parametrize("place", ["folder", "hub"])
def test_no_weights_are_fetched_or_copied(
    few: FineTuningRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Of a base that a chat template gives new tokens, and of one on the hub. A dry run agrees with the run."""
    make_base(tmp_path / "base")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}))
    recipe = few.changed({"data": tmp_path / "chats.jsonl", "chat_template": "chatml", "checkpoint_every": 1})
    recipe = recipe.changed({"base": tmp_path / "base"})
    fine_tune(recipe, tmp_path / "out")
    monkeypatch.setenv("LIGERMODELS_CACHE", str(tmp_path / "cache"))
    if place == "hub":
        shutil.copytree(tmp_path / "base", tmp_path / "fetched", ignore=shutil.ignore_patterns("*.safetensors"))
        resolve = hub.resolve
        monkeypatch.setattr(
            hub, "resolve", lambda name, **how: resolve(tmp_path / "fetched" if how == {"weights": False} else name)
        )
    named = recipe.changed({"base": "owner/name"} if place == "hub" else {})
    run = dry_run(named)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert run.plan.base.weights is not None and run.plan.base.new_tokens
    assert run.parameters == sum(p.numel() for p in lm.from_pretrained(tmp_path / "out").parameters())
    assert dry_run(recipe.changed({"steps": 3}), tmp_path / "out", resume=True).plan.start == 1
    if place == "hub":
        assert dry_run(named.changed({"chat_template": "alpaca"})).trained < run.trained
        common = {name: named.settings()[name] for name in ("base", "data", "validation_fraction", "seq_len")}
        for kind in (MedusaRecipe, MTPRecipe, EagleRecipe, DSparkRecipe):
            assert dry_run(kind().changed({**common, "chat_template": "alpaca"})).trained


def test_the_weights_of_a_teacher_on_the_hub_are_not_fetched(
    few: FineTuningRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = shutil.copytree(few.base, tmp_path / "fetched", ignore=shutil.ignore_patterns("*.safetensors"))
    resolve, asked = hub.resolve, list[dict[str, Any]]()

    def spied(name: Any, **how: Any) -> Path:
        if name != "owner/name":
            return resolve(name, **how)
        asked.append(how)
        return fetched

    monkeypatch.setattr(hub, "resolve", spied)
    run = dry_run(few.changed({"objective": "distill", "teacher": "owner/name"}))
    assert all(how == {"weights": False} for how in asked) and asked
    assert run.trained == run.parameters == dry_run(few).parameters
    with pytest.raises(CheckpointError, match="fetched"):  # a folder without weights is an error, as in a run
        dry_run(few.changed({"objective": "distill", "teacher": fetched}))


@pytest.mark.parametrize("kind", [MedusaRecipe, MTPRecipe, EagleRecipe])
def test_the_weights_of_heads_on_the_hub_are_not_fetched(
    few: FineTuningRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[TrainingRecipe]
) -> None:
    """The plan is that of heads in a folder, whose weights are read."""
    model = lm.from_pretrained(few.base)
    heads: Any = {
        MedusaRecipe: lambda: lm.MedusaModel.from_base(model, num_heads=2),
        MTPRecipe: lambda: lm.MTPModel.from_base(model, num_layers=2, num_steps=3),
        EagleRecipe: lambda: lm.Eagle3Model.from_base(
            model, vocabulary=DraftVocabulary(torch.arange(50), model.config.vocab_size), num_steps=3
        ),
    }[kind]()
    heads.save_head(tmp_path / "heads") if kind is MTPRecipe else heads.save_pretrained(tmp_path / "heads")
    recipe = kind().changed({"base": few.base, "data": few.data, "validation_fraction": 0.0, "seq_len": 128})
    recipe = recipe.changed({"num_heads": 2} if kind is MedusaRecipe else {"num_steps": 3})
    wanted = dry_run(recipe.changed({"start_from": tmp_path / "heads"}))
    fetched = shutil.copytree(tmp_path / "heads", tmp_path / "fetched", ignore=shutil.ignore_patterns("*.safetensors"))
    resolve, asked = hub.resolve, list[dict[str, Any]]()

    def spied(name: Any, **how: Any) -> Path:
        if name != "owner/name":
            return resolve(name, **how)
        asked.append(how)
        return fetched

    monkeypatch.setattr(hub, "resolve", spied)
    found = dry_run(recipe.changed({"start_from": "owner/name"}))
    assert all(how == {"weights": False} for how in asked)
    assert (found.trained, found.memory) == (wanted.trained, wanted.memory)


@pytest.mark.parametrize("kind", [FineTuningRecipe, MedusaRecipe, MTPRecipe, EagleRecipe, DSparkRecipe])
def test_the_command_prints_it(base: Path, data: Path, tmp_path: Path, kind: type[TrainingRecipe]) -> None:
    settings = recipe_for(base, data, seq_len=128, batch_tokens=256, micro_batch_tokens=128).settings()
    changed = [f"--set={name}={json.dumps(value)}" for name, value in settings.items() if name in kind.model_fields]
    command = "train" if kind.kind == "train" else f"{kind.kind} train"
    result = CliRunner().invoke(app, [*command.split(), *changed, "--dry-run", "--device", "cpu", "--gpus", "2"])
    assert result.exit_code == 0, result.output
    rows = dict(re.findall(r"^([a-zA-Z ]*\S) {2,}(.*)$", result.stdout, re.MULTILINE))
    assert rows.keys() >= {"model", "data", "epoch", "steps", "step", "optimizer", "memory", "attention", "CUDA graph"}
    assert rows["steps"].startswith("12 (") and "1 unusable lines are skipped" in result.stdout
    assert rows["step"] == "2 sequences of 128 tokens: 1 x 1 sequences on each of 2 GPUs"
    assert re.match(r"adamw, learning_rate 0\.005, .*warmup_steps 1, .*beta2 0\.95", rows["optimizer"])
    assert "base" not in rows["optimizer"] and "data" not in rows["optimizer"]
    assert "⟦" in result.stdout and "data.jsonl:" in result.stdout and result.stdout.count("\n--- ") <= 8
    adafactor = [*command.split(), *changed, "--dry-run", "--device", "cpu", "--set=optimizer=adafactor"]
    shown = CliRunner().invoke(app, [*adafactor, "--set=batch_tokens=16384"]).stdout
    assert re.search(r"^optimizer +adafactor, learning_rate 0\.005", shown, re.MULTILINE) and "beta1" not in shown
    assert re.search(r"^ +a step repeats the \d+ sequences of the data", shown, re.MULTILINE), shown
