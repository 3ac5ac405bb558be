"""A model that is trained on chats stops after its turn, in every form in which it is written."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig
from typer.testing import CliRunner

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointWarning
from ligermodels.training import Console, FineTuningRecipe, fine_tune
from ligermodels.training.fine_tuning import export_adapter

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|endoftext|>{% endfor %}"
"""A turn ends with a token that is not the EOS of the base model."""


def run(base: Path, data: Path, out: Path, template: Path | str, **changes: Any) -> list[str]:
    said: list[str] = []
    settings = {"base": base, "data": data, "steps": 1, "seq_len": 64, "batch_tokens": 64, "validation_fraction": 0.0}
    recipe = FineTuningRecipe().changed({**settings, "chat_template": template, **changes})
    fine_tune(recipe, out, console=Console(said.append))
    return said


def test_the_end_of_a_turn_is_an_eos_of_what_is_written(base: Path, tmp_path: Path) -> None:
    chats, template, text = tmp_path / "chats.jsonl", tmp_path / "template.jinja", tmp_path / "text.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    chats.write_text(json.dumps({"messages": turns}))
    text.write_text(json.dumps({"text": "Hi there, how are you"}))
    template.write_text(TEMPLATE)
    end = Tokenizer(base).backend.token_to_id("<|endoftext|>")
    before = json.loads((base / "config.json").read_text())["eos_token_id"]
    assert before != end

    said = run(base, chats, tmp_path / "out", template)
    assert "generation_config.json: eos_token_id gets <|endoftext|>, which ends a turn in the chat template" in said
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [before, end]
    assert lm.from_pretrained(tmp_path / "out").generation_defaults()["eos_token_id"] == [before, end]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == before
    # It is there already; and a text does not change it.
    assert not any("eos_token_id" in message for message in run(tmp_path / "out", chats, tmp_path / "again", template))
    assert GenerationConfig.from_pretrained(tmp_path / "again").eos_token_id == [before, end]
    assert not any("eos_token_id" in message for message in run(base, text, tmp_path / "text", template))
    # An adapter has it beside it, and so has what it is merged into.
    run(base, chats, tmp_path / "adapter", template, lora_rank=2)
    assert GenerationConfig.from_pretrained(tmp_path / "adapter").eos_token_id == [before, end]
    export_adapter(tmp_path / "adapter", tmp_path / "of a checkpoint")
    assert GenerationConfig.from_pretrained(tmp_path / "of a checkpoint").eos_token_id == [before, end]
    result = CliRunner().invoke(app, ["lora", "merge", str(base), str(tmp_path / "adapter"), str(tmp_path / "merged")])
    assert result.exit_code == 0, result.output
    assert GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id == [before, end]
    chats.unlink()
    with pytest.warns(CheckpointWarning, match=r"config.json: is as the base model's.*/chats.jsonl: no such"):
        export_adapter(tmp_path / "adapter", tmp_path / "without data")


@pytest.mark.parametrize("objective", ["sft", "dpo", "kto"])
def test_chats_after_other_lines_count(base: Path, tmp_path: Path, objective: str) -> None:
    """A file that starts with a text, and a line that is unusable, has chats all the same."""
    answer, other = ([{"role": "assistant", "content": words}] for words in ("Hello", "No"))
    user = [{"role": "user", "content": "Hi"}]
    records: dict[str, list[Any]] = {
        "sft": [{"text": "Hi there"}, {"messages": [*user, *answer]}],
        "dpo": [
            {"prompt": "Hi", "chosen": " there", "rejected": " no"},
            {"prompt": user, "chosen": answer, "rejected": other},
        ],
        "kto": [
            {"prompt": "Hi", "completion": " there", "label": True},
            {"prompt": user, "completion": answer, "label": False},
        ],
    }
    data, template = tmp_path / "data.jsonl", tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    data.write_text("\n".join(map(json.dumps, [5, *records[objective]])))
    options = {"objective": objective, "max_bad_lines": 1, "batch_tokens": 128}
    said = run(base, data, tmp_path / "out", template, **options)
    assert any("eos_token_id gets <|endoftext|>" in message for message in said)
    data.write_text(json.dumps(records[objective][0]) + "\n" + json.dumps(records[objective][0]))
    assert not any("eos_token_id" in message for message in run(base, data, tmp_path / "texts", template, **options))


def test_a_named_template_ends_turns(base: Path, tmp_path: Path) -> None:
    """Whatever the first lines are: the model gets the template's tokens."""
    data = tmp_path / "text.jsonl"
    data.write_text(json.dumps({"text": "Hi there, how are you"}))
    said = run(base, data, tmp_path / "out", "chatml")
    assert any("eos_token_id gets <|im_end|>" in message for message in said)
