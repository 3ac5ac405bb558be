"""Root mean square layer normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.layers.recompute import cheap


@dataclass(frozen=True)
class NormConfig:
    """`eps` under the root; the scale is `offset + weight`; `cast` says when the result leaves fp32.

    cast "before": normalise in fp32, cast, then scale (Llama). cast "after": scale in fp32, then cast (Gemma).
    """

    eps: float
    offset: float = 0.0
    cast: Literal["before", "after"] = "before"


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, config: NormConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scale one."""
        nn.init.constant_(self.weight, 1.0 - self.config.offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x (..., size) -> (..., size), same dtype; with a residual, of that shape, their sum, of the wider dtype."""
        if residual is None:
            return cheap(self._normalised, x, self.weight)
        if residual.dtype != x.dtype:  # under autocast
            return residual + self._normalised(x, self.weight)
        config = self.config
        return ops.rms_norm(x, self.weight, config.eps, offset=config.offset, cast=config.cast, residual=residual)

    def _normalised(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, self.config.eps, offset=self.config.offset, cast=self.config.cast)


class ResidualRMSNorm(RMSNorm):
    """RMSNorm where a branch joins the residual stream, or leaves it."""

    def forward(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x, branch (..., size) -> normalised x + branch, and x + branch, to be carried on: one pass, and backward one
        gradient. Under autocast the stream keeps its dtype."""
        config = self.config
        branch = branch if branch is None else branch.to(x.dtype)
        y, x = ops.add_rms_norm(x, branch, self.weight, config.eps, offset=config.offset, cast=config.cast)
        return cheap(self._normalised, x, self.weight, result=y), x


class ResidualIdentity(nn.Module):
    """Stands for a ResidualRMSNorm where nothing is normalised."""

    def forward(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x + branch, twice."""
        x = x if branch is None else x + branch
        return x, x
