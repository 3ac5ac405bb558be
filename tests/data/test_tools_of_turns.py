"""Further fields of turns, such as tools and calls in OLMo 3's data: the template writes them, or an error or a warning
names them."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from chat_templates import template_of, tokenizer_of

from ligermodels.data.chat import ChatTemplate
from ligermodels.data.corpus import Corpus
from ligermodels.data.documents import Documents
from ligermodels.data.unwritten import check_written
from ligermodels.errors import InputError

FIELDS: dict[str, tuple[str, Any, str]] = {
    "tools": ("system", [{"type": "function", "function": {"name": "f"}}], '"tools" beside the turns'),
    "functions": ("system", '[{"name": "f"}]', '"tools" beside the turns'),
    "function_calls": ("assistant", "f(x=1)", '"tool_calls"'),
    "tool_plan": ("assistant", "I will call f", '"reasoning_content" or "content"'),
}
READS_THEM = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
    " {{ m.tools or m.functions or m.function_calls or m.tool_plan }}<|im_end|>{% endfor %}"
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


def test_the_template_that_does_not_write_tools_is_named(tmp_path: Path) -> None:
    """Of the two of a checkpoint, the template for chats with tools."""
    template = ChatTemplate(SILENT, name="default")
    template.tool_use = ChatTemplate(SILENT, name="tool_use")
    with pytest.raises(ValueError, match='tool_use: does not write the "tools" of the chat'):
        check_written(template, [{"role": "user", "content": "a"}], {"tools": [{"name": "f"}]})


SILENT = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"


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


def test_plans_that_are_written_are_trained_on() -> None:
    """Command R7B's template writes the plan before the calls."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.tool_calls %}<|im_start|>{{ m.tool_plan }}<|im_end|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_plan": "I call f", "tool_calls": [call]}]
    text, spans = ChatTemplate(source).spans(chat, special=re.compile(r"<\|im_(?:start|end)\|>"))
    assert "".join(text[start:end] for start, end in spans) == '<|im_start|>I call f<|im_end|>{"x": 1}<|im_end|>'


def read(folder: Path, template: ChatTemplate, *turns: dict[str, Any], **more: Any) -> list[str]:
    """The warnings about a chat of these turns, read twice."""
    line = json.dumps({"messages": turns, **more})
    (folder / "data.jsonl").write_text(f"{line}\n{line}")
    documents = Documents(Corpus([folder / "data.jsonl"]), tokenizer_of("qwen2.5", folder), lambda: template)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert all(documents.read([0, 1]))
    return [str(warning.message) for warning in caught]


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize("turn", [USER, ANSWER])
def test_other_fields_that_are_not_written_are_named_once(tmp_path: Path, turn: dict[str, Any]) -> None:
    fields = {"language": "English", "audience": "all", "weight": None, "empty": ""}
    turns = [{**each, **(fields if each is turn else {})} for each in (USER, ANSWER)]
    found = read(tmp_path, template_of("qwen2.5"), *turns)
    words = "does not write {} of turns: the model gets chats without it"
    assert found == [f"qwen2.5: {words}".format(f'"{name}"') for name in ("language", "audience")]
    writes = ChatTemplate(template_of("qwen2.5").source + "{{ messages[0].language or messages[1].language }}")
    assert read(tmp_path, writes, *turns) == [f"chat template: {words}".format('"audience"')]


def test_each_field_is_named_once_whatever_is_beside_it(tmp_path: Path) -> None:
    names = ["language", "created_at", "model"]
    combinations = [[n for n in names if n != left_out] for left_out in (*names, "")] + [[name] for name in names]
    turns = [{**ANSWER, **dict.fromkeys(fields, "v")} for fields in combinations]
    lines = [json.dumps({"messages": [USER, turn]}) for turn in turns]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    template = template_of("qwen2.5")
    documents = Documents(Corpus([tmp_path / "data.jsonl"]), tokenizer_of("qwen2.5", tmp_path), lambda: template)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        documents.read(range(len(lines)))
    assert sorted(re.findall('"(.*?)"', " ".join(str(w.message) for w in caught))) == sorted(names)


NAMES_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.role == 'tool' %}{{ m.name }}{% endif %} {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant  {% endif %}"
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}


@pytest.mark.parametrize("of_tool", [{}, {"name": "f"}])
def test_the_name_of_a_user_is_named_beside_that_of_a_tool(tmp_path: Path, of_tool: dict[str, str]) -> None:
    turns = [{**USER, "name": "alice"}, CALL, {"role": "tool", "content": "3", **of_tool}, ANSWER]
    (warning,) = read(tmp_path, ChatTemplate(NAMES_TOOLS), *turns)
    assert 'does not write "name" of turns' in warning


@pytest.mark.parametrize(
    ("source", "turn", "unwritten"),
    [
        (NAMES_TOOLS, {**CALL, "function_calls": "f(x=1)"}, ["function_calls"]),
        (NAMES_TOOLS.replace("{{ m.content", "{{ m.reasoning_content or m.tool_plan }} {{ m.content"),
         {**CALL, "tool_plan": "I call f", "reasoning_content": "I call f"}, ["tool_plan"]),
        (NAMES_TOOLS.replace("{{ m.content", "{{ m.tool_plan or m.thoughts }} {{ m.content"),
         {**CALL, "tool_plan": "I call f", "thoughts": "I call f"}, []),
        (NAMES_TOOLS.replace("{{ m.content", "{{ m.tool_plan or m.thoughts }} {{ m.language }} {{ m.content"),
         {**CALL, "tool_plan": "I call f", "thoughts": "Hm", "language": "en", "model": "m"}, ["thoughts", "model"]),
    ],
)  # fmt: skip
def test_fields_whose_words_are_in_the_chat_are_no_error(
    tmp_path: Path, source: str, turn: dict[str, Any], unwritten: list[str]
) -> None:
    """Fields of two formats in one turn, of which the template writes one."""
    found = read(tmp_path, ChatTemplate(source), USER, turn, {"role": "tool", "content": "3"}, ANSWER)
    assert [re.findall('"(.*?)"', each) for each in found if " of turns: " in each] == [[each] for each in unwritten]


def test_fields_that_link_a_result_to_its_call_are_not_named(tmp_path: Path) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {"x": 1}}}
    result = {"role": "tool", "content": "3", "tool_call_id": "1", "name": "f"}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert not read(tmp_path, template_of("qwen2.5"), USER, calls, result, ANSWER)


WITH_REASONING = {**ANSWER, "reasoning_content": "They greet me"}
INLINE = {**ANSWER, "content": "<think>\nThey greet me\n</think>\n\nHello"}
WRITES = (
    "{% for m in messages %}<|im_start|>{{ m.role }} CONTENT<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
REASONS = {
    "cuts": WRITES.replace("CONTENT", "{{ m.content.split('</think>')[-1] }}"),  # as DeepSeek-R1's
    "asks": WRITES.replace(
        "CONTENT", "{% if thinks and loop.last %}{{ m.reasoning_content }} {% endif %}{{ m.content }}"
    ),
}
OF_THE_ASSISTANT = "does not write the reasoning of the assistant (message 1): the model gets chats without it"
OF_THE_USER = "does not write the reasoning of the user (message 0): the model gets chats without it"
REASONINGS: dict[str, tuple[str, list[dict[str, Any]], str | None]] = {
    "of a last turn": ("qwen2.5", [USER, WITH_REASONING], OF_THE_ASSISTANT),
    "of an earlier turn": ("qwen2.5", [USER, WITH_REASONING, USER, ANSWER], OF_THE_ASSISTANT),
    "of an earlier turn, by a template that writes that of the last": (
        "qwen3.5", [USER, WITH_REASONING, USER, ANSWER], None,
    ),
    "in the content": ("qwen2.5", [USER, INLINE], None),
    "in the content, by a template that moves it": ("qwen3.5", [USER, INLINE], None),
    "in the content of an earlier turn": ("qwen3.5", [USER, INLINE, USER, ANSWER], None),
    "in the content, by a template that cuts it": ("cuts", [USER, INLINE], OF_THE_ASSISTANT),
    "an empty one in the content": ("cuts", [USER, {**ANSWER, "content": "<think>\n\n</think>Hello"}], None),
    "of an earlier turn, by a template that writes it with a variable": ("asks", [USER, WITH_REASONING] * 2, None),
    "of an earlier turn, without the variable": ("asks", [USER, WITH_REASONING, USER, ANSWER], OF_THE_ASSISTANT),
    "of a user": ("qwen2.5", [{**USER, "thinking": "A friend"}, ANSWER], OF_THE_USER),
    "of a user, by a template that writes the assistant's": (
        "qwen3.5", [{**USER, "reasoning": "A friend"}, ANSWER], OF_THE_USER,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REASONINGS)
def test_reasoning_that_is_not_written_is_named(tmp_path: Path, case: str) -> None:
    name, turns, wanted = REASONINGS[case]
    qwen3_5 = ChatTemplate((Path(__file__).parent / "templates/qwen3_5.jinja").read_text(), name="qwen3.5")
    written = {"qwen3.5": qwen3_5, **{key: ChatTemplate(source, name=key) for key, source in REASONS.items()}}
    template = written[name] if name in written else template_of(name)
    variables = {"chat_template_kwargs": {"thinks": turns[-1] is WITH_REASONING}}
    assert read(tmp_path, template, *turns, **variables) == ([] if wanted is None else [f"{name}: {wanted}"])
