"""Functions that run on the host between decoding steps: logits processors, stopping criteria and streamers with the
interfaces of transformers, and stop strings."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ligermodels.errors import InputError, short
from ligermodels.generation.prompts import Prompts
from ligermodels.generation.step import new_tokens
from ligermodels.generation.text_stream import TextDecoder, TextStream

LogitsProcessor: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(ids (B, T), fp32 scores (B, V)) -> scores (B, V)."""

StoppingCriterion: TypeAlias = Callable[[Tensor, Any], Tensor | bool]
"""(ids (B, T), None) -> bool, or bool (B,): whether sequences end. transformers passes scores as the second argument
only if the caller asks for scores in the output."""


@runtime_checkable
class TokenStreamer(Protocol):
    """The interface of transformers' `BaseStreamer`."""

    def put(self, value: Tensor) -> None:
        """Called with the prompts (B, T), then with the tokens (B,) of each step."""

    def end(self) -> None:
        """Called after the last step."""


def check_streamer(streamer: object) -> None:
    """InputError unless `streamer` is None or has `put` and `end`; a class instead of an object is refused."""
    if streamer is not None and (inspect.isclass(streamer) or not isinstance(streamer, TokenStreamer)):
        raise InputError(f"streamer: must be an object with put(tokens) and end(), got {type(streamer).__name__}")


class Processors:
    """A list of logits processors as one `step.Process`."""

    def __init__(self, processors: Iterable[LogitsProcessor] | None, prompts: Prompts, pad_id: int | None) -> None:
        self._processors = _functions("logits_processor", processors)
        self._prompts, self._pad_id = prompts, pad_id

    def __len__(self) -> int:
        return len(self._processors)

    def __call__(self, logits: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        """Logits (B, V) after all processors; sequence b is the first lengths[b] tokens of text[b]."""
        self._prompts = self._prompts.to(logits.device)
        start = self._prompts.mask.sum(dim=1)
        ids = torch.cat([self._prompts.ids, new_tokens(text, start, lengths - start, self._pad_id)], dim=1)
        scores = logits.to(torch.float32, copy=True)  # a processor may change them in place
        for number, processor in enumerate(self._processors):
            scores = processor(ids, scores)
            _check_scores(f"logits_processor[{number}]", scores, logits)
        return scores


def _check_scores(name: str, scores: Any, logits: Tensor) -> None:
    if not isinstance(scores, Tensor):
        result = type(scores).__name__
    elif scores.shape != logits.shape or scores.device != logits.device:
        result = f"{tuple(scores.shape)} on {scores.device}"
    else:
        return
    expected = f"{tuple(logits.shape)}, got {result}; logits are on {logits.device}"
    raise InputError(f"{name}: must return scores {expected}")


class Stopping:
    """Decides which sequences end, by stopping criteria and by stop strings; called after each step.

    Args:
        criteria: functions (ids (B, T), None) -> bool or bool (B,); None for none.
        stop_strings: a text or several; a sequence ends with the token that completes one of them.
        tokenizer: has `decode(ids, skip_special_tokens=False)`; only for stop strings.
        prompts: the prompts of the batch.

    Raises:
        InputError: an argument of another type, an empty stop string, or stop strings without a tokenizer.
    """

    def __init__(
        self,
        criteria: Iterable[StoppingCriterion] | None,
        stop_strings: str | Sequence[str] | None,
        tokenizer: Any,
        prompts: Prompts,
    ) -> None:
        self._criteria = _functions("stopping_criteria", criteria)
        strings = _texts("stop_strings", stop_strings)
        if strings and not callable(getattr(tokenizer, "decode", None)):
            raise InputError("stop_strings: need a tokenizer, to read the text: give tokenizer=... too")
        self._texts: list[_StopText] = []
        if strings:
            rows = zip(prompts.ids.tolist(), prompts.mask.sum(dim=1).tolist(), strict=True)
            # Without the padding: pad_token_id may be any number, also one outside the vocabulary.
            self._texts = [_StopText(strings, tokenizer, ids[len(ids) - length :]) for ids, length in rows]

    def __bool__(self) -> bool:
        return bool(self._criteria or self._texts)

    def __call__(self, ids: Tensor, done: Tensor) -> Tensor:
        """Bool (B,): `done` (B,), and the sequences in `ids` (B, T) that end with their last token."""
        for number, criterion in enumerate(self._criteria):
            answer = criterion(ids, None)
            try:
                ends = torch.as_tensor(answer, dtype=torch.bool, device=done.device)
                ends = ends.view(done.shape) if ends.ndim else ends
            except (RuntimeError, TypeError, ValueError):
                expected = f"bool or bool {tuple(done.shape)}"
                raise InputError(f"stopping_criteria[{number}]: must return {expected}, got {answer!r}") from None
            done = done | ends
        if not self._texts:
            return done
        rows = zip(self._texts, ids[:, -1].tolist(), done.tolist(), strict=True)
        return torch.tensor([is_done or text.ends_with(token) for text, token, is_done in rows], device=done.device)


class _StopText:
    """The end of a sequence's text, read token by token for stop strings."""

    def __init__(self, strings: Sequence[str], tokenizer: TextDecoder, prompt: list[int]) -> None:
        self._strings, self._size = strings, max(map(len, strings)) - 1
        self._stream = TextStream(tokenizer, prompt, skip_special_tokens=False)
        self._text = self._last(tokenizer.decode(prompt[: self._stream.start], skip_special_tokens=False))

    def ends_with(self, token: int) -> bool:
        """Whether this next token of the sequence completes a stop string."""
        start, text = len(self._text), self._text + self._stream.push(token)
        self._text = self._last(text)
        text += self._stream.pending
        return any(text.rfind(string) + len(string) > start for string in self._strings if string in text)

    def _last(self, text: str) -> str:
        """The last characters of `text`, that a stop string may begin with."""
        return text[max(0, len(text) - self._size) :]


def _texts(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else _items(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise InputError(f"{name}: must be a text or a list of texts, none empty, got {short(value)}")
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{name}: {short(text)} is no Unicode, and no tokens decode to it") from None
    return texts


def _functions(name: str, value: Any) -> list[Any]:
    functions = _items(value)
    if not all(map(callable, functions)):
        raise InputError(f"{name}: must be a list of functions, got {value!r}")
    return functions


def _items(value: Any) -> list[Any]:
    """The items of a list or another iterable; no item for None. For any other value the only item is None, which
    neither `_texts` nor `_functions` accepts."""
    if value is None:
        return []
    is_list = isinstance(value, Iterable) and not isinstance(value, Mapping)
    return list(value) if is_list else [None]
