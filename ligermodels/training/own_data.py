"""Data from the model itself: what it says in place of the assistant, and how it continues texts."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ligermodels.chat import Message
from ligermodels.errors import CheckpointError, InputError
from ligermodels.generation.generate import as_eos_ids, until_eos
from ligermodels.model import CausalLM
from ligermodels.training.corpus import Documents, Indices, permutation
from ligermodels.training.folder import write_whole
from ligermodels.training.resume import BY_CONTENT, Content, require_same_content


@dataclass
class _Chat:
    """A chat on its way: what has been said, what is still to come of the original, what else its template reads."""

    said: list[Message]
    rest: list[Message]
    variables: dict[str, Any]

    def prompt(self, documents: Documents, index: int) -> list[int] | None:
        """Tokens of this document up to where the assistant is to speak next; None where it is over."""
        while self.rest and self.rest[0]["role"] != "assistant":
            self.said.append(self.rest.pop(0))
        if not self.rest or self.rest.pop(0).get("tool_calls"):  # A tool would answer what was asked in the original.
            self.rest = []
            return None
        try:
            text = documents.template.render(self.said, add_generation_prompt=True, **self.variables)
        except CheckpointError:  # No template: it is not the chat that is unusable.
            raise
        except InputError as error:
            documents.pass_over(index, str(error))
            self.rest = []
            return None
        return documents.tokenizer.encode_with_offsets(text)[0]


def opening_prompts(
    documents: Documents, indices: Indices, count: int, *, prompt_tokens: int, seed: int = 0
) -> list[list[int]]:
    """What a model is asked to continue in `count` of these documents, or in as many as there are, as token ids: the
    first `prompt_tokens` tokens of a text, or of a piece of a long one, and a chat up to the assistant's first turn.

    Documents are drawn by `seed`; those in which there is nothing to continue are left out, and so are those that start
    as another: no prompt comes twice, and each has a token that is not special. Raises InputError for more unusable
    lines than allowed, CheckpointError for chats without a template.
    """
    tokenizer, found = documents.tokenizer, list[list[int]]()
    special = set(map(tokenizer.backend.token_to_id, tokenizer.special_tokens()))
    for index in map(int, indices[permutation(len(indices), seed, "prompts")]):
        if len(found) == count:
            break
        record = documents.records([index])[0]
        if isinstance(record, str):
            prompt = tokenizer.encode(record)[:prompt_tokens]
        else:
            prompt = (record and _Chat([], *record).prompt(documents, index)) or []
        if prompt not in found and not special.issuperset(prompt):
            found.append(prompt)
    return found


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
            seed: with the indices of documents that are continued side by side, decides the draws.

        Raises InputError for a number out of its range.
        """
        if temperature < 0 or min(max_new_tokens, prompt_tokens) < 1:
            raise InputError(
                "temperature must be at least 0, max_new_tokens and prompt_tokens at least 1, got "
                f"{temperature}, {max_new_tokens} and {prompt_tokens}"
            )
        self._model, self.documents, self._seed = model, documents, seed
        self.settings: dict[str, Any] = {
            "corpus": documents.corpus.fingerprint,
            "temperature": temperature,
            "max_new_tokens": max_new_tokens,
            "prompt_tokens": prompt_tokens,
            "seed": seed,
        }
        self._max_new_tokens, self._prompt_tokens = max_new_tokens, prompt_tokens
        defaults = model.generation_defaults()
        self._ends = as_eos_ids(defaults.get("eos_token_ids"))
        self.settings["eos_token_ids"] = sorted(self._ends)
        self._options: dict[str, Any] = {} if self._ends else {"pad_token_id": 0}
        self._generator = torch.Generator(model.device)
        if temperature:
            self._options |= {"do_sample": True, "temperature": temperature, "generator": self._generator}

    def records(self, indices: Sequence[int]) -> list[dict[str, Any] | None]:
        """A record, or None, for each of these documents, which the model continues side by side.

        Raises InputError for more unusable lines than allowed, CheckpointError for chats without a template.
        """
        # Anew for each batch: what is drawn must not depend on what was done before a stop.
        self._generator.manual_seed(random.Random(f"{self._seed} {list(indices)}").getrandbits(63))
        texts: dict[int, list[int]] = {}
        chats: dict[int, _Chat] = {}
        for index, record in zip(indices, self.documents.records(indices), strict=True):
            if isinstance(record, str):
                texts[index] = self.documents.tokenizer.encode(record)[: self._prompt_tokens]
            elif record is not None:
                chats[index] = _Chat([], *record)
        found: dict[int, dict[str, Any]] = {}
        for index, new in self._continue(texts).items():
            found[index] = {"text": self.documents.tokenizer.decode(texts[index] + new)}
        while prompts := {i: prompt for i, chat in chats.items() if (prompt := chat.prompt(self.documents, i))}:
            for index, new in self._continue(prompts).items():
                chat = chats[index]
                if new[-1] in self._ends:
                    words = self.documents.tokenizer.continuation(prompts[index], new[:-1])
                    chat.said.append({"role": "assistant", "content": words})
                    found[index] = {"messages": list(chat.said), **chat.variables}
                else:
                    chat.rest = []
        return [found.get(index) for index in indices]

    def _continue(self, prompts: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """The new tokens after each prompt that has any token, up to its first EOS, which it keeps."""
        prompts = {index: prompt for index, prompt in prompts.items() if prompt}
        if not prompts:
            return {}
        rows = self._model.generate(list(prompts.values()), self._max_new_tokens, **self._options)
        longest = max(map(len, prompts.values()))
        new = (until_eos(row, self._ends) for row in rows[:, longest:].tolist())
        return dict(zip(prompts, new, strict=True))


def write_own_data(
    words: OwnWords,
    count: int,
    out: str | os.PathLike[str],
    *,
    batch_size: int = 16,
    resume: bool = False,
    content: Content | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> int:
    """Write the records of documents 0 to `count` - 1 to `out`, whole or not at all; how many there are.

    What is done is kept in hidden files beside `out`, batch by batch: stopped or killed at any time, it goes on with
    `resume`, to the same records as without a stop.

    Args:
        batch_size: documents side by side, which decides the draws too.
        resume: go on from where an earlier call stopped, if there is one.
        content: of the base, the data and the chat template (`resume.content_of`): to go on it must be the same,
            wherever it is.
        about: what else must be the same to go on, beside what is known here; for JSON.

    Raises InputError when there are no records: no line is one that the model could continue; and when the earlier
    call was for something else. Raises as `resume.require_same_content` for other content.
    """
    settings = {**words.settings, "documents": count, "batch_size": batch_size, **(about or {})}
    work = _Work(Path(out), settings, content or {what: [] for what in BY_CONTENT})
    with work.opened(resume) as file:
        words.documents.bad |= set(work.unusable)
        for start in range(work.done, count, batch_size):
            indices = range(start, min(start + batch_size, count))
            for record in words.records(indices):
                if record is not None:
                    file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                    work.written += 1
            work.done, work.unusable = indices.stop, sorted(words.documents.bad)
            work.note(file)
            if progress is not None:
                progress(work.done, count)
    if not work.written:
        work.remove()
        raise InputError("nothing in the data could be continued to an end: allow more new tokens, or give texts")
    work.finish()
    return work.written


def is_begun(out: Path) -> bool:
    """Whether `write_own_data` has something to go on from."""
    return _beside(out, "progress").is_file()


def begun_with(out: Path, setting: str) -> Any:
    """That setting (of `about` too) of the call that `write_own_data` could go on from; None where there is none."""
    try:
        return json.loads(_beside(out, "progress").read_text(encoding="utf-8"))["settings"].get(setting)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # Nothing, or damaged, which is told later.
        return None


def _beside(out: Path, ending: str) -> Path:
    return out.with_name(f".{out.name}.{ending}")


class _Work:
    """How far the file `out` is: .out.partial holds the records, .out.progress says how much of it is whole."""

    def __init__(self, out: Path, settings: dict[str, Any], content: Content) -> None:
        self._content, self._out = content, out
        self._partial, self._progress = _beside(out, "partial"), _beside(out, "progress")
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.done, self.written, self.unusable = 0, 0, list[int]()

    @contextmanager
    def opened(self, resume: bool) -> Iterator[BinaryIO]:
        """The records' file, cut off after the last batch that is known to be whole, or empty."""
        size = self._load() if resume and self._progress.is_file() else 0
        if not size:
            self.remove()
        with self._partial.open("r+b" if size else "wb") as file:
            file.truncate(size)
            file.seek(size)
            yield file

    def _load(self) -> int:
        """What was done before; the bytes of its records."""
        try:
            found = json.loads(self._progress.read_text(encoding="utf-8"))
            before, content, size = found["settings"], found["content"], int(found["bytes"])
            self.done, self.written, self.unusable = found["done"], found["written"], found["unusable"]
            is_whole = self._partial.stat().st_size >= size
        except (OSError, ValueError, LookupError, TypeError):
            is_whole = False
        if not is_whole:
            raise InputError(f"{self._progress}: is damaged; remove it to begin anew")
        require_same_content(self._content, content)
        if changed := [name for name in self._settings if self._settings[name] != before.get(name)]:
            told = "; ".join(f"{name} was {before.get(name)!r}, is {self._settings[name]!r}" for name in changed)
            raise InputError(f"{self._out}: cannot go on with other settings: {told}; use the old ones, or begin anew")
        return size

    def note(self, file: BinaryIO) -> None:
        """All up to here is done: first the records are forced to the disk, then the word of it."""
        file.flush()
        os.fsync(file.fileno())
        what = {"settings": self._settings, "content": self._content}
        state = {"done": self.done, "written": self.written, "bytes": file.tell(), "unusable": self.unusable}
        write_whole(self._progress, json.dumps({**what, **state}).encode())

    def finish(self) -> None:
        """The records become `out`."""
        self._partial.replace(self._out)
        self.remove()

    def remove(self) -> None:
        """What is beside `out`."""
        for ending in ("progress", "partial"):
            _beside(self._out, ending).unlink(missing_ok=True)
