"""Tools and calls as fields of turns, as in OLMo 3's data: the template writes them, or an error names them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_templates import template_of, tokenizer_of

from ligermodels.data.chat import ChatTemplate
from ligermodels.data.corpus import Corpus
from ligermodels.data.documents import Documents
from ligermodels.errors import InputError

FIELDS: dict[str, tuple[str, Any, str]] = {
    "tools": ("system", [{"type": "function", "function": {"name": "f"}}], '"tools" beside the turns'),
    "functions": ("system", '[{"name": "f"}]', '"tools" beside the turns'),
    "function_calls": ("assistant", "f(x=1)", '"tool_calls"'),
}
READS_THEM = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
    " {{ m.tools or m.functions or m.function_calls }}<|im_end|>{% endfor %}"
)


def documents_of(folder: Path, field: str, value: Any, template: ChatTemplate) -> Documents:
    """A chat whose turn has the value in the field."""
    contents = {"system": "Be brief", "user": "Hi there", "assistant": "Hello"}
    turns: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in contents.items()]
    turns = [{**turn, field: value} if turn["role"] == FIELDS[field][0] else turn for turn in turns]
    (folder / "data.jsonl").write_text(json.dumps({"messages": turns}))
    return Documents(Corpus([folder / "data.jsonl"]), tokenizer_of("qwen2.5", folder), lambda: template)


@pytest.mark.parametrize("field", FIELDS)
def test_a_template_that_does_not_write_them_is_an_error(tmp_path: Path, field: str) -> None:
    _, value, known = FIELDS[field]
    documents = documents_of(tmp_path, field, value, template_of("qwen2.5"))
    words = rf'data\.jsonl:1: qwen2\.5: does not write the "{field}" of a turn; give {known}, or another template'
    with pytest.raises(InputError, match=words):
        documents.read([0])


@pytest.mark.parametrize("field", FIELDS)
def test_a_template_that_writes_them_is_given_them(tmp_path: Path, field: str) -> None:
    _, value, _ = FIELDS[field]
    documents = documents_of(tmp_path, field, value, ChatTemplate(READS_THEM))
    (tokens,) = documents.read([0])
    assert tokens is not None
    text = documents.tokenizer.decode(tokens.ids, skip_special_tokens=False)
    assert str(value).replace(" ", "") in text.replace("Ġ", "").replace(" ", "")


@pytest.mark.parametrize("field", ["tools", "functions"])
@pytest.mark.parametrize("value", [None, "", []])
def test_empty_values_count_as_absent(tmp_path: Path, field: str, value: Any) -> None:
    (tokens,) = documents_of(tmp_path, field, value, template_of("qwen2.5")).read([0])
    assert tokens is not None


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("content", ["Hello", ""])
def test_calls_that_are_written_are_trained_on(is_last: bool, content: str) -> None:
    call = {"role": "assistant", "content": content, "function_calls": "f(x=1)"}
    following = [{"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3"}]
    chat = [{"role": "user", "content": "Hi"}, call, *([] if is_last else following)]
    text, spans = ChatTemplate(READS_THEM).spans(chat, special=re.compile(r"<\|im_(?:start|end)\|>"))
    answers = ["It is 3 <|im_end|>"] if not is_last else []
    assert [text[start:end].strip() for start, end in spans] == [f"{content} f(x=1)<|im_end|>".strip(), *answers]
