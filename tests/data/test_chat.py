"""Chats: the text that transformers renders, and a mask that is right to the token, whatever the template does."""

import re
import subprocess
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chat_templates import SPECIAL, TEMPLATES, save_template, template_of, tokenizer_of
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from ligermodels.data import rendering, versions
from ligermodels.data.chat import ChatTemplate, encode_chat
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError, InputError

CHAT = [
    {"role": "user", "content": "Hi there!"},
    {"role": "assistant", "content": " Hello, you? "},
    {"role": "user", "content": "How are you"},
    {"role": "assistant", "content": "I am\n\nfine"},
]
SYSTEM = {"role": "system", "content": "be brief"}

# Written by hand: every token, and the assistant's own in brackets. Spaces part the tokens.
LLAMA_3 = """
<|begin_of_text|> <|start_header_id|> system <|end_header_id|> ĊĊ be Ġbrief <|eot_id|>
<|start_header_id|> user <|end_header_id|> ĊĊ Hi Ġthere ! <|eot_id|>
<|start_header_id|> assistant <|end_header_id|> ĊĊ [Hello] [,] [Ġyou] [?] [<|eot_id|>]
<|start_header_id|> user <|end_header_id|> ĊĊ How Ġare Ġyou <|eot_id|>
<|start_header_id|> assistant <|end_header_id|> ĊĊ [I] [Ġam] [ĊĊ] [fine] [<|eot_id|>]
"""
MISTRAL = """
<s> [INST] ▁Hi ▁there ! [/INST] [▁Hello] [,] [▁you] [?] [</s>]
[INST] ▁be ▁brief <0x0A> <0x0A> How ▁are ▁you [/INST] [▁I] [▁am] [<0x0A>] [<0x0A>] [fine] [</s>]
"""
LLAMA_3_1 = """
<|begin_of_text|> <|start_header_id|> system <|end_header_id|> ĊĊ Cutting ĠKnowledge ĠDate : ĠDecember Ġ 202 3 Ċ
Today ĠDate : Ġ 26 ĠJul Ġ 202 4 ĊĊ be Ġbrief <|eot_id|>
<|start_header_id|> user <|end_header_id|> ĊĊ Hi Ġthere ! <|eot_id|>
<|start_header_id|> assistant <|end_header_id|> ĊĊ
[{] ["] [n] [am] [e] ["] [:] [Ġ] ["] [f] ["] [,] [Ġ] ["] [p] [ar] [am] [e] [t] [e] [r] [s] ["] [:]
[Ġ] [{] ["] [x] ["] [:] [Ġ] ["] [Hi] ["] [}] [}] [<|eot_id|>]
<|start_header_id|> ipython <|end_header_id|> ĊĊ " fine " <|eot_id|>
<|start_header_id|> assistant <|end_header_id|> ĊĊ [<|eot_id|>]
<|start_header_id|> user <|end_header_id|> ĊĊ How Ġare Ġyou <|eot_id|>
<|start_header_id|> assistant <|end_header_id|> ĊĊ [I] [Ġam] [ĊĊ] [fine] [<|eot_id|>]
"""
GEMMA_2 = """
<bos> <start_of_turn> user Ċ Hi ▁there ! <end_of_turn> Ċ
<start_of_turn> model Ċ [Hello] [,] [▁you] [?] [<end_of_turn>] Ċ
<start_of_turn> user Ċ How ▁are ▁you <end_of_turn> Ċ
<start_of_turn> model Ċ [I] [▁am] [ĊĊ] [fine] [<end_of_turn>] Ċ
"""
QWEN_2_5 = """
<|im_start|> system Ċ be Ġbrief <|im_end|> Ċ
<|im_start|> user Ċ Hi Ġthere ! <|im_end|> Ċ
<|im_start|> assistant Ċ [ĠHello] [,] [Ġyou] [?] [Ġ] [<|im_end|>] Ċ
<|im_start|> user Ċ How Ġare Ġyou <|im_end|> Ċ
<|im_start|> assistant Ċ [I] [Ġam] [ĊĊ] [fine] [<|im_end|>] Ċ
"""

TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é> & 'x'", "parameters": {"type": "object"}}}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "</s>"}}}]}
WITH_TOOLS = [CHAT[0], {**CALL, "content": ""}, {"role": "tool", "content": "Hello"}, *CHAT[1:]]
ANSWERED = [
    SYSTEM,
    CHAT[0],
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "Hi"}}}]},
    {"role": "tool", "content": "fine"},
    {"role": "assistant", "content": ""},
    *CHAT[2:],
]

BY_HAND: dict[str, tuple[str, list[dict], dict[str, object], str]] = {
    "Llama 3": ("llama-3", [SYSTEM, *CHAT], {}, LLAMA_3),
    "Llama 3.1: a call, its result, and an empty turn": ("llama-3.1", ANSWERED, {}, LLAMA_3_1),
    "Llama 3.1: the call ends in another token": (
        "llama-3.1", ANSWERED, {"builtin_tools": []}, LLAMA_3_1.replace("[}] [<|eot", "[}] [<|eom"),
    ),
    "Mistral": ("mistral", [SYSTEM, *CHAT], {}, MISTRAL),
    "Gemma 2": ("gemma-2", CHAT, {}, GEMMA_2),
    "Gemma 2: no system turn": (
        "gemma-2", [SYSTEM, *CHAT], {}, GEMMA_2.replace("Hi", "be ▁brief ĊĊ Hi"),
    ),
    "Qwen2.5": ("qwen2.5", [SYSTEM, *CHAT], {}, QWEN_2_5),
}  # fmt: skip


def chat_for(name: str) -> list[dict[str, str]]:
    return CHAT if name == "gemma-2" else [SYSTEM, *CHAT]


def expected(text: str, special: list[str]) -> list[tuple[str, bool]]:
    """Tokens and mask of a text written by hand. [INST] is a token of Mistral's, not the assistant's INST."""
    tokens = [(token, token not in special and re.fullmatch(r"\[.+\]", token) is not None) for token in text.split()]
    return [(token[1:-1] if own else token, own) for token, own in tokens]


@pytest.fixture(scope="module", params=TEMPLATES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Tokenizer]:
    folder = tmp_path_factory.mktemp("chat") / request.param
    tokenizer = tokenizer_of(request.param, folder)
    save_template(request.param, folder)
    return request.param, folder, tokenizer


@pytest.mark.parametrize("case", BY_HAND)
def test_the_mask_is_the_one_written_by_hand(case: str, tmp_path: Path) -> None:
    name, messages, variables, text = BY_HAND[case]
    tokenizer = tokenizer_of(name, tmp_path)
    ids, mask = encode_chat(messages, template_of(name), tokenizer, **variables)
    tokens = [tokenizer.backend.id_to_token(token).replace("\n", "Ċ") for token in ids]
    assert list(zip(tokens, mask, strict=True)) == expected(text, SPECIAL[name])


def test_text_and_tokens_are_those_of_transformers(model: tuple[str, Path, Tokenizer]) -> None:
    name, folder, tokenizer = model
    oracle, template, chat = AutoTokenizer.from_pretrained(folder), ChatTemplate.from_folder(folder), chat_for(name)
    for messages, prompt in ((chat, False), (chat[:-1], True), (chat[:-1], False)):
        wanted = oracle.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        assert template.render(messages, add_generation_prompt=prompt) == wanted
    assert encode_chat(chat, template, tokenizer)[0] == oracle.apply_chat_template(chat, return_dict=False)
    if name in ("qwen2.5", "mistral", "llama-3.1"):
        assert template.render(WITH_TOOLS, tools=TOOLS) == oracle.apply_chat_template(
            WITH_TOOLS, tools=TOOLS, tokenize=False
        )


def targets(template: ChatTemplate, messages: list[dict], special: str, **variables: object) -> list[str]:
    """What the assistant says, turn by turn."""
    text, spans = template.spans(messages, special=re.compile(special), **variables)
    assert text == template.render(messages, **variables)
    assert all(a <= b for a, b in spans) and all(a[1] <= b[0] for a, b in pairwise(spans))
    return [text[start:end] for start, end in spans]


CONTENTS = st.text(st.sampled_from("aé漢 \n\t[]<>|/s"), max_size=6) | st.sampled_from(
    ["<|im_end|>", "[/INST] x</s>", "<|im_start|>assistant\nno<|im_end|>", "<end_of_turn>\n", " <|eot_id|> "]
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(turns=st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=3))
def test_whatever_is_said_the_assistants_words_are_found(name: str, turns: list[tuple[str, str]]) -> None:
    messages = [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    ends = {"mistral": "</s>", "gemma-2": "<end_of_turn>", "qwen2.5": "<|im_end|>"}
    end = ends.get(name, "<|eot_id|>")
    wanted = [(said if name == "qwen2.5" else said.strip()) + end for _, said in turns]
    found = targets(template_of(name), messages, "|".join(map(re.escape, SPECIAL[name])))
    assert [text.removeprefix(" ") if name == "mistral" else text for text in found] == [
        text.removeprefix(" ") if name == "mistral" else text for text in wanted
    ]


LOOP = "{% for message in messages %}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = LOOP + "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n" + PROMPT
THOUGHTS = """{% set ns = namespace(last=0) %}{% for m in messages %}
{% if m.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == "assistant" and loop.index0 > ns.last %}<think>
{{ m.content.split("</think>")[0].split("<think>")[-1] if "</think>" in m.content }}
</think>

{% endif %}{{ m.content.split("</think>")[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THINKING = [CHAT[0], {"role": "assistant", "content": "<think>1</think>one"}, CHAT[2]]

AWKWARD: dict[str, tuple[str, list[dict], list[str]]] = {
    "ends with the prompt, asked for or not": (
        LOOP
        + "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}{{ '<|im_start|>assistant\n' }}",
        CHAT,
        [" Hello, you? <|im_end|>", "I am\n\nfine<|im_end|>"],
    ),
    "knows no prompt": (
        LOOP + "<|im_start|>{{ message.role }}\n{{ message.content }}\n<|im_end|>\n{% endfor %}",
        CHAT,
        [" Hello, you? \n<|im_end|>", "I am\n\nfine\n<|im_end|>"],
    ),
    "ends a turn with no special token": (
        LOOP + "{{ message.role }}: {{ message.content }} (end)\n\n{% endfor %}",
        CHAT,
        [" Hello, you?  (end)", "I am\n\nfine (end)"],
    ),
    "ends a turn with nothing, or the next one's head": (
        LOOP + "<|im_start|>{{ message.role }}\n{{ message.content }}{% endfor %}",
        CHAT,
        [" Hello, you? ", "I am\n\nfine"],
    ),
    "ends only the last turn": (
        LOOP + "{{ message.role }}: {{ message.content }}{{ '<|im_end|>' if loop.last else '\n' }}{% endfor %}",
        CHAT,
        [" Hello, you? ", "I am\n\nfine<|im_end|>"],
    ),
    "marks the turns": (
        LOOP + "{% if message.role == 'assistant' %}{%- generation -%}{{ message.content }}!{%- endgeneration -%}"
        "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}",
        CHAT,
        [" Hello, you? !", "I am\n\nfine!"],
    ),
    "drops the thoughts of earlier turns, adds empty ones to later": (
        THOUGHTS,
        [*THINKING, CHAT[3]],
        ["one<|im_end|>", "<think>\n\n</think>\n\nI am\n\nfine<|im_end|>"],
    ),
    "keeps the thoughts of the last turn": (
        THOUGHTS,
        [*THINKING, THINKING[1]],
        ["one<|im_end|>", "<think>\n1\n</think>\n\none<|im_end|>"],
    ),
    "starts with the assistant, who says nothing": (
        CHATML,
        [{"role": "assistant", "content": ""}, *CHAT],
        ["<|im_end|>", " Hello, you? <|im_end|>", "I am\n\nfine<|im_end|>"],
    ),
    "two turns in a row": (CHATML, [CHAT[0], CHAT[1], CHAT[1]], [" Hello, you? <|im_end|>"] * 2),
    "tool calls": (
        TEMPLATES["qwen2.5"],
        [*WITH_TOOLS, {**CALL, "content": "Now"}],
        [
            '<tool_call>\n{"name": "f", "arguments": {"x": "</s>"}}\n</tool_call><|im_end|>',
            " Hello, you? <|im_end|>",
            "I am\n\nfine<|im_end|>",
            'Now\n<tool_call>\n{"name": "f", "arguments": {"x": "</s>"}}\n</tool_call><|im_end|>',
        ],
    ),
}


@pytest.mark.parametrize("case", AWKWARD)
def test_templates_that_are_not_simple(case: str) -> None:
    source, messages, wanted = AWKWARD[case]
    template = ChatTemplate(source)
    assert targets(template, messages, r"<\|im_start\|>|<\|im_end\|>") == wanted
    texts, marked = render_jinja_template([messages], chat_template=source, return_assistant_tokens_mask=True)
    text, spans = template.spans(messages, special=re.compile("<"))
    assert text == texts[0]
    if "generation" in source and "endgeneration" in source:
        assert spans == [tuple(span) for span in marked[0]]


def test_calls_of_tools_where_no_prompt_is_known() -> None:
    special = "|".join(map(re.escape, SPECIAL["mistral"]))
    wanted = '[TOOL_CALLS] [{"function": {"name": "f", "arguments": {"x": 1}}}]</s>'
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    messages = [CHAT[0], call, WITH_TOOLS[2], CHAT[1]]
    assert targets(template_of("mistral"), messages, special) == [wanted, " Hello, you?</s>"]


def test_helpers_and_the_clock_that_stands_still() -> None:
    source = (
        "{%- for m in messages %}\n    {%- if loop.index0 == 1 %}{% continue %}{% endif %}\n"
        "    {% if loop.index0 == 3 %}{% break %}{% endif %}\n    {{ m | tojson(indent=1) }}\n{% endfor %}"
        "{{ strftime_now('%d %b %Y') }}{{ none_such }}"
    )
    template = ChatTemplate(source)
    template.now = datetime(2024, 7, 26)
    messages = [{"role": "user", "content": f"<{i}> & 'é'"} for i in range(5)]
    (wanted,), _ = render_jinja_template([messages], chat_template=source)
    assert template.render(messages) == wanted.replace(datetime.now().strftime("%d %b %Y"), "26 Jul 2024")
    assert wanted.count("é") == 2


@pytest.mark.parametrize(
    ("source", "messages", "words"),
    [
        (TEMPLATES["gemma-2"], [*CHAT, CHAT[3]], "must alternate"),
        (TEMPLATES["gemma-2"], [SYSTEM, CHAT[1]], "System role not supported"),
        (TEMPLATES["llama-3.1"], [CHAT[0], {**CHAT[1], "tool_calls": []}], "single tool-calls"),
        (TEMPLATES["llama-3"], WITH_TOOLS, "does not write the tool calls in message 1"),
        (LOOP + "{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}", WITH_TOOLS, "tool calls"),
        ("", [CHAT[0], {"role": "assistant", "tool_calls": 5}], "turn 2: tool_calls: must be a list of dicts"),
        ("", [CHAT[0], {"role": "assistant", "tool_calls": ["f"]}], "turn 2: tool_calls: must be a list of dicts"),
        ("{{ messages[0].content.x.y }}", CHAT, "x"),
        ("{{ ''.__class__.__mro__ }}", CHAT, "unsafe"),
        ("{{ messages.append(1) }}", CHAT, "unsafe|not safely callable"),
        (LOOP + "{% if message.role != 'assistant' %}{{ message.content }}{% endif %}{% endfor %}", CHAT, "message 1"),
    ],
)
def test_a_chat_that_cannot_be_used_is_an_error(source: str, messages: list[dict], words: str) -> None:
    with pytest.raises(InputError, match=f"mine: .*({words})"):
        ChatTemplate(source, {"bos_token": "<s>"}, name="mine").spans(messages, special=re.compile("<"))


def test_null_is_a_missing_key() -> None:
    """As in transformers: templates would write "None"."""
    template = ChatTemplate(LOOP + "{{ message.content }}{{ message.tool_calls is defined }}{% endfor %}")
    assert template.render([{"role": "user", "content": "a", "tool_calls": None}, {"content": None}]) == "aFalseFalse"


def test_a_limit_of_memory_that_cannot_be_raised() -> None:
    """`ulimit -v`, of which the process that renders inherits the hard limit."""
    program = "from ligermodels.data.chat import ChatTemplate; print(ChatTemplate('a{{ messages }}').render([]))"
    command = ["bash", "-c", 'ulimit -v 900000 && exec "$0" -c "$1"', sys.executable, program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "a[]\n"


def test_a_process_that_was_killed_while_it_waited_is_replaced() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    process = rendering._process._running
    assert process is not None
    process.kill()
    process.wait()
    assert template.render([{"content": "a"}]) == "a"


def test_a_chat_takes_one_exchange_with_the_process_that_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two renderings, once the frames of its turns are known.

    Unless a rendering goes beyond a limit, which is that of each: then those that are needed, alone.
    """
    special = re.compile("<e>")
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}<e>{% endfor %}")
    expected = template.spans(CHAT, special=special)
    counts: list[int] = []
    ask = rendering._process.ask

    def counted(request: str, count: int) -> Any:
        counts.append(count)
        return ask(request, count)

    monkeypatch.setattr(rendering._process, "ask", counted)
    assert template.spans(CHAT, special=special) == expected and counts == [2]
    counts.clear()
    large = [{"text": "x" * versions.AT_ONCE}]  # variables weigh too
    assert template.spans(CHAT, special=special, documents=large) == expected and set(counts) == {1}
    counts.clear()
    monkeypatch.setattr(versions, "AT_ONCE", 100)
    assert template.spans(CHAT, special=special) == expected and set(counts) == {1}
    monkeypatch.undo()

    monkeypatch.setattr(rendering, "SECONDS", 1)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    slow = "{% if messages|length == 2 %}" + loop + "{% endif %}" + template.source
    monkeypatch.setattr(rendering._process, "ask", counted)
    counts.clear()
    with pytest.raises(CheckpointError, match="takes more than 1 s"):
        ChatTemplate(slow).spans(CHAT, special=special)
    assert counts[:3] == [1, 2, 4] and set(counts[3:]) == {1}  # to compile it, the chat, the first frame, alone
    assert template.spans(CHAT, special=special) == expected


@pytest.mark.parametrize("system", ["raises", "dropped", "taken", "added"])
def test_where_the_words_of_the_system_go(system: str) -> None:
    refusing = "{% if message.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    start = LOOP + {"raises": refusing, "dropped": "{% if message.role != 'system' %}"}.get(system, "")
    if system == "added":
        start = start.replace("messages", "messages + []")
    end = "{% endif %}" if system == "dropped" else ""
    template = ChatTemplate(start + "{{ message.role }}: {{ message.content }}\n" + end + "{% endfor %}")
    rest, takes = "assistant:  Hello, you? \n", system in ("taken", "added")
    wanted = "system: be brief\nuser: Hi there!\n" if takes else "user: be brief\n\nHi there!\n"
    for kind in (list, tuple):
        assert template.render(kind([SYSTEM, *CHAT[:2]])) == wanted + rest
    empty = {"role": "system", "content": ""}
    assert takes or template.render([empty, *CHAT[:2]]) == "user: Hi there!\n" + rest


def test_noncharacters_are_refused() -> None:
    for mark in "\ufdd0\ufdd1\ufdd2":
        with pytest.raises(InputError, match="noncharacters"):
            ChatTemplate(CHATML).spans([{"role": "user", "content": f"a{mark}"}], special=re.compile("<"))
