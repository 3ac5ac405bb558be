"""A tokenizer with tokens beyond the model's vocabulary: a warning, and an error that names the document with one."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from runs import make_base

from ligermodels.cli import app
from ligermodels.errors import CheckpointWarning, ConfigError, InputError
from ligermodels.training import (
    DFlashRecipe,
    DSparkRecipe,
    EagleRecipe,
    FineTuningRecipe,
    MedusaRecipe,
    MTPRecipe,
    TrainingRecipe,
    fine_tune,
    train_dflash,
    train_dspark,
    train_eagle,
    train_heads,
    train_mtp,
)

NEW = "Zanzibar"
WARNING = r"the tokenizer has tokens that the model does not know, whose vocab_size is \d+: 'Zanzibar' \(\d+\)"
ERROR = r"data\.jsonl:3: has the token 'Zanzibar' with id \d+, and the model's vocab_size is \d+: .*base"
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"fine {NEW}"}]
RECORDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"text": "fine thanks"}, {"text": f"fine {NEW}"}),
    "chat": ({"messages": [TURNS[0], {"role": "assistant", "content": "fine"}]}, {"messages": TURNS}),
    "completion": ({"prompt": "Hi", "completion": "fine"}, {"prompt": NEW, "completion": "fine"}),
    "pair": (
        {"prompt": "Hi", "chosen": "fine", "rejected": "thanks"},
        {"prompt": "Hi", "chosen": "fine", "rejected": NEW},
    ),
    "label": (
        {"prompt": "Hi", "completion": "fine", "label": True},
        {"prompt": "Hi", "completion": NEW, "label": False},
    ),
    "prompt": ({"prompt": "Hi"}, {"prompt": NEW}),
}
"""Form -> a record of known tokens, and one with a token that the model lacks."""
HEADS: list[tuple[type[TrainingRecipe], Any]] = [
    (MedusaRecipe, train_heads),
    (EagleRecipe, train_eagle),
    (DFlashRecipe, train_dflash),
    (DSparkRecipe, train_dspark),
    (MTPRecipe, train_mtp),
]


REWARD = "def reward(completions, **fields):\n    return [float(len(text)) for text in completions]\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer got a token, as by `tokenizer.add_tokens` without `resize_token_embeddings`."""
    folder = tmp_path_factory.mktemp("token-ids") / "base"
    folder.mkdir()
    make_base(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([NEW])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def data_of(folder: Path, form: str, *, known: bool = False) -> Path:
    good, bad = RECORDS[form]
    (folder / "data.jsonl").write_text(
        "".join(f"{json.dumps(record)}\n" for record in (good, good, good if known else bad))
    )
    return folder / "data.jsonl"


def settings(base: Path, data: Path, **more: Any) -> dict[str, Any]:
    sizes = {"steps": 4, "seq_len": 64, "batch_tokens": 128, "validation_fraction": 0}
    return {"base": str(base), "data": (str(data),), **sizes, **more}


OBJECTIVES: list[tuple[str, dict[str, Any]]] = [
    ("text", {}),
    ("chat", {}),
    ("completion", {}),
    ("text", {"streaming": True}),
    ("pair", {"objective": "dpo"}),
    ("label", {"objective": "kto"}),
    (
        "prompt",
        {"objective": "grpo", "reward": ("token_id_rewards:reward",), "num_generations": 2, "max_completion_length": 4},
    ),
]


@pytest.mark.parametrize(("form", "more"), OBJECTIVES, ids=lambda value: str(value)[:30])
def test_a_document_with_a_token_that_the_model_lacks_is_named(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, more: dict[str, Any]
) -> None:
    (tmp_path / "token_id_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = FineTuningRecipe().changed(settings(base, data_of(tmp_path, form), **more))
    with pytest.warns(CheckpointWarning, match=WARNING), pytest.raises(InputError, match=ERROR):
        fine_tune(recipe, tmp_path / "out", device="cpu")
    skipping = recipe.changed({"max_bad_lines": 1, "steps": 1})
    with pytest.warns(CheckpointWarning, match=WARNING):
        assert fine_tune(skipping, tmp_path / "skipping", device="cpu").finished


@pytest.mark.parametrize(("kind", "train"), HEADS, ids=lambda value: getattr(value, "kind", ""))
def test_so_it_is_where_heads_are_trained(base: Path, tmp_path: Path, kind: type[TrainingRecipe], train: Any) -> None:
    recipe = kind().changed(settings(base, data_of(tmp_path, "chat")))
    with pytest.warns(CheckpointWarning, match=WARNING), pytest.raises(InputError, match=ERROR):
        train(recipe, tmp_path / "out", device="cpu")


def test_a_token_that_no_document_has_is_no_error(base: Path, tmp_path: Path) -> None:
    recipe = FineTuningRecipe().changed(settings(base, data_of(tmp_path, "chat", known=True)))
    with pytest.warns(CheckpointWarning, match=WARNING):
        assert fine_tune(recipe, tmp_path / "out", device="cpu").finished


def test_special_tokens_that_no_document_has_need_no_warning(tmp_path: Path) -> None:
    """Published tokenizers have such tokens: Gemma 3 1B's has one for images, others a <pad> of their own."""
    (folder := tmp_path / "base").mkdir()
    make_base(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([NEW])
    tokenizer.save(str(folder / "tokenizer.json"))
    recipe = FineTuningRecipe().changed(settings(folder, data_of(tmp_path, "chat", known=True), steps=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert fine_tune(recipe, tmp_path / "out", device="cpu").finished
    assert not [each for each in caught if NEW in str(each.message)]
    with pytest.raises(InputError, match=ERROR):
        fine_tune(recipe.changed({"data": (str(data_of(tmp_path, "chat")),)}), tmp_path / "bad", device="cpu")


@pytest.mark.parametrize("resumes", [False, True])
def test_a_config_without_weights_is_refused_before_its_data_is_read(base: Path, tmp_path: Path, resumes: bool) -> None:
    recipe = FineTuningRecipe().changed(settings(base / "config.json", tmp_path / "no data.jsonl"))
    with pytest.raises(ConfigError, match=r"config\.json: vocab_size: is \d+, and the tokenizer in .*at least \d+"):
        fine_tune(recipe, tmp_path / "out", device="cpu", resume=resumes)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_other_commands_name_it_too(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = data_of(tmp_path, "chat"), tmp_path / "own.jsonl"
    code, shown, messages = run(capsys, "data", data, "--model", base)
    assert (code, "unusable lines" in shown) == (0, True)
    assert "data.jsonl:3: has the token 'Zanzibar'" in messages
    assert "warning: " in messages
    command = ("medusa", "self-distillation-data", base, "--out", out, "--device", "cpu", "--max-new-tokens", 2)
    code, _, messages = run(capsys, *command, "--data", data_of(tmp_path, "completion"))
    assert (code, out.exists()) == (1, False)
    assert "data.jsonl:3: has the token 'Zanzibar'" in messages
