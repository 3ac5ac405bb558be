"""Lines of JSON, as datasets write them: one form of chat comes out, and what is none is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from ligermodels.data.lines import LINE_BYTES
from ligermodels.data.record_fields import Format
from ligermodels.data.records import ALL_QUESTIONS, Completion, NothingToLearn, parse_line, read_record

USER, ASSISTANT = {"role": "user", "content": "Hi there!"}, {"role": "assistant", "content": "Hello, you?"}
SYSTEM = {"role": "system", "content": "x"}
CUT = {**ASSISTANT, "finish_reason": "length"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
CALLING_BY_TEXT = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"a": 1}'}}]}
RESULT = {"role": "tool", "content": "5"}


def sharegpt(*turns: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": speaker, "value": value} for speaker, value in turns]}


def messages(*turns: object, **more: object) -> dict[str, object]:
    return {"messages": [USER, *turns], **more}


QUESTIONS = [
    {"role": role, "content": content}
    for role, content in zip(("user", "assistant") * 2, ("Do", "Yes", "Do\nit", "No"), strict=True)
]
USER_ASKS, NO = QUESTIONS[2:]
NULLS = {"tool_calls": None, "name": None, "tool_call_id": None, "from": None, "value": None}
TEXT_CALL = {"function": {"name": "f", "arguments": '{"a": 1}'}, "id": None}
CALLING_BY_TEXT = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": TEXT_CALL["function"]}],
}  # the template decides on the form of arguments
ODD_CALL = {"id": "c1", "function": {"name": "f", "arguments": "none"}}

GOOD: dict[str, tuple[object, object]] = {
    "text": ({"text": "a", "id": 5, "messages": None, "conversations": None}, "a"),
    "empty": ({"text": ""}, ""),
    "messages": (messages(ASSISTANT), [USER, ASSISTANT]),
    "nulls": (messages({**ASSISTANT, **NULLS}, tools=None), [USER, ASSISTANT]),
    "no calls": (messages({**ASSISTANT, "tool_calls": []}), [USER, ASSISTANT]),
    "other keys": (messages({**RESULT, "call": 1}, ASSISTANT), [USER, {**RESULT, "call": 1}, ASSISTANT]),
    "arguments as text": (
        messages({"role": "assistant", "content": None, "tool_calls": [TEXT_CALL]}), [USER, CALLING_BY_TEXT],
    ),
    "a call with an empty content": (messages({**CALLING, "content": ""}), [USER, {**CALLING, "content": ""}]),
    "arguments that are no object": (
        messages({**CALLING, "tool_calls": [ODD_CALL]}),
        [USER, {**CALLING, "tool_calls": [{"type": "function", **ODD_CALL}]}],
    ),
    "a call without its wrapping": (messages({"role": "assistant", "tool_calls": [CALL["function"]]}), [USER, CALLING]),
    "OpenAI's older call": (
        messages({"role": "assistant", "function_call": TEXT_CALL["function"]}), [USER, CALLING_BY_TEXT],
    ),
    "parts": (
        messages({"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
        [USER, {"role": "assistant", "content": "ab"}],
    ),
    "parts without text": (
        messages(ASSISTANT, {"role": "assistant", "content": [{"type": "text", "text": None}, {"type": "text"}]}),
        [USER, ASSISTANT, {"role": "assistant", "content": ""}],
    ),
    "ShareGPT, no calls in a turn of calls": (
        sharegpt(("human", "Hi there!"), ("function_call", "[]"), ("gpt", "Hello, you?")),
        [USER, {"role": "assistant", "content": ""}, ASSISTANT],
    ),
    "ShareGPT": (sharegpt(("human", "Hi there!"), ("gpt", "Hello, you?")), [USER, ASSISTANT]),
    "ShareGPT with calls": (
        sharegpt(("human", "Hi there!"), ("function_call", json.dumps(CALL["function"])), ("observation", "5"),
                 ("tool_call", json.dumps([CALL])), ("function_response", "5"), ("function_call", "f()")),
        [USER, CALLING, RESULT, CALLING, RESULT, {"role": "assistant", "content": "f()"}],
    ),
    "speakers in any case": (
        sharegpt(("System", "x"), (" Human ", "Hi there!"), ("GPT", "Hello, you?"), ("Tool", "5"), (" assistant", "y")),
        [SYSTEM, USER, ASSISTANT, RESULT, {"role": "assistant", "content": "y"}],
    ),
    "starts with the assistant": (
        sharegpt(("gpt", "a"), ("tool", "b"), ("gpt", "c"), ("human", "Hi there!"), ("gpt", "Hello, you?")),
        [USER, ASSISTANT],
    ),
    "starts with the assistant on purpose": ({"messages": [ASSISTANT, USER]}, [ASSISTANT, USER]),
    "the user twice and thrice": (
        {"messages": [SYSTEM, USER, {**USER, "content": "?"}, {**USER, "content": ""}, ASSISTANT, USER, USER]},
        [SYSTEM, {**USER, "content": "Hi there!\n\n?"}, ASSISTANT, {**USER, "content": "Hi there!\n\nHi there!"}],
    ),
    "a system prompt beside the turns": (messages(ASSISTANT, system="x"), [SYSTEM, USER, ASSISTANT]),
    "a system prompt twice": ({"messages": [SYSTEM, USER, ASSISTANT], "system_prompt": "x"}, [SYSTEM, USER, ASSISTANT]),
    "turns that are not trained on": (
        messages({**ASSISTANT, "weight": 0}, USER, {**ASSISTANT, "train": False}, USER, {**ASSISTANT, "loss": 0}, USER,
                 {**ASSISTANT, "weight": 1, "train": True, "loss": None}),
        [USER, {**ASSISTANT, "weight": 0}, USER, {**ASSISTANT, "weight": 0}, USER, {**ASSISTANT, "weight": 0}, USER,
         ASSISTANT],
    ),
    "turns of the user are never trained on": ({"messages": [{**USER, "train": False}, ASSISTANT]}, [USER, ASSISTANT]),
    "a chat that was cut": (messages(ASSISTANT, finish_reason="length"), [USER, CUT]),
    "an answer that was cut": (
        {"question": "Hi there!", "answer": "Hello, you?", "finish_reason": "length"}, [USER, CUT],
    ),
    "a chat that was not cut": (messages(ASSISTANT, finish_reason="stop"), [USER, ASSISTANT]),
    "a completion": ({"prompt": "a", "completion": " b"}, Completion("a", " b")),
    "a completion in turns": (
        {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]},
        [USER, {**ASSISTANT, "weight": 0}, USER, ASSISTANT],
    ),
    "Alpaca": ({"instruction": "Do", "input": "", "output": "Yes"}, QUESTIONS[:2]),
    "Dolly": ({"instruction": "Do", "context": "it", "response": "No"}, [USER_ASKS, NO]),
    "ms-swift": ({"query": "Do\nit", "response": "No", "history": "[]"}, [USER_ASKS, NO]),
    "GSM8K": ({"question": "Do\nit", "answer": "No"}, [USER_ASKS, NO]),
    "a row of a table": (
        {"text": "", "messages": json.dumps([USER, ASSISTANT]), "system": "x", "tools": "", "prompt": ""},
        [SYSTEM, USER, ASSISTANT],
    ),
    "Alpaca's row of a table": ({"instruction": "Do", "input": "", "output": "Yes", "history": ""}, QUESTIONS[:2]),
    "Alpaca with everything": (
        {"system": "x", "instruction": "Do", "input": "it", "output": "No", "history": [["Do", "Yes"]]},
        [SYSTEM, *QUESTIONS],
    ),
    "turns before a text": (
        {"prompt": [USER, ASSISTANT, USER], "completion": "Hello, you?"},
        [USER, {**ASSISTANT, "weight": 0}, USER, ASSISTANT],
    ),
    "JSON to learn": (
        {"prompt": "Write a chat", "completion": json.dumps([USER, ASSISTANT])},
        Completion("Write a chat", json.dumps([USER, ASSISTANT])),
    ),
    "turns before a text that was cut": (
        {"prompt": [USER], "completion": "Hello", "finish_reason": "length"},
        [USER, {"role": "assistant", "content": "Hello", "finish_reason": "length"}],
    ),
    "a text beside columns of questions": ({"text": "a", "prompt": "p", "response": "r", "input": 5}, "a"),
    "a text beside empty answers": ({"text": "a", "question": "q", "answer": "", "messages": "[]"}, "a"),
    "an answer beside an empty one": ({"prompt": "Do\nit", "completion": "", "response": "No"}, [USER_ASKS, NO]),
    "two writings of an answer": ({"prompt": "a", "completion": " b", "response": "c"}, Completion("a", " b")),
    "a problem with a solution and its number": (
        {"problem": "Do\nit", "solution": "No", "answer": "5"}, [USER_ASKS, NO]
    ),
    "the first Alpaca": ({"instruction": "Do", "input": "it", "output": "No", "text": "Below ..."}, [USER_ASKS, NO]),
    "Magpie": (
        {**sharegpt(("human", "Hi there!"), ("gpt", "Hello, you?")), "instruction": "Hi there!", "response": "Hello"},
        [USER, ASSISTANT],
    ),
    "a completion and its text": ({"prompt": "a", "completion": " b", "text": "a b"}, Completion("a", " b")),
    "OpenOrca": ({"id": "1", "system_prompt": "x", "question": "Do\nit", "response": "No"}, [SYSTEM, USER_ASKS, NO]),
    "a prompt and its response": ({"prompt": "Do\nit", "response": "No"}, [USER_ASKS, NO]),
    "a problem and its solution": ({"problem": "Do\nit", "solution": "No"}, [USER_ASKS, NO]),
    "a problem and its answer": ({"problem": "Do\nit", "answer": "No"}, [USER_ASKS, NO]),
    "an input and its output": ({"input": "Do\nit", "output": "No"}, [USER_ASKS, NO]),
    "empty media": (messages(ASSISTANT, images=[], audio=None), [USER, ASSISTANT]),
    "two users": (messages({**USER, "name": "b"}, ASSISTANT), [USER, {**USER, "name": "b"}, ASSISTANT]),
}  # fmt: skip

BAD: dict[str, tuple[object, str]] = {
    "cut": ('{"text": "x', "not JSON"),
    "deep": ("[" * 100_000, "not JSON"),
    "a field twice": ('{"prompt": "a", "completion": "b", "completion": "c"}', "the field 'completion' twice"),
    "a field of a turn twice": (
        '{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}',
        "the field 'role' twice",
    ),
    **{
        f"a field twice in {name}, a string": (messages(ASSISTANT, **{name: text}), "the field 'a' twice")
        for name, text in {
            "messages": '[{"a": 1, "a": 2}]',
            "tools": '[{"a": 1, "a": 2}]',
            "functions": '[{"x": {"a": 1, "a": 2}}]',
            "documents": '[{"a": 1, "a": 2}]',
            "chat_template_kwargs": '{"a": 1, "a": 2}',
        }.items()
    },
    "a field twice in tool_calls, a string": (
        messages({**ASSISTANT, "tool_calls": '[{"name": "f", "name": "g"}]'}),
        "the field 'name' twice",
    ),
    "half a character": ('{"text": "\\uD83D"}', "surrogate pair"),
    "list": (["text"], "not an object"),
    "no text": ({"text": 5}, '"text" must be a string'),
    "another format": ({"ask": "a", "answer": "b"}, 'not an object with "messages", .*fields are: "ask'),
    "two chats": ({"messages": [USER], **sharegpt(("human", "a"))}, 'remove "messages"; or "conversations"$'),
    "two answers": (
        {"instruction": "a", "output": "b", "response": "c"},
        'several formats: remove "instruction" and "output"; or "instruction" and "response"$',
    ),
    "an unwanted answer": ({"question": "a", "answer": "b", "label": 0.0}, '"label" is a field of preference data'),
    "a missing part": ({"prompt": "a"}, 'fields are: "prompt"$'),
    "half turns": ({"prompt": "a", "completion": [ASSISTANT]}, '"prompt" is a text; give the prompt as turns'),
    "half history": ({"instruction": "a", "output": "b", "history": [["c"]]}, '"history" must be a list of pairs'),
    "no instruction": ({"instruction": 5, "output": "b"}, '"instruction" must be a string'),
    "two system prompts": ({"messages": [SYSTEM, USER, ASSISTANT], "system": "y"}, '"system" and the first turn'),
    "a system prompt of a text": ({"text": "a", "system": "b"}, '"system" is for chats'),
    "tools of a text": ({"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}, '"tools" is for chats'),
    "tools twice": (messages(ASSISTANT, tools=[{"name": "f"}], functions=[{"name": "f"}]), '"functions" is the old'),
    "a variable that is set": (messages(ASSISTANT, chat_template_kwargs={"messages": 1}), 'may not set "messages"'),
    "documents that are none": (messages(ASSISTANT, documents="a"), '"documents" must be a list'),
    "preferences": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        '"chosen" is a field of preference data: .*--objective dpo',
    ),
    "preferences among messages": (messages(ASSISTANT, rejected_response="b"), '"rejected_response" is a field of'),
    "an unwanted completion": ({"prompt": "a", "completion": "b", "label": False}, '"label" is a field of preference'),
    "an unwanted completion of a table": (
        {"prompt": "a", "completion": "b", "label": "False"},
        '"label" is a field of',
    ),
    "pictures": (messages(ASSISTANT, images=["a.png"]), '"images" is not text'),
    "weights of records": (messages(ASSISTANT, weight=0.5), '"weight" selects what is trained on'),
    "masks": (messages({**ASSISTANT, "mask": 1}), 'turn 2 .*"mask" selects'),
    "masks in a turn": (messages({**ASSISTANT, "train_detail": [{"begin_offset": 0}]}), 'turn 2 .*"train_detail"'),
    "half weights": (messages({**ASSISTANT, "weight": 0.5}), 'turn 2 .*"weight" must be true, false, 1 or 0, got 0.5'),
    "a cut turn of the user": (
        messages(ASSISTANT, USER, finish_reason="length"),
        "the last turn is not the assistant's",
    ),
    "training on the user": ({"messages": [{**USER, "train": True}, ASSISTANT]}, "turn 1 .*of the user, and only"),
    "refusals": (messages({**ASSISTANT, "refusal": "no"}), 'turn 2 .*"refusal" is text that no'),
    "no list": ({"conversations": {"from": "gpt", "value": "x"}}, "a list of turns"),
    "no turn": ({"messages": ["hello"]}, "turn 1"),
    "no content": (messages({"role": "assistant"}), "turn 2"),
    "picture": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "turn 1 .*type 'image'"),
    "a part that is no text": (messages({"role": "assistant", "content": [{"type": "text", "text": 5}]}), "turn 2"),
    "no speaker": ({"conversations": [{"value": "x"}]}, "turn 1"),
    "another speaker": (messages(ASSISTANT, {"role": "critic", "content": "x"}), "turn 3 .* 'critic'; .* user, assist"),
    "another speaker first": (sharegpt(("narrator", "x"), ("human", "x"), ("gpt", "x")), "turn 1 .*'narrator'"),
    "calls that are none": (messages({**CALLING, "tool_calls": [1]}), "turn 2 .*list of objects"),
    "a call of nothing": (messages({**CALLING, "tool_calls": [{"function": {}}]}), "turn 2 .*without a name"),
    "tools that are none": (messages(ASSISTANT, tools="f"), '"tools" must be a list'),
}


@pytest.mark.parametrize("case", GOOD)
def test_lines_of_many_kinds(case: str) -> None:
    record, wanted = GOOD[case]
    assert parse_line(json.dumps(record).encode()) == ((wanted, {}) if isinstance(wanted, list) else wanted)


TOOL, DOCUMENT = {"type": "function", "function": {"name": "f"}}, {"title": "a", "text": "b"}


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"tools": [{"name": "f"}]}, {"tools": [TOOL]}),
        ({"tools": '[{"name": "f"}]'}, {"tools": [TOOL]}),
        ({"tools": [TOOL]}, {"tools": [TOOL]}),
        ({"functions": [{"name": "f"}]}, {"tools": [TOOL]}),
        ({"documents": [DOCUMENT]}, {"documents": [DOCUMENT]}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"chat_template_kwargs": "{}", "documents": []}, {}),
    ],
)
def test_what_goes_to_the_template(fields: dict[str, object], variables: dict[str, object]) -> None:
    assert parse_line(json.dumps(messages(ASSISTANT, **fields)).encode()) == ([USER, ASSISTANT], variables)


@pytest.mark.parametrize("form", ALL_QUESTIONS, ids=lambda form: " and ".join(form.required))
def test_a_column_without_a_name_is_no_part_of_a_question(form: Format) -> None:
    """pandas writes its index so, in `to_csv`."""
    record = {"": "7", **dict(zip(form.required, ("Hi there!", "Hello, you?"), strict=True))}
    assert read_record(json.dumps(record).encode()) == (([USER, ASSISTANT], {}), [""])


def test_fields_that_are_not_used_are_named() -> None:
    record = messages(
        ASSISTANT, tools=[], id=5, source="a", prompt="b", text="c", parallel_tool_calls=False, note="", label=1
    )
    assert read_record(json.dumps(record).encode())[1] == [
        "id",
        "source",
        "prompt",
        "text",
        "parallel_tool_calls",
        "label",
    ]


@pytest.mark.parametrize("tools", [[], None, "", "null", "[]"])
def test_no_tools_in_any_words(tools: object) -> None:
    assert parse_line(json.dumps(messages(ASSISTANT, tools=tools)).encode()) == ([USER, ASSISTANT], {})


@pytest.mark.parametrize("case", BAD)
def test_lines_that_cannot_be_used(case: str) -> None:
    record, words = BAD[case]
    with pytest.raises(ValueError, match=words) as caught:
        parse_line((record if isinstance(record, str) else json.dumps(record)).encode())
    assert not isinstance(caught.value, NothingToLearn)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_alone_is_words_of_the_assistant(key: str, content: dict[str, Any]) -> None:
    """Such a chat was left out as one in which the assistant says nothing, or unusable without an empty content."""
    given = {"content": content["content"]} if content.get("content") is not None else {}
    turn = {"role": "assistant", key: "I think"}
    assert parse_line(json.dumps(messages({**turn, **content})).encode()) == ([USER, {**turn, **given}], {})
    with pytest.raises(NothingToLearn, match="does not say a word"):
        parse_line(json.dumps(messages({**turn, key: " ", "content": ""})).encode())
    with pytest.raises(ValueError, match='needs text under "role" and "content"'):
        parse_line(json.dumps(messages({**turn, key: ""})).encode())


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_other_turns_need_text(role: str) -> None:
    """Whatever reasoning they have: templates would write an empty turn."""
    turns = [{"role": role, "reasoning": "x"}, {"role": "assistant", "content": "y"}]
    with pytest.raises(ValueError, match='turn 1 of the chat needs text under "role" and "content"'):
        parse_line(json.dumps({"messages": turns}).encode())


@pytest.mark.parametrize(
    "record",
    [
        messages(),
        {"messages": []},
        sharegpt(("gpt", "a")),
        {"conversations": []},
        messages({**ASSISTANT, "content": ""}, USER, {**ASSISTANT, "content": " \n", "tool_calls": []}),
        messages({**ASSISTANT, "content": [{"type": "text", "text": None}]}),
        sharegpt(("human", "Hi there!"), ("function_call", "[]")),
    ],
)
def test_chats_without_a_word_of_the_assistant_are_no_errors(record: object) -> None:
    with pytest.raises(NothingToLearn, match="does not say a word"):
        parse_line(json.dumps(record).encode())
    with pytest.raises(NothingToLearn, match="no turn of the assistant is trained on"):
        parse_line(json.dumps(messages({**ASSISTANT, "weight": 0})).encode())


def test_long_lines_take_bounded_memory(tmp_path: Path) -> None:
    """A line too long for memory is an unusable one; of long ones, few are held as tokens at once."""
    from chat_templates import tokenizer_of

    from ligermodels.data import documents
    from ligermodels.errors import InputError

    tokenizer_of("qwen2.5", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    lines = [json.dumps({"text": text}) for text in ("a " * (LINE_BYTES // 2), *(["b " * 500_000] * 20), "c")]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"data\.jsonl:1: has more than 8,388,608 bytes; cut the text"):
        documents.Documents.of_checkpoint(tmp_path, [tmp_path / "data.jsonl"]).read([0])
    found = documents.Documents.of_checkpoint(tmp_path, [tmp_path / "data.jsonl"])
    assert [found.at_once(range(first, 22)) for first in (0, 1, 15, 21)] == [1, 8, 7, 1]


def test_an_empty_record_is_a_text_or_a_completion() -> None:
    for record, name in (({"text": ""}, "text"), ({"prompt": "Hi", "completion": ""}, "completion")):
        found = read_record(json.dumps(record).encode())[0]
        assert isinstance(found, Completion) and found.emptiness == f"the {name} is empty"
