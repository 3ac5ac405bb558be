"""Fields of a chat that its template does not write: without such a field the rendered text is the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ligermodels.data.chat import ChatTemplate, Message
from ligermodels.data.parts import is_filled
from ligermodels.data.record_fields import RARE_IN_TURNS, rare_fields
from ligermodels.errors import InputError


def check_written(template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any]) -> None:
    """Check that a template writes what the chat has. Warns of other fields of turns that it does not write, once each.

    Args:
        template: the chat template.
        messages: the turns.
        variables: variables of the template, such as "tools".

    Raises:
        ValueError: it does not write the tools or documents of the chat, or tools, calls or plans of turns.
        InputError: it refuses the chat.
    """
    template = template.chosen(variables)
    rare = dict.fromkeys(name for message in messages for name in rare_fields(message))
    named = [name for name in ("tools", "documents") if name in variables]
    if not rare and not named:
        return
    text = template.render(messages, **variables)
    for name in named:
        if _rendered(template, messages, _without(variables, [name])) == text:
            raise ValueError(f'{template.name}: does not write the "{name}" of the chat; give another template')
    unwritten = _unwritten(template, messages, variables, text, rare.keys())
    _check_rare(template, messages, unwritten)
    for name in unwritten:
        if ("turn", name) not in template.omitted:
            template.omitted.add(("turn", name))
            template.warn(f'{template.name}: does not write "{name}" of turns: the model gets chats without it')


def _unwritten(
    template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any], text: str, rare: Collection[str]
) -> list[str]:
    """The names of `rare` fields of turns that are not in `text`, the rendered chat."""

    def with_only(names: Collection[str]) -> str | None:
        """The chat without other rare fields. The name of a tool stays: it is rare in turns of other roles only."""
        return _rendered(template, [_without(m, {*rare_fields(m)}.difference(names)) for m in messages], variables)

    if not rare or with_only(()) == text:
        return list(rare)
    unwritten = [name for name in rare if with_only(set(rare) - {name}) == text]
    written = set(rare).difference(unwritten)
    if len(unwritten) > 1 and with_only(written) != text:  # `m.a or m.b`, with the same words in both
        unwritten = [name for name in unwritten if with_only(written | {name}) != text]
    return unwritten


def _check_rare(template: ChatTemplate, messages: Sequence[Message], unwritten: Collection[str]) -> None:
    """Raise ValueError if a field of RARE_IN_TURNS is unwritten in a turn that has nothing in the usual place."""
    for field, (usual, part) in RARE_IN_TURNS.items():
        turns = [message for message in messages if field in unwritten and field in rare_fields(message)]
        if not all(part and is_filled(message, part) for message in turns):
            raise ValueError(
                f'{template.name}: does not write the "{field}" of a turn; give {usual}, or another template'
            )


def _rendered(template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any]) -> str | None:
    """The text of a chat; None if the template refuses it, as one does that needs a field."""
    with suppress(InputError):
        return template.render(messages, **variables)
    return None


def _without(fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in names}
