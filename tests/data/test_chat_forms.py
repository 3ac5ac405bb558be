"""Turns that are not trained on, parts that a template omits, tool calls and contents in other forms."""

import inspect
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from test_chat_table import CALLED, CHATS, SPECIAL, TOOLS, says, template_of, texts_of, user
from transformers import PreTrainedTokenizerBase

from ligermodels.data.chat import OF_TRANSFORMERS, ChatTemplate
from ligermodels.data.corpus import Corpus
from ligermodels.data.documents import Documents
from ligermodels.data.records import parse_line
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import InputError


def trained(name: str, messages: list[dict[str, Any]], **variables: object) -> list[str]:
    text, spans = template_of(name).spans(messages, special=SPECIAL, **variables)
    return texts_of(text, spans)


@pytest.mark.parametrize("name", ["Qwen3", "SmolLM3", "Gemma 4"])
@pytest.mark.parametrize("key", [{"weight": 0}, {"train": False}])
def test_turns_that_are_not_trained_on(name: str, key: dict[str, Any]) -> None:
    """SmolLM3's template marks the turns."""
    messages = [user(1), {**says("said1"), **key}, user(2), says("said2"), user(3), {**says("said3"), **key}]
    assert trained(name, messages) == trained(name, CHATS["turns"])[1:2] != []
    assert trained(name, [{"weight": 1, "train": True, **turn} for turn in messages]) == trained(name, messages)


OMITTED = {
    "Llama 3.2": [("reasoning", {"role": "assistant", "content": "a", "reasoning_content": "b"})],
    "Mistral v3": [("content", {**CALLED[1], "content": "a"})],
    "SmolLM3": [("reasoning", {"role": "assistant", "content": "a", "reasoning": "b"})],
}


@pytest.mark.parametrize("name", OMITTED)
def test_a_part_that_the_template_omits_is_named_once(name: str) -> None:
    ((part, turn),) = OMITTED[name]
    template = ChatTemplate(template_of(name).source, {"bos_token": "<s>", "eos_token": "</s>"}, name="mine")
    with pytest.warns(UserWarning, match=rf"^mine: does not write the {part} of the assistant \(message 1\)"):
        template.spans([user(1), turn], special=SPECIAL)
    with warnings.catch_warnings(action="error"):
        template.spans([user(1), turn], special=SPECIAL)


def test_a_system_turn_that_the_template_omits_is_named() -> None:
    """Mistral's template writes it into the last turn, if that is the user's."""
    template = ChatTemplate(template_of("Mistral v3").source, {"bos_token": "<s>", "eos_token": "</s>"}, name="mine")
    with pytest.warns(UserWarning, match=r"does not write the content of the system \(message 0\)"):
        template.spans(CHATS["system"], special=SPECIAL)


def test_the_reasoning_of_earlier_turns_may_be_omitted() -> None:
    with warnings.catch_warnings(action="error"):
        assert "thought1" not in "".join(trained("Qwen3", CHATS["reasoning"]))


def test_results_within_the_message_of_the_assistant() -> None:
    """Google's own form for Gemma 4."""
    responses = [{"name": "f", "response": {"value": "result1"}}]
    messages = [user(1), {**CALLED[1], "content": "said1", "tool_responses": responses}]
    call = '<|tool_call>call:f{x:<|"|>arg01<|"|>}<tool_call|><|tool_response>'
    assert trained("Gemma 4", messages, tools=TOOLS) == [call, "said1<turn|>"]


@pytest.mark.parametrize(("name", "end"), [("Gemma 3", "<end_of_turn>"), ("GLM-4.5", "")])
def test_contents_in_parts(name: str, end: str) -> None:
    parts = [{"type": "text", "text": "ask1"}], [{"type": "text", "text": "said"}, {"type": "text", "text": "1"}]
    messages = [{"role": role, "content": part} for role, part in zip(("user", "assistant"), parts, strict=True)]
    (text,) = trained(name, messages)
    assert text.endswith(f"said1{end}") and "ask" not in text


@pytest.mark.parametrize(
    ("name", "arguments", "written"),
    [
        ("Qwen2.5", '{"x":  "é"}', '"arguments": {"x": "é"}}'),
        ("Qwen2.5", "", '"arguments": {}}'),
        ("Qwen2.5", None, '"arguments": {}}'),
        ("Qwen2.5", "[1]", '"arguments": "[1]"}'),
        ("Qwen2.5", {"x": 1}, '"arguments": {"x": 1}}'),
        ("Qwen3", '{"x":  "é"}', '"arguments": {"x":  "é"}}'),
        ("Qwen3", {"x": 1}, '"arguments": {"x": 1}}'),
        ("Qwen3", "", '"arguments": {}}'),
        ("Qwen3", None, '"arguments": {}}'),
        ("DeepSeek-V3", '{"x":  "é"}', '```json\n{"x":  "é"}\n```'),
        ("DeepSeek-V3", {"x": "é"}, '```json\n{"x": "é"}\n```'),
        ("DeepSeek-V3", None, "```json\n{}\n```"),
    ],
)
def test_arguments_are_written_as_json(name: str, arguments: object, written: str) -> None:
    """A template that encodes them gets a dict, a template that concatenates them gets text, others what is given."""
    call = {"id": "abcdefg01", "type": "function", "function": {"name": "f", "arguments": arguments}}
    for content in ({}, {"content": None}, {"content": ""}):
        messages = [user(1), {"role": "assistant", **content, "tool_calls": [call]}]
        assert written in "".join(trained(name, messages))
        # Calls of records reach the template in their form; so do flat calls, without "function".
        record, _ = parse_line(json.dumps({"messages": messages}).encode())
        assert record[1]["tool_calls"][0]["function"].get("arguments") == arguments
        assert template_of(name).render(record) == template_of(name).render(messages)
    if name.startswith("Qwen"):
        flat = [user(1), {"role": "assistant", "tool_calls": [call["function"]]}]
        assert written in "".join(trained(name, flat))


def test_an_argument_twice() -> None:
    """A template that takes dicts would write the last one only."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1, "x": 2}'}}
    with pytest.raises(InputError, match="the arguments of a tool call: an object has the field 'x' twice"):
        trained("Qwen2.5", [user(1), {"role": "assistant", "tool_calls": [call]}])


def test_calls_of_which_only_the_first_is_written() -> None:
    with pytest.raises(InputError, match="gpt-oss: does not write the tool calls in message 1"):
        trained("gpt-oss", CHATS["two calls"], tools=TOOLS)


def test_a_template_that_refuses_a_chat_is_quoted_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in (CHATS["plain"], CALLED)))
    documents = Documents(Corpus([path]), Tokenizer(_tokenizer(tmp_path)), lambda: template_of("Gemma 3"))
    refusal = "Gemma 3: refuses the chat: Conversation roles must alternate user/assistant/user/assistant/..."
    with pytest.raises(InputError, match=re.escape(f"{path}:2: {refusal}")):
        documents.read([0, 1])


def _tokenizer(folder: Path) -> Path:
    from chat_templates import tokenizer_of

    tokenizer_of("gemma-2", folder)
    return folder


def test_every_argument_of_transformers_is_an_error_as_a_variable() -> None:
    """They are no variables of templates, and would have no effect."""
    names = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
    assert names - {"self", "tools", "documents", "add_generation_prompt", "kwargs"} <= OF_TRANSFORMERS


@pytest.mark.parametrize("name", ["gpt-oss", "Qwen3", "GLM-4.5", "Gemma 4", "DeepSeek-V3"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_turn_of_reasoning_alone(name: str, content: dict[str, Any]) -> None:
    """Without a content, as OpenAI's API writes it, it was refused by templates that join it (gpt-oss). Where the
    template leaves the reasoning out, nothing of the turn is in the text."""
    turn = {"role": "assistant", "reasoning_content": "thought1", **content}
    nowhere = "cannot be located in the rendered chat: it has reasoning alone, which the template does not write there"
    if name == "DeepSeek-V3":
        with pytest.raises(InputError, match=f"message 1, of the assistant, {nowhere}"):
            trained(name, [user(1), turn])
        return
    (text,) = trained(name, [user(1), turn])
    assert "thought1" in text
    with pytest.raises(InputError, match=f"message 1, of the assistant, {nowhere}"):
        trained(name, [user(1), turn, user(2), says("said2")])
