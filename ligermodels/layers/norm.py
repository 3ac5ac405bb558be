"""Normalisation over channels, alone and together with the residual addition before or after it.

A `Block` takes any module that maps (..., H) to (..., H) for a norm; one with `fused_add = True` also takes the other
operand of the addition, and adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.errors import ConfigError
from ligermodels.layers.config_checks import check_choice, check_numbers
from ligermodels.layers.float8 import writes_float8
from ligermodels.layers.sharding import TensorSharding, local
from ligermodels.ops import Float8Form
from ligermodels.ops.runtime.tensors import as_dtype


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

    def __post_init__(self) -> None:
        check_numbers(self, "eps")
        check_choice(self, "casting_mode", ("llama", "gemma"))
        check_choice(self, "kind", ("rms", "layer"))
        if self.bias and self.kind == "rms":
            raise ConfigError("bias: is of kind 'layer'; an RMSNorm has none")
        if self.casting_mode != "llama" and self.kind == "layer":
            raise ConfigError("casting_mode: is of kind 'rms'; leave it out for a LayerNorm")

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the ops of RMSNorm."""
        return {"eps": self.eps, "offset": self.offset, "casting_mode": self.casting_mode}

    def build(self, size: int) -> nn.Module:
        """x (..., size) -> its norm, of that shape and dtype."""
        return RMSNorm(size, self) if self.kind == "rms" else LayerNorm(size, self)

    def build_for_heads(self, size: int) -> nn.Module:
        """The norm of heads, (..., heads, size), of which tensor-parallel ranks have their own; "rms" alone."""
        if self.kind != "rms":
            raise ConfigError(f"kind: the norm of heads is 'rms', got {self.kind!r}")
        return HeadRMSNorm(size, self)

    def build_before(self, size: int) -> nn.Module:
        """The norm before a sublayer, together with the residual addition before it where one kernel does both."""
        return AddRMSNorm(size, self) if self.kind == "rms" else LayerNorm(size, self)

    def build_after(self, size: int) -> nn.Module:
        """The norm after a sublayer, together with the residual addition after it where one kernel does both."""
        return RMSNormAdd(size, self) if self.kind == "rms" else LayerNorm(size, self)


class _Norm(nn.Module):
    """The parameters of a norm."""

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"weight": "replicated", "bias": "replicated"}

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

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.config.eps}"


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis."""

    of_heads: ClassVar[bool] = False

    def forward(self, x: Tensor) -> Tensor:
        """x (..., size) -> (..., size), same dtype."""
        return ops.rms_norm(x, local(self, self.weight, partial=self.of_heads), **self.config.options)


class HeadRMSNorm(RMSNorm):
    """The norm of heads, of which tensor-parallel ranks have their own."""

    of_heads: ClassVar[bool] = True


class AddRMSNorm(RMSNorm):
    """A branch joins the residual stream, whose norm enters the next sublayer: one pass over memory.

    With a `form` the norm is a Float8Tensor."""

    fused_add: ClassVar[bool] = True

    @writes_float8
    def forward(  # type: ignore[override]
        self, x: Tensor, branch: Tensor | None = None, *, form: Float8Form | None = None
    ) -> tuple[Tensor, Tensor]:
        """x, branch (..., size) -> the norm of x + branch, and x + branch, in x's dtype.

        Args:
            x: (..., size).
            branch: (..., size), added to x; None for nothing.
            form: the norm is a `Float8Tensor` in this form; None for x's dtype.
        """
        branch, weight = None if branch is None else as_dtype(branch, x.dtype), local(self, self.weight)
        if form is not None:
            return ops.float8_add_rms_norm(x, branch, weight, dtype=form.dtype, tail=form.tail, **self.config.options)
        return ops.add_rms_norm(x, branch, weight, **self.config.options)


class RMSNormAdd(RMSNorm):
    """The norm of a branch joins the residual stream: one pass over memory."""

    fused_add: ClassVar[bool] = True

    def forward(self, branch: Tensor, x: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """branch, x (..., size) -> x + the norm of branch, in the wider dtype; without x the norm alone."""
        if x is None:
            return RMSNorm.forward(self, branch)
        if branch.dtype != x.dtype:  # under autocast
            return x + RMSNorm.forward(self, branch)
        return ops.rms_norm(branch, local(self, self.weight), residual=x, **self.config.options)


def adds_residual(norm: nn.Module | None) -> bool:
    """Whether a norm also adds the residual, by its attribute `fused_add`; any module may stand in the place of a
    norm."""
    return getattr(norm, "fused_add", False)


class LayerNorm(_Norm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * (offset + weight) + bias over the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., size) -> (..., size), same dtype."""
        weight = local(self, self.weight)
        weight = weight if self.config.offset == 0.0 else weight + self.config.offset
        return ops.layer_norm(x, weight, local(self, self.bias), self.config.eps)
