"""Records (lines of JSON) as texts and chats: the formats of datasets, normalised for chat templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import dropwhile
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ligermodels.data.chat import Message, join_turns
from ligermodels.data.lines import decoded, fields_of, without_nulls
from ligermodels.data.parts import is_filled
from ligermodels.data.record_fields import (
    COMPLETION,
    CONVERSATIONS,
    FINISH,
    MEDIA,
    MESSAGES,
    OF_CHATS,
    OTHER_QUESTIONS,
    QUESTIONS,
    REFUSED_IN_TURNS,
    SYSTEM,
    TEXT,
    Format,
    check_refused,
    format_of,
    is_cut,
    take_trained,
    unused_fields,
)

Chat: TypeAlias = tuple[list[Message], dict[str, Any]]
"""The messages of a chat, and further variables of its template (`tools`)."""


class Completion(NamedTuple):
    """A prompt and its completion. Only the completion is trained on.

    prompt: the prompt; "" for a text without a prompt.
    completion: the text after the prompt.
    is_finished: whether it ends with EOS.
    """

    prompt: str
    completion: str
    is_finished: bool = True

    @property
    def emptiness(self) -> str:
        """The message for a record without a completion."""
        return f"the {'completion' if self.prompt else 'text'} is empty"


Record: TypeAlias = Completion | Chat
"""A text with or without a prompt, or a chat."""

Json = TypeVar("Json")

ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response", "ipython"), "tool"),
}
"""Speakers in OpenAI's and ShareGPT's formats, in any case -> roles of chat templates."""

CALLS = ("function_call", "tool_call")
"""Speakers of turns that contain tool calls, as JSON."""


RESERVED = ("messages", "template", "tokenizer", "special", "add_generation_prompt", "tools", "documents")
"""Names that `chat_template_kwargs` cannot set."""


class NothingToLearn(ValueError):
    """The line is valid, but its text is empty, or the assistant says nothing in its chat."""


def parse_line(line: bytes) -> str | Record:
    """Parse a line of JSON with a text, a prompt and its completion, or a chat.

    Keys with a null value count as absent. Consecutive turns of the user are joined by a blank line. A chat under
    `conversations` starts at its first turn of the system or the user, as in FastChat. A turn of the assistant that is
    not trained on (`"weight": 0`, `"train": false`, `"loss": false`) has `weight` 0.

    Args:
        line: a JSON object with a string under `text`; strings or lists of turns under `prompt` and `completion`
            (TRL's format); strings under `instruction`, `input` and `output` (Alpaca's; for other names see
            `record_fields.QUESTIONS`); or a list of turns under
            `messages` (OpenAI's) or `conversations` (ShareGPT's). Chats may have `system`, `tools`, `functions`,
            `documents` and `chat_template_kwargs`.

    Returns:
        The text; a `Completion`, if it has a prompt or was cut (`"finish_reason": "length"`); or, for a chat, its
        messages and the template variables (`{"tools": [...]}` or `{}`).

    Raises:
        ValueError: the line is invalid, or has a field that is refused; the message names it.
        NothingToLearn: (a ValueError) the assistant neither says a word nor calls a tool in the chat, or no turn is
            trained on.

    Examples:
        >>> parse_line(b'{"text": "Once upon a time"}')
        'Once upon a time'
        >>> parse_line(b'{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}')
        ([{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}], {})
    """
    record, _ = read_record(line)
    if isinstance(record, Completion) and not record.prompt and record.is_finished:
        return record.completion
    return record


def read_record(line: bytes) -> tuple[Record, list[str]]:
    """The record in a line of JSON, as in `parse_line`, and the names of the line's fields that are not used."""
    return record_of(fields_of(line))


def record_of(record: Mapping[str, Any]) -> tuple[Record, list[str]]:
    """The record with these fields, as in `parse_line`, and the names of the fields that are not used."""
    form = format_of(record)
    parsed = _READ[form](record)
    if isinstance(parsed, Completion):
        _check_text(record, form.required[0])
    return parsed, unused_fields(record, form)


def _check_text(record: Mapping[str, Any], name: str) -> None:
    """Raise ValueError for a field of chats beside the field `name`, which holds a text."""
    if wrong := [field for field in OF_CHATS if record.get(field)]:
        raise ValueError(f'"{wrong[0]}" is for chats, and "{name}" is a text')


def prompt_of(record: Mapping[str, Any]) -> Record:
    """The prompt of a record that has no completion, for objectives that sample completions.

    Args:
        record: its fields: `prompt`, a text or turns; with turns also the other fields of a chat (`tools` ...).

    Returns:
        A text as a `Completion` with an empty completion; or a chat whose next turn is the assistant's.

    Raises:
        ValueError: there is no prompt, it is empty, or it ends with a turn of the assistant.

    Examples:
        >>> prompt_of({"prompt": "2 + 2 =", "answer": "4"})
        Completion(prompt='2 + 2 =', completion='', is_finished=True)
    """
    check_refused(record, MEDIA)
    prompt = record.get("prompt")
    if not prompt or not isinstance(prompt, str | list):
        fields = ", ".join(record) or "none"
        raise ValueError(f'has no "prompt", a text or a list of turns, for the objective; its fields are: {fields}')
    if isinstance(prompt, str):
        _check_text(record, "prompt")
        return Completion(prompt, "")
    messages = _messages(prompt, record)
    if (role := messages[-1]["role"]) in ("assistant", "system"):
        raise ValueError(f'"prompt" ends with a turn of the {role}; it must end with a turn of the user or of a tool')
    return _alternating(messages), _variables(record)


def chat_record(messages: Sequence[Message], variables: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a chat, as `parse_line` reads it."""
    others = {name: value for name, value in variables.items() if name not in OF_CHATS}
    record = {"messages": list(messages)} | {name: variables[name] for name in variables if name in OF_CHATS}
    return {**record, "chat_template_kwargs": others} if others else record


def _text(record: Mapping[str, Any]) -> Completion:
    return Completion("", _check_type(record["text"], str, '"text" must be a string'), not is_cut(record))


def _completion(record: Mapping[str, Any]) -> Completion | Chat:
    """A prompt and its completion, as texts or as turns; turns of the prompt are not trained on."""
    prompt, completion = record["prompt"], record["completion"]
    match prompt, completion:
        case str(), str():
            return Completion(prompt, completion, not is_cut(record))
        case list(), str():
            completion = [{"role": "assistant", "content": completion}]
        case list(), list():
            pass
        case str(), list():
            raise ValueError('"completion" is a list of turns, and "prompt" is a text; give the prompt as turns too')
        case _:
            raise ValueError('"prompt" and "completion" must be texts or lists of turns')
    return _chat([*prompt, *completion], record, untrained=len(prompt))


def _question(record: Mapping[str, Any], form: Format) -> Chat:
    """The question, with more of it below, as a turn of the user, and the answer, after the turns of `history`."""
    (question, answer), more = form.required, ALL_QUESTIONS[form]
    asked = [question] if more is None else [question, more]
    for name in (*asked, answer):
        _check_type(record.get(name, ""), str, f'"{name}" must be a string')
    text = "\n".join(filter(None, map(record.get, asked)))
    problem = '"history" must be a list of pairs, each a question and an answer'
    turns: list[dict[str, Any]] = []
    history = _check_type(decoded(record.get("history")) or [], list, problem)
    for pair in [*history, [text, record[answer]]]:
        if len(_check_type(pair, list, problem)) != 2:
            raise ValueError(problem)
        turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]
    return _chat(turns, record)


ALL_QUESTIONS = {**QUESTIONS, **OTHER_QUESTIONS}

_READ: dict[Format, Callable[[Mapping[str, Any]], Record]] = {
    MESSAGES: lambda record: _chat(record["messages"], record),
    CONVERSATIONS: lambda record: _chat(record["conversations"], record, from_sharegpt=True),
    COMPLETION: _completion,
    **{form: partial(_question, form=form) for form in ALL_QUESTIONS},
    TEXT: _text,
}
"""Format -> function that reads a record of it."""


def _check_type(value: Any, json_type: type[Json], message: str) -> Json:
    """`value`. Raises ValueError with `message` unless it is a `json_type`."""
    if not isinstance(value, json_type):
        raise ValueError(message)
    return value


def _chat(turns: Any, record: Mapping[str, Any], *, from_sharegpt: bool = False, untrained: int = 0) -> Chat:
    """The messages and template variables of a chat in which the assistant speaks.

    Args:
        turns: the turns of the record.
        record: the record, for its other fields.
        from_sharegpt: start at the first turn of the system or the user.
        untrained: number of turns at the start that are not trained on.
    """
    messages = _messages(turns, record, from_sharegpt=from_sharegpt, untrained=untrained)
    answers = [message for message in messages if message["role"] == "assistant"]
    if not any(is_filled(message, part) for message in answers for part in ("content", "calls", "reasoning")):
        raise NothingToLearn("the assistant does not say a word in the chat")
    if all("weight" in message for message in answers):
        raise NothingToLearn("no turn of the assistant is trained on")
    if is_cut(record):
        if messages[-1]["role"] != "assistant":
            raise ValueError(f'"{FINISH}" is "length", and the last turn is not the assistant\'s')
        messages[-1] = {**messages[-1], FINISH: record[FINISH]}
    return _alternating(messages), _variables(record)


def _messages(
    turns: Any, record: Mapping[str, Any], *, from_sharegpt: bool = False, untrained: int = 0
) -> list[Message]:
    """The messages of a chat: see `_chat` for the arguments."""
    turns = _check_type(decoded(turns), list, "a chat must be a list of turns")  # cells of tables are texts
    for number, turn in enumerate(turns, start=1):
        _check_parts(without_nulls(turn).get("content"), number)
    messages = [_weighted(_message(turn, number), number) for number, turn in enumerate(turns, start=1)]
    messages[:untrained] = [
        {**message, "weight": 0} if message["role"] == "assistant" else message for message in messages[:untrained]
    ]
    if from_sharegpt:
        messages = list(dropwhile(lambda message: message["role"] not in ("system", "user"), messages))
    messages = _with_system(messages, record)
    if any(map(is_cut, messages[:-1])):
        raise ValueError(f'"{FINISH}" is "length" in a turn that is not the last one')
    return messages


def _with_system(messages: list[Message], record: Mapping[str, Any]) -> list[Message]:
    """The messages, after a turn with the system prompt of the record, if there is one."""
    for name in SYSTEM:
        system = _check_type(_joined(record.get(name, "")), str, f'"{name}" must be a string')
        if system and messages[:1] and messages[0]["role"] == "system":
            if messages[0]["content"] != system:
                raise ValueError(f'"{name}" and the first turn are two different system prompts; remove one')
        elif system:
            messages = [{"role": "system", "content": system}, *messages]
    return messages


def _variables(record: Mapping[str, Any]) -> dict[str, Any]:
    """The template variables of a chat: its tools, its documents, and the entries of `chat_template_kwargs`."""
    variables: dict[str, Any] = {}
    for name in ("tools", "functions", "documents"):
        items = _check_type(decoded(record.get(name)) or [], list, f'"{name}" must be a list')
        if items and name == "functions" and variables:
            raise ValueError('"functions" is the old name of "tools"; give one of the two')
        if items:
            variables["documents" if name == "documents" else "tools"] = items
    if "tools" in variables:
        variables["tools"] = [_tool(tool) for tool in variables["tools"]]
    problem = '"chat_template_kwargs" must be an object'
    more = _check_type(decoded(record.get("chat_template_kwargs")) or {}, dict, problem)
    if wrong := sorted(more.keys() & {*RESERVED, *variables}):
        raise ValueError(f'"chat_template_kwargs" may not set "{wrong[0]}", which the record or the training sets')
    return {**variables, **more}


def _tool(tool: Any) -> Any:
    """A tool in OpenAI's form, as templates expect it. The record may give the function alone."""
    bare = isinstance(tool, dict) and "name" in tool and "function" not in tool
    return {"type": "function", "function": tool} if bare and tool.get("type", "function") == "function" else tool


def _weighted(message: dict[str, Any], number: int) -> Message:
    """The message, with `weight` 0 instead of the fields that say that it is not trained on."""
    where = f"turn {number} of the chat: "
    check_refused(message, REFUSED_IN_TURNS, where)
    trained, role = take_trained(message, where), message["role"]
    if trained and role != "assistant":
        raise ValueError(f"{where}is of the {role}, and only turns of the assistant can be trained on")
    return {**message, "weight": 0} if trained is False and role == "assistant" else message


def _message(turn: Any, number: int) -> dict[str, Any]:
    """A turn with the keys of transformers ("role", "content") or ShareGPT ("from", "value"), as a message."""
    fields = without_nulls(turn)
    role, content = fields.pop("from", None), fields.pop("value", None)
    role, content = fields.pop("role", role), _joined(fields.pop("content", content))
    function_call = fields.pop("function_call", None)  # OpenAI's format before tool_calls
    calls = decoded(fields.pop("tool_calls", [])) or ([function_call] if function_call else [])
    no_text = f'turn {number} of the chat needs text under "role" and "content", or "from" and "value"'
    role = _check_type(role, str, no_text).strip().lower()
    has_reasoning = ROLES.get(role) == "assistant" and is_filled(fields, "reasoning")
    if content is not None or not (calls or has_reasoning):
        content = _check_type(content, str, no_text)
    if role not in ROLES:
        raise ValueError(f"turn {number} of the chat has an unknown role, {role!r}; use one of {', '.join(ROLES)}")
    if role in CALLS and isinstance(call := decoded(content), (dict, list)):
        calls = call if isinstance(call, list) else [call]
        content = None if calls else ""
    if calls:
        fields["tool_calls"] = _calls(calls, number)
    return {"role": ROLES[role], **({} if content is None else {"content": content}), **fields}


def _check_parts(content: Any, number: int) -> None:
    """Raise ValueError for a part of a content that is not text."""
    for part in content if isinstance(content, list) else []:
        if (kind := without_nulls(part).get("type", "text")) != "text":
            raise ValueError(f"turn {number} of the chat: a part has type {kind!r}, and only text can be trained on")


def _joined(content: Any) -> Any:
    """The text of a list of text parts; any other content unchanged."""
    if not isinstance(content, list):
        return content
    parts = [without_nulls(part) for part in content]
    if all(part.get("type") == "text" for part in parts):
        with suppress(TypeError):  # the text of a part is no str
            return "".join(part.get("text", "") for part in parts)
    return content


def _calls(calls: Any, number: int) -> list[dict[str, Any]]:
    message = f"turn {number} of the chat: tool calls must be a list of objects"
    return [_call(_check_type(call, dict, message), number) for call in _check_type(calls, list, message)]


def _call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A tool call as {"type": "function", "function": {"name", "arguments"}}. Arguments stay in their form, a dict or
    JSON in a string, until it is known which form the chat template takes."""
    call = without_nulls(call)
    function = without_nulls(call.get("function", call))
    _check_type(function.get("name"), str, f"turn {number} of the chat calls a tool without a name")
    return {"type": "function", **(call if "function" in call else {}), "function": function}


def _alternating(messages: list[Message]) -> list[Message]:
    """Join consecutive turns of the user: most templates require turns to alternate."""
    joined = messages[:1]
    for message in messages[1:]:
        last = joined[-1]
        if message["role"] == last["role"] == "user" and message.get("name") == last.get("name"):
            joined[-1] = join_turns(last, message)
        else:
            joined.append(message)
    return joined
