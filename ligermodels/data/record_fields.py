"""Fields of records: the fields of each format, refused fields, and unused fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

SYSTEM = ("system", "system_prompt", "system_message")
"""Names of a system prompt beside the turns of a chat."""

OF_CHATS = (*SYSTEM, "tools", "functions", "documents", "chat_template_kwargs")
"""Fields that a chat has beside its turns."""


FINISH = "finish_reason"
"""Field of a record, or of the last turn of a chat, that is "length" if the text was cut: its end is not trained on."""

OPTIONAL = (*OF_CHATS, FINISH)
"""Fields that each format has beside those of its question and answer, other than a text's."""

EMPTY: tuple[Any, ...] = ("", [], {})
"""Values of fields that count as absent, besides null."""


class Format(NamedTuple):
    """A format of records.

    required: fields that every record of the format has.
    optional: further fields that are used.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = OPTIONAL


MESSAGES = Format(("messages",))
CONVERSATIONS = Format(("conversations",))
COMPLETION = Format(("prompt", "completion"))
TEXT = Format(("text",), (FINISH,))

QUESTIONS: dict[Format, str | None] = {
    Format(("instruction", "output"), ("input", "history", *OPTIONAL)): "input",
    Format(("instruction", "response"), ("context", "history", *OPTIONAL)): "context",
    Format(("query", "response"), ("history", *OPTIONAL)): None,
    Format(("question", "answer"), ("history", *OPTIONAL)): None,
}
"""Formats of a question and its answer, in this order -> name of a field with more of the question, or None:
Alpaca's and LLaMA-Factory's, Dolly's, ms-swift's, and GSM8K's."""

OTHER_QUESTIONS: dict[Format, str | None] = {
    Format((question, answer), ("history", *OPTIONAL)): None
    for question, answer in (
        *(("question", "response"), ("prompt", "response"), ("problem", "solution")),
        *(("problem", "answer"), ("input", "output")),
    )
}
"""Further formats of the hub, such as OpenOrca's and NuminaMath's, as in QUESTIONS: the first that a record has is
read, and none beside another format."""

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

RARE_IN_TURNS = {
    **dict.fromkeys(("tools", "functions"), ('"tools" beside the turns', "")),
    "function_calls": ('"tool_calls"', "calls"),
    "tool_plan": ('"reasoning_content" or "content"', "reasoning"),
}
"""Fields of turns for tools, their calls, and words before them, that few templates read (OLMo 3's, DeepSeek-V3.2's,
Command R7B's) -> the usual field, and the part of the same turn (see `parts.FIELDS`) that stands for the field."""

READ_IN_TURNS = frozenset({
    "role", "content", "tool_calls", "tool_responses", "reasoning_content", "thinking", "reasoning", "weight", FINISH,
    "tool_call_id",
})  # fmt: skip
"""Fields of turns that are used, or only say to which call a result belongs. Of these, other code names texts that a
template does not write."""

TRAINED = ("weight", "train", "training", "loss")
"""Fields of turns that say whether a turn is trained on: OpenAI's, axolotl's, and ms-swift's and XTuner's."""


def rare_fields(message: Mapping[str, Any]) -> list[str]:
    """Fields of a turn, not empty, that a template may write or not, beside the usual ones."""
    known = READ_IN_TURNS | {"name"} if message["role"] == "tool" else READ_IN_TURNS
    return [name for name, value in message.items() if name not in known and value not in (*EMPTY, None)]


def is_record(value: Mapping[str, Any]) -> bool:
    """Whether an object has the required fields of a format, or is preference data, or has a prompt."""
    return (
        value.keys() >= {"chosen", "rejected"}
        or "prompt" in value
        or any(value.keys() >= set(form.required) for form in (*FORMATS, *OTHER_QUESTIONS))
    )


def format_of(record: Mapping[str, Any]) -> Format:
    """The format of a record.

    A record may have the fields of several. A format with an empty answer, as cells of tables have it, counts only if
    there is no other. Then the first of these is read: turns of a chat; a completion, or a question as in QUESTIONS;
    a text; a question as in OTHER_QUESTIONS.

    Raises ValueError for a record without a format, or with two of the same rank, and for a field that is refused.
    """
    check_refused(record, REFUSED)
    ranks = ((MESSAGES, CONVERSATIONS), (COMPLETION, *QUESTIONS), (TEXT,), *((form,) for form in OTHER_QUESTIONS))
    found = [[form for form in rank if record.keys() >= {*form.required}] for rank in ranks]
    filled = [[form for form in rank if record[form.required[-1]] not in (*EMPTY, "[]")] for rank in found]
    forms = next(filter(None, [*filled, *found]), [])
    if len(forms) > 1:
        both = "; or ".join(_quoted(form.required, " and ") for form in forms)
        raise ValueError(f"the record has several formats: remove {both}")
    if not forms:
        known = ", ".join(_quoted(form.required, " and ") for form in FORMATS)
        raise ValueError(f"not an object with {known}; its fields are: {_quoted(record) or 'none'}")
    if forms[0] not in (MESSAGES, CONVERSATIONS, TEXT) and label_of(record.get("label")) is not None:
        raise ValueError(f'"label" {_PREFERENCE}')
    return forms[0]


LABEL_TEXTS = {**dict.fromkeys(("true", "1", "1.0"), True), **dict.fromkeys(("false", "0", "0.0"), False)}


def label_of(value: Any) -> bool | None:
    """The label of a completion: true, false, 1 or 0, or the text of one of them, as in a cell; None for any other."""
    if isinstance(value, str):
        return LABEL_TEXTS.get(value.strip().lower())
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


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
