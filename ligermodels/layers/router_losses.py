"""Losses on the outputs of a model's routers, and the number of tokens of each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers.context import RouterOutput
from ligermodels.layers.tokens import ContextShard


class CountedTokens(NamedTuple):
    """The tokens that count for losses on routers.

    mask: bool, one element per token, any shape; False for tokens that do not count, such as padding. None: all tokens
        count.
    shard: this rank's part of the tokens, see `layers.tokens`. None: the rank has all tokens.
    """

    mask: Tensor | None = None
    shard: ContextShard | None = None

    def weights(self, router_outputs: Sequence[RouterOutput]) -> Tensor:
        """(tokens, 1), 1 for tokens that count and 0 for other tokens, at least float32.

        Raises InputError if there is no layer, or shapes do not fit."""
        if not router_outputs:
            raise InputError("router_outputs: empty; a loss on routers needs a layer with experts")
        first, top_k = router_outputs[0].logits, router_outputs[0].top_k
        if any(output.logits.shape != first.shape or output.top_k != top_k for output in router_outputs):
            shapes = [(tuple(output.logits.shape), output.top_k) for output in router_outputs]
            raise InputError(f"router_outputs: all layers must have the same (tokens, experts) and top_k, got {shapes}")
        tokens = first.shape[0]
        mask = self.shard.is_token(first.device) if self.shard is not None and self.mask is None else self.mask
        if mask is not None and mask.numel() != tokens:
            raise InputError(f"mask: must have one element for each of {tokens} tokens, got shape {tuple(mask.shape)}")
        weights = first.new_ones(tokens, 1) if mask is None else mask.reshape(-1, 1)
        return weights.to(torch.promote_types(first.dtype, torch.float32))

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks that share the tokens."""
        return x if self.shard is None else self.shard.sum(x)


def load_balancing_loss(
    router_outputs: Sequence[RouterOutput],
    mask: Tensor | None = None,
    shard: ContextShard | None = None,
    *,
    replayed: bool = False,
) -> Tensor:
    """Load-balancing loss (Fedus et al., 2021, equations 4 to 6). Its minimum, for a uniform choice, is top_k.

    num_experts * sum over experts of (choices per token) * (mean probability), both over the tokens of all layers. As
    in transformers, probabilities are the softmax of the logits and choices are the largest probabilities, however the
    router itself scores and chooses. Gradients flow through the probabilities only.

    Args:
        router_outputs: the router's output for each layer, from `Decoder.forward`.
        mask: bool, one element per token, any shape; False for tokens that do not count, such as padding. Default: all
            tokens count.
        shard: this rank's part of the tokens, see `layers.tokens`. Default: None, the rank has all tokens.
        replayed: the caller gave the experts: count these as choices. Default: False.

    Returns:
        A float32 scalar; zero if no token counts.

    Raises:
        InputError: there are no layers, or shapes do not fit.
    """
    tokens = CountedTokens(mask, shard)
    weights = tokens.weights(router_outputs)
    total = (tokens.total(weights.sum()) * len(router_outputs)).clamp(min=1)
    choices, probability_sums = [], []
    for logits, top_k, experts, _ in router_outputs:
        probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        if experts is None or not replayed:
            experts = probabilities.topk(top_k, dim=-1).indices
        chosen = torch.zeros_like(probabilities).scatter(1, experts, 1)
        choices.append((chosen * weights).sum(0))
        probability_sums.append((probabilities * weights).sum(0))
    chosen, probable = tokens.total(torch.stack([sum(choices), sum(probability_sums)])).unbind()  # type: ignore[list-item]
    return len(chosen) * (chosen / total * (probable / total)).sum()


def router_z_loss(
    router_outputs: Sequence[RouterOutput], mask: Tensor | None = None, shard: ContextShard | None = None
) -> Tensor:
    """The router z-loss (Zoph et al., 2022, https://arxiv.org/abs/2202.08906, equation 5): the mean over the tokens of
    all layers of logsumexp(logits)^2. It keeps logits small.

    Args:
        router_outputs: the router's output for each layer, from `Decoder.forward`.
        mask: bool, one element per token, any shape; False for tokens that do not count, such as padding. Default: all
            tokens count.
        shard: this rank's part of the tokens, see `layers.tokens`. Default: None, the rank has all tokens.

    Returns:
        A float32 scalar; zero if no token counts.

    Raises:
        InputError: there are no layers, or shapes do not fit.
    """
    tokens = CountedTokens(mask, shard)
    weights = tokens.weights(router_outputs)
    total = (tokens.total(weights.sum()) * len(router_outputs)).clamp(min=1)
    squares = torch.stack([output.logits.to(weights.dtype).logsumexp(-1).square() for output in router_outputs])
    return tokens.total((squares * weights[:, 0]).sum()) / total


def count_tokens_per_expert(
    router_outputs: Sequence[RouterOutput], mask: Tensor | None = None, shard: ContextShard | None = None
) -> Tensor:
    """How many tokens each expert computed. Nothing waits for the GPU.

    Args:
        router_outputs: the router's output for each layer, from `Decoder.forward`, with the experts.
        mask: bool, one element per token, any shape; False for tokens that do not count, such as padding. Default: all
            tokens count.
        shard: this rank's part of the tokens, see `layers.tokens`. Default: None, the rank has all tokens.

    Returns:
        Long (layers, E), the same on all ranks that share the tokens.

    Raises:
        InputError: there are no layers, shapes do not fit, or a layer does not return its experts.
    """
    tokens = CountedTokens(mask, shard)
    weights = tokens.weights(router_outputs).long()
    added, counts = weights.expand(-1, router_outputs[0].top_k).flatten(), []
    for output in router_outputs:
        if output.experts is None:
            raise InputError("router_outputs: a layer does not return the experts of its tokens")
        counts.append(added.new_zeros(output.logits.shape[1]).scatter_add(0, output.experts.flatten(), added))
    return tokens.total(torch.stack(counts))
