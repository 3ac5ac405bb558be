"""Self-distillation data: a model's own continuations of texts, and its own turns in chats."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ligermodels.archs.causal_lm import CausalLM
from ligermodels.data.documents import Documents
from ligermodels.data.prompts import OpenChat
from ligermodels.errors import InputError
from ligermodels.generation.generate import as_eos_ids, until_eos
from ligermodels.training.folder import write_atomically
from ligermodels.training.inputs import BY_CONTENT, Content, require_same_content


class SelfDistillation:
    """A model's own continuations of documents, as records of a .jsonl file that `Documents` reads.

    A text keeps its first `prompt_tokens` tokens, and the model continues them. In a chat the model writes every turn
    of the assistant, given its own earlier turns. A chat ends before the first answer that does not end within
    `max_new_tokens`; without any answer it is left out.
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
            documents: by the model's tokenizer and chat template.
            temperature: 0 is greedy.
            seed: with the indices of the documents in a batch, decides the samples.

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
        self._ends = as_eos_ids(defaults.get("eos_token_id"))
        self.settings["eos_token_id"] = sorted(self._ends)
        self._options: dict[str, Any] = {} if self._ends else {"pad_token_id": 0}
        self._generator = torch.Generator(model.device)
        self._options["do_sample"] = bool(temperature)
        if temperature:
            self._options |= {"temperature": temperature, "generator": self._generator}

    def records(self, indices: Sequence[int]) -> list[dict[str, Any] | None]:
        """A record, or None, for each of these documents, generated as one batch.

        Raises InputError for more unusable lines than allowed, CheckpointError for chats without a template.
        """
        # Seeded for each batch, so that samples do not depend on where an earlier call stopped.
        self._generator.manual_seed(random.Random(f"{self._seed} {list(indices)}").getrandbits(63))
        texts: dict[int, list[int]] = {}
        chats: dict[int, OpenChat] = {}
        for index, record in zip(indices, self.documents.records(indices), strict=True):
            if isinstance(record, str):
                texts[index] = self.documents.tokenizer.encode(record)[: self._prompt_tokens]
            elif record is not None:
                chats[index] = OpenChat([], *record)
        found: dict[int, dict[str, Any]] = {}
        for index, new in self._continue(texts).items():
            found[index] = {"text": self.documents.tokenizer.decode(texts[index] + new)}
        while prompts := {i: prompt for i, chat in chats.items() if (prompt := chat.prompt(self.documents, i))}:
            for index, new in self._continue(prompts).items():
                chat = chats[index]
                if new[-1] in self._ends:
                    words = self.documents.tokenizer.continuation(prompts[index], new[:-1])
                    chat.messages.append({"role": "assistant", "content": words})
                    found[index] = {"messages": list(chat.messages), **chat.variables}
                else:
                    chat.rest = []
        return [found.get(index) for index in indices]

    def _continue(self, prompts: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """New tokens after each non-empty prompt, up to and including the first EOS."""
        prompts = {index: prompt for index, prompt in prompts.items() if prompt}
        if not prompts:
            return {}
        rows = self._model.generate(list(prompts.values()), self._max_new_tokens, **self._options)
        longest = max(map(len, prompts.values()))
        new = (until_eos(row, self._ends) for row in rows[:, longest:].tolist())
        return dict(zip(prompts, new, strict=True))


def write_self_distillation_data(
    source: SelfDistillation,
    count: int,
    out: str | os.PathLike[str],
    *,
    batch_size: int = 16,
    resume: bool = False,
    content: Content | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> int:
    """Write the records of documents 0 to `count` - 1 to `out`; their number. `out` appears when it is complete.

    Progress is kept in hidden files beside `out`, batch by batch. After a stop or a kill, `resume` continues there and
    the result is the same as without the stop.

    Args:
        batch_size: documents generated together; it also decides the samples.
        resume: continue an earlier call, if there is one.
        content: fingerprints of base, data and chat template (`inputs.content_of`), which must match to resume.
        about: further settings, for JSON, which must match to resume.

    Raises InputError when no document could be continued, and when the earlier call had other settings; and as
    `inputs.require_same_content`.
    """
    settings = {**source.settings, "documents": count, "batch_size": batch_size, **(about or {})}
    work = _Work(Path(out), settings, content or {what: [] for what in BY_CONTENT})
    with work.opened(resume) as file:
        source.documents.bad |= set(work.unusable)
        for start in range(work.done, count, batch_size):
            indices = range(start, min(start + batch_size, count))
            for record in source.records(indices):
                if record is not None:
                    file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                    work.written += 1
            work.done, work.unusable = indices.stop, sorted(source.documents.bad)
            work.note(file)
            if progress is not None:
                progress(work.done, count)
    if not work.written:
        work.remove()
        raise InputError("no document could be continued to its end: allow more new tokens, or give texts")
    work.finish()
    return work.written


def is_interrupted(out: Path) -> bool:
    """Whether there is something for `write_self_distillation_data` to resume."""
    return _beside(out, "progress").is_file()


def interrupted_with(out: Path, setting: str) -> Any:
    """A setting, one of `about` included, of the call that can be resumed; None if there is none."""
    try:
        return json.loads(_beside(out, "progress").read_text(encoding="utf-8"))["settings"].get(setting)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # `_Work` reports damage.
        return None


def _beside(out: Path, ending: str) -> Path:
    return out.with_name(f".{out.name}.{ending}")


class _Work:
    """Progress of `out`: .out.partial holds the records, .out.progress how many bytes of them are complete."""

    def __init__(self, out: Path, settings: dict[str, Any], content: Content) -> None:
        self._content, self._out = content, out
        self._partial, self._progress = _beside(out, "partial"), _beside(out, "progress")
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.done, self.written, self.unusable = 0, 0, list[int]()

    @contextmanager
    def opened(self, resume: bool) -> Iterator[BinaryIO]:
        """The file of records, truncated to the last complete batch; empty without `resume`."""
        size = self._load() if resume and self._progress.is_file() else 0
        if not size:
            self.remove()
        with self._partial.open("r+b" if size else "wb") as file:
            file.truncate(size)
            file.seek(size)
            yield file

    def _load(self) -> int:
        """Read the progress; the bytes of complete records."""
        try:
            found = json.loads(self._progress.read_text(encoding="utf-8"))
            before, content, size = found["settings"], found["content"], int(found["bytes"])
            self.done, self.written, self.unusable = found["done"], found["written"], found["unusable"]
            is_complete = self._partial.stat().st_size >= size
        except (OSError, ValueError, LookupError, TypeError):
            is_complete = False
        if not is_complete:
            raise InputError(f"{self._progress}: is damaged; remove it to start over")
        require_same_content(self._content, content)
        if changed := [name for name in self._settings if self._settings[name] != before.get(name)]:
            told = "; ".join(f"{name} was {before.get(name)!r}, is {self._settings[name]!r}" for name in changed)
            raise InputError(f"{self._out}: cannot resume with other settings: {told}; use the old ones, or start over")
        return size

    def note(self, file: BinaryIO) -> None:
        """Record the progress, after the records have been synced to disk."""
        file.flush()
        os.fsync(file.fileno())
        what = {"settings": self._settings, "content": self._content}
        state = {"done": self.done, "written": self.written, "bytes": file.tell(), "unusable": self.unusable}
        write_atomically(self._progress, json.dumps({**what, **state}).encode())

    def finish(self) -> None:
        """Rename the records to `out`."""
        self._partial.replace(self._out)
        self.remove()

    def remove(self) -> None:
        """Remove the hidden files."""
        for ending in ("progress", "partial"):
            _beside(self._out, ending).unlink(missing_ok=True)
