"""Records as tokens with labels."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ligermodels.arguments import IGNORE_INDEX
from ligermodels.data.chat import ChatTemplate, Message, covered, encode_chat
from ligermodels.data.record_fields import is_cut
from ligermodels.data.records import Completion, NothingToLearn, Record, read_record
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.data.unwritten import check_written
from ligermodels.errors import CheckpointError, LigerModelsError


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


Form = Literal["whole", "text", "piece"]
"""Chats and completions are whole, texts in lines of JSON are texts, and a text file has pieces."""


class Content(NamedTuple):
    """The bytes of a document, and whether it is a line of JSON, starts a text, and ends a text."""

    content: bytes
    is_line: bool
    starts: bool
    ends: bool

    def record(self) -> tuple[Record, list[str]]:
        """The record, and the names of its fields that are not used. Raises ValueError if it is invalid."""
        if self.is_line:
            return read_record(self.content)
        # Each line end is \n, as in files that Python or the package datasets opens; a byte order mark is no text.
        text = self.content.decode().replace("\r\n", "\n").replace("\r", "\n")
        return Completion("", text.removeprefix("\ufeff") if self.starts else text), []


class Encoded(NamedTuple):
    """A document as tokens, or the reason why it has none. It depends on the document's content, the tokenizer and the
    chat template alone, not on other documents.

    ids: token ids, int32.
    trained: for each token whether it is trained on; None for all.
    form: chat or completion, text, or piece of a text file.
    problem: "" for a usable document, else the reason why it is unusable or empty.
    is_empty: whether it is valid and has nothing to learn.
    unused: names of fields that are not used.
    warnings: warnings of the chat template.
    """

    ids: NDArray[np.int32] = np.empty(0, np.int32)
    trained: NDArray[np.bool_] | None = None
    form: Form = "whole"
    problem: str = ""
    is_empty: bool = False
    unused: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def labels(self) -> NDArray[np.int32]:
        """The ids, -100 for tokens that are not trained on, int32."""
        return self.ids if self.trained is None else np.where(self.trained, self.ids, np.int32(IGNORE_INDEX))

    def check(self) -> None:
        """Raise ValueError for an unusable document, NothingToLearn for an empty one."""
        if self.problem:
            raise (NothingToLearn if self.is_empty else ValueError)(self.problem)


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
        self._lock = threading.Lock()
        """Held while documents are encoded: the template has state."""

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises CheckpointError if there is none."""
        if self._make_template is None:
            raise CheckpointError("there are chats in the data, and no chat template for them")
        return self._make_template()

    def __getstate__(self) -> dict[str, Any]:
        """For another process: with the template, or the reason why there is none, in place of the function."""
        template = self._template_or_reason()
        return {"tokenizer": self.tokenizer, "eos_token_ids": self.eos_token_ids, "template": template}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["tokenizer"], partial(_usable, state["template"]), state["eos_token_ids"])  # type: ignore[misc]

    def _template_or_reason(self) -> ChatTemplate | LigerModelsError:
        try:
            return self.template
        except LigerModelsError as error:
            return error

    @property
    def key(self) -> dict[str, Any]:
        """All that the tokens depend on beside the documents, as JSON types."""
        template = self._template_or_reason()
        return {
            "tokenizer": hashlib.sha256(self.tokenizer.backend.to_str().encode()).hexdigest(),
            "eos_token_ids": self.eos_token_ids,
            "template": template.key if isinstance(template, ChatTemplate) else None,
        }

    def documents(self, contents: Sequence[Content]) -> list[Encoded]:
        """Documents as tokens; each as if it were the only one. Raises CheckpointError if the template is unusable."""
        with self._lock:
            return self._documents(contents)

    def _documents(self, contents: Sequence[Content]) -> list[Encoded]:
        documents, texts = list[Encoded](), dict[int, TextPiece]()
        for position, content in enumerate(contents):
            form: Form = "whole"
            unused: list[str] = []
            warnings: list[str] = []
            ids, labels, problem, is_empty = list[int](), list[int](), "", False
            try:
                record, unused = content.record()
                if not isinstance(record, Completion):
                    self._collect_warnings(warnings)
                    ids, labels = self.chat(*record)
                elif not record.completion:
                    raise NothingToLearn(record.emptiness)
                elif record.prompt:
                    ids, labels = self.completion(record)
                else:
                    form = "text" if content.is_line else "piece"
                    texts[position] = TextPiece(record.completion, content.starts, content.ends and record.is_finished)
            except CheckpointError:  # The template is missing or unusable: the document is not at fault.
                raise
            except ValueError as error:
                problem, is_empty = str(error), isinstance(error, NothingToLearn)
            trained = None if labels == ids else np.asarray(labels) != IGNORE_INDEX
            array = np.asarray(ids, np.int32)
            documents.append(Encoded(array, trained, form, problem, is_empty, tuple(unused), tuple(warnings)))
        for (position, _), ids in zip(texts.items(), self.texts(list(texts.values())), strict=True):
            documents[position] = documents[position]._replace(ids=np.asarray(ids, np.int32))
        return documents

    def _collect_warnings(self, warnings: list[str]) -> None:
        """Append the template's warnings about the next chat to `warnings`, also those that it has given before."""
        for template in (self.template, self.template.tool_use):
            if template is not None:
                template.omitted.clear()
                template.warn = warnings.append

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
            InputError: the template refuses the chat, or does not write its tools, documents, calls or plans.
            NothingToLearn: no token has a label.
        """
        check_written(self.template, messages, variables)
        ids, mask = encode_chat(messages, self.template, self.tokenizer, **variables)
        if is_cut(messages[-1]):  # The token that ends the turn is the template's, not the model's.
            end = max((i for i, is_trained in enumerate(mask) if is_trained), default=-1)
            while end >= 0 and mask[end] and ids[end] in self.tokenizer.special_ids:
                mask[end] = False
                end -= 1
        if not any(mask):
            raise NothingToLearn("no token is the assistant's")
        return ids, [token if is_trained else IGNORE_INDEX for token, is_trained in zip(ids, mask, strict=True)]

    def chat_prompt(self, messages: Sequence[Message], variables: dict[str, Any]) -> list[int]:
        """Token ids of a chat, as the template writes it, up to the beginning of the assistant's next turn.

        Raises:
            InputError: the template refuses the chat, or does not write its tools, documents, calls or plans.
        """
        check_written(self.template, messages, variables)
        text = self.template.render(messages, add_generation_prompt=True, **variables)
        return self.tokenizer.encode_with_offsets(text)[0]

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


def _usable(template: ChatTemplate | LigerModelsError) -> ChatTemplate:
    """A template. Raises the reason if there is none."""
    if isinstance(template, LigerModelsError):
        raise template
    return template
