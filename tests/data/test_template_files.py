"""Named chat templates: chosen as by transformers, and kept by everything that writes a checkpoint."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from chat_templates import tokenizer_of
from runs import make_base
from transformers import AutoTokenizer

import ligermodels as lm
from ligermodels.adapt.adapter import save_adapter
from ligermodels.adapt.lora import add_lora
from ligermodels.cli.models import export_with_tokenizer
from ligermodels.data.chat import ChatTemplate
from ligermodels.data.fingerprint import of_checkpoint
from ligermodels.errors import CheckpointError, InputError
from ligermodels.training.base import Base
from ligermodels.training.fine_tuning_recipe import FineTuningRecipe

CHAT = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
ONE = "one {{ bos_token }}{{ messages[0].content }}"
TOOL_USE = "tools {{ tools[0].function.name }} {{ messages[0].content }}"
LIST = [{"name": name, "template": text} for name, text in {"default": ONE, "tool_use": TOOL_USE, "rag": "r"}.items()]

PLACES: dict[str, dict[str, object]] = {
    "files": {"chat_template.jinja": ONE, "additional_chat_templates/tool_use.jinja": TOOL_USE},
    "list": {"chat_template": LIST},
    "files before the list": {"chat_template": LIST, "chat_template.jinja": "other {{ messages[0].content }}"},
    "no template for tools": {"chat_template": ONE},
    "tool_use alone": {"chat_template": [LIST[1]]},
    "files without a default, before the config": {
        "chat_template": ONE, "additional_chat_templates/tool_use.jinja": TOOL_USE,
    },
}  # fmt: skip


def write(folder: Path, contents: dict[str, object]) -> Path:
    tokenizer_of("qwen2.5", folder)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<b>"}
    for name, content in contents.items():
        if name == "chat_template":
            config[name] = content
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(str(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "list", "chat_template.json"])
def test_where_a_template_is_found(place: str, tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<é>", "lstrip": False}, "eos_token": None, "chat_template": "{{ 'no' }}"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<e>", "bos_token": "no"}))
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    if place == "chat_template.jinja":
        (tmp_path / place).write_text(source)
    elif place == "chat_template.json":
        del config["chat_template"]
        (tmp_path / place).write_text(json.dumps({"chat_template": source}))
    else:
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": source}]
        config["chat_template"] = named if place == "list" else source
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.from_folder(tmp_path).render(CHAT) == "<é>Hi<e>"
    (tmp_path / "other.jinja").write_text("other {{ bos_token }}")
    assert ChatTemplate.from_folder(tmp_path, tmp_path / "other.jinja").render(CHAT) == "other <é>"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, r"has no chat template \(base models have none\): give --chat-template"),
        ([{"name": "rag", "template": "x"}], "none is named 'default', only \\['rag'\\]"),
        (5, "must be text, got 5"),
        ("{% for %}", "not a jinja2 template"),
    ],
)
def test_no_template_is_an_error(template: object, words: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(CheckpointError, match=words):
        ChatTemplate.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere"):
        ChatTemplate.from_folder(tmp_path, tmp_path / "nowhere.jinja")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("tools", [None, [], TOOLS], ids=["none", "empty", "tools"])
def test_templates_are_chosen_as_by_transformers(place: str, tools: list | None, tmp_path: Path) -> None:
    folder = write(tmp_path, PLACES[place])
    oracle, template = AutoTokenizer.from_pretrained(folder), ChatTemplate.from_folder(folder)
    try:
        wanted = oracle.apply_chat_template(CHAT, tools=tools, tokenize=False)
    except Exception:
        with pytest.raises(InputError, match="refuses the chat: "):
            template.render(CHAT, tools=tools)
        return
    assert template.render(CHAT, tools=tools) == wanted
    assert template.spans(CHAT, special=re.compile("(?!)"), tools=tools) == (wanted, [])
    other = folder / "other.jinja"
    other.write_text("mine")
    assert ChatTemplate.from_folder(folder, other).render(CHAT, tools=tools) == "mine"


def test_a_template_that_is_wrong_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path, {"chat_template.jinja": ONE, "additional_chat_templates/tool_use.jinja": "{% for %}"})
    with pytest.raises(CheckpointError, match=r"additional_chat_templates/tool_use\.jinja: not a jinja2 template"):
        ChatTemplate.from_folder(folder)


def test_named_templates_are_written_again(tmp_path: Path) -> None:
    """By saves, which replace the templates of a folder, by fine-tuning, and beside adapters."""
    base, tool_use = tmp_path / "base", "additional_chat_templates/tool_use.jinja"
    make_base(base)
    (base / tool_use).parent.mkdir()
    (base / tool_use).write_text(TOOL_USE)
    model, out = lm.from_pretrained(base), tmp_path / "out"
    model.save_pretrained(out)
    assert (out / tool_use).read_text() == TOOL_USE
    (out / "additional_chat_templates/rag.jinja").write_text("old")
    model.save_pretrained(out, overwrite=True)
    assert [path.name for path in (out / tool_use).parent.iterdir()] == ["tool_use.jinja"]
    assert ChatTemplate.from_folder(out).render(CHAT, tools=TOOLS) == "tools f Hi"

    before = of_checkpoint(base / "config.json", base, None)
    (base / tool_use).write_text("other")
    assert of_checkpoint(base / "config.json", base, None) != before

    recipe = FineTuningRecipe(base=str(base), data=["chats.jsonl"])
    assert exported(recipe)[tool_use] == base / tool_use
    (tmp_path / "mine.jinja").write_text("mine")
    files = exported(recipe.changed({"chat_template": tmp_path / "mine.jinja"}))  # it is for all chats
    assert tool_use not in files and files["chat_template.jinja"] == tmp_path / "mine.jinja"


def exported(recipe: FineTuningRecipe) -> Mapping[str, Path]:
    return Base.find(recipe).load(recipe, device="cpu", attention="auto").require_export_spec().files


def test_adapters_have_the_templates_that_differ_from_the_base(tmp_path: Path) -> None:
    base, tool_use = tmp_path / "base", "additional_chat_templates/tool_use.jinja"
    make_base(base)
    (base / tool_use).parent.mkdir()
    (base / tool_use).write_text(TOOL_USE)
    model = lm.from_pretrained(base)
    add_lora(model, r=2)
    save_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter" / tool_use).exists()
    (tmp_path / "mine.jinja").write_text("mine")
    spec = model.require_export_spec()
    model.export_spec = replace(spec, files={**spec.files, tool_use: tmp_path / "mine.jinja"})
    save_adapter(model, tmp_path / "adapter", overwrite=True)
    assert (tmp_path / "adapter" / tool_use).read_text() == "mine"
    again = export_with_tokenizer(lm.from_pretrained(base), tmp_path / "adapter")
    assert again.require_export_spec().files[tool_use] == tmp_path / "adapter" / tool_use
