"""Text to token ids and back, with the tokenizer.json of a checkpoint folder."""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from ligermodels.convert.hub import resolve
from ligermodels.convert.input_files import TOKENIZER_BYTES, as_path, read_bytes
from ligermodels.convert.journal import settle
from ligermodels.errors import CheckpointError, InputError

CHARACTERS_AT_ONCE = 1 << 20
"""Of texts that are encoded together: meanwhile memory holds about a hundred bytes for each."""


class Tokenizer:
    """The tokenizer of a checkpoint `folder`; CheckpointError when it has no usable tokenizer.json."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        place = as_path(folder, CheckpointError, "the folder of the tokenizer")
        settle(place)
        path = place / "tokenizer.json"
        content = read_bytes(path, CheckpointError, TOKENIZER_BYTES, "; text needs a checkpoint with its tokenizer")
        try:
            self.backend = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # The library raises nothing narrower.
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from None
        # Some are saved with truncation or padding enabled.
        self.backend.no_truncation()
        self.backend.no_padding()

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **hub: Any) -> "Tokenizer":
        """The tokenizer of a checkpoint: a local folder or a hub id, whose weights are not fetched.

        Args:
            name_or_path: as of `lm.from_pretrained`.
            hub: `revision`, `token`, `cache_dir`, `local_files_only`, as of `lm.from_pretrained`.

        Raises:
            CheckpointError: no such local folder, or no usable tokenizer.json in it.
            HubError: the repository cannot be found or fetched.
        """
        return cls(resolve(name_or_path, weights=False, **hub))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer adds (usually a BOS).

        Raises InputError, as all that takes a text, for what is no text, or holds half of a surrogate pair."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts, in parallel. A text that starts with the BOS gets no second one."""
        found = []
        for some in _groups([_checked(text) for text in texts]):
            for encoding in self.backend.encode_batch(some, add_special_tokens=add_special_tokens):
                ids: list[int] = encoding.ids
                is_twice = ids[:1] == ids[1:2] and encoding.special_tokens_mask[:2] == [1, 0]  # added, and in the text
                found.append(ids[1:] if is_twice else ids)
        return found

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of `text`, which contains its special tokens, and the span [start, end) of each.

        No special token is added. Spans are in characters, and include the white space that belongs to a token.
        """
        encoding = self._verbatim.encode(_checked(text), add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    @cached_property
    def _verbatim(self) -> tokenizers.Tokenizer:
        """The tokenizer without post-processing: some post-processors remove white space from the spans."""
        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        copy.post_processor = None
        return copy

    def special_tokens(self) -> list[str]:
        """Texts of the special tokens."""
        return [token.content for token in self.backend.get_added_tokens_decoder().values() if token.special]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, by default without special tokens. Raises InputError for what is no token's id."""
        try:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise InputError(f"token ids: must be whole numbers from 0 to 2**32 - 1: {error}") from None

    def continuation(self, prompt: Sequence[int], new: Iterable[int]) -> str:
        """The text of the ids `new` after `prompt`."""
        stream = TextStream(self, prompt)
        return "".join([*map(stream.push, new), stream.flush()])


def _checked(text: object) -> str:
    """`text`; InputError when it is none that could be written as UTF-8."""
    if not isinstance(text, str):
        raise InputError(f"text: must be a str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"text: character {error.start} is half of a surrogate pair ({text[error.start]!r}), as of bytes that were "
            "no UTF-8"
        ) from None
    return text


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """`texts` in groups of at most CHARACTERS_AT_ONCE, or of one text."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > CHARACTERS_AT_ONCE:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


class TextStream:
    """Decodes tokens one by one. A token may be part of a character, and its text may depend on earlier tokens."""

    CONTEXT = 8
    """Number of earlier tokens that are decoded together with the newest ones."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer, self.ids = tokenizer, list(prompt[-self.CONTEXT :])
        self.shown = len(self.ids)

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self.ids.append(token)
        text = self._pending()
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._take(text)

    def flush(self) -> str:
        """The remaining text, if the last character is incomplete."""
        return self._take(self._pending())

    def _pending(self) -> str:
        return self.tokenizer.decode(self.ids)[len(self.tokenizer.decode(self.ids[: self.shown])) :]

    def _take(self, text: str) -> str:
        start = max(0, len(self.ids) - self.CONTEXT)
        self.ids = self.ids[start:]
        self.shown = len(self.ids)
        return text
