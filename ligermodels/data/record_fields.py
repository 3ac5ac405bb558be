"""Fields of records: the fields of each format, refused fields, and unused fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

SYSTEM = ("system", "system_prompt", "system_message")
"""Names of a system prompt beside the turns of a chat."""

OF_CHATS = (*SYSTEM, "tools", "functions", "documents", "chat_template_kwargs")
"""Fields that a chat has beside its turns."""


FINISH = "finish_reason"
"""Field of a text, or of the last turn of a chat, that is "length" if it was cut: its end is not trained on."""

EMPTY: tuple[Any, ...] = ("", [], {})
"""Values of fields that count as absent, besides null."""


class Format(NamedTuple):
    """A format of records.

    required: fields that every record of the format has.
    optional: further fields that are used.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = OF_CHATS


MESSAGES = Format(("messages",))
CONVERSATIONS = Format(("conversations",))
COMPLETION = Format(("prompt", "completion"), (*OF_CHATS, FINISH))
TEXT = Format(("text",), (FINISH,))

QUESTIONS = {
    Format(("instruction", "output"), ("input", "history", *OF_CHATS)): "input",
    Format(("instruction", "response"), ("context", "history", *OF_CHATS)): "context",
    Format(("query", "response"), ("history", *OF_CHATS)): "",
    **{
        Format(names, ("history", *OF_CHATS)): ""
        for names in (
            *(("question", "answer"), ("question", "response"), ("prompt", "response")),
            *(("problem", "solution"), ("problem", "answer"), ("input", "output")),
        )
    },
}
"""Formats of a question and its answer, in this order -> name of a field with more of the question: Alpaca's and
LLaMA-Factory's, Dolly's, ms-swift's, GSM8K's, OpenOrca's, and others of the hub."""

FORMATS = (MESSAGES, CONVERSATIONS, COMPLETION, *QUESTIONS, TEXT)

_PREFERENCE = (
    "is a field of preference data: train on it by another objective, such as --objective dpo (pairs) or kto (labels), "
    "or remove the field or the record"
)
_LOSS = 'selects what is trained on, and is not supported: give "weight": 0 in each turn that is not trained on'
_MEDIA = "is not text, and models are trained on text only; remove the field or the record"

MEDIA = dict.fromkeys(("images", "image", "videos", "video", "audios", "audio"), _MEDIA)
"""Fields of records and of turns that are not text -> reason."""

REFUSED = {
    **dict.fromkeys(("chosen", "rejected", "rejected_response", "rejected_messages", "kto_tag"), _PREFERENCE),
    **MEDIA,
    **dict.fromkeys(("weight", "train", "training", "loss", "mask", "train_detail", "loss_scale"), _LOSS),
}
"""Fields of records that would change the training and are not implemented -> reason."""

REFUSED_IN_TURNS = {
    **dict.fromkeys(("mask", "train_detail", "loss_scale"), _LOSS),
    **MEDIA,
    "refusal": 'is text that no chat template writes; give it as "content"',
}
"""Fields of turns that would change the training and are not implemented -> reason."""

TRAINED = ("weight", "train", "training", "loss")
"""Fields of turns that say whether a turn is trained on: OpenAI's, axolotl's, and ms-swift's and XTuner's."""


def is_record(value: Mapping[str, Any]) -> bool:
    """Whether an object has the required fields of a format, or is preference data, or has a prompt."""
    return (
        value.keys() >= {"chosen", "rejected"}
        or "prompt" in value
        or any(value.keys() >= set(form.required) for form in FORMATS)
    )


def format_of(record: Mapping[str, Any]) -> Format:
    """The format of a record: of several the turns of a chat, or the one whose fields include the other's, and no text
    beside another format, since it is another writing of the same; the fields of the others are not used.

    Raises ValueError if it has no format, or still several, or a field that is refused.
    """
    check_refused(record, REFUSED)
    found = [form for form in FORMATS if record.keys() >= set(form.required)]
    if len(found) > 1:  # in tables, the columns of other formats may be empty
        found = [form for form in found if any(record[name] not in EMPTY for name in form.required)] or found[:1]
        found = [form for form in found if not any(_goes_before(other, form) for other in found)]
    if len(found) > 1:
        both = "; or ".join(_quoted(form.required, " and ") for form in found)
        raise ValueError(f"the record has several formats: remove {both}")
    if not found:
        known = ", ".join(_quoted(form.required, " and ") for form in FORMATS)
        raise ValueError(f"not an object with {known}; its fields are: {_quoted(record) or 'none'}")
    if found[0] is COMPLETION and label_of(record.get("label")) is not None:
        raise ValueError(f'"label" {_PREFERENCE}')
    return found[0]


def _goes_before(other: Format, form: Format) -> bool:
    """Whether a record of both formats is one of the other format."""
    of_chats = MESSAGES, CONVERSATIONS
    includes = other is not form and {*other.required, *other.optional} > {*form.required}
    return includes or (other in of_chats and form not in of_chats) or (form is TEXT and other is not TEXT)


def label_of(value: Any) -> bool | None:
    """The label of a completion: true, false, 1 or 0, or one of them as the text of a cell; None for another value."""
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower())
    return bool(value) if isinstance(value, int) and value in (0, 1) else None


def check_refused(fields: Mapping[str, Any], refused: Mapping[str, str], where: str = "") -> None:
    """Raise ValueError if `fields` has a refused one that is not empty; `where` begins the message."""
    for name, value in fields.items():
        if name in refused and value not in EMPTY:
            raise ValueError(f'{where}"{name}" {refused[name]}')


def unused_fields(record: Mapping[str, Any], form: Format) -> list[str]:
    """Fields of a record that are neither used nor empty, such as its id."""
    used = {*form.required, *form.optional}
    return [name for name, value in record.items() if name not in used and value not in EMPTY]


def take_trained(fields: dict[str, Any], where: str) -> bool | None:
    """Remove the fields TRAINED of a turn. Returns whether the turn is trained on; None if no field says so.

    Raises ValueError for a value other than true, false, 1 and 0; `where` begins the message.
    """
    values = {name: fields.pop(name) for name in TRAINED if name in fields}
    for name, value in values.items():
        if value not in (0, 1):
            raise ValueError(f'{where}"{name}" must be true, false, 1 or 0, got {value!r}')
    return all(values.values()) if values else None


def is_cut(fields: Mapping[str, Any]) -> bool:
    """Whether a record of a text, or a turn, was cut before its end."""
    return fields.get(FINISH) == "length"


def _quoted(names: Iterable[str], separator: str = ", ") -> str:
    return separator.join(f'"{name}"' for name in names)
