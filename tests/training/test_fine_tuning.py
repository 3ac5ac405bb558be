"""Training of whole models: what a step is, by transformers and torch alone; from checkpoints and configs; resumed."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runs import command, equal_heads, losses
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError, ConfigError, HubError, LigerModelsError
from ligermodels.training import Console, FineTuningRecipe, MedusaRecipe, Outcome, fine_tune, fine_tuning, train_heads
from ligermodels.training import step as training_step
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.recipe_file import recipe_text, shipped_recipes

pytestmark = pytest.mark.usefixtures("one_thread")

CHATS = [
    [("system", "Be brief."), ("user", "Who can help?"), ("assistant", "the Free Software Foundation.")],
    [("user", "Hi"), ("assistant", "You may copy it."), ("user", "And change it?"), ("assistant", "You may.")],
]


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def recipe_for(base: Path, *data: Path, **changes: Any) -> FineTuningRecipe:
    settings = {
        "base": base,
        "data": data,
        "max_bad_lines": 1,
        "validation_fraction": 0.2,
        "learning_rate": 5e-3,
        "steps": 12,
        "seq_len": 16,
        "batch_tokens": 64,
        "micro_batch_tokens": 32,
        "evaluate_every": 5,
        "checkpoint_every": 3,
        "seed": 3,
        "date": "2024-07-26",
    }
    return FineTuningRecipe().changed(settings).changed(changes)


def evaluations(out: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and another end of it."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(
        "the quick brown fox jumps over the lazy dog\n" * 40 + "over the lazy dog jumps the quick fox\n" * 4
    )
    return path


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    lines = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in CHATS]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """The config and the tokenizer of `base`, without weights."""
    folder = tmp_path_factory.mktemp("config")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, folder)
    return folder


def test_a_text_is_learned_and_transformers_opens_the_result(base: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--steps", 60, "--lr", 1e-2, "--seq-len", 32, "--batch-tokens", 128, "--evaluate-every", 20]
    result = cli(base, "--data", text, "--out", out, *flags, "--set", "validation_fraction=0.1")
    assert result.exit_code == 0, result.output
    found = [loss for _, loss, _ in losses(out)]
    assert len(found) == 60 and sum(found[-5:]) < 0.1 * sum(found[:5])
    assert [step for step, _ in evaluations(out)] == [20, 40, 60] and f"wrote {out}" in result.stderr

    # The validation split is the tail of the text: its loss, by transformers alone.
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    lines = text.read_text().splitlines(keepends=True)
    size = len(text.read_text())
    start = next(i for i in range(len(lines)) if sum(map(len, lines[:i])) > 0.9 * size)
    ids = tokenizer("".join(lines[start:]), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    eos = json.loads((base / "config.json").read_text())["eos_token_id"]
    ids[-1] = eos[0] if isinstance(eos, list) else eos
    total, count = 0.0, 0
    for piece in (torch.tensor([ids[i : i + 32]]) for i in range(0, len(ids) - 1, 32)):
        if (targets := piece.shape[1] - 1) > 0:
            total, count = total + targets * theirs(piece, labels=piece).loss.item(), count + targets
    assert evaluations(out)[-1][1] == pytest.approx(total / count, rel=1e-4)
    assert f"validation loss {total / count:.3f}"[:-1] in result.stderr
    ours = lm.from_pretrained(out)
    torch.testing.assert_close(ours(piece).logits, theirs(piece).logits, rtol=1e-4, atol=1e-4)


def test_lora_is_trained_alone_and_merged(base: Path, text: Path, config: Path, tmp_path: Path) -> None:
    out, merged = tmp_path / "adapter", tmp_path / "merged"
    flags = ["--steps", 60, "--lr", 2e-2, "--seq-len", 32, "--batch-tokens", 128, "--lora-rank", 4, "--lora-alpha", 6]
    result = cli(base, "--data", text, "--out", out, *flags)
    assert result.exit_code == 0, result.output
    found = [loss for _, loss, _ in losses(out)]
    assert sum(found[-5:]) < 0.5 * sum(found[:5])
    saved = json.loads((out / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], saved["base_model_name_or_path"]) == (4, 6, str(base))
    assert not (out / "model.safetensors").exists()
    result = CliRunner().invoke(app, ["lora", "merge", str(base), str(out), str(merged)])
    assert result.exit_code == 0, result.output

    ids = torch.randint(3, 40, (2, 9))
    adapted = lm.load_adapter(lm.from_pretrained(base), out)
    plain = lm.from_pretrained(base)
    theirs = AutoModelForCausalLM.from_pretrained(merged)
    torch.testing.assert_close(theirs(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain(ids).logits, adapted(ids).logits, atol=1e-2)
    for name, weight in adapted.state_dict().items():
        if "lora_" not in name:
            assert torch.equal(weight, plain.state_dict()[name])

    for arguments, message in (
        ([base, "--lora-alpha", 3], "lora_alpha: is for LoRA; give lora_rank too"),
        ([base, "--lora-rank", 2, "--lora-targets", "query"], "lora_targets: 'query'"),
        ([config, "--lora-rank", 2], "safetensors"),
    ):
        failed = cli(*arguments, "--data", text, "--out", tmp_path / "no", "--steps", 2)
        assert failed.exit_code == 1 and message in failed.stderr, failed.stderr


@pytest.mark.parametrize("kind", ["int4", "float8", "nf4"])
def test_lora_on_quantised_weights(kind: str, base: Path, text: Path, tmp_path: Path) -> None:
    """It learns; the adapter is that of the quantised base; a run that was cut off resumes to the same adapter."""
    flags = ["--data", text, "--lr", 2e-2, "--seq-len", 32, "--batch-tokens", 128, "--lora-rank", 4]
    flags += ["--quantize", kind, "--set", "validation_fraction=0.1", "--steps", 40]
    result = cli(base, *flags, "--out", tmp_path / "whole")
    assert result.exit_code == 0, result.output
    found = [loss for _, loss, _ in losses(tmp_path / "whole")]
    assert sum(found[-5:]) < 0.7 * sum(found[:5])
    model = lm.load_adapter(lm.from_pretrained(base, quantize=kind), tmp_path / "whole").eval()  # type: ignore[arg-type]
    plain = lm.load_adapter(lm.from_pretrained(base), tmp_path / "whole").eval()
    ids = torch.randint(3, 40, (2, 9))
    assert not torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-4)
    rounded = lm.merge_lora(model, dequantize=True)
    torch.testing.assert_close(rounded(ids).logits, lm.dequantize(quantised(base, tmp_path, kind))(ids).logits)

    for arguments, message in (
        (["--quantize", kind], "quantize: freezes the weights, which only LoRA then trains; give lora_rank too"),
        (["--lora-rank", 2, "--quantize-exclude", "mlp"], "quantize_exclude: is for quantised weights"),
        (["--lora-rank", 2, "--quantize", kind, "--float8"], "float8: is for weights that quantize does not round"),
        (["--lora-rank", 2, "--quantize", kind, "--quantize-exclude", "no"], "quantize_exclude: 'no' matches no layer"),
    ):
        failed = cli(base, *arguments, "--data", text, "--out", tmp_path / "no", "--steps", 2)
        assert failed.exit_code == 1 and message in failed.stderr, failed.stderr


def quantised(base: Path, folder: Path, kind: str) -> lm.CausalLM:
    return lm.load_adapter(lm.from_pretrained(base, quantize=kind), folder / "whole").eval()  # type: ignore[arg-type]


def by_hand(base: Path, steps: int, recipe: FineTuningRecipe) -> tuple[list[float], Any, int]:
    """Losses and model of steps over CHATS, by transformers' model and torch's AdamW; and the number of tokens."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        AutoTokenizer.from_pretrained(base),
    )
    examples = []
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        spans, at = [], 0
        for role, content in chat:
            at = whole.index(f"<|im_start|>{role}\n{content}<|im_end|>", at) + len(f"<|im_start|>{role}\n")
            if role == "assistant":
                spans.append((at, at + len(f"{content}<|im_end|>")))
        own = [any(a <= start < b for a, b in spans) for start, _ in encoded["offset_mapping"]]
        ids = torch.tensor(encoded["input_ids"])
        examples.append((ids, torch.where(torch.tensor(own), ids, -100)))
    assert all(0 < (labels != -100).sum() < len(ids) / 2 for ids, labels in examples)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2))
    found = []
    for _ in range(steps):
        sums = [
            torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], labels[1:], reduction="sum")
            for ids, labels in examples
        ]
        loss = sum(sums) / sum((labels[1:] != -100).sum() for _, labels in examples)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        found.append(loss.item())
    return found, model, sum(len(ids) for ids, _ in examples)


@pytest.mark.parametrize("micro", [False, True])
def test_a_step_on_chats_is_that_of_transformers_and_torch(
    base: Path, chats: Path, tmp_path: Path, micro: bool
) -> None:
    """On the assistant's tokens alone; with activation checkpointing, and with accumulation, which cuts no document."""
    recipe = recipe_for(base, chats, validation_fraction=0, weight_decay=0.1, min_lr_ratio=1.0, warmup_steps=0, steps=2)
    recipe = recipe.changed({"learning_rate": 1e-3, "max_grad_norm": 0.5, "max_bad_lines": 0})
    wanted, theirs, tokens = by_hand(base, 2, recipe)
    sizes = {"seq_len": tokens, "batch_tokens": tokens, "micro_batch_tokens": tokens}
    if micro:  # two epochs to a step: the mean over them is that of one
        sizes |= {"batch_tokens": 2 * tokens}
    recipe = recipe.changed({**sizes, "activation_checkpointing": "full" if micro else "none"})
    fine_tune(recipe, tmp_path / "out")
    assert [loss for _, loss, _ in losses(tmp_path / "out")] == pytest.approx(wanted, rel=1e-5)
    ours, before = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), AutoModelForCausalLM.from_pretrained(base)
    for (name, p), q, r in zip(ours.named_parameters(), theirs.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        assert (p - r).abs().max() > 1e-3


@pytest.mark.parametrize(("kind", "target"), [("checkpoint", 5), ("config", 1), ("lora", 3)])
def test_killed_anywhere_a_run_comes_out_the_same(
    base: Path, config: Path, data: Path, tmp_path: Path, children: Any, kind: str, target: int
) -> None:
    """From random weights too, before there is a checkpoint or after."""
    recipe = recipe_for(config if kind == "config" else base, data, checkpoint_every=2, steps=8, report_every=1)
    lora = {"lora_rank": 3, "lora_dropout": 0.2, "lora_targets": ["q_proj", "down_proj"]}
    recipe = recipe.changed({"checkpoint": {}, "config": {"dtype": "bfloat16"}, "lora": lora}[kind])
    file, out, whole = tmp_path / "recipe.yaml", tmp_path / "killed", tmp_path / "whole"
    file.write_text(yaml.safe_dump(recipe.settings()))
    arguments = ("--recipe", str(file), "--out", str(out), "--device", "cpu")
    child = children.Process(target=command, args=arguments, kwargs={"name": "train"})
    child.start()
    while child.is_alive() and not [step for step, *_ in losses(out) if step >= target]:
        time.sleep(0.002)
    child.kill()
    child.join()
    assert len(losses(out)) < 8
    fine_tune(recipe, whole)
    fine_tune(recipe, out, resume=True)
    assert losses(out) == losses(whole) and evaluations(out) == evaluations(whole) and equal_heads(out, whole)
    assert Checkpoints(out / "checkpoints").steps() == [6, 8]


def test_what_may_change_when_a_run_resumes(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = recipe_for(base, data, steps=6), tmp_path / "out"
    fine_tune(recipe, tmp_path / "whole")
    count = 0

    def stops(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 9:
            raise KeyboardInterrupt
        return on_device(*arguments)

    on_device = training_step.on_device
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(training_step, "on_device", stops)
        fine_tune(recipe, out)
    with pytest.raises(ConfigError, match=r"another recipe: learning_rate was 0\.005, is 0\.1"):
        fine_tune(recipe.changed({"learning_rate": 0.1}), out, resume=True)
    other = shutil.copytree(base, tmp_path / "tokenizer")
    (other / "tokenizer.json").write_text((base / "tokenizer.json").read_text() + "\n")
    with pytest.raises(CheckpointError, match=r"base: differs .*tokenizer\.json had"):
        fine_tune(recipe.changed({"tokenizer": other}), out, resume=True)
    shutil.copy(base / "tokenizer.json", other)
    free = {"activation_checkpointing": "full", "tokenizer": other, "keep_checkpoints": 1}
    assert fine_tune(recipe.changed(free), out, resume=True).finished
    assert losses(out) == losses(tmp_path / "whole") and equal_heads(out, tmp_path / "whole")


def test_from_a_config(base: Path, config: Path, data: Path, text: Path, tmp_path: Path) -> None:
    """Random weights by the seed; a .json file takes a tokenizer from elsewhere, and a chat template goes with it."""
    said: list[str] = []
    path = tmp_path / "my.json"
    shutil.copy(config / "config.json", path)
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    recipe = recipe_for(path, text, learning_rate=0.0, steps=1, tokenizer=config)
    recipe = recipe.changed({"chat_template": tmp_path / "template.jinja"})
    assert fine_tune(recipe, tmp_path / "out", console=Console(said.append)).finished
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    count = sum(p.numel() for p in model.parameters())
    assert f"{path}: a config without weights: training {count:,} random parameters" in said
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x<|im_end|>"
    fine_tune(recipe_for(config, text, learning_rate=0.0, steps=1), tmp_path / "folder")
    assert equal_heads(tmp_path / "out", tmp_path / "folder")
    fine_tune(recipe.changed({"seed": 4}), tmp_path / "other")
    assert not equal_heads(tmp_path / "out", tmp_path / "other")
    said.clear()
    fine_tune(recipe_for(base, data, steps=1), tmp_path / "checkpoint", console=Console(said.append))
    assert not [line for line in said if "random" in line]


def test_a_checkpoint_without_usable_weights_is_no_config(config: Path, data: Path, tmp_path: Path) -> None:
    """Nor does training of heads begin with random weights."""
    folder = shutil.copytree(config, tmp_path / "model")
    recipe, out = recipe_for(folder, data), tmp_path / "out"
    with pytest.raises((CheckpointError, HubError), match=r"model\.safetensors"):
        train_heads(MedusaRecipe(base=folder, data=data), out)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        fine_tune(recipe, out)
    (folder / "pytorch_model.bin").unlink()
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": 100}))
    with pytest.raises(
        ConfigError, match=r"config\.json: vocab_size: is 100, and the tokenizer .*make it at least \d+"
    ):
        fine_tune(recipe, out)
    (folder / "config.json").write_text(json.dumps({**settings, "dtype": "float16"}))
    with pytest.raises(ConfigError, match=r"dtype: .* is float16"):
        fine_tune(recipe, out)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer: there is no tokenizer\.json in .*; give the folder"):
        fine_tune(recipe, out)
    with pytest.raises(LigerModelsError, match=r"nowhere\.json"):
        fine_tune(recipe.changed({"base": tmp_path / "nowhere.json"}), out)
    assert not out.exists()


def test_settings_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[FineTuningRecipe] = []
    monkeypatch.setattr(fine_tuning, "fine_tune", lambda recipe, *_, **__: seen.append(recipe) or Outcome(1, 1))

    (tmp_path / "mine.yaml").write_text("base: somewhere\ndata: x\nbeta2: 0.99\nseed: 1\nsteps: 7\n")
    given = ["--recipe", tmp_path / "mine.yaml", "--out", tmp_path / "out"]
    more = [
        "--lr",
        0.25,
        "--seed",
        2,
        "--set",
        "seed=3",
        "--set",
        "data=[a.jsonl, b.txt]",
        "--set",
        "max_grad_norm=null",
    ]
    result = cli(*given, *more, "--set", "weight_decay = 1e-3")
    assert result.exit_code == 0, result.output
    (recipe,) = seen
    assert (recipe.base, recipe.data, recipe.beta2, recipe.seed) == ("somewhere", ("a.jsonl", "b.txt"), 0.99, 3)
    assert (recipe.learning_rate, recipe.max_grad_norm, recipe.weight_decay, recipe.steps) == (0.25, None, 1e-3, 7)
    assert cli("elsewhere", *given, "--recipe", "pre-training", "--data", "z").exit_code == 0
    assert (seen[1].base, seen[1].weight_decay) == ("elsewhere", 0.1)

    model = ["m", "--data", "x", "--out", "y"]
    for arguments, words, code in (
        (["--data", "x", "--out", "y"], "MODEL", 2),
        (["m", "--out", "y"], "--data", 2),
        (["m", "--data", "x"], "--out", 2),
        ([*model, "--set", "lr=1"], "the command line: there is no setting 'lr'; the nearest is 'learning_rate'", 1),
        ([*model, "--set", "seed"], "--set: must be KEY=VALUE, got 'seed'", 1),
        ([*model, "--set", "seed=x"], "the command line: seed: must be a valid integer, got 'x'", 1),
        ([*model, "--set", "seed=["], "--set seed: not YAML", 1),
        ([*model, "--set", "num_heads=3"], "there is no setting 'num_heads'", 1),
        ([*model, "--set", "length=3"], "there is no setting 'length'", 1),
        ([*model, "--recipe", "llama-3"], "the shipped recipes are fine-tuning, pre-training", 1),
        ([*model, "--steps", 0], "--steps", 2),
        ([*model, "--activation-checkpointing", "all"], "selective", 2),
    ):
        result = cli(*arguments)
        assert result.exit_code == code and words in result.stderr, result.output
    assert len(seen) == 2


@pytest.mark.parametrize("name", shipped_recipes("train"))
def test_a_shipped_recipe_runs_on_a_small_sample(
    base: Path, config: Path, data: Path, tmp_path: Path, name: str
) -> None:
    sizes = {"seq_len": 128, "batch_tokens": 256, "micro_batch_tokens": 128, "epochs": 0.01, "max_bad_lines": 1}
    recipe = FineTuningRecipe.read(name).changed({"base": config, "data": data, **sizes})
    assert fine_tune(recipe, tmp_path / "out").finished
    assert lm.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert CliRunner().invoke(app, ["recipe", name]).stdout == recipe_text(name, "train")
    assert name in CliRunner().invoke(app, ["recipe"]).stdout.split()


def test_a_mixture_of_experts_logs_its_auxiliary_loss(base: Path, text: Path, tmp_path: Path) -> None:
    from zoo import LLAMA

    shutil.copytree(base, tmp_path / "moe", ignore=shutil.ignore_patterns("*.safetensors"))
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    vocabulary = {"vocab_size": json.loads((base / "config.json").read_text())["vocab_size"]}
    (tmp_path / "moe" / "config.json").write_text(json.dumps({**LLAMA, **experts, **vocabulary}))
    fine_tune(recipe_for(tmp_path / "moe", text, steps=2), tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["aux_loss"] > 0 for line in lines if "loss" in line)


@pytest.mark.gpu
def test_the_gpu_is_the_default_device(base: Path, text: Path, tmp_path: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    fine_tune(FineTuningRecipe(base=str(base), data=str(text), seq_len=16, batch_tokens=64, steps=1), tmp_path / "out")
    assert torch.cuda.max_memory_allocated() > before


def test_the_old_name_of_the_recipe_of_heads_warns() -> None:
    import ligermodels.training

    with pytest.warns(DeprecationWarning, match="Recipe is now MedusaRecipe"):
        assert ligermodels.training.Recipe is MedusaRecipe


@pytest.mark.parametrize("name", ["train", "medusa train", "mtp train"])
def test_seq_len_beyond_the_context_is_told(base: Path, tmp_path: Path, name: str) -> None:
    model = Path(shutil.copytree(base, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    end = Tokenizer(model).backend.token_to_id("<|im_end|>")  # with another EOS than the tokenizer's there is a warning
    changes = {"max_position_embeddings": 20, "eos_token_id": end}
    (model / "config.json").write_text(json.dumps({**config, **changes}))
    (tmp_path / "text.txt").write_text("a text of some words, " * 400)
    for seq_len, warnings in ((40, 1), (20, 0)):
        options = {"--data": tmp_path / "text.txt", "--steps": 2, "--seq-len": seq_len, "--batch-tokens": seq_len}
        options["--out"] = tmp_path / f"{seq_len}"
        words = [*name.split(), model, *(each for pair in options.items() for each in pair)]
        result = CliRunner().invoke(app, [*map(str, words), "--validation-fraction", "0"])
        assert result.exit_code == 0, result.output
        found = result.stderr.count("a sequence of 40 tokens is longer than the model's max_position_embeddings, 20;")
        assert found == result.stderr.count("warning: ") == warnings, result.stderr
