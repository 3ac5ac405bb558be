"""What runs on the host between steps of decoding: logits processors, stopping criteria and streamers by transformers'
protocols, and stop strings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ligermodels.errors import InputError, short
from ligermodels.generation.prompts import Prompts
from ligermodels.generation.step import new_tokens

LogitsProcessor: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(ids (B, T), fp32 scores (B, V)) -> scores (B, V)."""

StoppingCriterion: TypeAlias = Callable[[Tensor, Any], Tensor | bool]
"""(ids (B, T), None) -> whether sequences end, bool or bool (B,). transformers gives scores as the second argument only
where the caller asks for scores to be returned."""


@runtime_checkable
class TokenStreamer(Protocol):
    """What transformers' `BaseStreamer` is."""

    def put(self, value: Tensor) -> None:
        """Called with the prompts (B, T), then with the tokens (B,) of each step."""

    def end(self) -> None:
        """Called after the last."""


class Processors:
    """A `logits_processor` as a `step.Process`."""

    def __init__(self, given: Iterable[LogitsProcessor] | None, prompts: Prompts, pad_id: int | None) -> None:
        self._processors = _functions("logits_processor", given)
        self._prompts, self._pad_id = prompts, pad_id

    def __len__(self) -> int:
        return len(self._processors)

    def __call__(self, logits: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        self._prompts = self._prompts.to(logits.device)
        start = self._prompts.mask.sum(dim=1)
        ids = torch.cat([self._prompts.ids, new_tokens(text, start, lengths - start, self._pad_id)], dim=1)
        scores = logits.to(torch.float32, copy=True)  # a processor may change them in place
        for number, processor in enumerate(self._processors):
            scores = processor(ids, scores)
            if not isinstance(scores, Tensor) or scores.shape != logits.shape or scores.device != logits.device:
                found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                place = f" on {scores.device}" if isinstance(scores, Tensor) else ""
                expected = f"{tuple(logits.shape)}, got {found}{place}; logits are on {logits.device}"
                raise InputError(f"logits_processor[{number}]: must return scores {expected}")
        return scores


class Stopping:
    """Which sequences end, by criteria and by texts."""

    def __init__(
        self,
        criteria: Iterable[StoppingCriterion] | None,
        stop_strings: str | Sequence[str] | None,
        tokenizer: Any,
        prompts: Prompts,
    ) -> None:
        self._criteria, self._tokenizer = _functions("stopping_criteria", criteria), tokenizer
        strings = _texts("stop_strings", stop_strings)
        if strings and not callable(getattr(tokenizer, "decode", None)):
            raise InputError("stop_strings: need a tokenizer, to read the text: give tokenizer=... too")
        self._strings = strings
        # No token is shorter than a byte. A decoder may change the beginning of a text, such as its first space.
        self._window = max((len(each.encode()) for each in strings), default=0) + 2
        self._width, self._lengths = prompts.ids.shape[1], prompts.mask.sum(dim=1).tolist()

    def __bool__(self) -> bool:
        return bool(self._criteria or self._strings)

    def __call__(self, ids: Tensor, done: Tensor) -> Tensor:
        """ids (B, T), and bool (B,), which of the sequences have ended -> bool (B,), which end here or have."""
        for number, criterion in enumerate(self._criteria):
            found = criterion(ids, None)
            try:
                ends = torch.as_tensor(found, dtype=torch.bool, device=done.device)
                ends = ends.view(done.shape) if ends.ndim else ends
            except (RuntimeError, TypeError, ValueError):
                expected = f"bool or bool {tuple(done.shape)}"
                raise InputError(f"stopping_criteria[{number}]: must return {expected}, got {found!r}") from None
            done = done | ends
        if not self._strings:
            return done
        new = ids.shape[1] - self._width
        rows = zip(ids[:, -self._window - 1 :].tolist(), self._lengths, done.tolist(), strict=True)
        # Padding may be any number, also one that is no token.
        found = [ended or self._has_text(row[-(length + new) :]) for row, length, ended in rows]
        return torch.tensor(found, device=done.device)

    def _has_text(self, ids: list[int]) -> bool:
        """Whether the last of these tokens completes one of the texts."""
        before, after = (self._tokenizer.decode(part, skip_special_tokens=False) for part in (ids[:-1], ids))
        differs = (place for place, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
        known = next(differs, min(len(before), len(after)))
        return any(after.rfind(each) + len(each) > known for each in self._strings if each in after)


def _texts(name: str, given: Any) -> list[str]:
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if given is None:
        return []
    is_list = isinstance(given, str | Iterable) and not isinstance(given, Mapping)
    if not is_list or not all(isinstance(each, str) and each for each in found):
        raise InputError(f"{name}: must be a text or a list of texts, none empty, got {short(given)}")
    for each in found:
        try:
            each.encode()
        except UnicodeEncodeError:
            raise InputError(f"{name}: {short(each)} is no Unicode, and no tokens decode to it") from None
    return found


def _functions(name: str, given: Any) -> list[Any]:
    found = list(given) if isinstance(given, Iterable) else [given]
    if given is None:
        return []
    if not isinstance(given, Iterable) or not all(map(callable, found)):
        raise InputError(f"{name}: must be a list of functions, got {given!r}")
    return found
