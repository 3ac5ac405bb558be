"""Documents as tokens, with labels: those of files, read as they are needed, and those in memory."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ligermodels.convert.config_json import read_json
from ligermodels.data.chat import ChatTemplate, Message, encode_chat
from ligermodels.data.corpus import Corpus, Indices
from ligermodels.data.records import Chat, NothingToLearn, parse_line
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError, InputError
from ligermodels.layers import IGNORE_INDEX

AT_ONCE, BYTES_AT_ONCE = 64, 8 << 20
"""Documents, and bytes of them, that are read together: memory holds their tokens."""


class Tokens(NamedTuple):
    """A document: token ids, and labels, which are the ids, or -100 where a token is not trained on."""

    ids: list[int]
    labels: list[int]


class Documents:
    """The documents of a corpus as tokens. Unusable ones are counted, named and, up to a limit, skipped.

    Lines are as of `parse_line`. Chats are written by the chat template, and only what the assistant says is a label.
    Texts get the special tokens that the tokenizer adds, and an EOS, each once.

    `bad` are the indices of unusable documents, `empty` those without a label, which the limit does not count.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        template: Callable[[], ChatTemplate] | None = None,
        *,
        eos_token_id: int | None = None,
        max_bad_lines: int = 0,
        on_bad_line: Callable[[str], object] = warnings.warn,
    ) -> None:
        """
        Args:
            template: makes the chat template; called for the first chat.
            eos_token_id: appended to texts that do not end in it.
            max_bad_lines: unusable lines that are skipped; each counts once.
            on_bad_line: called with a message, which names file and line, for each, and for the first of `empty`.
        """
        self.corpus, self.tokenizer, self.bad, self.empty = corpus, tokenizer, set[int](), set[int]()
        self._make_template, self._end = template, [] if eos_token_id is None else [eos_token_id]
        self._max_bad_lines, self._on_bad_line = max_bad_lines, on_bad_line

    @classmethod
    def of_checkpoint(
        cls,
        folder: Path,
        files: Iterable[str | os.PathLike[str]],
        *,
        config: Path | None = None,
        chat_template: str | None = None,
        date: str | None = None,
        piece: int | None = None,
        **options: Any,
    ) -> Documents:
        """The documents in `files`, by the tokenizer, chat template and EOS of the checkpoint in `folder`.

        Args:
            config: another config.json, which names the EOS.
            chat_template: the file of another template.
            date: YYYY-MM-DD, for templates that write it; by default today.
            piece: bytes of a piece of a long text; by default as of `Corpus`.
            options: `max_bad_lines` and `on_bad_line`.

        Raises as `Corpus`, `Tokenizer` and `ChatTemplate.from_folder`.
        """
        now = datetime.fromisoformat(date) if date else datetime.now()

        def template() -> ChatTemplate:
            found = ChatTemplate.from_folder(folder, chat_template)
            found.now = now
            return found

        eos = read_json(config or folder / "config.json").get("eos_token_id")
        eos = eos[0] if isinstance(eos, list) else eos
        return cls(Corpus(files, piece=piece), Tokenizer(folder), template, eos_token_id=eos, **options)

    def __len__(self) -> int:
        return len(self.corpus)

    def name(self, index: int) -> str:
        """FILE:LINE of a document."""
        return self.corpus.name(index)

    @property
    def fingerprint(self) -> dict[str, Any]:
        return self.corpus.fingerprint

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises CheckpointError without one."""
        if self._make_template is None:
            raise CheckpointError("there are chats in the data, and no chat template for them")
        return self._make_template()

    def read(self, indices: Iterable[int]) -> list[Tokens | None]:
        """Tokens of these documents; None for those that are unusable or `empty`.

        Raises InputError for more unusable lines than allowed, and CheckpointError for a chat without a chat template.
        """
        found: list[Tokens | None] = []
        texts: list[tuple[int, str, bool, bool]] = []
        for place, index in enumerate(map(int, indices)):
            content, is_line, starts, ends = self.corpus.read(index)
            found.append(None)
            with self._skipping(index):
                record = _record(content, is_line)
                if isinstance(record, str):
                    texts.append((place, record, starts, ends))
                else:
                    found[place] = self._encode(*record)
        for whole in (True, False):  # Only the first piece of a text gets a BOS.
            chosen = [each for each in texts if each[2] == whole]
            encoded = self.tokenizer.encode_all([text for _, text, *_ in chosen], add_special_tokens=whole)
            for (place, _, _, ends), ids in zip(chosen, encoded, strict=True):
                if ends and ids[-1:] != self._end:
                    ids = ids + self._end
                found[place] = Tokens(ids, ids) if ids else None
        return found

    def at_once(self, indices: Iterable[int]) -> int:
        """How many of these documents, from the first on, to `read` together; at least one."""
        count = held = 0
        for index in islice(indices, AT_ONCE):
            held += self.corpus.size(int(index))
            if count and held > BYTES_AT_ONCE:
                break
            count += 1
        return count

    def records(self, indices: Iterable[int]) -> list[str | Chat | None]:
        """These documents as a text or a chat; None for those that are unusable or `empty`. Raises InputError for more
        unusable lines than allowed."""
        found: list[str | Chat | None] = []
        for index in map(int, indices):
            content, is_line, *_ = self.corpus.read(index)
            found.append(None)
            with self._skipping(index):
                found[-1] = _record(content, is_line)
        return found

    def count(self, indices: Sequence[int] | Indices, progress: Callable[[int, int], object] | None = None) -> int:
        """Number of tokens of these documents. Reads them all, and so reports those that are unusable or `empty`."""
        total, known, start = 0, len(self.empty), 0
        while start < len(indices):
            end = start + self.at_once(indices[start : start + AT_ONCE])
            total += sum(len(each.ids) for each in self.read(indices[start:end]) if each)
            start = end
            if progress is not None:
                progress(start, len(indices))
        if len(self.empty) > known:
            self._on_bad_line(f"{len(self.empty):,} documents in all hold nothing to learn; they are left out")
        return total

    def _encode(self, messages: list[Message], variables: dict[str, Any]) -> Tokens:
        ids, mask = encode_chat(messages, self.template, self.tokenizer, **variables)
        if not any(mask):
            raise NothingToLearn("no token is the assistant's")
        return Tokens(ids, [token if own else IGNORE_INDEX for token, own in zip(ids, mask, strict=True)])

    @contextmanager
    def _skipping(self, index: int) -> Iterator[None]:
        """Count document `index` as unusable or `empty` when the body says so by an error."""
        try:
            yield
        except CheckpointError:  # There is no template: not the line's fault.
            raise
        except NothingToLearn as reason:
            if not self.empty:
                name = self.corpus.name(index)
                self._on_bad_line(f"{name}: nothing to learn: {reason}; left out and counted, as more such will be")
            self.empty.add(index)
        except ValueError as error:
            self.skip(index, str(error))

    def skip(self, index: int, reason: str) -> None:
        """Count a document as unusable and report it. Raises InputError for one more than allowed."""
        if index in self.bad:
            return
        self.bad.add(index)
        name = self.corpus.name(index)
        if len(self.bad) > self._max_bad_lines:
            first = ", ".join(map(self.corpus.name, sorted(self.bad)[:10]))
            more = f"; {len(self.bad)} unusable lines, {self._max_bad_lines} allowed: {first}"
            raise InputError(f"{name}: {reason}{more if self._max_bad_lines else ''}")
        self._on_bad_line(f"{name}: {reason}; line skipped")


def _record(content: bytes, is_line: bool) -> str | Chat:
    """The text, or the chat, of a line or a piece. Raises ValueError as `parse_line`, NothingToLearn for no text."""
    record = parse_line(content) if is_line else content.decode()
    if not record:
        raise NothingToLearn("the text is empty")
    return record


class TokenDocuments:
    """Documents in memory, as token ids; every token is trained on."""

    def __init__(self, documents: Iterable[Sequence[int]]) -> None:
        self.documents, self.bad = [list(ids) for ids in documents], set[int]()

    @classmethod
    def chunks(cls, documents: Iterable[Sequence[int]], size: int) -> TokenDocuments:
        """The documents cut into chunks of `size` tokens each, without the remainders: to shuffle parts of them."""
        return cls(ids[at : at + size] for ids in documents for at in range(0, len(ids) - size + 1, size))

    def __len__(self) -> int:
        return len(self.documents)

    def read(self, indices: Iterable[int]) -> list[Tokens | None]:
        """These documents; None for those without a token."""
        return [Tokens(ids, ids) if (ids := self.documents[index]) else None for index in indices]

    def at_once(self, indices: Iterable[int]) -> int:
        """How many of these documents to `read` together: all."""
        return len(list(indices))

    def name(self, index: int) -> str:
        """A name for messages."""
        return f"document {index}"

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Their number and a digest."""
        return {"digest": hashlib.sha256(json.dumps(self.documents).encode()).hexdigest()[:16]}
