"""Rules that accept candidate tokens: greedy, and typical acceptance. Expected tokens of a chain."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.generation.sampling import greedy


class Accepted(NamedTuple):
    """What a rule decides about the N nodes of a tree: arguments of `ops.accept_path`.

    choices: long (B, N), the token after each node. -1 is no token.
    accept_mask: bool (B, N), True for accepted tokens. None: a token is accepted if it is the choice after its parent.
    scores: fp32 (B, N), given with `accept_mask`: among equally long paths the highest sum is taken.
    """

    choices: Tensor
    accept_mask: Tensor | None = None
    scores: Tensor | None = None


class Accept(Protocol):
    """A rule that accepts tokens of a tree of candidates."""

    def __call__(self, logits: Tensor, tokens: Tensor, parent: Tensor) -> Accepted:
        """Decide about the nodes of a tree.

        Args:
            logits: (B, N, V), the model's logits after each node.
            tokens: long (B, N), the token of each node.
            parent: long (N,), or (B, N) where each sequence has a tree of its own, the parent of each node; the root's
                parent is the root.
        """


def accept_greedy(logits: Tensor, tokens: Tensor, parent: Tensor) -> Accepted:
    """The rule of greedy decoding: the choice after each node is the most probable token. See `Accept` for logits,
    tokens and parent."""
    return Accepted(greedy(logits))


@dataclass(frozen=True)
class Typical:
    """Typical acceptance (Cai et al. 2024, arXiv 2401.10774, section 2.3.1).

    A token is accepted if its probability exceeds min(epsilon, delta * exp(-H)). H is the entropy, in nats, of the
    model's distribution at this position, the softmax of logits / temperature.

    Args:
        temperature: above 0.
        epsilon: upper limit of the threshold, above 0.
        delta: factor of exp(-H), above 0.

    Raises:
        InputError: a value is out of range.
    """

    temperature: float
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise InputError(f"temperature must be above 0, or 0 for greedy decoding, got {self.temperature}")
        for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if not (value > 0 and math.isfinite(value)):
                raise InputError(f"{name} must be above 0, got {value}")

    def __call__(self, logits: Tensor, tokens: Tensor, parent: Tensor) -> Accepted:
        """The most probable token after each node, and the accepted tokens. See `Accept`."""
        return Accepted(greedy(logits), *self.accept_mask(logits, tokens, parent))

    def accept_mask(self, logits: Tensor, tokens: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
        """Decide for each node of a tree whether its token is accepted after its parent.

        Args:
            logits: (B, N, V), the model's logits after each node.
            tokens: long (B, N), the token of each node.
            parent: long (N,) or (B, N), the parent of each node; the root's parent is the root.

        Returns:
            Bool (B, N), True for accepted tokens; and fp32 (B, N), the log-probability of each token.
        """
        log_p = (logits.float() / self.temperature).log_softmax(dim=-1)
        entropy = torch.special.entr(log_p.exp()).sum(dim=-1)
        threshold = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        row = torch.arange(len(tokens), device=tokens.device)[:, None]
        log_token = log_p[row, parent, tokens]
        return log_token.exp() > threshold[row, parent], log_token


def chain_length(shares: Iterable[float]) -> float:
    """Mean number of tokens per step with drafts in a chain, 1 + sum_k prod_{i <= k} shares[i].

    Args:
        shares: how often the drafted tokens are accepted, each if all tokens before it are; NaN for a token that was
            never drafted, which counts as never accepted.
    """
    return 1 + math.fsum(accumulate((0.0 if math.isnan(share) else share for share in shares), operator.mul))
