"""Documents as tokens with labels: from files, read on demand, or from memory."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from ligermodels.data.chat import ChatTemplate
from ligermodels.data.corpus import Corpus
from ligermodels.data.encoding import Content, Encoded, Encoder, Tokens
from ligermodels.data.ends import eos_of_checkpoint
from ligermodels.data.records import Completion, NothingToLearn, Record, read_record
from ligermodels.data.source import EncodedSource
from ligermodels.data.streaming import StreamedCorpus
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError, CheckpointWarning, InputError, warn_caller

MOST = 1 << 20
"""Documents that are counted for each reason: streams do not end, and memory is limited."""


class Notes:
    """Counts of documents by reason.

    Args:
        say: called with a message for the first document of each reason, and with the totals.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self.say = say
        self._tokens: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._told: dict[str, int] = {}
        self._uncounted = set[str]()

    def add(self, reason: str, index: int, message: Callable[[], str], tokens: int = 0) -> None:
        """Count a document.

        Args:
            reason: ends the sentence "3 documents in all ...".
            index: index of the document; a document is counted once for each reason.
            message: returns the message about the first document.
            tokens: number of its tokens that are left out.
        """
        if not self._tokens[reason]:
            self.say(f"{message()}; such documents are counted")
        if index in (known := self._tokens[reason]) or len(known) < MOST:
            known[index] = tokens
        else:
            self._uncounted.add(reason)

    def indices(self, reason: str) -> set[int]:
        """Indices of the documents counted for `reason`."""
        return set(self._tokens[reason])

    def totals(self) -> dict[str, tuple[int, int]]:
        """Reason -> number of documents, and of their tokens that are left out."""
        return {reason: (len(tokens), sum(tokens.values())) for reason, tokens in self._tokens.items() if tokens}

    def say_totals(self) -> None:
        """Report the totals that have changed since the last call."""
        for reason, (documents, tokens) in self.totals().items():
            if documents > self._told.get(reason, 0):
                lost = f" ({tokens:,} tokens are left out)" if tokens else ""
                more = "more than " if reason in self._uncounted else ""
                self.say(f"{more}{documents:,} documents in all {reason}{lost}")
                self._told[reason] = documents


T = TypeVar("T")

AT_ONCE, BYTES_AT_ONCE = 64, 8 << 20
"""Most documents, and most bytes of documents, that are read together: memory holds their tokens."""


EMPTY = "have nothing to learn; they are left out"
"""Reason of `Notes` for documents without labels."""

PackingStrategy = Literal["bfd", "wrapped"]
"""bfd: whole documents, by best-fit decreasing. wrapped: documents are split to fill sequences."""


class Documents:
    """The documents of a corpus as tokens with labels, read on demand.

    Chats are rendered by the chat template, and only the assistant's tokens have labels. In texts every token has a
    label, and of a prompt with its completion the completion; both get the special tokens that the tokenizer adds, and
    an EOS token at the end. Unusable lines are reported and skipped, up to a limit. Fields that are not used are
    reported once.

    `bad` has the indices of unusable documents, and `empty` the indices of documents without labels: these are skipped
    without counting towards the limit. `notes` counts documents that are not used in full.

    Args:
        corpus: the files.
        tokenizer: the tokenizer.
        template: function that returns the chat template, called for the first chat; None if there are no chats.
        eos_token_id: appended to texts that do not end with it; of several, the first. None appends nothing.
        max_bad_lines: most unusable lines; one more raises InputError.
        on_bad_line: called with a message with file and line for each unusable line, and for the first document of
            `notes`. Default: a warning.
        packing_strategy: "bfd": no document is split over sequences, other than the pieces of a text file. "wrapped":
            all may be. None: only texts may be.
        vocab_size: tokens of the model; a document with another token is unusable. None: any token is allowed.

    Examples:
        >>> documents = Documents(Corpus(["book.txt"]), Tokenizer("MODEL"))
        >>> (tokens,) = documents.read([0])
        >>> tokens.ids == tokens.labels
        True
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        template: Callable[[], ChatTemplate] | None = None,
        *,
        eos_token_id: int | Sequence[int] | None = None,
        max_bad_lines: int = 0,
        on_bad_line: Callable[[str], object] = warnings.warn,
        packing_strategy: PackingStrategy | None = None,
        vocab_size: int | None = None,
    ) -> None:
        ends = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
        self.encoder = Encoder(tokenizer, template, ends)
        self.corpus, self.tokenizer, self.bad, self.notes = corpus, tokenizer, set[int](), Notes(on_bad_line)
        self.source = EncodedSource(self.content, self.encoder)
        self._max_bad_lines, self._unused, self._warned = max_bad_lines, set[str](), set[str]()
        self._vocab_size = vocab_size
        self._splits = {"whole": packing_strategy == "wrapped", "text": packing_strategy != "bfd", "piece": True}

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
        streaming: bool = False,
        **options: Any,
    ) -> Documents:
        """Documents in `files`, with the tokenizer, chat template and EOS token of a checkpoint.

        Args:
            folder: local folder of the checkpoint.
            files: files, folders, globs and datasets of the hub: see `data_files`.
            config: path of the config.json with the EOS token. Default: the checkpoint's.
            chat_template: path of another chat template, or name of a built-in one. Default: the checkpoint's.
            date: YYYY-MM-DD, for templates that write the date. Default: today.
            piece: bytes of a piece of a text file. Default: 32 KiB.
            streaming: read the files from start to end, without an index: see `StreamedCorpus`.
            options: `max_bad_lines`, `on_bad_line`, `packing_strategy` and `vocab_size` of `Documents`.

        Returns:
            The documents. Chat template and lines are read on demand. CheckpointWarning if the tokenizer has tokens
            beyond `vocab_size` that are not special.

        Raises:
            InputError: a data file cannot be read, is not UTF-8, or is of no known kind.
            CheckpointError: the checkpoint has no usable config.json or tokenizer.json.

        Examples:
            >>> documents = Documents.of_checkpoint(Path("MODEL"), ["chats.jsonl"], max_bad_lines=3)
            >>> tokens = documents.read(range(len(documents)))
        """
        now = datetime.fromisoformat(date) if date else datetime.now()

        def template() -> ChatTemplate:
            checkpoint_template = ChatTemplate.from_folder(folder, chat_template)
            checkpoint_template.now = now
            return checkpoint_template

        tokenizer = Tokenizer(folder)
        size = options.get("vocab_size")
        beyond = {} if size is None else tokenizer.tokens_from(size)
        # Special tokens alone are no mistake: Gemma 3 1B has one for images, models with LLaMA's tokenizer a <pad>.
        if not beyond.keys() <= tokenizer.special_ids:
            names = ", ".join(f"{token!r} ({id})" for id, token in [*beyond.items()][:3])
            warn_caller(
                f"{folder}: the tokenizer has tokens that the model does not know, whose vocab_size is {size:,}: "
                f"{names}{', ...' if len(beyond) > 3 else ''}; documents with them cannot be used",
                CheckpointWarning,
            )
        eos = eos_of_checkpoint(config or folder / "config.json", folder, tokenizer)
        say = options.get("on_bad_line", lambda message: None)
        corpus = (StreamedCorpus if streaming else Corpus)(files, piece=piece, say=say)
        return cls(corpus, tokenizer, template, eos_token_id=eos, **options)

    def __len__(self) -> int:
        return len(self.corpus)

    def name(self, index: int) -> str:
        """FILE:LINE of a document."""
        return self.corpus.name(index)

    @property
    def empty(self) -> set[int]:
        """Indices of the documents without labels that have been read."""
        return self.notes.indices(EMPTY)

    def has_chats(self) -> bool:
        """Whether any of the first AT_ONCE lines of a file is a chat. Unusable lines are not."""
        for index in chain.from_iterable(lines[:AT_ONCE] for lines in self.corpus.files_of_lines()):
            with suppress(ValueError):
                if not isinstance(self._first_record(index), Completion):
                    return True
        return False

    def _first_record(self, index: int) -> Record:
        return read_record(self.corpus.read(index)[0])[0]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Number and bytes of the files, and a digest of their content."""
        return self.corpus.fingerprint

    @property
    def template(self) -> ChatTemplate:
        """The chat template. Raises CheckpointError if there is none."""
        return self.encoder.template

    def read(self, indices: Iterable[int]) -> list[Tokens | None]:
        """Tokens of these documents; None for unusable documents and documents without labels.

        Raises InputError for more unusable lines than allowed, and CheckpointError for a chat without a chat template.
        """
        indices = list(map(int, indices))
        encoded = self.source.read(indices)
        return [self._tokens(index, document) for index, document in zip(indices, encoded, strict=True)]

    def sequences(self, indices: Iterable[int]) -> list[list[tuple[str, Tokens]]]:
        """The sequences of these documents before any is cut, each with its role: a text or chat is one, with the role
        ""; unusable documents have none."""
        return [[] if tokens is None else [("", tokens)] for tokens in self.read(indices)]

    @property
    def units_ahead(self) -> int:
        """Groups of documents to announce (`ahead`) before the group that is read."""
        return self.source.units_ahead

    def ahead(self, indices: Iterable[int]) -> None:
        """Start to encode documents that will be read together later, if there are processes that encode."""
        self.source.ahead(list(map(int, indices)))

    def close(self) -> None:
        """End the processes that encode."""
        self.source.close()

    def content(self, index: int) -> Content:
        """The bytes of a document."""
        return Content(*self.corpus.read(index))

    def _tokens(self, index: int, document: Encoded) -> Tokens | None:
        """The tokens of a document, and messages about it; None if it has none."""
        self._note_unused(index, document.unused)
        for message in document.warnings:
            if (kind := re.sub(r"\d+", "", message)) not in self._warned:
                self._warned.add(kind)
                warnings.warn(message, stacklevel=3)
        with self._skipping(index):
            document.check()
            ids, labels = document.ids.tolist(), document.labels.tolist()
            self.check_ids(ids)
            return Tokens(ids, labels, self._splits[document.form]) if ids else None
        return None

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise InputError, a ValueError, if the model has no such token: no row of the embedding is for its id."""
        if self._vocab_size is not None and ids and (last := max(ids)) >= self._vocab_size:
            raise InputError(
                f"has the token {self.tokenizer.backend.id_to_token(last)!r} with id {last:,}, and the model's "
                f"vocab_size is {self._vocab_size:,}: give the tokenizer of the model in place of "
                f"{self.tokenizer.folder}, or a model with a row for each of its tokens (resize_token_embeddings)"
            )

    def at_once(self, indices: Iterable[int]) -> int:
        """Number of the first of these documents to `read` together, at least one: they fit into memory."""
        count = size = 0
        for index in islice(indices, AT_ONCE):
            size += self.corpus.size(int(index))
            if count and size > BYTES_AT_ONCE:
                break
            count += 1
        return count

    def records(self, indices: Iterable[int]) -> list[Record | None]:
        """The records of these documents; None for unusable documents and documents with nothing to learn.

        Raises InputError for more unusable lines than allowed.
        """
        return self._each(indices, self._record, lambda: None)

    def _record(self, index: int) -> Record | None:
        record, unused = self.content(index).record()
        self._note_unused(index, unused)
        if isinstance(record, Completion) and not record.completion:
            raise NothingToLearn(record.emptiness)
        return record

    def _each(self, indices: Iterable[int], read: Callable[[int], T], unusable: Callable[[], T]) -> list[T]:
        """`read` of each of these documents, and `unusable` in place of it where it raises ValueError."""
        results: list[T] = []
        for index in map(int, indices):
            results.append(unusable())
            with self._skipping(index):
                results[-1] = read(index)
        return results

    def _note_unused(self, index: int, names: Iterable[str]) -> None:
        """Report fields that are not used, once each."""
        if new := [name for name in names if name not in self._unused]:
            self._unused.update(new)
            names = ", ".join(name or '""' for name in new)  # pandas names no column for its index
            self.notes.say(f"{self.name(index)}: has fields that are not used: {names}")

    @contextmanager
    def _skipping(self, index: int) -> Iterator[None]:
        """Count document `index` as unusable if the body raises ValueError, as empty if it raises NothingToLearn."""
        try:
            yield
        except CheckpointError:  # The template is missing or unusable: the line is not at fault.
            raise
        except NothingToLearn as reason:
            message = f"nothing to learn: {reason}; it is left out"
            self.notes.add(EMPTY, index, lambda: f"{self.corpus.name(index)}: {message}")
        except ValueError as error:
            self.skip(index, str(error))

    def skip(self, index: int, reason: str) -> None:
        """Count a document as unusable and report it. Raises InputError for more documents than allowed."""
        if index in self.bad:
            return
        self.bad.add(index)
        name = self.corpus.name(index)
        if len(self.bad) > self._max_bad_lines:
            first = ", ".join(map(self.corpus.name, sorted(self.bad)[:10]))
            more = f"; {len(self.bad)} unusable lines, {self._max_bad_lines} allowed: {first}"
            raise InputError(f"{name}: {reason}{more if self._max_bad_lines else ''}")
        self.notes.say(f"{name}: {reason}; line skipped")


class TokenDocuments:
    """Documents in memory, as lists of token ids; every token has a label.

    Args:
        documents: token ids of each document, also as an array or a tensor.
        splits: whether documents may be split over sequences. Default: True.

    Examples:
        >>> TokenDocuments([[5, 6, 7], [8]]).read([1])
        [Tokens(ids=[8], labels=[8], splits=True)]
    """

    def __init__(self, documents: Iterable[Sequence[int]], *, splits: bool = True) -> None:
        self.documents, self.bad = [list(map(operator.index, ids)) for ids in documents], set[int]()
        self.splits, self.notes = splits, Notes(warnings.warn)
        self.units_ahead = 0

    @classmethod
    def chunks(cls, documents: Iterable[Sequence[int]], size: int) -> TokenDocuments:
        """Documents cut into chunks of `size` tokens, without the remainders, so that batches shuffle chunks."""
        return cls(ids[start : start + size] for ids in documents for start in range(0, len(ids) - size + 1, size))

    def __len__(self) -> int:
        return len(self.documents)

    def read(self, indices: Iterable[int]) -> list[Tokens | None]:
        """These documents as tokens with labels; None for documents without tokens."""
        return [Tokens(ids, ids, self.splits) if (ids := self.documents[index]) else None for index in indices]

    def ahead(self, indices: Iterable[int]) -> None:
        """Nothing: the documents are tokens already."""

    def at_once(self, indices: Iterable[int]) -> int:
        """Number of these documents to `read` together: all of them."""
        return len(list(indices))

    def name(self, index: int) -> str:
        """Name of a document, for messages."""
        return f"document {index}"

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Digest of the documents."""
        return {"digest": hashlib.sha256(json.dumps(self.documents).encode()).hexdigest()[:16]}
