"""Records as tokens with labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from ligermodels.data.chat import ChatTemplate, Message, covered, encode_chat
from ligermodels.data.record_fields import is_cut
from ligermodels.data.records import Completion, NothingToLearn
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError, InputError
from ligermodels.layers import IGNORE_INDEX


class Tokens(NamedTuple):
    """A document as tokens.

    ids: token ids.
    labels: as many labels: the id of the token, or -100 if it is not trained on.
    splits: whether the document may be split over sequences.
    """

    ids: list[int]
    labels: list[int]
    splits: bool = True


class Example(NamedTuple):
    """Sequences, each a prompt with a completion, that an objective compares.

    sequences: the chosen and the rejected sequence of a pair; or a single sequence.
    desirable: label of a single sequence; None for pairs.
    mismatched: the prompt of a single sequence with the completion of another record, for KTO's estimate of the KL
        divergence; or None.
    """

    sequences: tuple[Tokens, ...]
    desirable: bool | None = None
    mismatched: Tokens | None = None


class TextPiece(NamedTuple):
    """A piece of a text; `starts` and `ends` say whether it is the first and the last piece."""

    text: str
    starts: bool
    ends: bool


class Encoder:
    """Encodes records with a tokenizer, a chat template and EOS tokens.

    Args:
        tokenizer: the tokenizer.
        template: function that returns the chat template, called for the first chat; None if there are no chats.
        eos_token_ids: the first one is appended to texts that do not end with one of them; empty: none is appended.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: Callable[[], ChatTemplate] | None, eos_token_ids: Sequence[int]
    ) -> None:
        self.tokenizer, self._make_template, self.eos_token_ids = tokenizer, template, list(eos_token_ids)
        self._written: set[str] = set()

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises CheckpointError if there is none."""
        if self._make_template is None:
            raise CheckpointError("there are chats in the data, and no chat template for them")
        return self._make_template()

    def texts(self, pieces: Sequence[TextPiece]) -> list[list[int]]:
        """Token ids of pieces of texts: after the first piece's BOS, and before the last piece's EOS."""
        encoded = self.tokenizer.encode_all([piece.text for piece in pieces], add_special_tokens=False)
        return [
            [*(self._before(ids) if piece.starts else []), *ids, *(self._after(ids) if piece.ends else [])]
            for piece, ids in zip(pieces, encoded, strict=True)
        ]

    def prompt(self, text: str) -> list[int]:
        """Token ids of the beginning of a text: after its BOS, and without EOS."""
        return self.texts([TextPiece(text, starts=True, ends=False)])[0]

    def completion(self, record: Completion) -> tuple[list[int], list[int]]:
        """Token ids and labels of a prompt and its completion; the completion and its EOS have labels.

        The two are encoded together. A token of both has a label.
        """
        text = record.prompt + record.completion
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        mask = covered(offsets, [(len(record.prompt), len(text))])
        before, after = self._before(ids), self._after(ids) if record.is_finished else []
        labels = [token if is_trained else IGNORE_INDEX for token, is_trained in zip(ids, mask, strict=True)]
        return [*before, *ids, *after], [*(IGNORE_INDEX for _ in before), *labels, *after]

    def chat(self, messages: Sequence[Message], variables: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Token ids and labels of a chat, as the template writes it; the assistant's tokens have labels.

        Raises:
            InputError: the template refuses the chat, or does not write its tools or documents.
            NothingToLearn: no token has a label.
        """
        for name in ("tools", "documents"):
            if name in variables and name not in self._written:
                self._check_written(messages, variables, name)
        ids, mask = encode_chat(messages, self.template, self.tokenizer, **variables)
        if is_cut(messages[-1]):  # The token that ends the turn is the template's, not the model's.
            end = max((i for i, is_trained in enumerate(mask) if is_trained), default=-1)
            while end >= 0 and mask[end] and ids[end] in self.tokenizer.special_ids:
                mask[end] = False
                end -= 1
        if not any(mask):
            raise NothingToLearn("no token is the assistant's")
        return ids, [token if is_trained else IGNORE_INDEX for token, is_trained in zip(ids, mask, strict=True)]

    def _check_written(self, messages: Sequence[Message], variables: dict[str, Any], name: str) -> None:
        """Raise ValueError if the template does not write the variable `name`."""
        text = self.template.render(messages, **variables)
        others = {key: value for key, value in variables.items() if key != name}
        with suppress(InputError):  # a template that needs the variable writes it
            if self.template.render(messages, **others) == text:
                raise ValueError(
                    f'{self.template.name}: does not write the "{name}" of the chat; give another template'
                )
        self._written.add(name)

    def _before(self, ids: list[int]) -> list[int]:
        """The tokens that the tokenizer adds before a text, unless the text starts with them."""
        before, _ = self.tokenizer.added_tokens
        return [] if ids[: len(before)] == before else before

    def _after(self, ids: list[int]) -> list[int]:
        """The tokens that the tokenizer adds after a text, and EOS, unless the text ends with them."""
        _, after = self.tokenizer.added_tokens
        after = [] if after and ids[-len(after) :] == after else after
        last = [*ids[-1:], *after][-1:]
        is_ended = not self.eos_token_ids or (last and last[0] in self.eos_token_ids)
        return after if is_ended else [*after, self.eos_token_ids[0]]
