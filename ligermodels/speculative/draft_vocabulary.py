"""The tokens that a draft head can propose: all tokens of the model, or the most frequent ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn

from ligermodels.arguments import check_count
from ligermodels.errors import CheckpointError, InputError
from ligermodels.layers import IGNORE_INDEX, HeadLoss


class DraftVocabulary(nn.Module):
    """Tokens in ascending order; token i of the draft vocabulary is token `tokens[i]` of the model.

    `tokens` is a buffer in state dicts if it is not all tokens: weights for other tokens have the same shapes.

    Args:
        tokens: long (V_d,), ids of the model's vocabulary, ascending.
        vocab_size: V, number of tokens of the model.

    Raises:
        InputError: the ids do not ascend, or lie outside of the vocabulary.
    """

    tokens: Tensor

    def __init__(self, tokens: Tensor, vocab_size: int) -> None:
        super().__init__()
        _check(tokens, vocab_size)
        self.vocab_size = vocab_size
        if len(tokens) == vocab_size:
            self.tokens = tokens
        else:
            self.register_buffer("tokens", tokens)

    def copied_to(self, device: torch.device) -> DraftVocabulary:
        """A copy for a head on a device; on the CPU for a head on the meta device, which has no values."""
        place = torch.device("cpu") if device.type == "meta" else device
        return DraftVocabulary(self.tokens.to(place, copy=True), self.vocab_size)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DraftVocabulary:
        # Moves keep the ids: `to_empty` and the meta device would lose them.
        if (device := fn(self.tokens).device).type != "meta":
            self.tokens = self.tokens.to(device)
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        tokens = state_dict.get(f"{prefix}tokens")
        if tokens is not None and tokens.shape == self.tokens.shape and not (self.is_whole or tokens.is_meta):
            try:
                _check(tokens, self.vocab_size)
            except InputError as error:
                args[-1].append(f"{prefix}tokens: {error}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __len__(self) -> int:
        """V_d, number of tokens."""
        return len(self.tokens)

    @property
    def is_whole(self) -> bool:
        """Whether these are all tokens of the model."""
        return len(self) == self.vocab_size

    @classmethod
    def whole(cls, vocab_size: int) -> DraftVocabulary:
        """All tokens of a model with `vocab_size` tokens."""
        return cls(torch.arange(vocab_size, device="cpu"), vocab_size)

    @classmethod
    def counted(cls, labels: Iterable[Tensor], size: int, vocab_size: int) -> DraftVocabulary:
        """The tokens that are trained most often.

        Args:
            labels: long tensors of any shape, -100 where ignored, such as the labels of all batches of a data set.
            size: number of tokens to choose. Of tokens that are equally frequent, the lowest ids are chosen.
            vocab_size: number of tokens of the model.

        Returns:
            The vocabulary.

        Raises:
            InputError: a size is out of range, or a label is outside of the vocabulary.

        Examples:
            >>> DraftVocabulary.counted([torch.tensor([5, 5, 2, -100])], size=3, vocab_size=8).tokens
            tensor([0, 2, 5])
        """
        return cls.of_counts(token_counts(labels, vocab_size), size)

    @classmethod
    def of_counts(cls, counts: Tensor, size: int) -> DraftVocabulary:
        """The `size` most frequent tokens, the lowest ids first, of the numbers long (V,) of all tokens."""
        size = check_count("draft_vocab_size", size, most=len(counts))
        return cls(counts.argsort(descending=True, stable=True)[:size].sort().values, len(counts))

    @overload
    def rows(self, x: Tensor) -> Tensor: ...
    @overload
    def rows(self, x: None) -> None: ...
    def rows(self, x: Tensor | None) -> Tensor | None:
        """The rows (V_d, ...) of x (V, ...), for these tokens; x itself for all tokens."""
        return x if x is None or self.is_whole else x[self.tokens.to(x.device)]

    def ids(self, chosen: Tensor) -> Tensor:
        """Ids of the model's vocabulary, of ids `chosen` of the draft vocabulary; long, of any shape."""
        return chosen if self.is_whole else self.tokens.to(chosen.device)[chosen]

    def ranks(self, targets: Tensor, head: Callable[[Tensor], HeadLoss]) -> Tensor:
        """The ranks of targets among a head's candidates.

        Args:
            targets: long (...), ids of the model's vocabulary, -100 without a target.
            head: targets, as ids of the draft vocabulary -> a `HeadLoss` with ranks.

        Returns:
            Long (...): how many draft tokens are likelier than the target, V_d for a target that is no draft token, -1
            without a target.
        """
        own = self.own_ids(targets)
        found: Any = head(own).ranks
        if self.is_whole:
            return found
        return found.masked_fill((targets != IGNORE_INDEX) & (own == IGNORE_INDEX), len(self))

    def own_ids(self, targets: Tensor) -> Tensor:
        """Ids of the draft vocabulary, of ids `targets` of the model's, long of any shape; -100 without one."""
        if self.is_whole:
            return targets
        tokens = self.tokens.to(targets.device)
        place = torch.searchsorted(tokens, targets.clamp(min=0)).clamp(max=len(tokens) - 1)
        return place.masked_fill(tokens[place] != targets, IGNORE_INDEX)

    # -- files ---------------------------------------------------------------------------------------------------------

    def tables(self) -> dict[str, Tensor]:
        """The tensors of published heads: d2t int64 (V_d,), offsets from draft ids to ids of the model; and t2d bool
        (V,), the tokens that are draft tokens."""
        is_draft = torch.zeros(self.vocab_size, dtype=torch.bool, device="cpu")
        tokens = self.tokens.cpu()
        is_draft[tokens] = True
        return {"d2t": tokens - torch.arange(len(self), device="cpu"), "t2d": is_draft}

    @classmethod
    def from_tables(cls, d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> DraftVocabulary:
        """The vocabulary of a published head.

        Args:
            d2t: int64 (V_d,), offsets from draft ids to ids of the model.
            t2d: bool (V,), or None where the head has none.
            vocab_size: V, number of tokens of the model.

        Raises:
            CheckpointError: the tables contradict each other, or do not fit the model.
        """
        if d2t.ndim != 1 or d2t.is_floating_point() or d2t.is_complex():
            raise CheckpointError(f"d2t: must be whole numbers (n,), got {d2t.dtype} {tuple(d2t.shape)}")
        if t2d is not None and t2d.shape != (vocab_size,):
            raise CheckpointError(
                f"t2d: has the shape {tuple(t2d.shape)}, and the model {vocab_size:,} tokens; give the base model of "
                "this head"
            )
        tokens = d2t.long() + torch.arange(len(d2t), device=d2t.device)
        try:
            vocabulary = cls(tokens, vocab_size)
        except InputError as error:
            raise CheckpointError(f"d2t: holds offsets to the ids of the model; {error}") from None
        if t2d is not None and not torch.equal(vocabulary.tables()["t2d"], t2d.bool()):
            raise CheckpointError("t2d: marks other tokens than d2t")
        return vocabulary


def _check(tokens: Tensor, vocab_size: int) -> None:
    """Raise InputError unless these are ascending ids of a vocabulary, int64 (n,)."""
    if tokens.ndim != 1 or tokens.dtype != torch.int64 or not len(tokens):
        raise InputError(f"draft tokens: must be int64 (n,), got {tokens.dtype} {tuple(tokens.shape)}")
    if bool((tokens[1:] <= tokens[:-1]).any()) or not 0 <= int(tokens[0]) <= int(tokens[-1]) < vocab_size:
        raise InputError(f"draft tokens: must ascend within [0, {vocab_size})")


def token_counts(labels: Iterable[Tensor], vocab_size: int) -> Tensor:
    """How often each token is trained.

    Args:
        labels: long tensors of any shape, -100 where ignored.
        vocab_size: V, number of tokens of the model.

    Returns:
        Long (V,).

    Raises:
        InputError: `vocab_size` is out of range, or a label is outside of the vocabulary.
    """
    counts = torch.zeros(check_count("vocab_size", vocab_size), dtype=torch.int64, device="cpu")
    for each in labels:
        kept = each[each != IGNORE_INDEX].flatten().cpu()
        if len(kept) and not 0 <= int(kept.min()) <= int(kept.max()) < vocab_size:
            raise InputError(f"labels: must lie in [0, {vocab_size}), or be {IGNORE_INDEX} to be ignored")
        counts += torch.bincount(kept, minlength=vocab_size)
    return counts
