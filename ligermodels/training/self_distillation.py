"""Self-distillation data: a model's own continuations of texts, and its own turns in chats."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from ligermodels.arguments import check_count, check_number
from ligermodels.convert.input_files import read_json_object
from ligermodels.data.chat import end_of_turn
from ligermodels.data.documents import Documents
from ligermodels.data.prompts import OpenChat, text_prompt
from ligermodels.data.record_fields import FINISH
from ligermodels.data.records import Completion, chat_record
from ligermodels.errors import InputError, short
from ligermodels.generation.generate import as_eos_ids, until_eos
from ligermodels.generation.text_stream import INCOMPLETE
from ligermodels.models.causal_lm import CausalLM
from ligermodels.training.folder import named_in_errors, write_atomically
from ligermodels.training.inputs import BY_CONTENT, Content, changes, require_same_content

Truncated = Literal["keep", "drop"]
"""What happens to answers that do not end within the largest number of new tokens."""


class SelfDistillation:
    """A model's own continuations of documents, as records of a .jsonl file that `Documents` reads.

    A text keeps its first `prompt_tokens` tokens, and the model continues them. In a chat the model writes every turn
    of the assistant, given its own earlier turns, except turns with `weight` 0. A text or an answer
    that does not end within `max_new_tokens` has `"finish_reason": "length"`, so that no end of it is trained on. Such
    an answer ends its chat; `num_cut` counts these answers.
    """

    def __init__(
        self,
        model: CausalLM,
        documents: Documents,
        *,
        temperature: float = 0.3,
        max_new_tokens: int = 2048,
        prompt_tokens: int = 64,
        seed: int = 0,
        truncated: Truncated = "keep",
    ) -> None:
        """
        Args:
            model: continues the documents.
            documents: texts and chats, read with the model's tokenizer and chat template.
            temperature: sampling temperature; 0 for greedy decoding.
            max_new_tokens: largest number of new tokens per text, and per answer in a chat.
            prompt_tokens: tokens of a text that are kept as the prompt.
            seed: seed of sampling, together with the indices of the documents in a batch.
            truncated: "keep" writes an answer in a chat that does not end within `max_new_tokens`; "drop" leaves it
                out, and a chat without any answer with it, so that the data lacks long answers.

        Raises:
            InputError: a number is out of range, or `truncated` has another value.
        """
        check_number("temperature", temperature)
        check_count("max_new_tokens", max_new_tokens)
        check_count("prompt_tokens", prompt_tokens)
        if truncated not in get_args(Truncated):
            raise InputError(f"truncated: must be one of {', '.join(get_args(Truncated))}, got {short(truncated)}")
        self._model, self.documents, self._seed = model, documents, seed
        self._max_new_tokens, self._prompt_tokens, self._truncated = max_new_tokens, prompt_tokens, truncated
        self.num_cut = 0
        self._ends = as_eos_ids(model.generation_defaults().get("eos_token_id"))
        self._generator = torch.Generator(model.device)
        self._options: dict[str, Any] = {"do_sample": bool(temperature)}
        if temperature:
            self._options |= {"temperature": temperature, "generator": self._generator}
        if not self._ends:
            self._options["pad_token_id"] = 0
        self.settings: dict[str, Any] = {
            "corpus": documents.corpus.fingerprint,
            "temperature": temperature,
            "max_new_tokens": max_new_tokens,
            "prompt_tokens": prompt_tokens,
            "seed": seed,
            "truncated": truncated,
            "eos_token_id": sorted(self._ends),
        }

    def records(self, indices: Sequence[int]) -> list[dict[str, Any] | None]:
        """A record for each of these documents, generated as one batch; None for a document without a continuation.

        Raises InputError for more unusable lines than allowed, CheckpointError for chats without a template.
        """
        # The seed depends on the batch, so that samples do not depend on where an earlier call stopped.
        self._generator.manual_seed(random.Random(f"{self._seed} {list(indices)}").getrandbits(63))
        texts: dict[int, Completion] = {}
        chats: dict[int, OpenChat] = {}
        for index, record in zip(indices, self.documents.records(indices), strict=True):
            if isinstance(record, Completion):
                texts[index] = record
            elif record is not None:
                chats[index] = OpenChat([], *record)
        records: dict[int, dict[str, Any]] = {}
        prompts = {i: text_prompt(self.documents, text, self._prompt_tokens) for i, text in texts.items()}
        for index, new in self._continue(prompts, self._ends).items():
            words, finish = self._answer(prompts[index], new, self._ends)
            if texts[index].prompt:
                records[index] = {"prompt": texts[index].prompt, "completion": words, **finish}
            else:
                text = self.documents.tokenizer.decode(prompts[index] + new)
                records[index] = {"text": text.rstrip(INCOMPLETE) if finish else text, **finish}
        while questions := {i: prompt for i, chat in chats.items() if (prompt := chat.prompt(self.documents, i))}:
            for index, new in self._continue(questions, self._turn_ends).items():
                chat = chats[index]
                words, finish = self._answer(questions[index], new, self._turn_ends)
                if finish:
                    self.num_cut += 1
                    chat.rest = []
                if not finish or self._truncated == "keep":
                    chat.messages.append({"role": "assistant", "content": words, **finish})
                    records[index] = chat_record(chat.messages, chat.variables)
        return [records.get(index) for index in indices]

    @cached_property
    def _turn_ends(self) -> list[int]:
        """Tokens that end a turn: EOS, and the token that ends a turn in the chat template."""
        return [*self._ends, *end_of_turn(self.documents.template, self.documents.tokenizer)]

    def _answer(self, prompt: list[int], new: list[int], ends: Sequence[int]) -> tuple[str, dict[str, str]]:
        """The text of new tokens without their EOS, and `finish_reason`, if they have none.

        A text without EOS does not end with an incomplete character.
        """
        continuation = self.documents.tokenizer.continuation
        if new[-1] in ends:
            return continuation(prompt, new[:-1]), {}
        return continuation(prompt, new).rstrip(INCOMPLETE), {FINISH: "length"}

    def _continue(self, prompts: Mapping[int, list[int]], ends: Sequence[int]) -> dict[int, list[int]]:
        """New tokens after each non-empty prompt, up to and including the first of `ends`."""
        prompts = {index: prompt for index, prompt in prompts.items() if prompt}
        if not prompts:
            return {}
        for index, prompt in prompts.items():
            try:
                self.documents.check_ids(prompt)
            except InputError as error:
                raise InputError(f"{self.documents.name(index)}: {error}") from None
        options = {**self._options, "eos_token_id": list(ends) or None}
        rows = self._model.generate(list(prompts.values()), self._max_new_tokens, **options)
        longest = max(map(len, prompts.values()))
        new = (until_eos(row, ends) for row in rows[:, longest:].tolist())
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
    """Write self-distillation data of documents 0 to `count` - 1. `out` appears when it is complete.

    Hidden files beside `out` keep the progress: after a stop or a kill, `resume` gives the result of an uninterrupted
    call.

    Args:
        source: generates the records.
        count: number of documents.
        out: the .jsonl file to write.
        batch_size: documents that are generated together. Samples depend on it.
        resume: continue an earlier call, if there is one.
        content: fingerprints of base, data and chat template (`inputs.content_of`); must be the same to resume.
        about: further settings, as JSON types; must be the same to resume.
        progress: called with the number of documents done, and `count`.

    Returns:
        The number of records.

    Raises:
        InputError: no document could be continued, `batch_size` is below 1, `out` is a file of the data, or the earlier
            call had other settings or data.
        CheckpointError: the earlier call had another base or chat template.
    """
    check_count("batch_size", batch_size)
    out = Path(out)
    if source.documents.corpus.has_file(out):
        raise InputError(f"{out}: is a file of the data, which the result would replace; give another name")
    settings = {**source.settings, "documents": count, "batch_size": batch_size, **(about or {})}
    state: dict[str, Any] = {
        "settings": json.loads(json.dumps(settings)),
        "content": content or {what: [] for what in BY_CONTENT},
        "done": 0,
        "written": 0,
        "bytes": 0,
        "unusable": [],
        "cut": 0,
    }
    if resume and is_interrupted(out):
        before = _interrupted_state(out)
        require_same_content(state["content"], before["content"])
        if message := changes(state["settings"], before["settings"]):
            raise InputError(f"{out}: cannot resume with other settings: {message}; use the old ones, or start over")
        state |= before
    else:
        _remove(out)
    partial = _beside(out, "partial")
    with named_in_errors(partial), partial.open("ab") as file:
        file.truncate(state["bytes"])  # to the last complete batch
        file.seek(state["bytes"])
        source.documents.bad |= set(state["unusable"])
        source.num_cut = state["cut"]
        for start in range(state["done"], count, batch_size):
            indices = range(start, min(start + batch_size, count))
            for record in source.records(indices):
                if record is not None:
                    file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                    state["written"] += 1
            file.flush()
            os.fsync(file.fileno())
            state |= {"done": indices.stop, "bytes": file.tell(), "cut": source.num_cut}
            state["unusable"] = sorted(source.documents.bad)
            write_atomically(_beside(out, "progress"), json.dumps(state).encode())
            if progress is not None:
                progress(indices.stop, count)
    if state["written"]:
        partial.replace(out)
    _remove(out)
    if not state["written"]:
        raise InputError(
            "no document could be continued: give texts, or chats with turns of the assistant, which the model writes "
            "anew; with truncated 'drop', allow more new tokens"
        )
    return int(state["written"])


def is_interrupted(out: Path) -> bool:
    """Whether `write_self_distillation_data` can resume an earlier call."""
    return _beside(out, "progress").is_file()


def interrupted_with(out: Path, setting: str) -> Any:
    """A setting of the call that can be resumed, also from `about`; None if there is no such call."""
    return _interrupted_state(out)["settings"].get(setting) if is_interrupted(out) else None


def _beside(out: Path, ending: str) -> Path:
    """The path of .out.partial, the records, or of .out.progress, the settings and the number of complete bytes."""
    return out.with_name(f".{out.name}.{ending}")


def _remove(out: Path) -> None:
    for ending in ("progress", "partial"):
        _beside(out, ending).unlink(missing_ok=True)


def _interrupted_state(out: Path) -> dict[str, Any]:
    path = _beside(out, "progress")
    try:
        state = read_json_object(path, InputError)
        is_complete = {"settings", "content", "done", "written", "unusable", "cut"} <= state.keys()
        if is_complete and _beside(out, "partial").stat().st_size >= state["bytes"]:
            return state
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    raise InputError(f"{path}: is damaged; remove it to start over")
