"""Text to token ids and back, with the tokenizer.json of a checkpoint folder."""

import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from ligermodels.errors import CheckpointError


class Tokenizer:
    """The tokenizer of a checkpoint `folder`; CheckpointError when it has no usable tokenizer.json."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; text needs a checkpoint that has its tokenizer beside it")
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises nothing narrower.
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from None
        # Some are saved with the settings of their training, which would cut or pad documents without a word.
        self.backend.no_truncation()
        self.backend.no_padding()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer adds (most often a BOS)."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts, in parallel. A text that starts with the BOS gets no other."""
        found = []
        for encoding in self.backend.encode_batch(list(texts), add_special_tokens=add_special_tokens):
            ids: list[int] = encoding.ids
            is_twice = ids[:1] == ids[1:2] and encoding.special_tokens_mask[:2] == [1, 0]  # Added, and its own.
            found.append(ids[1:] if is_twice else ids)
        return found

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of `text`, in which special tokens are written out, and where [start, end) each stands in it.

        No special token is added. Offsets count characters, and hold the white space that belongs to a token.
        """
        encoding = self._verbatim.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    @cached_property
    def _verbatim(self) -> tokenizers.Tokenizer:
        """The tokenizer without post-processing: some take white space out of the offsets, up to whole tokens of it."""
        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        copy.post_processor = None
        return copy

    def special_tokens(self) -> list[str]:
        """Texts of the special tokens."""
        return [token.content for token in self.backend.get_added_tokens_decoder().values() if token.special]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def continuation(self, prompt: Sequence[int], new: Iterable[int]) -> str:
        """The text that the ids `new` add to that of `prompt`."""
        stream = TextStream(self, prompt)
        return "".join([*map(stream.push, new), stream.flush()])


class TextStream:
    """Text as its tokens come. A token may be part of a character, and its text may depend on those before it."""

    CONTEXT = 8
    """Tokens before the newest ones that are decoded with them."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer, self.ids = tokenizer, list(prompt[-self.CONTEXT :])
        self.shown = len(self.ids)

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is not whole."""
        self.ids.append(token)
        text = self._pending()
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._take(text)

    def flush(self) -> str:
        """What is left at the end, if the last character never became whole."""
        return self._take(self._pending())

    def _pending(self) -> str:
        return self.tokenizer.decode(self.ids)[len(self.tokenizer.decode(self.ids[: self.shown])) :]

    def _take(self, text: str) -> str:
        start = max(0, len(self.ids) - self.CONTEXT)
        self.ids = self.ids[start:]
        self.shown = len(self.ids)
        return text
