"""Targets: labels shifted for one loss or several, and the tokens that have a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.arguments import IGNORE_INDEX as IGNORE_INDEX
from ligermodels.errors import InputError
from ligermodels.layers.lm_head import WITHOUT_TARGET, HeadLoss, as_head_loss
from ligermodels.layers.packing import document_of
from ligermodels.layers.tokens import SelectedTokens, TokenLayout, Tokens, token_layout
from ligermodels.losses.sequences import per_item
from ligermodels.ops.loss.linear_head import SKIP_BELOW
from ligermodels.ops.loss.sampler import is_temperature
from ligermodels.ops.loss.token_losses import check_mean_weights
from ligermodels.ops.runtime.checks import assert_async, check_plain, check_same_tokens
from ligermodels.ops.runtime.dispatch import checked_on_host, is_recording
from ligermodels.ops.runtime.library import is_fake
from ligermodels.ops.runtime.tensors import AsyncHostCopy


def shift_labels(labels: Tensor, ahead: int, cu_seqlens: Tensor | None = None, *, fill: int = IGNORE_INDEX) -> Tensor:
    """targets[b, t] = labels[b, t + ahead], and `fill` past the row's end and in another document.

    Args:
        labels: (B, T) long, aligned with the inputs.
        ahead: 1 for the language-model head; 2 + i for Medusa head i.
        cu_seqlens: int32 (n + 1,), bounds of packed documents over the flattened B * T tokens.
        fill: the value of tokens without a target.

    Returns:
        (B, T), of the labels' dtype.
    """
    return _shifted(labels, ahead, None if cu_seqlens is None else tokens_left(cu_seqlens, labels), fill)


def _shifted(labels: Tensor, ahead: int, left: Tensor | None, fill: int) -> Tensor:
    """`shift_labels`, with `tokens_left` of the documents, which several distances share, in place of their bounds."""
    targets = F.pad(labels[:, ahead:], (0, min(ahead, labels.shape[1])), value=fill)
    return targets if left is None else targets.masked_fill(left <= ahead, fill)


def tokens_left(cu_seqlens: Tensor, labels: Tensor) -> Tensor:
    """The number of tokens from each one on to the end of its document, (B, T) as `labels`."""
    index = torch.arange(labels.numel(), device=labels.device)
    return (cu_seqlens[document_of(cu_seqlens, labels.numel()) + 1] - index).view_as(labels)


def count_targets(
    labels: Tensor,
    ahead: Sequence[int],
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Count the targets of K losses.

    Args:
        labels: (B, T) int64, -100 where ignored.
        ahead: for each loss, how many tokens its labels lie ahead.
        position_ids: (B, T) long. Positions that do not rise by 1 mark packed documents.
        cu_seqlens: int32 (n + 1,), bounds of documents packed into a single row.
        attention_mask: (B, T), 1 on tokens and 0 on padding; it excludes the two arguments before.

    Returns:
        Long (K,), the number of targets of each loss.

    Raises:
        InputError: a tensor of a wrong dtype or shape.
    """
    check_plain("labels", labels, torch.int64)
    if labels.ndim != 2:
        raise InputError(f"labels: must be (batch, tokens), got shape {tuple(labels.shape)}")
    if attention_mask is not None:
        check_same_tokens(labels, attention_mask=attention_mask)
    shape = (labels.shape[0], labels.shape[1])
    layout = token_layout(shape, attention_mask=attention_mask, position_ids=position_ids, cu_seqlens=cu_seqlens)
    rows = layout.packing.take(labels, IGNORE_INDEX)
    left = None if layout.cu_seqlens is None else tokens_left(layout.cu_seqlens, rows)
    return torch.stack([(_shifted(rows, each, left, IGNORE_INDEX) != IGNORE_INDEX).sum() for each in ahead])


class TokensWithTarget(Tokens):
    """The tokens that have a target of at least one of K losses, for a decoder that `narrows`.

    Their number is copied to the host while the first blocks run; `take` and `restore` wait for it.

    Args:
        values: long (K, rows, length), the targets.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._any = (values != IGNORE_INDEX).any(0).flatten()
        self._count = AsyncHostCopy(self._any.sum())

    @cached_property
    def selected(self) -> SelectedTokens | None:
        """The tokens; None for all tokens, if nearly all have a target, or none has."""
        count = self._count.get()
        if not 0 < count < SKIP_BELOW * self._any.numel():
            return None
        indices = self._any.argsort(descending=True, stable=True)[:count]
        return SelectedTokens(indices, self._values.shape[1], self._values.shape[2])

    def take(self, x: Tensor, fill: float = 0) -> Tensor:
        """x (rows, length, ...) -> (1, n, ...) of these tokens; x itself if all tokens are taken."""
        return x if self.selected is None else self.selected.take(x, fill)

    def restore(self, x: Tensor, fill: float = 0) -> Tensor:
        """x (1, n, ...) -> (rows, length, ...), with `fill` for the other tokens."""
        return x if self.selected is None else self.selected.restore(x, fill)


class Targets:
    """The targets of K losses, whose labels lie `ahead` tokens further on.

    The numbers of targets are copied to the host while the decoder's first blocks run, so that the losses skip tokens
    without a target and nothing waits for the GPU.

    Args:
        labels: (B, T) int64, -100 where ignored.
        ahead: K distances, at least 1.
        vocab_size: labels must be below it.
        layout: layout of the tokens (B, T); by default one document in each row.
        narrow: the decoder computes the states of tokens without a target no further than its last block that mixes
            tokens, and `loss` takes the states of the other tokens: see `Decoder.narrows`. Default: False.

    Attributes:
        values: long (K, rows, length), the targets of this rank's tokens in the layout.
        tokens: `loss` takes the states of these tokens; None for all tokens.

    Raises:
        InputError: labels of another dtype, or outside of the vocabulary (on a GPU: a device assertion).
    """

    def __init__(
        self,
        labels: Tensor,
        ahead: Sequence[int],
        *,
        vocab_size: int,
        layout: TokenLayout | None = None,
        narrow: bool = False,
    ) -> None:
        if labels.dtype != torch.int64:
            raise InputError(f"labels: must be int64, got {labels.dtype}")
        inside = (labels >= 0) & (labels < vocab_size) | (labels == IGNORE_INDEX)
        assert_async(inside, f"labels: must lie in [0, {vocab_size}), or be {IGNORE_INDEX} to be ignored", labels)
        self.ahead = tuple(ahead)
        self.layout = TokenLayout((labels.shape[0], labels.shape[1]), Tokens()) if layout is None else layout
        rows, bounds = self.layout.packing.take(labels, IGNORE_INDEX), self.layout.cu_seqlens
        self._left = None if bounds is None else tokens_left(bounds, rows)
        self.values = torch.stack([self._shifted(rows, each, IGNORE_INDEX) for each in ahead])
        # A graph, compiled or captured, is the same for any number of targets; meta tensors have none to count.
        counted = not (torch.compiler.is_compiling() or is_recording() or labels.is_meta)
        self._counts = AsyncHostCopy((self.values != IGNORE_INDEX).sum((1, 2))) if counted else None
        self.tokens = TokensWithTarget(self.values) if counted and narrow else None

    def wait_for_count(self, index: int) -> int | None:
        """How many targets loss number `index` has on this rank; None in a graph. Waits for the copy to the host."""
        return None if self._counts is None else self._counts.get()[index]

    def take(self, x: Tensor) -> Tensor:
        """x (rows, length, ...) of the layout's tokens -> (1, n, ...) of `tokens`."""
        return x if self.tokens is None else self.tokens.take(x)

    def shifted(self, token_weights: Tensor, index: int) -> Tensor:
        """A weight (B, T) for each label's term -> of the targets of loss number `index`, in the layout."""
        return self._taken(token_weights, index, 0)

    def share(self, num_items_in_batch: Tensor | int | None, reduction: str | None = None) -> Tensor | float:
        """The factor of losses that are means over this batch, such as a router's, beside the first loss.

        Args:
            num_items_in_batch: number of targets in all micro-batches; None for one micro-batch.
            reduction: the reduction of the first loss. Default: the mean.

        Returns:
            This batch's fraction of the targets. Without `num_items_in_batch`, 1; with the reduction "sum" the number
            of targets, so that the sum of micro-batches, divided by `num_items_in_batch`, is the same loss.
        """
        if num_items_in_batch is None and reduction != "sum":
            return 1.0
        count = self.layout.sum((self.values[0] != IGNORE_INDEX).sum(dtype=torch.float32))
        return count if num_items_in_batch is None else per_item(count, num_items_in_batch)

    def loss(
        self,
        index: int,
        head: Callable[..., Any],
        hidden: Tensor,
        *,
        token_weights: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        reduction: str = "mean",
        **options: Any,
    ) -> HeadLoss:
        """Compute loss number `index` by `head(hidden, targets, **options)`.

        Args:
            index: number of the loss, from 0.
            head: a head such as `LMHead`, which returns a `HeadLoss`, or the results of `ops.linear_cross_entropy`.
            hidden: states (rows, length, H) of the tokens in the layout, or (1, n, H) of `tokens`.
            token_weights: (B, T), a weight for each label's term.
            num_items_in_batch: divides the summed loss, in place of the number of targets; see `per_item`.
            reduction: "mean", "sum", or "none".
            options: other options of the head's loss, such as those in LOSS_RETURNS.

        Returns:
            The results of the head. Scalars are summed over the ranks that share the tokens. Results by token are
            (B, T): a loss of 0, and -1 for ranks and predicted tokens, where there is no target.

        Raises:
            InputError: context parallelism with class weights and a z-loss, whose mean has two divisors; or
                `num_items_in_batch` with the reduction "none".
        """
        targets, divisor = self.take(self.values[index]), num_items_in_batch
        if divisor is not None and reduction not in ("mean", "sum"):
            raise InputError(
                f"reduction: {reduction!r} does not go with num_items_in_batch, which divides the summed loss; give "
                '"mean" or "sum", or no num_items_in_batch'
            )
        if token_weights is not None:
            options["token_weights"] = self.take(self.shifted(token_weights, index))
        if self.layout.shard is not None and reduction == "mean" and divisor is None:
            divisor = self._weight_of_all(targets, options, hidden.dtype)
        options |= {"num_targets": self.wait_for_count(index), "reduction": reduction if divisor is None else "sum"}
        result = as_head_loss(head(hidden, targets, **options), options)
        return self._of_batch(result, divisor)

    def log_probs(self, index: int, head: Callable[..., HeadLoss], hidden: Tensor, **options: Any) -> HeadLoss:
        """Log-probabilities of the targets of loss number `index`.

        Args:
            index: number of the loss, from 0.
            head: a head such as `LMHead`, which returns a `HeadLoss`.
            hidden: states (rows, length, H) of the tokens in the layout, or (1, n, H) of `tokens`.
            options: options of `ops.linear_log_probs`, such as `return_entropy` and `return_predicted`. A tensor
                `temperature` is (B, T), aligned with the labels.

        Returns:
            `log_probs`, and `entropy`, `predicted` and `log_kept_mass` where the options ask for them, each (B, T): 0,
            and -1 for predicted tokens, where there is no target.
        """
        if isinstance(temperature := options.get("temperature"), Tensor):
            self._check_temperature(index, temperature)
            options["temperature"] = self.take(self._taken(temperature, index, 1))
        options["num_targets"] = self.wait_for_count(index)
        result = head(hidden, self.take(self.values[index]), log_probs=True, **options)
        return self._of_batch(result)

    def _check_temperature(self, index: int, temperature: Tensor) -> None:
        """InputError, where values are read on the host, for the temperature (B, T) of a label that is not positive and
        finite. Elsewhere `ops.linear_log_probs` alone checks it, which knows no indices of the batch."""
        if torch.compiler.is_compiling() or is_fake(temperature) or not checked_on_host(temperature):
            return
        places = torch.arange(temperature.numel(), device=temperature.device).view_as(temperature)
        places = self._taken(places, index, 0)
        labelled = torch.zeros(temperature.numel(), dtype=torch.bool, device=temperature.device)
        labelled[places[self.values[index] != IGNORE_INDEX]] = True
        usable = is_temperature(temperature) | ~labelled.view_as(temperature)
        assert_async(usable, "temperature: must be positive and finite", temperature, "temperature")

    def _weight_of_all(self, targets: Tensor, options: dict[str, Any], dtype: torch.dtype) -> Tensor:
        """Divisor of the mean loss over the tokens of all ranks: see `ops.cross_entropy`; inf in place of 0."""
        token_weights, class_weights = (options.get(f"{each}_weights") for each in ("token", "class"))
        if class_weights is not None and options.get("z_loss"):
            raise InputError(
                "class_weights: beside z_loss, means have two divisors, which context parallelism does not support; "
                "give num_items_in_batch or another reduction"
            )
        weights = (targets != IGNORE_INDEX).to(torch.promote_types(dtype, torch.float32))
        if token_weights is not None:
            weights = torch.where(weights > 0, token_weights.to(weights), 0.0)
            check_mean_weights(weights)
        if class_weights is not None:
            weights = weights * class_weights[targets.clamp(min=0)]
        total = self.layout.sum(weights.sum())
        return torch.where(total == 0, torch.inf, total)

    def _taken(self, x: Tensor, index: int, fill: int) -> Tensor:
        """x (B, T) of the labels of loss number `index` -> of the tokens that predict them, in the layout."""
        return self._shifted(self.layout.packing.take(x, fill), self.ahead[index], fill)

    def _shifted(self, rows: Tensor, ahead: int, fill: int) -> Tensor:
        """Values of labels in the layout, of all ranks -> of this rank's tokens, which predict them."""
        shifted = _shifted(rows, ahead, self._left, fill)
        return shifted if self.layout.shard is None else self.layout.shard.take(shifted, fill)

    def _of_batch(self, result: HeadLoss, divisor: Tensor | float | None = None) -> HeadLoss:
        """The results of a head: scalars are summed over the ranks that share the tokens, and divided by `divisor`;
        results of each token are (B, T), filled where there is no target."""
        given = {name: x for name, x in result._asdict().items() if x is not None}
        return HeadLoss(**{name: self._restored(name, x, divisor) for name, x in given.items()})

    def _restored(self, name: str, x: Tensor, divisor: Tensor | float | None) -> Tensor:
        if not x.dim():
            return self.layout.sum(x) if divisor is None else per_item(self.layout.sum(x), divisor)
        fill = WITHOUT_TARGET[name]
        return self.layout.restore(x if self.tokens is None else self.tokens.restore(x, fill), fill)
