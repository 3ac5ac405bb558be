"""Accepting candidates that the model finds likely enough, though it would not have chosen them itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ligermodels.errors import InputError


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

    def accept_mask(self, logits: Tensor, tokens: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
        """Bool (B, N), the nodes whose token is accepted after their parent, and fp32 (B, N), its log-probability.

        logits: (B, N, V), after each node. tokens: long (B, N). parent: long (N,).
        """
        log_p = (logits.float() / self.temperature).log_softmax(dim=-1)
        entropy = torch.special.entr(log_p.exp()).sum(dim=-1)
        threshold = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        row = torch.arange(len(tokens), device=tokens.device)[:, None]
        log_token = log_p[row, parent, tokens]
        return log_token.exp() > threshold[:, parent], log_token
