"""Normalisation over channels, alone and together with the residual addition before or after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ligermodels import ops


@dataclass(frozen=True)
class NormConfig:
    """`eps` under the root; the scale is `offset + weight`.

    kind "rms": RMSNorm (Zhang and Sennrich, 2019). "layer": LayerNorm (Ba et al., 2016), with a `bias` if so set.
    casting_mode, of "rms": "llama" normalises in fp32, casts, then scales; "gemma" scales in fp32, then casts.
    """

    eps: float
    offset: float = 0.0
    casting_mode: Literal["llama", "gemma"] = "llama"
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False

    def build(self, size: int) -> nn.Module:
        """x (..., size) -> its norm, of that shape and dtype."""
        return _KINDS[self.kind][0](size, self)

    def build_before(self, size: int) -> nn.Module:
        """The norm before a sublayer: (x, branch or None) -> the norm of x + branch, and x + branch."""
        return _KINDS[self.kind][1](size, self)

    def build_after(self, size: int) -> nn.Module:
        """The norm after a sublayer: (branch, x) -> x + the norm of branch."""
        return _KINDS[self.kind][2](size, self)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis."""

    def __init__(self, size: int, config: NormConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(size))
        self.init_weights()

    def init_weights(self, std: float = 0.0) -> None:
        """Scale one."""
        nn.init.constant_(self.weight, 1.0 - self.config.offset)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., size) -> (..., size), same dtype."""
        config = self.config
        return ops.rms_norm(x, self.weight, config.eps, offset=config.offset, casting_mode=config.casting_mode)


class AddRMSNorm(RMSNorm):
    """A branch joins the residual stream, whose norm enters the next sublayer: one pass over memory."""

    def forward(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x, branch (..., size) -> the norm of x + branch, and x + branch, in x's dtype."""
        config = self.config
        branch = branch if branch is None else branch.to(x.dtype)
        return ops.add_rms_norm(
            x, branch, self.weight, config.eps, offset=config.offset, casting_mode=config.casting_mode
        )


class RMSNormAdd(RMSNorm):
    """The norm of a branch joins the residual stream: one pass over memory."""

    def forward(self, branch: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        """branch, x (..., size) -> x + the norm of branch, in the wider dtype."""
        config = self.config
        options: dict[str, Any] = {"offset": config.offset, "casting_mode": config.casting_mode}
        if branch.dtype != x.dtype:  # under autocast
            return x + ops.rms_norm(branch, self.weight, config.eps, **options)
        return ops.rms_norm(branch, self.weight, config.eps, residual=x, **options)


class LayerNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * (offset + weight) + bias over the last axis."""

    def __init__(self, size: int, config: NormConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if config.bias else None
        self.init_weights()

    def init_weights(self, std: float = 0.0) -> None:
        """Scale one, bias zero."""
        nn.init.constant_(self.weight, 1.0 - self.config.offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., size) -> (..., size), same dtype."""
        weight = self.weight if self.config.offset == 0.0 else self.weight + self.config.offset
        return ops.layer_norm(x, weight, self.bias, self.config.eps)


class AddLayerNorm(LayerNorm):
    """`AddRMSNorm`'s counterpart."""

    def forward(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x, branch (..., size) -> the norm of x + branch, and x + branch, in x's dtype."""
        x = x if branch is None else x + branch.to(x.dtype)
        return super().forward(x), x


class LayerNormAdd(LayerNorm):
    """`RMSNormAdd`'s counterpart."""

    def forward(self, branch: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        """branch, x (..., size) -> x + the norm of branch."""
        return x + super().forward(branch)


class NoNorm(nn.Module):
    """Takes the place of an `AddRMSNorm` where a sublayer has no norm before it."""

    def forward(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x + branch, twice."""
        x = x if branch is None else x + branch
        return x, x


_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "rms": (RMSNorm, AddRMSNorm, RMSNormAdd),
    "layer": (LayerNorm, AddLayerNorm, LayerNormAdd),
}
