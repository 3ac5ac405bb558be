"""Which of a tree's candidates to accept: those the model would have chosen, or those it finds likely enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ligermodels.errors import InputError


def exact(choices: Tensor, tokens: Tensor, parent: Tensor) -> Tensor:
    """Bool (B, N): the nodes whose token is the model's own choice after their parent.

    choices, tokens: long (B, N), the model's choice after each node, and the node's token. parent: long (N,).
    """
    return tokens == choices[:, parent]


@dataclass(frozen=True)
class Typical:
    """Typical acceptance (Cai et al. 2024, section 2.3.1): a token is accepted when its probability is above
    min(epsilon, delta * exp(-H)), H being the entropy, in nats, of the distribution it comes from.

    The distribution is the softmax of the logits over `temperature`. Raises InputError when a value is out of range.
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

    def judge(self, logits: Tensor, tokens: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
        """Bool (B, N), the nodes whose token is accepted after their parent, and fp32 (B, N), its log-probability.

        logits: (B, N, V), after each node. tokens: long (B, N). parent: long (N,).
        """
        log_p = (logits.float() / self.temperature).log_softmax(dim=-1)
        entropy = torch.special.entr(log_p.exp()).sum(dim=-1)
        threshold = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        row = torch.arange(len(tokens), device=tokens.device)[:, None]
        log_token = log_p[row, parent, tokens]
        return log_token.exp() > threshold[:, parent], log_token


def furthest(right: Tensor, score: Tensor | None, mask: Tensor, depth: Tensor) -> Tensor:
    """Long (B,): the deepest node that is right with all its ancestors; of several, that of the highest path score.

    right: bool (B, N); the root, node 0, is always in. score: (B, N), added up along a path; None where no two nodes of
    a depth can be right. mask, depth: those of the tree.
    """
    right = right | (depth == 0)
    inside = (right[:, None] | ~mask).all(dim=-1)
    reached = torch.where(inside, depth, -1)
    if score is None:
        return reached.argmax(dim=1)
    deepest = reached == reached.amax(dim=1, keepdim=True)
    path = torch.where(mask & (depth > 0), score[:, None], 0).sum(dim=-1)
    return path.masked_fill(~deepest, -math.inf).argmax(dim=1)
