"""Text to token ids and back, with a checkpoint's tokenizer.json."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import tokenizers

from ligermodels.convert.hub import resolve
from ligermodels.convert.input_files import TOKENIZER_BYTES, as_path, read_bytes
from ligermodels.convert.journal import settle
from ligermodels.errors import CheckpointError, InputError

__all__ = ["Tokenizer"]

CHARACTERS_AT_ONCE = 1 << 20
"""Most characters of texts that are encoded together: encoding takes about 100 bytes of memory per character."""


class Tokenizer:
    """The tokenizer of a checkpoint, from its tokenizer.json. Truncation and padding stored in the file are disabled.

    Args:
        folder: local folder of the checkpoint. `Tokenizer.from_pretrained` also takes a hub id.

    Raises:
        CheckpointError: the folder has no usable tokenizer.json.

    Examples:
        >>> tokenizer = Tokenizer("MODEL")
        >>> tokenizer.decode(tokenizer.encode("Once upon a time"))
        'Once upon a time'
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = as_path(folder, CheckpointError, "the folder of the tokenizer")
        settle(self.folder)
        path = self.folder / "tokenizer.json"
        content = read_bytes(path, CheckpointError, TOKENIZER_BYTES, "; text needs a checkpoint with its tokenizer")
        try:
            self.backend = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # The library raises nothing narrower.
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from None
        self.backend.no_truncation()
        self.backend.no_padding()

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **hub: Any) -> "Tokenizer":
        """Load the tokenizer of a checkpoint; from the hub, without downloading its weights.

        Args:
            name_or_path: hub id, such as "meta-llama/Llama-3.1-8B", or local folder.
            hub: `revision` (branch, tag or commit), `token`, `cache_dir` and `local_files_only`, as in huggingface_hub.

        Returns:
            The tokenizer.

        Raises:
            CheckpointError: the local folder does not exist, or the checkpoint has no usable tokenizer.json.
            HubError: the repository cannot be found or downloaded.

        Examples:
            >>> tokenizer = Tokenizer.from_pretrained("Qwen/Qwen3-0.6B")  # doctest: +SKIP
        """
        return cls(resolve(name_or_path, weights=False, **hub))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, including the special tokens that the tokenizer adds (usually a BOS).

        Raises InputError if `text` is no str, or has half of a surrogate pair.
        """
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts, encoded in parallel.

        Args:
            texts: the texts. If a text starts with the BOS token, no second BOS is added.
            add_special_tokens: add the special tokens of the tokenizer (usually a BOS).

        Returns:
            A list of token ids for each text.

        Raises:
            InputError: `texts` is a single text; or a text is no str, has half of a surrogate pair, or has letters that
                the tokenizer has no token for.
        """
        if isinstance(texts, str):
            raise InputError("texts: must be a list of texts, got a str; encode takes a single text")
        token_ids = []
        for group in _groups([_checked(text) for text in texts]):
            with self._errors_named():
                encodings = self.backend.encode_batch(group, add_special_tokens=add_special_tokens)
            for encoding in encodings:
                ids: list[int] = encoding.ids
                # The mask is 1 on a BOS that the tokenizer adds, and 0 on a BOS in the text.
                has_two = ids[:1] == ids[1:2] and encoding.special_tokens_mask[:2] == [1, 0]
                token_ids.append(ids[1:] if has_two else ids)
        return token_ids

    @property
    def added_tokens(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer adds before a text (usually a BOS), and after it."""
        for text in self._texts_with_tokens():
            with suppress(Exception):  # no token is for unknown letters; the library raises nothing narrower
                encoding = self.backend.encode(text)
                added = list(map(bool, encoding.special_tokens_mask))  # 0 for special tokens of the text itself
                if False in added:
                    start, end = added.index(False), len(added) - added[::-1].index(False)
                    return encoding.ids[:start], encoding.ids[end:]
        return [], []

    def _texts_with_tokens(self) -> Iterator[str]:
        """Texts of which most have tokens: a vocabulary may lack letters (DNA)."""
        yield "a"
        yield from self.backend.get_vocab()

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of `text`, and the span [start, end) of each token, in characters.

        No special tokens are added: the text contains them. A span includes the white space of its token. Raises
        InputError if `text` is no str, or has half of a surrogate pair.
        """
        with self._errors_named():
            encoding = self._verbatim.encode(_checked(text), add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Context manager that turns errors of the library, such as for a letter without a token, into InputError."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise InputError(f"text: the tokenizer in {self.folder} cannot encode it: {error}") from None

    @cached_property
    def _verbatim(self) -> tokenizers.Tokenizer:
        """The tokenizer without post-processing: some post-processors remove white space from the spans."""
        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        copy.post_processor = None
        return copy

    def special_tokens(self) -> list[str]:
        """Texts of the special tokens."""
        return [token.content for token in self.backend.get_added_tokens_decoder().values() if token.special]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        return frozenset(id for id, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def tokens_from(self, start: int) -> dict[int, str]:
        """Id -> text of the tokens with ids of at least `start`, ascending."""
        return dict(sorted((id, token) for token, id in self.backend.get_vocab().items() if id >= start))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, by default without special tokens. Raises InputError for values that are no token ids."""
        try:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise InputError(f"token ids: must be whole numbers from 0 to 2**32 - 1: {error}") from None

    def continuation(self, prompt: Sequence[int], new: Iterable[int]) -> str:
        """Text of the token ids `new`, decoded as the continuation of the token ids `prompt`."""
        from ligermodels.generation.text_stream import TextStream  # imports torch, which encoding does not need

        stream = TextStream(self, prompt)
        return "".join([*map(stream.push, new), stream.flush()])


def _checked(text: object) -> str:
    """`text`. Raises InputError unless it is a str that UTF-8 can encode."""
    if not isinstance(text, str):
        raise InputError(f"text: must be a str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"text: character {error.start} is half of a surrogate pair ({text[error.start]!r}), as in decoded bytes "
            "that were no UTF-8"
        ) from None
    return text


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Split `texts` into groups of at most CHARACTERS_AT_ONCE characters; a longer text is a group of its own."""
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
