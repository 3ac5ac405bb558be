"""Text files into token ids, packed without padding into rows of equal length, in an order that a seed decides."""

from __future__ import annotations

import os
import random
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.records import has_json_lines, parse_line

T = TypeVar("T")


class Batch(dict[str, Tensor]):
    """Arguments of a model's forward, always with `input_ids` and `labels`; and `where`, which tells what is in it."""

    def __init__(self, tensors: Mapping[str, Tensor], where: Callable[[], str] | None = None) -> None:
        super().__init__(tensors)
        self.where = where


TEXTS_AT_ONCE = 256
"""Texts that the tokenizer gets in one call: it works on them in parallel."""


def read_documents(
    paths: Iterable[str | os.PathLike[str]],
    *,
    max_bad_lines: int = 0,
    on_bad_line: Callable[[str], object] = warnings.warn,
) -> Iterator[str]:
    """The texts in files: of one of JSON lines each line's "text", of any other the whole. Empty texts are left out.

    Args:
        paths: files, read in this order, in UTF-8.
        max_bad_lines: how many lines that are no JSON object with a text may be passed over, in all files together.
        on_bad_line: called with a message, which names file and line, for each line passed over.

    Raises InputError for a file that cannot be read, as `has_json_lines`, or is not UTF-8, and for more bad lines than
    allowed.
    """
    bad: list[str] = []
    for path in map(Path, paths):
        try:
            if not has_json_lines(path):
                if text := path.read_text(encoding="utf-8"):
                    yield text
                continue
            with path.open("rb") as lines:  # bytes: one line in another encoding does not spoil the others
                for number, line in enumerate(lines, start=1):
                    try:
                        if text := _text_of(line):
                            yield text
                    except ValueError as error:
                        bad.append(f"{path}:{number}")
                        if len(bad) > max_bad_lines:
                            more = f"; {len(bad)} bad lines, {max_bad_lines} allowed: {', '.join(bad[:10])}"
                            raise InputError(f"{path}:{number}: {error}{more if max_bad_lines else ''}") from None
                        on_bad_line(f"{path}:{number}: {error}; line passed over")
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 text at byte {error.start}") from None
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def _text_of(line: bytes) -> str:
    if not line.strip():
        return ""
    record = parse_line(line)
    if not isinstance(record, str):
        raise ValueError('a chat, where only a "text" is wanted: `Documents` reads both')
    return record


def hold_out(items: Sequence[T], fraction: float = 0.1, *, seed: int = 0) -> tuple[list[T], list[T]]:
    """Two lists, (the rest, `fraction` of the items), at least one item each, both in the given order.

    Whole files or documents are what to give: pieces of one document on both sides would make scores too good.
    Raises InputError for fewer than two items or a fraction outside (0, 1).
    """
    if len(items) < 2 or not 0 < fraction < 1:
        raise InputError(f"hold_out needs two items or more and a fraction in (0, 1), got {len(items)} and {fraction}")
    size = min(max(1, round(fraction * len(items))), len(items) - 1)
    held = set(random.Random(seed).sample(range(len(items)), size))
    return [x for i, x in enumerate(items) if i not in held], [x for i, x in enumerate(items) if i in held]


def encode(texts: Iterable[str], tokenizer: Tokenizer, *, eos_token_id: int | None = None) -> Iterator[list[int]]:
    """Token ids of each text, with the special tokens that the tokenizer adds, and `eos_token_id` at the end."""
    texts = iter(texts)
    end = [] if eos_token_id is None else [eos_token_id]
    while chunk := list(islice(texts, TEXTS_AT_ONCE)):
        for ids in tokenizer.encode_all(chunk):
            yield ids if ids[-1:] == end else ids + end


@dataclass(frozen=True)
class Rows:
    """Documents end to end, cut into rows of `length` tokens (the last may be shorter). No token is lost or padded.

    `tokens` is int32 (N,); `starts` long, rising: where a document or a row starts, so that a piece between two starts
    lies in one row and one document.
    """

    tokens: Tensor
    starts: Tensor
    length: int

    def __len__(self) -> int:
        """How many rows there are."""
        return -(-len(self.tokens) // self.length)

    def batch(self, rows: Iterable[int]) -> Batch:
        """These rows end to end: `input_ids` and `labels`, long (1, n), and `cu_seqlens`, the bounds of their pieces.

        Pieces neither attend to one another nor predict one another, so a document that goes on in the next row starts
        there without its context.
        """
        tokens, bounds, size = [], [], 0
        for row in rows:
            first = row * self.length
            piece = self.tokens[first : first + self.length]
            low, high = torch.searchsorted(self.starts, torch.tensor([first, first + len(piece)])).tolist()
            tokens.append(piece)
            bounds.append(self.starts[low:high] - first + size)
            size += len(piece)
        ids = torch.cat(tokens).long()[None]
        return Batch({"input_ids": ids, "labels": ids, "cu_seqlens": torch.cat([*bounds, torch.tensor([size])]).int()})


def pack(documents: Iterable[Sequence[int]], length: int) -> Rows:
    """Pack documents (token ids) into rows of `length` tokens. Raises InputError without any token."""
    if length < 1:
        raise InputError(f"length of a row must be at least 1, got {length}")
    tokens, starts = array("i"), array("q")
    for document in documents:
        starts.append(len(tokens))
        tokens.extend(document)
    if not tokens:
        raise InputError("the texts hold not a single token: give files with text")
    cuts = torch.arange(0, len(tokens), length)
    begun = torch.tensor(starts)
    return Rows(torch.tensor(tokens, dtype=torch.int32), torch.cat([begun[begun < len(tokens)], cuts]).unique(), length)


def batches(
    rows: Rows, rows_per_batch: int, *, seed: int | None = None, epochs: int | None = None, skip: int = 0
) -> Iterator[Batch]:
    """Batches of rows, each row once an epoch; the last batch of an epoch may be smaller.

    Args:
        rows_per_batch: rows in a batch, B; a batch has at most B * rows.length tokens.
        seed: decides the order, which is another in each epoch; None keeps the rows as they stand.
        epochs: how often to go through the rows; None is without end.
        skip: batches to leave out at the start: those that a run which is resumed has seen.
    """
    if rows_per_batch < 1:
        raise InputError(f"rows_per_batch must be at least 1, got {rows_per_batch}")
    an_epoch = -(-len(rows) // rows_per_batch)
    order: Sequence[int] = range(len(rows))
    shuffled: int | None = None
    for number in count(skip):
        epoch, place = divmod(number, an_epoch)
        if epoch == epochs:
            return
        if seed is not None and shuffled != epoch:
            order = random.Random(f"{seed} {epoch}").sample(range(len(rows)), len(rows))
            shuffled = epoch
        yield rows.batch(order[place * rows_per_batch : (place + 1) * rows_per_batch])
