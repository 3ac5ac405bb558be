"""Which tokens of a chat are trained: every published kind of template with every kind of chat."""

import json
import random
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ligermodels.data import built_in_templates
from ligermodels.data.built_in_templates import template_file
from ligermodels.data.chat import ChatTemplate
from ligermodels.errors import InputError

TEMPLATES = Path(__file__).parent / "templates"
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
SPECIAL = re.compile(
    r"<\|[^<>|]+\|>|<\|\w+>|<\w+\|>|<｜[^<>]+｜>|</?s>|<(?:bos|start_of_turn|end_of_turn)>|\[/?[A-Z_]+\]"
)


class Published(NamedTuple):
    """A template of tests/data/templates, or a built-in one, and what its model writes.

    file: name of the template.
    own: pattern, written by hand, of a turn of the model in a rendered chat; its group is the text to train on.
    arguments: the form of tool-call arguments that the template takes: "dict", "text" or "both".
    refuses: pattern of the kinds of chats that the template refuses, or whose tool calls it does not write.
    variables: variables of the template.
    """

    file: str
    own: str
    arguments: str = "dict"
    refuses: str = "none"
    variables: Mapping[str, Any] = MappingProxyType({})


NO_THINKING = {"enable_thinking": False}
CHATML = r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)"
NO_THOUGHTS = r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n\n)?(.*?<\|im_end\|>)"
MISTRAL = (
    r"(?:\[/INST\]|\[/SYSTEM_PROMPT\](?!\[(?:INST|AVAILABLE_TOOLS)\])|\[/TOOL_RESULTS\](?!\[TOOL_RESULTS\]))"
    r"(.*?</s>(?:[a-z].*?</s>)*)"
)
DEEPSEEK = (
    "(?:<｜Assistant｜>|<｜tool▁outputs▁end｜>|<｜tool▁output▁end｜>(?=\n<｜tool▁call▁begin))(.*?<｜end▁of▁sentence｜>)"
)
LLAMA = r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eo[tm]_id\|>)"
R1 = DEEPSEEK.replace(  # which starts another turn for the content of a turn with calls
    "(?:<｜Assistant｜>",
    "(?:(?<!<｜end▁of▁sentence｜>)<｜Assistant｜>|(?<=<｜end▁of▁sentence｜>)<｜Assistant｜>(?!<｜end▁of▁sentence｜>)",
)
WITH_CALLS = ".*call.*|two rounds.*"
ALTERNATING = "|two in a row|three in a row.*|greeting.*|call after the system"
ONE_CALL = "two calls|call after the system"  # it takes the tools into the first turn after the system's
PUBLISHED = {
    "Qwen2.5": Published("qwen2_5", CHATML),
    "Qwen3": Published("qwen", CHATML, "both"),
    "Qwen3, no thinking": Published("qwen", NO_THOUGHTS, "both", variables=NO_THINKING),
    "Qwen3.5": Published("qwen3_5", r"<\|im_start\|>assistant\n(?:<think>\n)?(.*?<\|im_end\|>)"),
    "Qwen3.5, no thinking": Published("qwen3_5", NO_THOUGHTS, variables=NO_THINKING),
    "GLM-4.5": Published("glm4_5", r"<\|assistant\|>(.*?)\s*(?=<\|user\|>|<\|assistant\|>|<\|observation\|>|$)"),
    "Mistral v3": Published("mistral_v3", MISTRAL, refuses=ALTERNATING),
    "Mistral v7": Published("mistral_v7", MISTRAL, "both"),
    "Llama 3.2": Published("llama3_2", LLAMA, refuses=ONE_CALL),
    "Llama 3.2, built-in": Published("llama3_2", LLAMA, refuses=ONE_CALL, variables={"builtin_tools": ["f"]}),
    "Gemma 3": Published("gemma3", r"<start_of_turn>model\n(.*?<end_of_turn>)", refuses=WITH_CALLS + ALTERNATING),
    "Gemma 4": Published(
        "gemma4",
        r"(?:<\|turn>model\n|<tool_response\|>(?!<\|tool_response>))(.*?(?:<\|tool_response>|<turn\|>|$))",
    ),
    "Gemma 4, thinking": Published(
        "gemma4",
        r"(?:<\|turn>model\n|<tool_response\|>(?!<\|tool_response>)(?:<\|channel>thought\n)?)"
        r"(.*?(?:<\|tool_response>|<turn\|>|$))",
        variables={"enable_thinking": True},
    ),
    "gpt-oss": Published(
        "gpt_oss",
        r"<\|start\|>assistant((?:<\|channel\|>analysis<\|message\|>[^<]*<\|end\|><\|start\|>assistant)?"
        r".*?(?:<\|call\|>|<\|return\|>|<\|end\|>))",
        refuses="two calls|reasoning, content and call",  # it writes the first of two calls
    ),
    "DeepSeek-V3": Published("deepseek_v3", DEEPSEEK, "text"),
    "DeepSeek-R1": Published("deepseek_r1", R1, "text"),
    "Command R7B": Published(
        "cohere_command", r"<\|START_OF_TURN_TOKEN\|><\|CHATBOT_TOKEN\|>(.*?<\|END_OF_TURN_TOKEN\|>)"
    ),
    "Cohere 2": Published(
        "cohere2",
        r"<\|CHATBOT_TOKEN\|><\|START_RESPONSE\|>(.*?<\|END_OF_TURN_TOKEN\|>)",
        refuses=WITH_CALLS + ALTERNATING,
    ),
    "Phi-3": Published("phi3", r"<\|assistant\|>\n(.*?<\|end\|>)", refuses=WITH_CALLS),
    "Phi-4-mini": Published("phi4_mini", r"<\|assistant\|>(.*?<\|end\|>)"),
    "SmolLM3": Published("smollm3", r"(<\|im_start\|>assistant\n.*?<\|im_end\|>\n)", refuses=WITH_CALLS),
    "Granite 4": Published("granite4", r"<\|start_of_role\|>assistant<\|end_of_role\|>(.*?<\|end_of_text\|>)", "both"),
    "Hermes 3": Published("hermes3", CHATML),
    "chatml": Published("chatml", CHATML),
    "llama3": Published("llama3", LLAMA, refuses=WITH_CALLS),
    "gemma": Published("gemma", r"<start_of_turn>model\n(.*?<end_of_turn>)", refuses=WITH_CALLS + ALTERNATING),
    "mistral": Published("mistral", r"\[/INST\](.*?</s>)", refuses=WITH_CALLS + ALTERNATING),
    "phi": Published("phi", r"<\|assistant\|>\n(.*?<\|end\|>)", refuses=WITH_CALLS),
    "zephyr": Published("zephyr", r"<\|assistant\|>\n(.*?</s>)", refuses=WITH_CALLS),
    "alpaca": Published("alpaca", r"### Response:\n(.*?</s>)", refuses=WITH_CALLS),
}  # fmt: skip
TOKENS = {
    "mistral_v3": {"bos_token": "<s>", "eos_token": "</s>"},
    "mistral_v7": {"bos_token": "<s>", "eos_token": "</s>"},
    "llama3_2": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "gemma3": {"bos_token": "<bos>"},
    "gemma4": {"bos_token": "<bos>"},
    "deepseek_v3": {"bos_token": "<｜begin▁of▁sentence｜>"},
    "deepseek_r1": {"bos_token": "<｜begin▁of▁sentence｜>"},
    "cohere_command": {"bos_token": "<BOS_TOKEN>"},
    "cohere2": {"bos_token": "<BOS_TOKEN>"},
    "phi3": {"eos_token": "<|endoftext|>"},
    "phi4_mini": {"eos_token": "<|endoftext|>"},
    "hermes3": {"bos_token": "<|begin_of_text|>"},
    "llama3": {"bos_token": "<|begin_of_text|>"},
    "gemma": {"bos_token": "<bos>"},
    **{file: {"bos_token": "<s>", "eos_token": "</s>"} for file in ("mistral", "zephyr", "alpaca")},
}

Turn = dict[str, Any]


def user(number: int) -> Turn:
    return {"role": "user", "content": f"ask{number}"}


def says(content: str | None = None, calls: tuple[str, ...] = (), **fields: Any) -> Turn:
    """A turn of the assistant; `calls` are values of an argument, one per tool call."""
    tool_calls = [
        {"id": f"abcdefg{x[-2:]}", "type": "function", "function": {"name": "f", "arguments": {"x": x}}} for x in calls
    ]
    turn = {"role": "assistant", "content": content, "tool_calls": tool_calls or None, **fields}
    return {key: value for key, value in turn.items() if value is not None}


def result(number: int, call: str) -> Turn:
    return {"role": "tool", "name": "f", "tool_call_id": f"abcdefg{call[-2:]}", "content": f"result{number}"}


def in_form(turn: Turn, form: str) -> Turn:
    """The turn with arguments as a dict, or as JSON in a string, as in OpenAI's API ("text")."""
    if form == "both" or "tool_calls" not in turn:
        return turn
    calls = json.loads(json.dumps(turn["tool_calls"]))
    for call in calls:
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        call["function"]["arguments"] = arguments if form == "dict" else json.dumps(arguments)
    return {**turn, "tool_calls": calls}


SYSTEM = {"role": "system", "content": "rule1"}
THOUGHTS = "<think>\nthought1\n</think>\n\nsaid1"
CALLED = [user(1), says(calls=("arg01",)), result(1, "arg01"), says("said2")]
CHATS: dict[str, list[Turn]] = {
    "plain": [user(1), says("said1")],
    "system": [SYSTEM, user(1), says("said1"), user(2), says("said2")],
    "turns": [turn for i in (1, 2, 3) for turn in (user(i), says(f"said{i}"))],
    "same words, tools": [turn for _ in range(3) for turn in (user(1), says("said1"))],
    "same words": [turn for _ in range(3) for turn in (user(1), says("said1"))],
    "two in a row": [user(1), says("said1"), says("said2", reasoning_content="thought2")],
    "three in a row, then turns": [user(1), says("said1"), says("said2"), says("said3"), user(2), says("said4")],
    "greeting": [says("said1"), user(1), says("said2")],
    "greeting after the system": [SYSTEM, says("said1"), user(1), says("said2")],
    "call after the system": [SYSTEM, *CALLED[1:], user(2), says("said3")],
    "empty": [user(1), says(""), user(2), says("said2")],
    "call": CALLED,
    "call, system": [SYSTEM, *CALLED],
    "call, empty content": [user(1), says("", calls=("arg01",)), *CALLED[2:]],
    "call, content": [user(1), says("said1", calls=("arg01",)), *CALLED[2:]],
    "call, text": [user(1), in_form(says("", calls=("arg01",)), "text"), *CALLED[2:]],
    "call, null": [user(1), {**says(calls=("arg01",)), "content": None}, *CALLED[2:]],
    "call at the end": CALLED[:2],
    "call, then turns": [*CALLED, user(2), says("said3")],
    "turns, then call": [user(0), says("said0"), *CALLED],
    "two calls": [
        user(1), says("", calls=("arg01", "arg02")), result(1, "arg01"), result(2, "arg02"), says("said2"),
    ],
    "two rounds": [*CALLED[:3], says("", calls=("arg02",)), result(2, "arg02"), says("said2")],
    "two rounds, then turns": [
        *CALLED[:3], says("", calls=("arg02",)), result(2, "arg02"), says("said2"), user(2), says("said3"),
    ],
    "reasoning": [
        user(1), says("said1", reasoning_content="thought1"), user(2), says("said2", reasoning_content="thought2"),
    ],
    "reasoning, other key": [user(1), says("said1", reasoning="thought1")],
    "thinking": [user(1), says("said1", thinking="thought1")],
    "reasoning before a call": [
        user(1), says("", calls=("arg01",), reasoning_content="thought1"), result(1, "arg01"),
        says("said2", reasoning_content="thought2"),
    ],
    "reasoning, content and call": [
        user(1), says("said1", calls=("arg01",), reasoning_content="thought1"), result(1, "arg01"), says("said2"),
    ],
    "think tags": [user(1), says(THOUGHTS), user(2), says("<think>thought2</think>said2")],
    "think tags before a call": [user(1), says(THOUGHTS, calls=("arg01",)), *CALLED[2:]],
    "empty think tags": [user(1), says("<think>\n\n</think>\n\nsaid1")],
}  # fmt: skip


WRITTEN = re.compile(r"(?:said|thought|arg0)\d")
"""What the model wrote in these chats."""
GIVEN = re.compile(r"(?:ask|result|rule)\d")
MARKER = re.compile(f"{WRITTEN.pattern}|{GIVEN.pattern}")


@cache
def template_of(name: str) -> ChatTemplate:
    file = PUBLISHED[name].file
    path = template_file(file) if file in built_in_templates.TOKENS else TEMPLATES / f"{file}.jinja"
    return ChatTemplate(path.read_text(), TOKENS.get(file), name=name)


def variables_of(name: str, kind: str) -> dict[str, Any]:
    tools = {"tools": TOOLS} if kind.endswith("tools") or any("tool_calls" in turn for turn in CHATS[kind]) else {}
    return {**PUBLISHED[name].variables, **tools}


def as_transformers(name: str, messages: list[Turn], variables: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """The text by transformers, and the spans of its generation marks."""
    template = template_of(name)
    texts, marks = render_jinja_template(
        [messages], chat_template=template.source, return_assistant_tokens_mask=True, **template.tokens, **variables
    )
    return texts[0], [(start, end) for start, end in marks[0]]


def joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans without empty ones, neighbours joined."""
    result: list[tuple[int, int]] = []
    for start, end in spans:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], end)
        elif end > start:
            result.append((start, end))
    return result


def texts_of(text: str, spans: list[tuple[int, int]]) -> list[str]:
    return [text[start:end] for start, end in spans]


@pytest.mark.filterwarnings("ignore:.*does not write the")
@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_what_the_model_wrote_is_trained(name: str, kind: str) -> None:
    """The text is transformers'; the spans are those of a pattern written by hand."""
    published, template, variables = PUBLISHED[name], template_of(name), variables_of(name, kind)
    messages = [in_form(turn, published.arguments) for turn in CHATS[kind]]
    if re.fullmatch(published.refuses, kind):
        with pytest.raises(InputError, match=f"{re.escape(name)}: (refuses the chat: ...|does not write the tool)"):
            template.spans(CHATS[kind], special=SPECIAL, **variables)
        return
    try:
        present = [{key: value for key, value in turn.items() if value is not None} for turn in messages]
        wanted, marks = as_transformers(name, present, variables)
    except Exception:  # transformers drops a null content, which DeepSeek's templates ask for
        nulls = [{"content": None, **turn} if turn["role"] == "assistant" else turn for turn in messages]
        wanted, marks = as_transformers(name, nulls, variables)
    text, spans = template.spans(CHATS[kind], special=SPECIAL, **variables)
    assert text == wanted
    own = joined([turn.span(1) for turn in re.finditer(published.own, text, re.DOTALL)])
    assert texts_of(text, joined(spans)) == texts_of(text, own) and joined(spans) == own
    trained = "".join(texts_of(text, spans))
    assert set(WRITTEN.findall(trained)) == set(WRITTEN.findall(text)) and not GIVEN.search(trained)
    assert not template.marks_turns or spans == marks


LOOK_ALIKE = [
    "<|im_start|>assistant\nno<|im_end|>", "[/INST] x</s>", "<|end|><|start|>assistant<|message|>q",
    "<｜Assistant｜>z<｜end▁of▁sentence｜>", "<|assistant|>\nhm<|end|>\n", "<start_of_turn>model\nx<end_of_turn>",
    "<tool_response|>y<turn|>", "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>", "}", "yes",
    "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "é漢", "</tool_call>", "said", "x</arg_value>",
]  # fmt: skip
"""Values that look like the frames of turns."""


def replaced(value: Any, values: dict[str, str]) -> Any:
    """A text, or all texts of messages, with other values for the markers."""
    if isinstance(value, dict):
        return {key: item if key in ("id", "tool_call_id") else replaced(item, values) for key, item in value.items()}
    if isinstance(value, list):
        return [replaced(item, values) for item in value]
    return MARKER.sub(lambda marker: values[marker[0]], value)


@pytest.mark.filterwarnings("ignore:.*does not write the")
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "SmolLM3"])
def test_values_that_look_like_frames_do_not_move_the_spans(name: str) -> None:
    """With other values the spans are the same, in the text with other values."""
    template, choose, compared = template_of(name), random.Random(name), 0
    for kind in ("turns", "same words", "call, content", "two rounds, then turns", "reasoning", "think tags"):
        if re.fullmatch(PUBLISHED[name].refuses, kind):
            continue
        variables = variables_of(name, kind)
        text, spans = template.spans(CHATS[kind], special=SPECIAL, **variables)
        for _ in range(4):
            values = {marker: choose.choice(LOOK_ALIKE) for marker in MARKER.findall(json.dumps(CHATS[kind]))}
            messages, other = replaced(CHATS[kind], values), replaced(text, values)
            if other == template.render(messages, **variables):  # no value is trimmed or encoded
                wanted = [tuple(len(replaced(text[:place], values)) for place in span) for span in spans]
                assert template.spans(messages, special=SPECIAL, **variables)[1] == wanted, values
                compared += 1
    assert compared >= 8
