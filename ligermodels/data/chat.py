"""Chats as text and as tokens, by a checkpoint's chat template, with a mask of the assistant's tokens."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from ligermodels.arguments import check_flag, is_sequence
from ligermodels.convert.config_json import read_json, short
from ligermodels.convert.input_files import as_path, is_present, read_text, shown
from ligermodels.convert.journal import settle
from ligermodels.data import rendering
from ligermodels.data.calls import CallForm
from ligermodels.data.parts import PROBE, as_templates_expect
from ligermodels.data.rendering import END, START
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.data.turns import Turns
from ligermodels.data.versions import Versions
from ligermodels.errors import CheckpointError, InputError

Message: TypeAlias = Mapping[str, Any]
"""One turn: `role`, `content`, and other keys that templates read (`tool_calls`, `name` ...)."""

OF_TRANSFORMERS = frozenset({
    "chat_template", "continue_final_message", "conversation", "max_length", "padding", "return_assistant_tokens_mask",
    "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "truncation",
})  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that are not variables of templates."""

TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens in templates."""


class ChatTemplate:
    """A chat template: jinja2 with the helpers that published templates use, in a separate process with limits of time
    and memory (see `rendering`).

    The time that templates write (`now`) is the time of creation, so that a chat has the same text throughout a run.

    Args:
        source: the jinja2 template.
        tokens: special tokens, variables of the template: {"bos_token": "<s>", "eos_token": "</s>", ...}.
        name: name of the template, for messages.

    Raises:
        CheckpointError: `source` is no jinja2 template.

    Examples:
        >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}",
        ...                         {"eos_token": "</s>"})
        >>> template.render([{"role": "user", "content": "Hello!"}])
        'user: Hello!</s>'
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None, *, name: str = "chat template") -> None:
        self.name, self.source, self.tokens, self.now = name, source, dict(tokens or {}), datetime.now()
        rendering.render(name, source, self.now, None)
        self.marks_turns = re.search(r"\{%[-+]?\s*generation\b", source) is not None

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], file: str | os.PathLike[str] | None = None) -> ChatTemplate:
        """The chat template of a checkpoint.

        It is read from chat_template.jinja, tokenizer_config.json or chat_template.json, the first that has one. From a
        list of named templates "default" is taken.

        Args:
            folder: local folder of the checkpoint, with its special tokens.
            file: path of another template, to use instead of the checkpoint's.

        Returns:
            The template.

        Raises:
            CheckpointError: there is no template, or it is no jinja2 template, or a file cannot be read.
        """
        folder = as_path(folder, CheckpointError, "the folder of the chat template")
        settle(folder)
        tokens: dict[str, str] = {}
        config: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if is_present(folder / name, CheckpointError):
                config = read_json(folder / name)
                texts = {key: _token_text(config.get(key)) for key in TOKENS}
                tokens |= {key: text for key, text in texts.items() if text is not None}
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
        if source is None:
            raise CheckpointError(
                f"{shown(folder)}: has no chat template (base models have none): give the file of one"
            )
        return cls(_default_source(source, path), tokens, name=f"{path}: chat_template")

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False, **variables: Any) -> str:
        """The text of a chat.

        If the template does not support system turns, a system turn at the start is prepended to the user's first turn.

        Args:
            messages: the turns, each a dict with `role` and `content`.
            add_generation_prompt: append the beginning of a turn of the assistant.
            variables: further variables of the template (`tools`, `documents` ...).

        Returns:
            The text, special tokens included.

        Raises:
            InputError: the template refuses the chat, `messages` is no list of dicts, or a variable is an argument of
                transformers' `apply_chat_template` instead (`tokenize` ...).
            CheckpointError: rendering takes too much time or memory.
        """
        text = self.render_marked(self._fitting(messages), add_generation_prompt, variables)
        return text.replace(START, "").replace(END, "")

    def _fitting(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The chat; its system turn joined with the user's turn if the template does not support system turns.

        Raises InputError unless `messages` is a list of dicts.
        """
        if not is_sequence(messages):
            raise InputError(f"{self.name}: messages: must be a list of turns, got {short(messages)}")
        for number, message in enumerate(messages, 1):
            if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
                raise InputError(f"{self.name}: messages: turn {number} must be a dict with names as keys")
        turns = [as_templates_expect(message) for message in messages]
        turns = [self._call_form.apply(turn) if turn.get("tool_calls") else turn for turn in turns]
        roles = [turn.get("role") for turn in turns[:2] if isinstance(turn.get("content"), str)]
        if roles != ["system", "user"] or self._supports_system:
            return turns
        return [join_turns(*turns[:2]), *turns[2:]]

    @cached_property
    def _call_form(self) -> CallForm:
        """The form of turns with tool calls that the template takes."""
        return CallForm.of(self._try)

    @cached_property
    def _supports_system(self) -> bool:
        """Whether the content of a system turn is rendered; some published templates raise an error, some omit it."""
        chat = [{"role": "system", "content": PROBE}, {"role": "user", "content": "?"}]
        # If the template refuses the same content from a user, the system turn is not the reason.
        return self._writes(chat) or not self._writes([join_turns(*chat)])

    @cached_property
    def takes_prompt(self) -> bool:
        """Whether `add_generation_prompt` changes the text; some templates always write a prompt, some never."""
        chat = [{"role": "user", "content": "?"}]
        return self._try(chat) != self._try(chat, add_generation_prompt=True)

    def _writes(self, messages: Sequence[Message]) -> bool:
        return PROBE in self._try(messages)

    def _try(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of a chat; "" if the template refuses it."""
        try:
            return self.render_marked(messages, add_generation_prompt, {})
        except InputError:
            return ""

    def render_marked(
        self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """The text of `messages` as they are, with the marks of `{% generation %}`.

        Args:
            messages: the turns; a system turn is not joined with the user's.
            add_generation_prompt: append the beginning of a turn of the assistant.
            variables: further variables of the template.
        """
        all_variables = self._all_variables(messages, add_generation_prompt, variables)
        return rendering.render(self.name, self.source, self.now, all_variables)

    def render_all_marked(
        self, chats: Sequence[tuple[Sequence[Message], bool]], variables: Mapping[str, Any]
    ) -> list[tuple[str, str]]:
        """`render_marked` of several chats (messages, add_generation_prompt), as answers for `rendering.text_of`."""
        all_variables = [self._all_variables(messages, prompt, variables) for messages, prompt in chats]
        return rendering.render_all(self.name, self.source, self.now, all_variables)

    def _all_variables(
        self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> dict[str, Any]:
        """All variables of the template."""
        check_flag("add_generation_prompt", add_generation_prompt)
        if unsupported := sorted(OF_TRANSFORMERS & variables.keys()):
            raise InputError(
                f"{unsupported[0]}: is no variable of a chat template, but an argument of transformers; leave it out"
            )
        return {
            **{"tools": None, "documents": None, **self.tokens, **variables},
            **{"messages": messages, "add_generation_prompt": add_generation_prompt},
        }

    def spans(
        self, messages: Sequence[Message], *, special: re.Pattern[str], **variables: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, and the spans of the assistant's turns, end tokens included.

        If the template marks turns with `{% generation %}`, these are the spans. Otherwise a turn starts after its
        generation prompt, or with its content, and ends with a special token that follows the content, or with the
        content. Rendering the chat with another content in place of the turn's locates the content, even if the
        template trims content, drops the reasoning of earlier turns or moves the system turn.

        Args:
            messages: the turns, each a dict with `role` and `content`.
            special: pattern of the special tokens.
            variables: further variables of the template (`tools`, `documents` ...).

        Returns:
            The text, and a list of (start, end), in characters, end exclusive.

        Raises:
            InputError: the template refuses the chat or omits its tool calls, or a turn cannot be located.
            CheckpointError: rendering takes too much time or memory.
        """
        chat_json = json.dumps(messages, ensure_ascii=False, default=str)
        if any(mark in chat_json for mark in (START, END, PROBE)):
            raise InputError("the chat has U+FDD0, U+FDD1 or U+FDD2, which are noncharacters; remove them")
        versions = Versions(self, self._fitting(messages), variables)
        versions.render_ahead(len(chat_json) + len(json.dumps(variables, ensure_ascii=False, default=str)))
        turns = Turns(versions, special)
        marked = turns.text
        turns.check_calls()
        return _without_marks(marked) if self.marks_turns else (marked, turns.spans())


def encode_chat(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer, **variables: Any
) -> tuple[list[int], list[bool]]:
    """Token ids of a chat, and a mask of the assistant's tokens, to train on.

    No special tokens are added: the template writes them.

    Args:
        messages: the turns, each a dict with `role` and `content`.
        template: the chat template.
        tokenizer: the tokenizer.
        variables: further variables of the template (`tools`, `documents` ...).

    Returns:
        Token ids; and for each token whether it belongs, at least in part, to the content of a turn of the assistant or
        is the token that ends the turn.

    Raises:
        InputError: the template refuses the chat or omits its tool calls, or a turn cannot be located.
        CheckpointError: rendering takes too much time or memory.

    Examples:
        >>> template, tokenizer = ChatTemplate.from_folder("MODEL"), Tokenizer("MODEL")
        >>> chat = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello!"}]
        >>> ids, mask = encode_chat(chat, template, tokenizer)
        >>> tokenizer.decode([token for token, is_assistant in zip(ids, mask) if is_assistant])
        'Hello!'
    """
    text, spans = template.spans(messages, special=special_pattern(tokenizer), **variables)
    ids, offsets = tokenizer.encode_with_offsets(text)
    return ids, covered(offsets, spans)


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """The special token that ends the assistant's turns, as a list; an empty list if the template has none."""
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
    """For each token, whether its `offsets` (start, end) overlap one of `spans` (start, end). Both lists are sorted."""
    mask, k = [], 0
    for start, end in offsets:
        while k < len(spans) and spans[k][1] <= start:
            k += 1
        mask.append(k < len(spans) and max(start, spans[k][0]) < min(end, spans[k][1]))
    return mask


def join_turns(first: Message, second: Message) -> Message:
    """Join two turns into a turn with the role of the second; a blank line separates contents that are not empty."""
    contents = filter(None, (first["content"], second["content"]))
    return {**first, **second, "content": "\n\n".join(contents)}


@lru_cache(maxsize=8)
def special_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """A pattern that matches the special tokens of `tokenizer`; the longest match first."""
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


def _default_source(source: Any, path: Path) -> str:
    """The template in the field `chat_template` of a file: a text, or the template "default" in a list of templates."""
    if isinstance(source, list):
        templates = {str(entry.get("name")): entry.get("template") for entry in source if isinstance(entry, Mapping)}
        if "default" not in templates:
            raise CheckpointError(f"{path}: chat_template: none is named 'default', only {short(list(templates))}")
        source = templates["default"]
    if not isinstance(source, str):
        raise CheckpointError(f"{path}: chat_template: must be text, got {short(source)}")
    return source


def _token_text(value: Any) -> str | None:
    """The text of a special token, in the form of a text or of an object with `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
