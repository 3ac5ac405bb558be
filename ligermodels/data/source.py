"""Documents encoded ahead of their use, by several processes, and kept in a cache."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from ligermodels.convert.locks import Locked
from ligermodels.data.corpus import Corpus
from ligermodels.data.encoding import Content, Encoded, Encoder
from ligermodels.data.token_cache import TokenCache
from ligermodels.data.workers import Workers, local_ranks

Result = Callable[[], list[Encoded]]


def cache_key(corpus: Corpus, encoder: Encoder) -> dict[str, Any]:
    """All that the tokens of a corpus depend on, as JSON types: files, tokenizer, chat template, and versions of code.

    It has nothing of the recipe's other settings: sequence length, packing, seed and split do not change tokens.
    """
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    return {
        **encoder.key,
        "files": corpus.versions(),
        "code": code.hexdigest(),
        "python": sys.version_info[:2],
        "libraries": {library.__name__: library.__version__ for library in (jinja2, tokenizers)},
    }


class EncodedSource:
    """Encodes documents by index, with workers and a cache, both optional. The result does not depend on them.

    Ranks and other processes that read the same documents in the same order share the work: each group of documents is
    tokenised by the process that claims it first; the others wait for it in the cache.

    Args:
        content: returns a document's bytes.
        encoder: encodes documents.
        num_workers: processes that encode; 0: this process does, when the documents are needed.
        cache: where encoded documents are kept; None: nowhere.
    """

    def __init__(
        self,
        content: Callable[[int], Content],
        encoder: Encoder,
        *,
        num_workers: int = 0,
        cache: TokenCache | None = None,
    ) -> None:
        self._content, self._encoder, self._cache = content, encoder, cache
        self._workers = Workers(encoder, num_workers) if num_workers else None
        self._pending: dict[tuple[int, ...], Result] = {}
        self.units_ahead = 2 * num_workers * local_ranks() + 2 if num_workers else 0
        """Groups of documents to announce before the group that is read."""

    def ahead(self, indices: Sequence[int]) -> None:
        """Start to encode a group of documents that will be read later."""
        if self._workers is not None and (key := tuple(indices)) not in self._pending:
            self._pending[key] = self._submit(key)

    def read(self, indices: Sequence[int]) -> list[Encoded]:
        """The encoded documents. Raises CheckpointError if the chat template is unusable."""
        key = tuple(indices)
        return (self._pending.pop(key, None) or self._submit(key))()

    def close(self) -> None:
        """End the workers, and close the cache."""
        self._pending.clear()
        if self._workers is not None:
            self._workers.close()
        if self._cache is not None:
            self._cache.close()

    def _submit(self, indices: tuple[int, ...]) -> Result:
        """A function that returns the documents; workers start to encode those that are not in the cache."""
        if not (missing := self._missing(indices)):
            return lambda: self._collect(indices, {})
        if self._workers is None:
            return lambda: self._make(indices)
        claim = ExitStack()
        if self._cache is not None:
            try:
                claim.enter_context(self._cache.claim(indices, wait=0.0))
            except Locked:
                return lambda: self._make(indices)
            self._cache.refresh()
            missing = self._missing(indices)
        future = self._workers.submit([self._content(index) for index in missing])

        def keep(done: Future[list[Encoded]]) -> None:
            with claim:
                if self._cache is not None and not done.cancelled() and done.exception() is None:
                    self._cache.add(missing, done.result())

        future.add_done_callback(keep)
        return lambda: self._collect(indices, dict(zip(missing, future.result(), strict=True)))

    def _make(self, indices: Sequence[int]) -> list[Encoded]:
        """The documents, by this process; or by another process that encodes them now."""
        with ExitStack() as claim:
            if self._cache is not None:
                claim.enter_context(self._cache.claim(indices, wait=math.inf))
                self._cache.refresh()
            missing = self._missing(indices)
            encoded = self._encoder.documents([self._content(index) for index in missing])
            if self._cache is not None and missing:
                self._cache.add(missing, encoded)
        return self._collect(indices, dict(zip(missing, encoded, strict=True)))

    def _missing(self, indices: Sequence[int]) -> list[int]:
        return [index for index in indices if self._cache is None or index not in self._cache]

    def _collect(self, indices: Sequence[int], encoded: dict[int, Encoded]) -> list[Encoded]:
        """The documents in `encoded`, and the others from the cache; damaged ones are encoded again."""
        for index in indices:
            if index not in encoded and self._cache is not None and (document := self._cache.get(index)) is not None:
                encoded[index] = document
        damaged = [index for index in indices if index not in encoded]
        again = self._encoder.documents([self._content(index) for index in damaged])
        encoded.update(zip(damaged, again, strict=True))
        return [encoded[index] for index in indices]
