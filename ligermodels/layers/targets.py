"""Targets: labels shifted for one loss or several, and the tokens that have one, which alone a training pass needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers.async_copy import AsyncHostCopy
from ligermodels.layers.context_parallel import SequenceShard
from ligermodels.layers.lm_head import LOSS_RETURNS, named_results
from ligermodels.layers.packing import (
    Unpadding,
    assert_async,
    check_plain,
    check_same_tokens,
    document_bounds,
    document_of,
)
from ligermodels.ops.loss.chunks import SKIP_BELOW

IGNORE_INDEX = -100


def shift_labels(labels: Tensor, ahead: int, cu_seqlens: Tensor | None = None, *, fill: int = IGNORE_INDEX) -> Tensor:
    """targets[b, t] = labels[b, t + ahead], and `fill` where that is past the row's end or in another document.

    Args:
        labels: (B, T) long, aligned with the inputs.
        ahead: 1 for the language-model head; 2 + i for Medusa head i.
        cu_seqlens: int32 (n + 1,), bounds of packed documents over the flattened B * T tokens.
    """
    length = labels.shape[1]
    targets = F.pad(labels[:, ahead:], (0, min(ahead, length)), value=fill)
    if cu_seqlens is None:
        return targets
    place = torch.arange(labels.numel(), device=labels.device)
    end = cu_seqlens[document_of(cu_seqlens, labels.numel()) + 1]
    return targets.masked_fill((place + ahead >= end).view_as(labels), fill)


def count_targets(
    labels: Tensor,
    ahead: Sequence[int],
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """How many `labels` (B, T) each of K losses counts, long (K,); `ahead` as of `Targets`, the rest of a model."""
    check_plain("labels", labels, torch.int64)
    if labels.ndim != 2:
        raise InputError(f"labels: must be (batch, tokens), got shape {tuple(labels.shape)}")
    if attention_mask is not None:
        check_same_tokens(labels, attention_mask=attention_mask)
        unpad = Unpadding(attention_mask)
        labels, cu_seqlens = unpad.take(labels), unpad.cu_seqlens
    bounds = document_bounds(labels.shape, position_ids, cu_seqlens)
    return torch.stack([(shift_labels(labels, each, bounds) != IGNORE_INDEX).sum() for each in ahead])


class Targets:
    """The targets of K losses, whose labels lie `ahead` tokens further on.

    Past the last mixer, tokens without any target have no bearing on losses or gradients. Where enough of them have
    none, `token_indices` are those that do: a decoder that is given these computes their states alone, and `loss` takes
    those. The counts travel to the host while the decoder's first blocks run.

    Args:
        labels: (B, T) int64, -100 where ignored; InputError for another dtype.
        ahead: K distances, at least 1.
        cu_seqlens: int32 (n + 1,), bounds of packed documents.
        vocab_size: labels must lie below it: InputError on a CPU, on a GPU a device assertion.
        every_token: all tokens are needed, whatever the labels.
        shard: under context parallelism, the tokens that this rank has. `values`, `counts` and `token_indices` are of
            these; losses are summed over the ranks, and what is (B, T) is of all tokens.
    """

    def __init__(
        self,
        labels: Tensor,
        ahead: Sequence[int],
        *,
        vocab_size: int,
        cu_seqlens: Tensor | None = None,
        every_token: bool = False,
        shard: SequenceShard | None = None,
    ) -> None:
        if labels.dtype != torch.int64:
            raise InputError(f"labels: must be int64, got {labels.dtype}")
        assert_async(
            (labels == IGNORE_INDEX) | ((labels >= 0) & (labels < vocab_size)),
            f"labels: must lie in [0, {vocab_size}), or be {IGNORE_INDEX} to be ignored",
        )
        self.ahead, self.cu_seqlens, self._every_token = tuple(ahead), cu_seqlens, every_token
        self.shard = shard
        self.values = torch.stack([self._own(shift_labels(labels, each, cu_seqlens), IGNORE_INDEX) for each in ahead])
        self._counts: AsyncHostCopy | None = None
        self._indices: Tensor | None = None
        # A graph, compiled or captured, is the same for any number of targets; meta tensors have none to count.
        compiling = torch.compiler.is_compiling()  # asked first: a compiler does not trace the next question
        captured = not compiling and labels.is_cuda and torch.cuda.is_current_stream_capturing()
        if not (compiling or captured or labels.is_meta):
            valid = (self.values != IGNORE_INDEX).flatten(1)
            self._any = valid.any(0)
            self._counts = AsyncHostCopy(torch.cat([valid, self._any[None]]).sum(1))

    @property
    def counts(self) -> list[int] | None:
        """How many targets each loss has, (K,); None in a graph."""
        return None if self._counts is None else self._counts.get()[:-1]

    @property
    def token_indices(self) -> Tensor | None:
        """Indices of the tokens with a target, of the flattened B * T: long (n,), rising. None where all are taken:
        where nearly all have one, or none has, and in a graph. Waits for the counts."""
        if self._indices is None and self._counts is not None and not self._every_token:
            count = self._counts.get()[-1]
            if 0 < count < SKIP_BELOW * self._any.numel():
                self._indices = self._any.argsort(descending=True, stable=True)[:count]
        return self._indices

    def share(self, num_items_in_batch: Tensor | int | None) -> Tensor | float:
        """That of the first loss in a batch of so many targets, of which this is a micro-batch; 1 without a number."""
        if num_items_in_batch is None:
            return 1.0
        count = (self.values[0] != IGNORE_INDEX).sum(dtype=torch.float32)
        return per_item(count if self.shard is None else self.shard.sum(count), num_items_in_batch)

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
    ) -> Any:
        """Loss number `index`, of `head(hidden, targets, **options)`, or a tuple of it and what else is asked for, as
        the head gives it.

        Args:
            head: such as an `LMHead`.
            hidden: states (B, T, H), or (1, n, H) of `token_indices`; with a `shard` of its tokens.
            token_weights: (B, T), a weight for each label's term.
            num_items_in_batch: divides the sum, in place of the number of targets; sets the reduction to "sum". See
                `per_item`.
            reduction: "mean", "sum", or "none": (B, T).
            options: further options of the head's loss. return_rank: also return the ranks, return_predicted: the
                predicted tokens, long (B, T), -1 without a target; return_z_loss: the z-loss, reduced as the loss.
        """
        options = {name: value for name, value in options.items() if name not in LOSS_RETURNS or value}
        if token_weights is not None:
            weights = self._own(shift_labels(token_weights, self.ahead[index], fill=0), 0)
            options["token_weights"] = self._take(weights)
        counts, targets, divisor = self.counts, self._take(self.values[index]), num_items_in_batch
        if self.shard is not None and reduction == "mean" and divisor is None:
            divisor = self._weight_of_all(targets, self.shard, options, hidden.dtype)
        found = head(
            hidden,
            targets,
            reduction=reduction if divisor is None else "sum",
            num_targets=None if counts is None else counts[index],
            **options,
        )
        results = named_results(found, options)
        for name, value in results.items():
            if name in ("return_rank", "return_predicted"):
                results[name] = self._put_back(value, -1)
            elif reduction == "none" and divisor is None:
                results[name] = self._put_back(value, 0.0)
            else:
                value = value if self.shard is None else self.shard.sum(value)
                results[name] = value if divisor is None else per_item(value, divisor)
        return tuple(results.values()) if len(results) > 1 else results["loss"]

    def log_probs(
        self,
        index: int,
        head: Callable[..., Any],
        hidden: Tensor,
        *,
        return_entropy: bool = False,
        return_predicted: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities (B, T) of the targets of loss `index`, and entropies and predicted tokens if asked for;
        without a target 0, and -1 for the token.

        Arguments as of `loss`; `options` are those of `ops.linear_log_probs`.
        """
        counts = self.counts
        found = head(
            hidden,
            self._take(self.values[index]),
            log_probs=True,
            return_entropy=return_entropy,
            return_predicted=return_predicted,
            num_targets=None if counts is None else counts[index],
            **options,
        )
        if isinstance(found, Tensor):
            return self._put_back(found, 0.0), None, None
        entropy = None if found.entropy is None else self._put_back(found.entropy, 0.0)
        predicted = None if found.predicted is None else self._put_back(found.predicted, -1)
        return self._put_back(found.log_probs, 0.0), entropy, predicted

    @staticmethod
    def _weight_of_all(targets: Tensor, shard: SequenceShard, options: dict[str, Any], dtype: torch.dtype) -> Tensor:
        """What the mean of the losses of all ranks divides their sum by: see `ops.cross_entropy`; inf in place of 0."""
        token_weights, class_weights = (options.get(f"{each}_weights") for each in ("token", "class"))
        if class_weights is not None and options.get("z_loss"):
            raise InputError(
                "class_weights: beside z_loss, means have two divisors, which context parallelism does not do; give "
                "num_items_in_batch or another reduction"
            )
        weights = (targets != IGNORE_INDEX).to(torch.promote_types(dtype, torch.float32))
        if token_weights is not None:
            weights = weights * token_weights
        if class_weights is not None:
            weights = weights * class_weights[targets.clamp(min=0)]
        total = shard.sum(weights.sum())
        return torch.where(total == 0, torch.inf, total)

    def _own(self, x: Tensor, fill: float) -> Tensor:
        """Of x (B, T) the tokens of the shard."""
        return x if self.shard is None else self.shard.take(x, fill)

    def _take(self, x: Tensor) -> Tensor:
        """x (B, T) -> (1, n), of `token_indices`; x itself where all tokens are taken."""
        return x if self.token_indices is None else x.flatten().index_select(0, self.token_indices)[None]

    def _put_back(self, x: Tensor, other: float) -> Tensor:
        """What `_take` gives -> (B, T), with `other` for the other tokens."""
        if self.token_indices is not None:
            whole = x.new_full((self._any.numel(),), other)
            x = whole.index_copy(0, self.token_indices, x[0]).view(self.values.shape[1:])
        return x if self.shard is None else self.shard.gather(x)


def per_item(total: Tensor, num_items_in_batch: Tensor | float) -> Tensor:
    """total / num_items_in_batch, scalars; 0 / 0 is 0: without a target in all batches there is no loss.

    Raises InputError for several numbers, for a negative one, and for 0 where the total is another; of a tensor on a
    GPU the last two are device assertions.
    """
    message = "num_items_in_batch: must be above 0, the number of targets; 0 only where no label is counted"
    if isinstance(num_items_in_batch, Tensor):
        items = num_items_in_batch
        if items.numel() != 1:
            raise InputError(f"num_items_in_batch: must be one number, got a tensor of shape {tuple(items.shape)}")
        assert_async((items > 0) | (items == 0) & (total == 0), f"{message}; got another tensor")
        return total / items.masked_fill(items == 0, 1)
    if not num_items_in_batch >= 0:
        raise InputError(f"{message}; got {num_items_in_batch}")
    if num_items_in_batch == 0:
        assert_async(total == 0, f"{message}; got 0")
    return total / (num_items_in_batch or 1)


def take_tokens(x: Tensor, token_indices: Tensor) -> Tensor:
    """x (B, T, H) -> (1, n, H), the tokens of these indices, long (n,), of the flattened B * T, none of them twice."""
    return _TakeTokens.apply(x, token_indices)


class _TakeTokens(torch.autograd.Function):
    """Its gradient is a copy, as no index occurs twice; that of torch's indexing is a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_indices: Tensor) -> Tensor:
        ctx.save_for_backward(token_indices)
        ctx.shape = x.shape
        return x.flatten(0, 1).index_select(0, token_indices)[None]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (token_indices,) = ctx.saved_tensors
        dx = dy.new_zeros(ctx.shape)
        dx.flatten(0, 1).index_copy_(0, token_indices, dy[0])
        return dx, None
