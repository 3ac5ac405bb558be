"""Chats as text and as tokens, by a checkpoint's chat template, with a mask of the assistant's tokens."""

from __future__ import annotations

import json
import os
import re
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

from ligermodels.arguments import check_flag, is_sequence
from ligermodels.convert.input_files import as_path
from ligermodels.convert.journal import settle
from ligermodels.data import rendering
from ligermodels.data.frames import Frame
from ligermodels.data.parts import PROBE, CallForm, as_templates_expect
from ligermodels.data.rendering import END, START
from ligermodels.data.template_files import DEFAULT, TOOL_USE, Source, read_templates, read_tokens, require_tokens
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.data.turns import Turns
from ligermodels.data.versions import Versions
from ligermodels.errors import CheckpointError, InputError, short

Message: TypeAlias = Mapping[str, Any]
"""One turn: `role`, `content`, and other keys that templates read (`tool_calls`, `name` ...)."""

OF_TRANSFORMERS = frozenset({
    "chat_template", "continue_final_message", "conversation", "max_length", "padding", "return_assistant_tokens_mask",
    "return_dict", "return_tensors", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "truncation",
})  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that are not variables of templates."""

NO_DEFAULT = "{{ raise_exception('the checkpoint has a chat template for chats with tools, and none for others') }}"
"""The template "default" of a checkpoint that only has "tool_use"."""


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
        self.omitted, self.frames = set[tuple[object, str]](), dict[Any, Frame]()
        self.tool_use: ChatTemplate | None = None
        self.warn: Callable[[str], object] = _warn
        """Called once for each part of messages that the template omits."""
        self.marks_turns = re.search(r"\{%[-+]?\s*generation\b", source) is not None

    def __getstate__(self) -> dict[str, Any]:
        """For another process: without functions."""
        return {name: value for name, value in vars(self).items() if name != "warn"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, warn=_warn)

    @property
    def key(self) -> list[Any]:
        """All that texts of chats depend on beside the chats, as JSON types; the time only if it is written."""
        template = [self.source, self.tokens, self.now.isoformat() if "strftime_now" in self.source else None]
        return [*template, self.tool_use.key if self.tool_use else None]

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], file: str | os.PathLike[str] | None = None) -> ChatTemplate:
        """The chat template of a checkpoint.

        Of several templates, "default" is used, and for chats with tools "tool_use", as in transformers.

        Args:
            folder: local folder of the checkpoint, with its special tokens.
            file: path of another template, or name of a built-in one, to use instead of the checkpoint's.

        Returns:
            The template.

        Raises:
            CheckpointError: there is no template, or it is no jinja2 template, or a file cannot be read; or the
                tokenizer lacks special tokens of a built-in template.
        """
        folder = as_path(folder, CheckpointError, "the folder of the chat template")
        settle(folder)
        if file is not None:
            require_tokens(folder, str(file))
        sources, tokens = read_templates(folder, file), read_tokens(folder)
        default, tool_use = sources.get(DEFAULT, Source(str(folder), NO_DEFAULT)), sources.get(TOOL_USE)
        template = cls(default.text, tokens, name=default.place)
        if tool_use is not None:
            template.tool_use = cls(tool_use.text, tokens, name=tool_use.place)
        return template

    def chosen(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """The template for a chat with these variables: with `tools` the template "tool_use", if there is one."""
        if self.tool_use is None or variables.get("tools") is None:
            return self
        self.tool_use.now = self.now
        return self.tool_use

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
        template = self.chosen(variables)
        text = template.render_marked(template._fitting(messages), add_generation_prompt, variables)
        return text.replace(START, "").replace(END, "")

    def _fitting(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The chat; its system turn joined with the user's turn if the template does not support system turns.

        Raises InputError unless `messages` is a list of dicts.
        """
        self._check_turns(messages)
        turns: list[Message] = [as_templates_expect(message) for message in messages]
        turns = [self._call_form.apply(turn) if turn.get("tool_calls") else turn for turn in turns]
        roles = [turn.get("role") for turn in turns[:2] if isinstance(turn.get("content"), str)]
        if roles != ["system", "user"] or self._supports_system:
            return turns
        return [join_turns(*turns[:2]), *turns[2:]]

    def _check_turns(self, messages: Sequence[Message]) -> None:
        """InputError unless `messages` is a list of dicts, and so are their tool calls."""
        if not is_sequence(messages):
            raise InputError(f"{self.name}: messages: must be a list of turns, got {short(messages)}")
        for number, message in enumerate(messages, 1):
            if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
                raise InputError(f"{self.name}: messages: turn {number} must be a dict with names as keys")
            calls = message.get("tool_calls") or []
            if not is_sequence(calls) or not all(isinstance(call, Mapping) for call in calls):
                raise InputError(f"{self.name}: messages: turn {number}: tool_calls: must be a list of dicts")

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
    def writes_reasoning(self) -> bool:
        """Whether the reasoning of a last turn is rendered."""
        answer = {"role": "assistant", "content": "!", "reasoning_content": PROBE, "thinking": PROBE}
        return self._writes([{"role": "user", "content": "?"}, answer])

    def _writes(self, messages: Sequence[Message]) -> bool:
        return PROBE in self._try(messages)

    def _try(self, messages: Sequence[Message]) -> str:
        """The text of a chat; "" if the template refuses it."""
        try:
            return self.render_marked(messages, False, {})
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
        """`render_marked` of several chats (messages, add_generation_prompt), as answers of `rendering.render_all`."""
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

        If the template marks turns with `{% generation %}`, these are the spans. Otherwise they are found by rendering
        other versions of the chat (see `turns`): content, reasoning and tool calls, as far as the template writes them,
        from the end of the generation prompt to the tokens that end the turn, without tool results in between. Turns
        with `"train": false` or `"weight": 0` have no span.

        Args:
            messages: the turns, each a dict with `role` and `content`. A turn of the assistant with `weight` 0 has no
                span.
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
        template = self.chosen(variables)
        turns = Turns(Versions(template, template._fitting(messages), variables), special)
        spans = turns.trained_spans()
        return turns.text, spans


def encode_chat(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer, **variables: Any
) -> tuple[list[int], list[bool]]:
    """Token ids of a chat, and a mask of the assistant's tokens, to train on.

    No special tokens are added: the template writes them.

    Args:
        messages: the turns, each a dict with `role`, and `content` or `tool_calls`. A turn of the assistant with
            `"weight": 0` or `"train": false` is not trained on.
        template: the chat template.
        tokenizer: the tokenizer.
        variables: further variables of the template (`tools`, `documents` ...).

    Returns:
        Token ids; and for each token whether it belongs, at least in part, to the content, reasoning or tool calls of a
        turn of the assistant, or is a token that ends the turn.

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
    mask = [False] * len(offsets)
    for start, end in spans:
        first = bisect_right(offsets, start, key=lambda token: token[1])
        last = bisect_left(offsets, end, key=lambda token: token[0])
        mask[first:last] = [a < b for a, b in offsets[first:last]]  # a token without characters overlaps nothing
    return mask


def join_turns(first: Message, second: Message) -> Message:
    """Join two turns into a turn with the role of the second; a blank line separates contents that are not empty."""
    contents = filter(None, (first["content"], second["content"]))
    return {**first, **second, "content": "\n\n".join(contents)}


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


@lru_cache(maxsize=8)
def special_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """A pattern that matches the special tokens of `tokenizer`; the longest match first."""
    texts = sorted(tokenizer.special_tokens(), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")
