"""Which tokens of a chat are trained: every published kind of template with every kind of chat."""

import re
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ligermodels.data.chat import ChatTemplate
from ligermodels.errors import InputError

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = re.compile(
    r"<\|[^<>|]+\|>|<\|\w+>|<\w+\|>|<｜[^<>]+｜>|</?s>|<(?:bos|start_of_turn|end_of_turn)>|\[/?[A-Z_]+\]"
)


class Published(NamedTuple):
    """A template, what its model writes in a rendered chat, and kinds of chats that it refuses or does not write.

    file: name of the template.
    own: pattern of a turn of the model, written by hand; its group is the trained text.
    refused: kinds of chats for which the template raises an error of its own.
    omitted: kinds of chats with tool calls that the template does not write.
    variables: variables of the template.
    """

    file: str
    own: str
    refused: str = ""
    omitted: str = ""
    variables: dict[str, Any] = {}


NO_THINKING = {"enable_thinking": False}
CHATML = r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)"
NO_THOUGHTS = r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n\n)?(.*?<\|im_end\|>)"
MISTRAL = r"(?:\[/INST\]|\[/TOOL_RESULTS\](?!\[TOOL_RESULTS\]))(.*?</s>)"
DEEPSEEK = (
    "(?:<｜Assistant｜>|<｜tool▁outputs▁end｜>|<｜tool▁output▁end｜>(?=\n<｜tool▁call▁begin))(.*?<｜end▁of▁sentence｜>)"
)
PUBLISHED = {
    "Qwen2.5": Published("qwen2_5", CHATML),
    "Qwen3": Published("qwen3", CHATML),
    "Qwen3, no thinking": Published("qwen3", NO_THOUGHTS, variables=NO_THINKING),
    "Qwen3.5": Published("qwen3_5", r"<\|im_start\|>assistant\n(?:<think>\n)?(.*?<\|im_end\|>)"),
    "Qwen3.5, no thinking": Published("qwen3_5", NO_THOUGHTS, variables=NO_THINKING),
    "GLM-4.5": Published("glm4_5", r"<\|assistant\|>(.*?)\s*(?=<\|user\|>|<\|observation\|>|$)"),
    "Mistral v3": Published("mistral_v3", MISTRAL),
    "Mistral v7": Published("mistral_v7", MISTRAL),
    "Llama 3.2": Published("llama3_2", r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eo[tm]_id\|>)"),
    "Llama 3.2, built-in": Published(
        "llama3_2", r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eo[tm]_id\|>)",
        variables={"builtin_tools": ["f"]},
    ),
    "Gemma 3": Published("gemma3", r"<start_of_turn>model\n(.*?<end_of_turn>)"),
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
        "gpt_oss", r"<\|start\|>assistant(.*?(?:<\|call\|>|<\|return\|>|<\|end\|>(?!<\|start\|>assistant)))"
    ),
    "DeepSeek-V3": Published("deepseek_v3", DEEPSEEK),
    "DeepSeek-R1": Published("deepseek_r1", DEEPSEEK.replace("(?:<｜Assistant｜>", "(?:(?<!<｜end▁of▁sentence｜>)<｜Assistant｜>|(?<=<｜end▁of▁sentence｜>)<｜Assistant｜>(?!<｜end▁of▁sentence｜>)", 1)),
    "Command R7B": Published(
        "cohere_command", r"<\|START_OF_TURN_TOKEN\|><\|CHATBOT_TOKEN\|>(.*?<\|END_OF_TURN_TOKEN\|>)"
    ),
    "Cohere 2": Published("cohere2", r"<\|CHATBOT_TOKEN\|><\|START_RESPONSE\|>(.*?<\|END_OF_TURN_TOKEN\|>)"),
    "Phi-3": Published("phi3", r"<\|assistant\|>\n(.*?<\|end\|>)"),
    "Phi-4-mini": Published("phi4_mini", r"<\|assistant\|>(.*?<\|end\|>)"),
    "SmolLM3": Published("smollm3", r"(<\|im_start\|>assistant\n.*?<\|im_end\|>\n)"),
    "Granite 4": Published("granite4", r"<\|start_of_role\|>assistant<\|end_of_role\|>(.*?<\|end_of_text\|>)"),
    "Hermes 3": Published("hermes3", CHATML),
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
}

Turn = dict[str, Any]


def user(number: int) -> Turn:
    return {"role": "user", "content": f"ask{number}"}


def says(content: str | None = None, calls: tuple[str, ...] = (), **fields: Any) -> Turn:
    """A turn of the assistant; `calls` are values of an argument."""
    functions = [{"name": "f", "arguments": {"x": value}} for value in calls]
    tool_calls = [{"id": f"abcdefg{v[-2:]}", "type": "function", "function": f} for v, f in zip(calls, functions)]
    turn = {"role": "assistant", "content": content, "tool_calls": tool_calls or None, **fields}
    return {key: value for key, value in turn.items() if value is not None}


def result(number: int, call: str) -> Turn:
    return {"role": "tool", "name": "f", "tool_call_id": f"abcdefg{call[-2:]}", "content": f"result{number}"}


def as_text(turn: Turn) -> Turn:
    """The turn with arguments as JSON in a string, as in OpenAI's API."""
    calls = [{**c, "function": {"name": "f", "arguments": '{"x": "%s"}' % c["function"]["arguments"]["x"]}}
             for c in turn["tool_calls"]]
    return {**turn, "tool_calls": calls}


SYSTEM = {"role": "system", "content": "rule1"}
THOUGHTS = "<think>\nthought1\n</think>\n\nsaid1"
CALLED = [user(1), says(calls=("arg01",)), result(1, "arg01"), says("said2")]
CHATS: dict[str, list[Turn]] = {
    "plain": [user(1), says("said1")],
    "system": [SYSTEM, user(1), says("said1"), user(2), says("said2")],
    "turns": [turn for i in (1, 2, 3) for turn in (user(i), says(f"said{i}"))],
    "same words": [turn for _ in range(3) for turn in (user(1), says("said1"))],
    "empty": [user(1), says(""), user(2), says("said2")],
    "call": CALLED,
    "call, system": [SYSTEM, *CALLED],
    "call, empty content": [user(1), says("", calls=("arg01",)), *CALLED[2:]],
    "call, content": [user(1), says("said1", calls=("arg01",)), *CALLED[2:]],
    "call, text": [user(1), as_text(says("", calls=("arg01",))), *CALLED[2:]],
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
    "reasoning": [user(1), says("said1", reasoning_content="thought1"), user(2), says("said2", reasoning_content="thought2")],
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


def merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans without empty ones, neighbours joined."""
    out: list[tuple[int, int]] = []
    for start, end in spans:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], end)
        elif end > start:
            out.append((start, end))
    return [s for s in out if s[1] > s[0]]


DICTS = "qwen3_5 glm4_5 gemma4 qwen2_5 mistral_v3 llama3_2 gpt_oss cohere_command phi4_mini hermes3".split()
TEXTS = "deepseek_v3 deepseek_r1".split()

def given_form(published, a):
    import json
    if isinstance(a, str) and published.file in DICTS: return json.loads(a)
    if isinstance(a, dict) and published.file in TEXTS: return json.dumps(a)
    return a


def check(name: str, kind: str) -> str:
    published = PUBLISHED[name]
    source = (TEMPLATES / f"{published.file}.jinja").read_text()
    tokens = TOKENS.get(published.file, {})
    template = ChatTemplate(source, tokens, name=name)
    messages = CHATS[kind]
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    variables = {**published.variables, **({"tools": tools} if any("tool_calls" in m for m in messages) else {})}
    dropped = [{k: v for k, v in m.items() if v is not None} for m in messages]
    try:
        given = [m if "tool_calls" not in m else {**m, "tool_calls": [{**c, "function": {**c["function"], "arguments": given_form(published, c["function"]["arguments"])}} for c in m["tool_calls"]]} for m in dropped]
        (wanted,), _ = render_jinja_template([given], chat_template=source, **tokens, **variables)
        refused = None
    except Exception as error:
        wanted, refused = None, str(error)
    try:
        text, spans = template.spans(messages, special=SPECIAL, **variables)
    except InputError as error:
        if "does not write" in str(error):
            return "omitted"
        return ("refused by both: " if refused else "REFUSED BY US: ") + str(error) 
    out = "" if not refused else "MORE THAN transformers; "
    if wanted is not None and text != wanted:
        out += "OTHER TEXT "
    oracle = merged([m.span(1) for m in re.finditer(published.own, text, re.DOTALL)])
    if merged(spans) != oracle:
        out += f"SPANS {[text[a:b] for a, b in spans]} NOT {[text[a:b] for a, b in oracle]}"
    return out or "ok"


if __name__ == "__main__":
    import collections, sys
    counts = collections.Counter()
    for name in PUBLISHED:
        for kind in CHATS:
            r = check(name, kind)
            counts[r.split(":")[0].split(" ")[0] if r[0].isupper() else r.split(":")[0]] += 1
            if r != "ok" and (len(sys.argv) < 2 or sys.argv[1] in name):
                print(f"{name} | {kind} | {r}")
    print(counts)
