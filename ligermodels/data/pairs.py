"""Preference data: records of pairs (chosen and rejected), and of completions with a label."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

from ligermodels.data.record_fields import EMPTY, OF_CHATS, OPTIONAL, REFUSED, check_refused, label_of
from ligermodels.data.records import ALL_QUESTIONS, Chat, Completion, NothingToLearn, Record, record_of

SIDES = {"chosen": ("chosen",), "rejected": ("rejected", "rejected_response", "rejected_messages")}
"""Sides of a pair -> fields that hold them: TRL's, then ms-swift's, whose chosen answer is the last message."""

QUESTIONS = ("question", "instruction", "input")
"""Fields with the text of a user's turn: Orca's, Alpaca's (with `input`), and distilabel's."""

TURNS = ("messages", "conversations")
"""Fields with turns: OpenAI's and ShareGPT's."""

LABELS = ("label", "kto_tag")
"""Fields that say whether a completion is desirable: TRL's, and LLaMA-Factory's."""

_PAIR = {"prompt", *TURNS, *OPTIONAL, *QUESTIONS, *(name for names in SIDES.values() for name in names)}
_LABELLED = {*OPTIONAL, *LABELS}
"""Fields that are used beside those of a question and its answer."""


class Labelled(NamedTuple):
    """A prompt with its completion, and whether the completion is desirable."""

    record: Record
    desirable: bool


def read_pair(fields: Mapping[str, Any]) -> tuple[tuple[Record, Record], list[str]]:
    """The chosen and the rejected sequence of a record.

    Args:
        fields: the fields of the record: `chosen` and `rejected`, as texts, turns or lists of turns, with `prompt` (a
            text, or turns), or with the prompt in both: of texts their common beginning, of lists of turns their common
            first turns, as TRL extracts it. Also `question` or `instruction` with `input`, and `messages` or
            `conversations` in place of `prompt`; with `rejected_response`, the last turn of `messages` is chosen.

    Returns:
        The two sequences, with the completions trained on; and the names of fields that are not used.

    Raises:
        ValueError: a field is missing, or of a wrong type; the message names it.
        NothingToLearn: (a ValueError) a completion is empty, or both are equal.

    Examples:
        >>> read_pair({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"})[0][0]
        Completion(prompt='2 + 2 =', completion=' 4', is_finished=True)
    """
    unused = _unused(fields, _PAIR)
    prompt, chosen, rejected = _sides(fields)
    if chosen == rejected:
        raise NothingToLearn('"chosen" and "rejected" are equal')
    return (_completion(fields, prompt, chosen), _completion(fields, prompt, rejected)), unused


def read_labelled(fields: Mapping[str, Any]) -> tuple[list[Labelled], list[str]]:
    """The completions of a record with their labels.

    Args:
        fields: the fields of the record: `prompt`, `completion` and `label` (true or false), as TRL's; or `messages` or
            `conversations` with `label` or `kto_tag`, whose last turn is the completion; or a question and its answer
            (see `record_fields.QUESTIONS`) with a label; or a pair, as in `read_pair`,
            whose chosen completion is desirable and whose rejected one is not.

    Returns:
        The completions, one, or two of a pair; and the names of fields that are not used.

    Raises:
        ValueError: a field is missing, or of a wrong type; the message names it.
        NothingToLearn: (a ValueError) the completion is empty.

    Examples:
        >>> read_labelled({"prompt": "2 + 2 =", "completion": " 4", "label": True})[0][0].desirable
        True
    """
    if _first(fields, SIDES["rejected"]) is not None:
        pair, unused = read_pair(fields)
        return [Labelled(record, is_chosen) for record, is_chosen in zip(pair, (True, False), strict=True)], unused
    given = {name: value for name, value in fields.items() if value not in EMPTY}
    desirable = _label(fields, given)
    question = next((form for form in ALL_QUESTIONS if given.keys() >= {*form.required}), None)
    if (turns := _first(given, TURNS)) is not None:
        known = {turns}
        *prompt, completion = _turns(fields, turns)
        record = _completion(fields, prompt, [completion])
    elif question is not None and "completion" not in given:
        known = {*question.required, *question.optional}
        chat = cast("Chat", record_of({each: value for each, value in given.items() if each not in LABELS})[0])
        *prompt, completion = chat[0]
        record = _completion(fields, prompt, [completion])
    else:
        known = {"prompt", "completion"}
        missing = [each for each in ("prompt", "completion") if each not in fields]
        if missing:
            raise ValueError(f'has no "{missing[0]}"; give "prompt", "completion" and "label"')
        record = _completion(fields, fields["prompt"], fields["completion"])
    return [Labelled(record, desirable)], _unused(fields, known | _LABELLED)


def _label(fields: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """The label of a record. `given`: the fields that are not empty. Raises ValueError without one, or for two."""
    name = _first(given, LABELS) or _first(fields, LABELS)
    desirable = None if name is None else label_of(fields[name])
    if desirable is None:
        problem = f'"{name}" must be true or false' if name else f'has no "{LABELS[0]}", true or false'
        raise ValueError(f"{problem}: the objective is for completions with a label, or pairs")
    if any(label_of(given[other]) != desirable for other in LABELS if other in given):
        raise ValueError(f'"{LABELS[0]}" and "{LABELS[1]}" differ: remove one of them')
    return desirable


def _sides(fields: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected completion: three texts, or three lists of turns."""
    chosen, rejected, fields = _given_sides(fields)
    # The hub's UltraFeedback has the chosen conversation under "messages" too.
    prompt = _prompt({name: value for name, value in fields.items() if value != chosen or name not in TURNS})
    if isinstance(prompt, str) and any(fields.get(name) for name in OF_CHATS):
        prompt = _user(prompt)
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            return _common_text(chosen, rejected)
        return (prompt, chosen, rejected) if isinstance(prompt, str) else (prompt, _answer(chosen), _answer(rejected))
    return _split_turns(prompt, _answer(chosen), _answer(rejected))


def _given_sides(fields: Mapping[str, Any]) -> tuple[Any, Any, Mapping[str, Any]]:
    """The two sides, each a text or a list of turns, and the fields without them."""
    others, rejected_name, turns_name = dict(fields), _first(fields, SIDES["rejected"]), _first(fields, TURNS)
    if rejected_name in SIDES["rejected"][1:] and "chosen" not in fields and turns_name:
        turns = _turns(fields, turns_name)  # ms-swift's
        others |= {turns_name: turns[:-1], "chosen": turns[-1:]}
    missing = [side for side, names in SIDES.items() if _first(others, names) is None]
    if missing or rejected_name is None:
        known = 'the objective is for pairs: give "prompt", "chosen" and "rejected"'
        raise ValueError(f'has no "{missing[0]}"; {known}; its fields are: {", ".join(fields) or "none"}')
    return _as_turns(others.pop("chosen")), _as_turns(others.pop(rejected_name)), others


def _split_turns(prompt: Any, chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The turns of the prompt, and the turns of each side after them; a side may begin with the prompt."""
    count = _common_turns(chosen, rejected)
    if prompt is None:
        if not count:
            raise ValueError('"chosen" and "rejected" begin with different turns, and there is no "prompt"')
        return chosen[:count], chosen[count:], rejected[count:]
    if isinstance(prompt, str):
        if prompt in [_text_of(turn) for turn in chosen[:count]]:  # a prompt that is given as a text too
            return chosen[:count], chosen[count:], rejected[count:]
        prompt = _user(prompt)
    return prompt, *(side[len(prompt) :] if _begins_with(side, prompt) else side for side in (chosen, rejected))


def _begins_with(side: list[Any], prompt: list[Any]) -> bool:
    return len(side) > len(prompt) and side[: len(prompt)] == prompt


def _prompt(fields: Mapping[str, Any]) -> str | list[Any] | None:
    """The prompt of a pair as a text or as turns; None if the record has none of its own."""
    given = {name: fields[name] for name in ("prompt", *TURNS, *QUESTIONS) if fields.get(name) not in (None, *EMPTY)}
    more = given.pop("input", None) if "instruction" in given else None
    if len(given) > 1 and (more is not None or len({str(prompt) for prompt in given.values()}) > 1):
        raise ValueError(f"the record has several prompts: remove all but one of {', '.join(map(repr, given))}")
    if not given:
        return None
    *_, (name, prompt) = given.items()  # of equal ones a question, which is a turn of the user
    if name in TURNS:
        return _turns(fields, name)
    if name in QUESTIONS:
        if not isinstance(prompt, str) or not isinstance(more, str | None):
            raise ValueError(f'"{name}" and "input" must be texts')
        return _user("\n".join(filter(None, (prompt, more))))
    if not isinstance(prompt, str | list):
        raise ValueError('"prompt" must be a text, or a list of turns')
    return prompt


def _completion(fields: Mapping[str, Any], prompt: Any, completion: Any) -> Record:
    """The record of a prompt and a completion, with the other fields of a chat."""
    others = {name: value for name, value in fields.items() if name in OPTIONAL}
    record = record_of({**others, "prompt": prompt, "completion": completion})[0]
    if isinstance(record, Completion) and not record.completion:
        raise NothingToLearn("a completion is empty")
    return record


def _common_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """The common beginning, without a space at its end, and the rest of both; as TRL's `extract_prompt`."""
    count = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    count = min(len(chosen), len(rejected)) if count is None else count
    if chosen[:count].endswith(" "):
        count -= 1
    return chosen[:count], chosen[count:], rejected[count:]


def _common_turns(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Number of first turns that both have; each side keeps a last turn."""
    most = min(len(chosen), len(rejected)) - 1
    return next((i for i in range(max(0, most)) if chosen[i] != rejected[i]), max(0, most))


def _as_turns(side: Any) -> Any:
    """A side of a pair: a text, or a list of turns; a single turn becomes a list."""
    if isinstance(side, Mapping):
        return [side]
    if not isinstance(side, str | list):
        raise ValueError('"chosen" and "rejected" must be texts, turns or lists of turns')
    return side


def _user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def _answer(side: Any) -> list[Any]:
    return [{"role": "assistant", "content": side}] if isinstance(side, str) else side


def _turns(fields: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(fields[name], list) or not fields[name]:
        raise ValueError(f'"{name}" must be a list of turns')
    return fields[name]


def _text_of(turn: Any) -> Any:
    return turn.get("content", turn.get("value")) if isinstance(turn, Mapping) else None


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of the `names` that is a field."""
    return next((name for name in names if name in fields), None)


def _unused(fields: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Fields that are neither `known` nor empty. Raises ValueError for one that is refused."""
    others = {name: value for name, value in fields.items() if name not in known and value not in EMPTY}
    check_refused({name: value for name, value in others.items() if name not in LABELS}, REFUSED)
    return list(others)
