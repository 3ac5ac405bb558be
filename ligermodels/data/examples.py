"""Preference data as tokens, and batches of it: whole pairs, or single sequences with a label."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ligermodels.data.batches import Batch
from ligermodels.data.documents import EMPTY, Documents
from ligermodels.data.encoding import Example, Tokens
from ligermodels.data.lines import fields_of
from ligermodels.data.packing import ExcessLengthStrategy, PackedBatches
from ligermodels.data.pairs import Labelled, read_labelled, read_pair
from ligermodels.data.records import Completion, Record
from ligermodels.data.rows import Piece
from ligermodels.errors import InputError
from ligermodels.layers import IGNORE_INDEX

REFERENCES = 4
"""Reference log-probabilities per record at most: of a pair's two sequences; or of two completions with a label, each
with its mismatched sequence."""
PARTNERS = 64
"""Records that are tried for a mismatched completion."""


class Form(NamedTuple):
    """A form of preference data.

    sequences: number of sequences of an example.
    read: fields of a record -> its sequences, with labels where they have some; and names of unused fields.
    """

    sequences: int
    read: Callable[[Any], tuple[Sequence[Record | Labelled], list[str]]]


FORMS = {"pairs": Form(2, read_pair), "unpaired": Form(1, read_labelled)}


class Examples(Documents):
    """Preference data of a corpus as tokens, read on demand.

    Args:
        args: further arguments of `Documents`.
        form: "pairs" or "unpaired".
        seq_len: most tokens of a sequence.
        excess_length_strategy: for a longer sequence: "truncate" keeps its first tokens, as TRL's "keep_start", "drop"
            leaves the example out, "raise" is an error.
        mismatched: whether single sequences come with a mismatched one: the prompt with the completion of the record
            before it.
        options: further options of `Documents`.
    """

    reference: NDArray[np.float64] | None = None
    """Reference log-probabilities, (records, REFERENCES), NaN where there is no sequence; None if they are not used."""

    def __init__(
        self,
        *args: Any,
        form: str,
        seq_len: int,
        excess_length_strategy: ExcessLengthStrategy = "truncate",
        mismatched: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._form, self._seq_len, self._excess = FORMS[form], seq_len, excess_length_strategy
        self._mismatched = mismatched

    def _first_record(self, index: int) -> Record:
        record = self._records(index)[0]
        return record.record if isinstance(record, Labelled) else record

    def read_examples(self, indices: Iterable[int]) -> list[list[Example]]:
        """The examples of these records; none of unusable records, and of those without tokens to train on.

        Raises InputError for more unusable lines than allowed, and CheckpointError for a chat without a chat template.
        """
        return self._each(indices, self._examples, list)

    def sequences(self, indices: Iterable[int]) -> list[list[tuple[str, Tokens]]]:
        """The sequences of these records before any is cut, each with its role: "chosen" and "rejected" of a pair, or
        "desirable" or "undesirable"; unusable records have none."""
        return self._each(indices, self._with_roles, list)

    def _with_roles(self, index: int) -> list[tuple[str, Tokens]]:
        records = self._records(index)
        if self._form.sequences == 2:
            roles = list(zip(("chosen", "rejected"), records, strict=True))
        else:
            roles = [("desirable" if one.desirable else "undesirable", one.record) for one in records]
        return [(role, self._encoded(record)) for role, record in roles]

    def _examples(self, index: int) -> list[Example]:
        records = self._records(index)
        if self._form.sequences == 2:
            every = [Example(tuple(map(self._encoded, records)))]
        else:
            every = [Example((self._encoded(record),), desirable) for record, desirable in records]
        self._note_long(every, index)
        examples = []
        for number, whole in enumerate(every):
            if (fitted := self._fitted(whole.sequences, index)) is not None:
                other = _mismatched(whole.sequences[0], self._partner(index, number)) if self._mismatched else None
                examples.append(Example(fitted, whole.desirable, None if other is None else self._cut(other)))
        return examples

    def _records(self, index: int) -> Sequence[Any]:
        content, is_line, _, _ = self.corpus.read(index)
        if not is_line:
            raise ValueError("is a text, and the objective is for preference data: give records, such as .jsonl")
        records, unused = self._form.read(fields_of(content))
        self._note_unused(index, unused)
        return records

    def _encoded(self, record: Record) -> Tokens:
        encode = self.encoder
        ids, labels = encode.completion(record) if isinstance(record, Completion) else encode.chat(*record)
        self.check_ids(ids)
        return Tokens(ids, labels, splits=False)

    def _partner(self, index: int, number: int) -> Tokens:
        """Sequence `number` of the usable record before this one, or its last; the last record is before the first."""
        for before in range(1, min(len(self), PARTNERS)):
            with suppress(ValueError):
                records = self._records((index - before) % len(self))
                return self._encoded(records[min(number, len(records) - 1)].record)
        raise InputError("data: has no second usable record, whose completion KTO's estimate of the KL needs")

    def _note_long(self, examples: Iterable[Example], index: int) -> None:
        """Count a record with sequences of more than `seq_len` tokens, and its tokens that are left out."""
        sizes = [[len(tokens.ids) for tokens in example.sequences] for example in examples]
        longest, problem = max(map(max, sizes)), f"more than seq_len ({self._seq_len:,}) tokens"
        if longest <= self._seq_len:
            return
        message = f"has {longest:,} tokens, {problem}"
        if self._excess == "raise":
            raise InputError(f"{self.name(index)}: {message}, and strategy 'raise'")
        if self._excess == "truncate":
            done, lost = "truncated", sum(max(0, size - self._seq_len) for sides in sizes for size in sides)
        else:
            done, lost = "left out", sum(sum(sides) for sides in sizes if max(sides) > self._seq_len)
        self.notes.add(f"have {problem}: {done}", index, lambda: f"{self.name(index)}: {message}: {done}", lost)

    def _fitted(self, sequences: Sequence[Tokens], index: int) -> tuple[Tokens, ...] | None:
        """The sequences of an example with at most `seq_len` tokens each; None if it is left out."""
        if self._excess == "drop" and any(len(tokens.ids) > self._seq_len for tokens in sequences):
            return None
        cut = tuple(map(self._cut, sequences))
        if any(_first_target(tokens.labels) == len(tokens.labels) for tokens in cut):
            why = "nothing to learn: a completion has no token within seq_len"
            self.notes.add(EMPTY, index, lambda: f"{self.name(index)}: {why}")
            return None
        return cut

    def _cut(self, tokens: Tokens) -> Tokens:
        return tokens._replace(ids=tokens.ids[: self._seq_len], labels=tokens.labels[: self._seq_len])


class ExampleBatches(PackedBatches):
    """Batches of whole examples, packed into one row without padding; resumable, as `PackedBatches`.

    The tensors of a batch with S sequences of n tokens in all, for pairs the chosen sequences and then the rejected
    ones:

    input_ids, labels: int64 (1, n). Labels are -100 where no log-probability is needed.
    cu_seqlens: int32 (S + 1,), bounds of the sequences.
    targets: int64 (S, T), for each label of a sequence the position in the row of the token before it; -1 is padding.
    completion_mask: bool (S, T), true for targets of the completion.
    examples: int64 (B, 2), index of each example's record, and number of the example in it.
    ref_log_probs: float64 (S,), log-probabilities of the completions by the reference, if there is one.
    desirable: bool (S,), the labels of single sequences.
    kl_...: input_ids, labels, cu_seqlens, targets and ref_log_probs of the mismatched sequences.

    Args:
        documents: the examples.
        args: further arguments of `PackedBatches`.
        prompt_targets: also label the prompts of the chosen sequences, for ORPO's likelihood.
        options: further options of `PackedBatches`; `seq_len` is the length of a row, enough for any example.
    """

    def __init__(self, documents: Examples, *args: Any, prompt_targets: bool = False, **options: Any) -> None:
        super().__init__(documents, *args, **options)
        self._prompt_targets, self._examples = prompt_targets, documents

    @property
    def _advice(self) -> str:
        return "give records whose completions begin within the first seq_len tokens"

    def _read(self, indices: Iterable[int]) -> Iterator[Piece]:
        indices = list(map(int, indices))
        for index, examples in zip(indices, self._examples.read_examples(indices), strict=True):
            for number, example in enumerate(examples):
                ids, labels = (
                    np.concatenate([np.asarray(getattr(tokens, name), np.int32) for tokens in example.sequences])
                    for name in ("ids", "labels")
                )
                yield Piece(index, number, ids, labels, False, example)

    def _batch(self, pieces: list[Piece]) -> Batch:
        examples = [piece.example for piece in pieces if piece.example is not None]
        rows = list(chain.from_iterable(zip(*(example.sequences for example in examples), strict=True)))
        labelled = len(examples) if self._prompt_targets else 0
        tensors = pack_sequences(rows, labelled)
        tensors["examples"] = torch.tensor([[piece.document, piece.start] for piece in pieces], device="cpu")
        if examples[0].desirable is not None:
            tensors["desirable"] = torch.tensor([bool(example.desirable) for example in examples], device="cpu")
        others = [example.mismatched for example in examples if example.mismatched is not None]
        if others:
            packed = pack_sequences(others)
            tensors |= {f"kl_{name}": packed[name] for name in ("input_ids", "labels", "cu_seqlens", "targets")}
        if self._examples.reference is not None:
            tensors |= self._reference(tensors["examples"], with_kl=bool(others))
        sources = dict.fromkeys(piece.document for piece in pieces)
        return Batch(tensors, where=lambda: ", ".join(map(self._documents.name, sources)))

    def _reference(self, examples: Tensor, *, with_kl: bool) -> dict[str, Tensor]:
        values = torch.from_numpy(self._examples.reference)[reference_cells(examples)]
        if with_kl:
            return {"ref_log_probs": values[:, 0], "kl_ref_log_probs": values[:, 1]}
        is_pair = self._examples._form.sequences == 2
        return {"ref_log_probs": values.T.flatten() if is_pair else values[:, 0]}


def reference_cells(examples: Tensor) -> tuple[Tensor, Tensor]:
    """Indices into `Examples.reference` of the two values of each of the examples, int64 (B, 2) as in a batch."""
    return examples[:, :1], 2 * examples[:, 1:] + torch.arange(2, device=examples.device)


def pack_sequences(rows: Sequence[Tokens], with_prompts: int = 0) -> dict[str, Tensor]:
    """Sequences in one row, and their targets, as in `ExampleBatches`.

    Args:
        rows: the sequences.
        with_prompts: number of the first sequences whose prompts are labelled too.
    """
    ids = np.concatenate([np.asarray(row.ids, np.int64) for row in rows])
    completion = np.concatenate([np.asarray(row.labels, np.int64) for row in rows])
    bounds = np.cumsum([0, *(len(row.ids) for row in rows)])
    labels = np.where(np.arange(len(ids)) < bounds[with_prompts], ids, completion)
    labels[bounds[:-1]] = IGNORE_INDEX  # the first token of a sequence is predicted from nothing
    places = [start + np.flatnonzero(labels[start:end] != IGNORE_INDEX) for start, end in pairwise(bounds)]
    targets = np.full((len(rows), max(1, *map(len, places))), -1)
    for row, place in zip(targets, places, strict=True):
        row[: len(place)] = place - 1
    mask = (targets >= 0) & (completion[targets + 1] != IGNORE_INDEX)
    return {
        "input_ids": torch.from_numpy(ids[None]),
        "labels": torch.from_numpy(labels[None]),
        "cu_seqlens": torch.from_numpy(bounds.astype(np.int32)),
        "targets": torch.from_numpy(targets),
        "completion_mask": torch.from_numpy(mask),
    }


def _first_target(labels: Sequence[int]) -> int:
    """Position of the first label, after the first token, that is trained on; the length if there is none."""
    return next((i for i, label in enumerate(labels) if i and label != IGNORE_INDEX), len(labels))


def _mismatched(one: Tokens, other: Tokens) -> Tokens:
    """The prompt of `one` with the completion of `other`."""
    (a, b), ids = (_first_target(tokens.labels) for tokens in (one, other)), other.ids
    return Tokens([*one.ids[:a], *ids[b:]], [*[IGNORE_INDEX] * a, *other.labels[b:]], splits=False)
