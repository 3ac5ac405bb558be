"""Chats as text and as tokens by a checkpoint's chat template, with a mask of the assistant's tokens."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

from ligermodels.arguments import check_flag
from ligermodels.convert.config_json import read_json, short
from ligermodels.convert.input_files import as_path, is_present, read_text, shown
from ligermodels.convert.journal import settle
from ligermodels.data import rendering
from ligermodels.data.rendering import END, START
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError, InputError

Message: TypeAlias = Mapping[str, Any]
"""One turn: `role`, `content`, and optional keys that the template reads (`tool_calls`, `name` ...)."""

PROBE = "\ufdd2"
"""A marker in rendered text, as START and END are: a noncharacter."""

AT_ONCE = 1 << 22
"""Characters of versions of a chat that are rendered together."""

OF_TRANSFORMERS = frozenset({
    "chat_template", "continue_final_message", "conversation", "max_length", "padding", "return_assistant_tokens_mask",
    "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "truncation",
})  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that are no variables of templates."""

TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens in templates."""


class ChatTemplate:
    """A chat template: jinja2 with the helpers that published templates expect, in a sandbox with limits of time and
    memory (see `rendering`).

    `now`, for templates that write the date, is fixed when the object is made: a chat has one text throughout a run.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None, *, name: str = "chat template") -> None:
        """Compile `source`; the special `tokens` ("bos_token", "eos_token" ...) are variables of it.

        Raises CheckpointError, with `name`, when it is not a jinja2 template.
        """
        self.name, self.source, self.tokens, self.now = name, source, dict(tokens or {}), datetime.now()
        rendering.render(name, source, self.now, None)
        self._marks_turns = re.search(r"\{%[-+]?\s*generation\b", source) is not None

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], file: str | os.PathLike[str] | None = None) -> ChatTemplate:
        """The template of the checkpoint in `folder`, or the one in another `file`, with the checkpoint's tokens.

        Searched in chat_template.jinja, tokenizer_config.json (of a list of named templates, "default") and
        chat_template.json. Raises CheckpointError when there is none.
        """
        folder = as_path(folder, CheckpointError, "the folder of the chat template")
        settle(folder)
        tokens: dict[str, str] = {}
        config: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if is_present(folder / name, CheckpointError):
                config = read_json(folder / name)
                found = {key: _token_text(config.get(key)) for key in TOKENS}
                tokens |= {key: text for key, text in found.items() if text is not None}
        path = folder / "chat_template.jinja"
        if file is not None:
            path = as_path(file, CheckpointError, "the file of the chat template")
        if file is not None or is_present(path, CheckpointError):
            return cls(read_text(path, CheckpointError), tokens, name=str(path))
        path = folder / "tokenizer_config.json"
        source = config.get("chat_template")
        if source is None and is_present(folder / "chat_template.json", CheckpointError):
            path = folder / "chat_template.json"
            source = read_json(path).get("chat_template")
        if isinstance(source, list):
            named = {str(each.get("name")): each.get("template") for each in source if isinstance(each, dict)}
            if "default" not in named:
                raise CheckpointError(f"{path}: chat_template: none is named 'default', only {short(list(named))}")
            source = named["default"]
        if source is None:
            raise CheckpointError(
                f"{shown(folder)}: has no chat template (base models have none): give the file of one"
            )
        if not isinstance(source, str):
            raise CheckpointError(f"{path}: chat_template: must be text, got {short(source)}")
        return cls(source, tokens, name=f"{path}: chat_template")

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False, **variables: Any) -> str:
        """The text of a chat. `variables` (`tools`, `documents` ...) are further variables of the template.

        If the template supports no system turn, one at the start is prepended to the user's first turn.

        Raises InputError when the template refuses the chat, for what is no list of turns, and for arguments of
        transformers' `apply_chat_template` that are no variables.
        """
        text = self._render(self._fitting(messages), add_generation_prompt, variables)
        return text.replace(START, "").replace(END, "")

    def _fitting(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The chat, with its system turn merged into the user's if the template supports none. InputError for what is
        no list of turns."""
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise InputError(f"{self.name}: messages: must be a list of turns, got {short(messages)}")
        for number, message in enumerate(messages, 1):
            if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
                raise InputError(f"{self.name}: messages: turn {number} must be a dict with names as keys")
        roles = [message.get("role") for message in messages[:2] if isinstance(message.get("content"), str)]
        if roles != ["system", "user"] or self._takes_system:
            return messages
        return [join_turns(*messages[:2]), *messages[2:]]

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the content of a system turn is rendered; some published templates raise, some drop it."""
        chat = [{"role": "system", "content": PROBE}, {"role": "user", "content": "?"}]
        # If it refuses the same content from a user, the system turn is not the reason.
        return self._writes(chat) or not self._writes([join_turns(*chat)])

    def _writes(self, messages: Sequence[Message]) -> bool:
        try:
            return PROBE in self._render(messages, False, {})
        except InputError:
            return False

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        known = self._known(messages, add_generation_prompt, variables)
        return rendering.render(self.name, self.source, self.now, known)

    def _render_all(
        self, chats: Sequence[tuple[Sequence[Message], bool]], variables: Mapping[str, Any]
    ) -> list[tuple[str, str]]:
        """`rendering.render_all` of messages with a generation prompt or without."""
        known = [self._known(messages, prompt, variables) for messages, prompt in chats]
        return rendering.render_all(self.name, self.source, self.now, known)

    def _known(
        self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> dict[str, Any]:
        """All variables of the template."""
        check_flag("add_generation_prompt", add_generation_prompt)
        if wrong := sorted(OF_TRANSFORMERS & variables.keys()):
            raise InputError(
                f"{wrong[0]}: is no variable of a chat template, but an argument of transformers; leave it out"
            )
        known = {"tools": None, "documents": None, **self.tokens, **variables}
        # As in transformers: OpenAI's API and columns of tables have null where a key is missing, and templates do not
        # expect it (they write "None").
        turns = [{key: value for key, value in each.items() if value is not None} for each in messages]
        return known | {"messages": turns, "add_generation_prompt": add_generation_prompt}

    def spans(
        self, messages: Sequence[Message], *, special: re.Pattern[str], **variables: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, as of `render`, and the spans [start, end) of the assistant's turns, end tokens included.

        If the template marks them with `{% generation %}`, these are the spans. Otherwise a turn starts at the end of
        its generation prompt, or with its content; it ends with the token that follows, if it matches `special`, or
        with its content. The content is located by rendering the chat with another one in its place, which also works
        for templates that trim content, drop reasoning of earlier turns or move the system turn.

        Raises InputError when the template refuses the chat or omits its tool calls, or when a turn cannot be located.
        """
        written = json.dumps(messages, ensure_ascii=False, default=str)
        if any(mark in written for mark in (START, END, PROBE)):
            raise InputError("the chat holds U+FDD0, U+FDD1 or U+FDD2, which are noncharacters; remove them")
        messages = self._fitting(messages)
        turns = _Turns(self, messages, special, variables)
        assistant = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        size = len(written) + len(json.dumps(variables, ensure_ascii=False, default=str))
        turns.render_ahead([] if self._marks_turns else assistant, size)
        marked = turns.text
        turns.check_calls()
        if self._marks_turns:
            return _without_marks(marked)
        return marked, [turns.span(i) for i in assistant]


@dataclass(frozen=True)
class _Turns:
    """Locates the assistant's turns in `text`, the rendering of `messages` by `template`, by other versions of them."""

    template: ChatTemplate
    messages: Sequence[Message]
    special: re.Pattern[str]
    variables: Mapping[str, Any]
    answers: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    """Of versions that have been rendered: see `rendering.render_all`."""

    def render_ahead(self, assistant: Sequence[int], size: int) -> None:
        """Render all at once what is needed to locate these turns, of about `size` characters each; unless it is much,
        which memory is not to hold."""
        needed = [("whole", 0)]
        needed += [("without calls", i) for i, message in enumerate(self.messages) if message.get("tool_calls")]
        needed += [(version, i) for i in assistant for version in ("last", "prompt", "earlier", "probed")]
        if len(needed) * size <= AT_ONCE:
            found = self.template._render_all([self._version(*each) for each in needed], self.variables)
            self.answers.update(zip(needed, found, strict=False))  # none where one has ended the process

    def _version(self, version: str, i: int) -> tuple[Sequence[Message], bool]:
        """Messages, and whether a generation prompt follows: the "whole" chat; messages "earlier" than message i, or
        with the "prompt" after them, or a "last" one of the assistant; those "so far", message i included; or all, with
        PROBE as the content of message i ("probed"), or it "without calls"."""
        if version == "whole":
            return self.messages, False
        earlier, message, later = self.messages[:i], self.messages[i], self.messages[i + 1 :]
        match version:
            case "earlier" | "prompt":
                return earlier, version == "prompt"
            case "last":
                return [*earlier, {"role": "assistant", "content": PROBE}], False
            case "probed":
                return [*earlier, {**message, "content": PROBE}, *later], False
            case "so far":
                return [*earlier, message], False
        without = {key: value for key, value in message.items() if key != "tool_calls"}
        return [*earlier, without, *later], False

    @cached_property
    def text(self) -> str:
        """Of all messages. Raises InputError when the template refuses them."""
        return self._text("whole", 0)

    def check_calls(self) -> None:
        """Raises InputError if the template omits tool calls: the model would be trained on an empty turn."""
        for i, message in enumerate(self.messages):
            if message.get("tool_calls") and self._try("without calls", i) == self.text:
                raise InputError(f"{self.template.name}: does not write the tool calls in message {i}")

    def span(self, i: int) -> tuple[int, int]:
        """Start and end of turn i of the assistant in `text`. Raises InputError if it cannot be located."""
        # The turn, rendered as the last one, shows the template's text before and after the content.
        head, probed, tail = (self._try("last", i) or "").partition(PROBE)
        content = self._content(i)
        start = self._start(i, content, [head, head.rstrip()] if probed else [])
        if start is not None and content is not None and not self.messages[i].get("tool_calls"):
            return start, self._end(content[1], tail)
        # The turn has more than content (tool calls), or its content changes the surrounding text (reasoning).
        end = self._end_of_more(i, content[1] if content else start, tail) if start is not None else None
        if start is None or end is None:
            raise InputError(
                f"{self.template.name}: message {i}, of the assistant, cannot be located in the rendered chat"
            )
        return start, end

    def _start(self, i: int, content: tuple[int, int] | None, heads: list[str]) -> int | None:
        """The start of turn i: after the generation prompt, or else of the content, or else after one of the heads."""
        prompt = self._try("prompt", i)
        has_prompt = prompt is not None and prompt != self._try("earlier", i)
        start = len(prompt) if prompt is not None and self.text.startswith(prompt) else None
        if content is not None:
            is_before = start is not None and start <= content[0]
            return start if is_before and (has_prompt or self.text[start : content[0]].isspace()) else content[0]
        return start if has_prompt else next((len(head) for head in heads if self.text.startswith(head)), None)

    def _end_of_more(self, i: int, start: int, tail: str) -> int | None:
        """The end, after `start`, of message i, which is followed by `tail` if it is the last one; None if unknown."""
        so_far = self._try("so far", i)
        if so_far is not None and self.text.startswith(so_far):
            tokens = list(self.special.finditer(so_far, start))
            if tokens and not so_far[tokens[-1].end() :].strip():
                return tokens[-1].end()
        token = self.special.match(tail.lstrip())
        mark = token[0] if token else tail.strip()
        end = self.text.find(mark, start) if mark else -1
        return end + len(mark) if end >= 0 else None

    def _content(self, i: int) -> tuple[int, int] | None:
        """The span of the content of message i: what changes when the content is replaced."""
        probed = self._try("probed", i)
        before, found, after = (probed or "").partition(PROBE)
        if not found or PROBE in after or len(before) + len(after) > len(self.text):
            return None
        if not (self.text.startswith(before) and self.text.endswith(after)):
            return None
        return len(before), len(self.text) - len(after)

    def _end(self, content_end: int, tail: str) -> int:
        """The end of a turn whose content ends at `content_end`; `tail` follows the content of a last turn."""
        rest = tail.lstrip()
        if token := self.special.match(rest):
            after = len(self.text) - len(self.text[content_end:].lstrip())
            return after + len(token[0]) if self.text.startswith(token[0], after) else content_end
        mark = tail.rstrip()  # an end marker that is not a special token
        return content_end + len(mark) if self.text.startswith(mark, content_end) else content_end

    def _text(self, version: str, i: int) -> str:
        """The text of a version of the messages. Raises InputError when the template refuses it."""
        if (answer := self.answers.get((version, i))) is not None:
            return rendering.text_of(self.template.name, answer)
        return self.template._render(*self._version(version, i), self.variables)

    def _try(self, version: str, i: int) -> str | None:
        """The text of a version of the messages, or None if the template refuses it."""
        try:
            return self._text(version, i)
        except InputError:
            return None


def encode_chat(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer, **variables: Any
) -> tuple[list[int], list[bool]]:
    """Token ids of a chat, and a mask of the assistant's: its content, and the token that ends its turn.

    A token that is partly the assistant's counts. No special token is added to those of the template. Raises InputError
    as `ChatTemplate.spans`.
    """
    text, spans = template.spans(messages, special=special_pattern(tokenizer), **variables)
    ids, offsets = tokenizer.encode_with_offsets(text)
    return ids, covered(offsets, spans)


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """The special token that ends the assistant's turns, as a list; empty if the template writes none."""
    pattern = special_pattern(tokenizer)
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    try:
        text, spans = template.spans(chat, special=pattern)
    except InputError:
        return []
    tokens = list(pattern.finditer(text, *spans[-1])) if spans else []
    if not tokens or text[tokens[-1].end() : spans[-1][1]].strip():
        return []
    token = tokenizer.backend.token_to_id(tokens[-1][0])
    return [] if token is None else [token]


def covered(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """For each token, by its span [start, end), whether it overlaps one of `spans`. Both are sorted."""
    found, k = [], 0
    for start, end in offsets:
        while k < len(spans) and spans[k][1] <= start:
            k += 1
        found.append(k < len(spans) and max(start, spans[k][0]) < min(end, spans[k][1]))
    return found


def join_turns(first: Message, second: Message) -> Message:
    """Two turns as one of the second's role; contents are joined by a blank line if neither is empty."""
    contents = filter(None, (first["content"], second["content"]))
    return {**first, **second, "content": "\n\n".join(contents)}


@lru_cache(maxsize=8)
def special_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """A pattern of the special tokens of `tokenizer`, the longest first."""
    texts = sorted(tokenizer.special_tokens(), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    parts, spans, size, start = [], [], 0, 0
    for piece in re.split(f"([{START}{END}])", marked):
        if piece == START:
            start = size
        elif piece == END:
            spans.append((start, size))
        else:
            parts.append(piece)
            size += len(piece)
    return "".join(parts), spans


def _token_text(value: Any) -> str | None:
    """A special token, given as text or as an object with `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
