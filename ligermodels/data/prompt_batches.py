"""Prompts of records as tokens, and batches of them, for objectives that sample completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ligermodels.arguments import IGNORE_INDEX
from ligermodels.data.batches import Batch
from ligermodels.data.chat import end_of_turn
from ligermodels.data.documents import Documents
from ligermodels.data.encoding import Tokens
from ligermodels.data.lines import fields_of
from ligermodels.data.packing import PackedBatches
from ligermodels.data.records import Completion, Record, prompt_of
from ligermodels.data.rows import Piece, Pool, Queue
from ligermodels.errors import InputError


class Prompt(NamedTuple):
    """The prompt of a record.

    name: its file and line.
    ids: token ids.
    fields: the fields of the record, for reward functions.
    """

    name: str
    ids: list[int]
    fields: Mapping[str, Any]


class PromptDocuments(Documents):
    """The prompts of a corpus as tokens, read on demand. They are all texts or all chats.

    Args:
        args: further arguments of `Documents`.
        most_tokens: longer prompts are left out, and counted in a message.
        raises: whether a longer prompt is an error instead.
        options: further options of `Documents`.
    """

    def __init__(self, *args: Any, most_tokens: int, raises: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self._most, self._raises = most_tokens, raises

    @cached_property
    def are_chats(self) -> bool:
        """Whether the prompts are chats."""
        return self.has_chats()

    @cached_property
    def end_ids(self) -> list[int]:
        """Tokens that end a completion: EOS, and of chats also the token that ends a turn in the chat template."""
        turn = end_of_turn(self.template, self.tokenizer) if self.are_chats else []
        return list(dict.fromkeys([*self.encoder.eos_token_ids, *turn]))

    @cached_property
    def columns(self) -> frozenset[str]:
        """Names of the fields of the first AT_ONCE usable records."""
        found = self.prompts(range(self.at_once(range(len(self)))))
        return frozenset(name for prompt in found if prompt is not None for name in prompt.fields)

    def completion(self, ids: Sequence[int]) -> Any:
        """A completion as reward functions get it: a text, or of chats a list with a turn of the assistant. Special
        tokens are left out."""
        text = self.tokenizer.decode(ids)
        return [{"role": "assistant", "content": text}] if self.are_chats else text

    def prompts(self, indices: Iterable[int]) -> list[Prompt | None]:
        """The prompts of these records; None for unusable records and for prompts that are too long.

        Raises InputError for more unusable lines than allowed, and CheckpointError for a chat without a chat template.
        """
        indices = list(map(int, indices))
        found = zip(indices, self._each(indices, self._prompt, lambda: None), strict=True)
        return [prompt if prompt is not None and self._fits(prompt, index) else None for index, prompt in found]

    def sequences(self, indices: Iterable[int]) -> list[list[tuple[str, Tokens]]]:
        """The prompts of these records, also those that are too long, none of which is trained on; see
        `Documents.sequences`."""
        return [
            [] if prompt is None else [("prompt", Tokens(prompt.ids, [IGNORE_INDEX] * len(prompt.ids)))]
            for prompt in self._each(indices, self._prompt, lambda: None)
        ]

    def _first_record(self, index: int) -> Record:
        return prompt_of(fields_of(self.corpus.read(index)[0]))

    def _prompt(self, index: int) -> Prompt | None:
        content, is_line, _, _ = self.corpus.read(index)
        if not is_line:
            raise ValueError('is a text, and the objective is for prompts: give records with a "prompt", as .jsonl')
        fields = fields_of(content)
        record = prompt_of(fields)
        if isinstance(record, Completion) == self.are_chats:
            own, others = ("a text", "chats") if self.are_chats else ("a chat", "texts")
            raise ValueError(f'"prompt" is {own}, and other records have {others}; give all prompts in one form')
        ids = (
            self.encoder.prompt(record.prompt) if isinstance(record, Completion) else self.encoder.chat_prompt(*record)
        )
        if not ids:
            raise ValueError('"prompt" has no tokens')
        self.check_ids(ids)
        return Prompt(self.name(index), ids, fields)

    def _fits(self, prompt: Prompt, index: int) -> bool:
        """Whether there is room for a completion after the prompt."""
        size = len(prompt.ids)
        if size <= self._most:
            return True
        problem = f"more than seq_len less max_completion_length ({self._most:,}) tokens"
        message = f"{prompt.name}: the prompt has {size:,} tokens, {problem}"
        if self._raises:
            raise InputError(f"{message}, and excess_length_strategy is 'raise'")
        self.notes.add(f"have {problem}: left out", index, lambda: f"{message}: left out", size)
        return False


class PromptBatch(Batch):
    """Prompts as a packed row, without labels, and as `prompts`; `documents` decodes their completions."""

    def __init__(self, tensors: Mapping[str, Tensor], prompts: Sequence[Prompt], documents: PromptDocuments) -> None:
        super().__init__(tensors, where=lambda: ", ".join(prompt.name for prompt in prompts))
        self.prompts, self.documents = prompts, documents

    def pinned(self) -> PromptBatch:
        """The batch itself: its tensors are not copied to a device."""
        return self

    def without_targets(self) -> PromptBatch:
        """A batch without prompts."""
        return PromptBatch(self, [], self.documents)


class PromptBatches(PackedBatches):
    """Batches of `batch_size` prompts, as `PromptBatch`; resumable, as `PackedBatches`.

    Args:
        documents: the prompts.
        args: further arguments of `PackedBatches`.
        options: further options of `PackedBatches`.
    """

    def __init__(self, documents: PromptDocuments, *args: Any, **options: Any) -> None:
        super().__init__(documents, *args, **options)
        self._prompts = documents

    def _new_pool(self) -> Pool:
        return Queue(self._seq_len)

    @property
    def _advice(self) -> str:
        return "give shorter prompts, a longer seq_len, or a smaller max_completion_length"

    def _read(self, indices: Iterable[int]) -> Iterator[Piece]:
        indices = list(map(int, indices))
        for index, prompt in zip(indices, self._prompts.prompts(indices), strict=True):
            if prompt is not None:
                ids = np.asarray(prompt.ids, np.int32)
                yield _PromptPiece(index, 0, ids, np.full_like(ids, IGNORE_INDEX), False, prompt)

    def _batch(self, pieces: list[Piece]) -> PromptBatch:
        packed = super()._batch(pieces)
        return PromptBatch(packed, [piece.example for piece in pieces], self._prompts)


class _PromptPiece(Piece):
    """A prompt; its completions are the targets."""

    @property
    def has_target(self) -> bool:
        return True
