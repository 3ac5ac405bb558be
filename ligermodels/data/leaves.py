"""Where the parts of messages are in a rendered chat.

The parts are not searched for, because a text may occur twice. The chat is rendered again with markers for all texts of
its messages: between the markers is the template's own text. If the two renderings do not fit, because the template
does more with a text than to write it, the chat is rendered with another value for one part at a time: the part is
where the renderings differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from ligermodels.data.parts import PROBE, is_filled, outlined, parts_of, probed, text_of
from ligermodels.data.versions import Version, Versions
from ligermodels.errors import InputError


class Leaf(NamedTuple):
    """The span [start, end) of the text, in characters, that shows a part of a message."""

    start: int
    end: int
    message: int
    part: str


def find_leaves(versions: Versions) -> list[Leaf]:
    """The parts of all messages that the template writes, in the order of the text.

    Warns, once per template, if the template omits a part. Many templates that write reasoning omit it in earlier
    turns of the assistant: that is no reason to warn.

    Args:
        versions: the chat and its other versions.

    Raises:
        InputError: the template refuses the chat, or omits tool calls, so that a turn would be trained without them.
    """
    versions.render_ahead([Version(), Version(outlined=True)])
    text, found = versions.text(Version()), _outline_leaves(versions)
    parts = [(i, part) for i, message in enumerate(versions.messages) for part in parts_of(message)]
    versions.render_ahead([Version(probed=key) for key in parts if key not in found])
    for key in parts:
        if key not in found:
            found[key] = _leaf(versions, text, *key)
    _check_calls(versions)
    writes_reasoning = any(leaf is not None and part == "reasoning" for (_, part), leaf in found.items())
    for i, part in parts:
        if found[i, part] is None:
            _warn_of_omission(versions, text, i, part, writes_reasoning)
    _warn_of_omitted_thoughts(versions, text)
    return sorted(leaf for leaf in found.values() if leaf is not None)


def _outline_leaves(versions: Versions) -> dict[tuple[int, str], Leaf | None]:
    """Index of a message and its part -> the place, by the version with markers; {} if that does not fit.

    The place is None if the template omits the part.
    """
    text, (_, parts) = versions.text(Version()), outlined(versions.messages)
    first, *pieces = re.split(f"{PROBE}([0-9]+){PROBE}", versions.try_text(Version(outlined=True)) or PROBE)
    numbers, following = [int(number) for number in pieces[::2]], pieces[1::2]
    if not text.startswith(first) or len(set(numbers)) < len(numbers):
        return {}
    leaves, end = dict[tuple[int, str], Leaf | None].fromkeys(parts), len(first)
    for number, own in zip(numbers, following, strict=True):
        i, part = parts[number]
        shown = next((v for v in _shown(text_of(versions.messages[i], part)) if text.startswith(v + own, end)), None)
        if shown is None:
            return {}
        leaves[i, part] = Leaf(end, end + len(shown), i, part)
        end += len(shown) + len(own)
    return leaves if end == len(text) else {}


def _shown(value: str) -> Iterator[str]:
    """The forms in which templates write a text."""
    yield from (value, value.strip(), value.lstrip("\n"), value.rstrip(), json.dumps(value, ensure_ascii=False)[1:-1])


def _leaf(versions: Versions, text: str, i: int, part: str) -> Leaf | None:
    """The place of a part of message i; None if the template omits the part, or writes it twice."""
    other = versions.try_text(Version(probed=(i, part)))
    if other is None or other == text or other.count(PROBE) > probed(versions.messages[i], part)[1]:
        return None
    start = common_start(text, other)
    return Leaf(start, len(text) - common_end(text[start:], other[start:]), i, part)


def _check_calls(versions: Versions) -> None:
    for i, message in enumerate(versions.messages):
        if "calls" in parts_of(message):
            other = versions.try_text(Version(probed=(i, "calls")))
            if other is not None and other.count(PROBE) < probed(message, "calls")[1]:
                raise InputError(f"{versions.template.name}: does not write the tool calls in message {i}")


def _warn_of_omission(versions: Versions, text: str, i: int, part: str, writes_reasoning: bool) -> None:
    """Warn, once per template, that message i is in the text without a part. `writes_reasoning` says that the text has
    the reasoning of another message: some templates write it only with the variables of the chat."""
    template, message, later = versions.template, versions.messages[i], versions.messages[i + 1 :]
    role, is_known = message.get("role"), versions.try_text(Version(probed=(i, part))) == text
    if not is_known or not is_filled(message, part):
        return
    is_earlier = role == "assistant" and any(message.get("role") == "assistant" for message in later)
    if part != "reasoning" or not is_earlier or not (writes_reasoning or template.writes_reasoning):
        _warn_once(versions, i, part)


def _warn_of_omitted_thoughts(versions: Versions, text: str) -> None:
    """Warn, once per template, that it cuts reasoning in <think> tags out of the assistant's last content, as
    DeepSeek-R1's template does."""
    last = max((i for i, message in enumerate(versions.messages) if message.get("role") == "assistant"), default=None)
    content = None if last is None else versions.messages[last].get("content")
    if last is not None and isinstance(content, str):
        before, _, _ = content.rpartition("</think>")
        thoughts = [thought.strip() for thought in re.split("</?think>", before)]
        if not all(any(shown in text for shown in _shown(thought)) for thought in thoughts):
            _warn_once(versions, last, "reasoning")


def _warn_once(versions: Versions, i: int, part: str) -> None:
    """Warn that message i is written without a part, unless the template omitted the part of its role before."""
    template, role = versions.template, versions.messages[i].get("role")
    if (role, part) not in template.omitted:
        template.omitted.add((role, part))
        template.warn(
            f"{template.name}: does not write the {part} of the {role} (message {i}): the model gets chats without it"
        )


def common_start(a: str, b: str) -> int:
    """Number of characters that two texts have in common at their starts."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def common_end(a: str, b: str) -> int:
    """Number of characters that two texts have in common at their ends."""
    return common_start(a[::-1], b[::-1])
