"""Data from the model itself: what it says in place of the assistant, and how it continues texts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ligermodels.chat import Message
from ligermodels.errors import CheckpointError, InputError
from ligermodels.generation.generate import as_eos_ids
from ligermodels.model import CausalLM
from ligermodels.training.corpus import Documents


@dataclass
class _Chat:
    """A chat on its way: what has been said, what is still to come of the original, what else its template reads."""

    said: list[Message]
    rest: list[Message]
    variables: dict[str, Any]


class OwnWords:
    """A model's own continuations of documents, as the records of a .jsonl file that `Documents` reads.

    Of a text its first `prompt_tokens` tokens stay, and the model goes on from there. In a chat it says all that the
    assistant does, each time knowing what it has said before; a chat ends before an answer that does not end within
    `max_new_tokens`, lest one learns to break off, and is left out when that is its first.
    """

    def __init__(
        self,
        model: CausalLM,
        documents: Documents,
        *,
        temperature: float = 0.3,
        max_new_tokens: int = 512,
        prompt_tokens: int = 64,
        seed: int = 0,
    ) -> None:
        """
        Args:
            documents: with the model's tokenizer and, if there are chats, its template.
            temperature: 0 is greedy.
            seed: decides the draws.

        Raises InputError for a number out of its range.
        """
        if temperature < 0 or min(max_new_tokens, prompt_tokens) < 1:
            raise InputError(
                "temperature must be at least 0, max_new_tokens and prompt_tokens at least 1, got "
                f"{temperature}, {max_new_tokens} and {prompt_tokens}"
            )
        self._model, self._documents = model, documents
        self._max_new_tokens, self._prompt_tokens = max_new_tokens, prompt_tokens
        defaults = model.generation_defaults()
        self._ends = as_eos_ids(defaults.get("eos_token_ids"))
        self._options: dict[str, Any] = {} if self._ends else {"pad_token_id": 0}
        if temperature:
            generator = torch.Generator(model.device).manual_seed(seed)
            self._options |= {"do_sample": True, "temperature": temperature, "generator": generator}

    def records(self, indices: Sequence[int]) -> list[dict[str, Any] | None]:
        """A record, or None, for each of these documents, which the model continues side by side.

        Raises InputError for more unusable lines than allowed, CheckpointError for chats without a template.
        """
        texts: dict[int, list[int]] = {}
        chats: dict[int, _Chat] = {}
        for index, record in zip(indices, self._documents.records(indices), strict=True):
            if isinstance(record, str):
                texts[index] = self._documents.tokenizer.encode(record)[: self._prompt_tokens]
            elif record is not None:
                chats[index] = _Chat([], *record)
        found: dict[int, dict[str, Any]] = {}
        for index, new in self._continue(texts).items():
            found[index] = {"text": self._documents.tokenizer.decode(texts[index] + new)}
        while prompts := {index: prompt for index, chat in chats.items() if (prompt := self._prompt(index, chat))}:
            for index, new in self._continue(prompts).items():
                chat = chats[index]
                if new[-1] in self._ends:
                    words = self._documents.tokenizer.continuation(prompts[index], new[:-1])
                    chat.said.append({"role": "assistant", "content": words})
                    found[index] = {"messages": list(chat.said), **chat.variables}
                else:
                    chat.rest = []
        return [found.get(index) for index in indices]

    def _prompt(self, index: int, chat: _Chat) -> list[int] | None:
        """Tokens of a chat up to where the assistant is to speak next; None where it is over."""
        while chat.rest and chat.rest[0]["role"] != "assistant":
            chat.said.append(chat.rest.pop(0))
        if not chat.rest or chat.rest.pop(0).get("tool_calls"):  # A tool would answer what was asked in the original.
            chat.rest = []
            return None
        try:
            text = self._documents.template.render(chat.said, add_generation_prompt=True, **chat.variables)
        except CheckpointError:  # No template: it is not the chat that is unusable.
            raise
        except InputError as error:
            self._documents.pass_over(index, str(error))
            chat.rest = []
            return None
        return self._documents.tokenizer.encode_with_offsets(text)[0]

    def _continue(self, prompts: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """The new tokens after each prompt that has any token, up to its first EOS, which it keeps."""
        prompts = {index: prompt for index, prompt in prompts.items() if prompt}
        if not prompts:
            return {}
        rows = self._model.generate(list(prompts.values()), self._max_new_tokens, **self._options)
        longest = max(map(len, prompts.values()))
        new = (until_end(row, self._ends) for row in rows[:, longest:].tolist())
        return dict(zip(prompts, new, strict=True))


def until_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """A row's tokens up to its first EOS, which it keeps; what follows is padding."""
    end = next((place for place, token in enumerate(tokens, start=1) if token in ends), len(tokens))
    return tokens[:end]


def write_own_data(
    words: OwnWords,
    count: int,
    out: str | os.PathLike[str],
    *,
    batch_size: int = 16,
    progress: Callable[[int, int], object] | None = None,
) -> int:
    """Write the records of documents 0 to `count` - 1 to `out`, whole or not at all; how many there are.

    Raises InputError when there are none: no line is one that the model could continue.
    """
    path, written = Path(out), 0
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            for start in range(0, count, batch_size):
                indices = range(start, min(start + batch_size, count))
                for record in words.records(indices):
                    if record is not None:
                        file.write(json.dumps(record, ensure_ascii=False) + "\n")
                        written += 1
                if progress is not None:
                    progress(indices.stop, count)
        if not written:
            raise InputError("nothing in the data could be continued to an end: allow more new tokens, or give texts")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return written
