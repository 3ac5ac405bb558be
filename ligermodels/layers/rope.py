"""Rotary position embedding: inverse frequencies with their scalings, and the cos/sin tables of a forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class RopeScaling(Protocol):
    """How a scaling changes the plain inverse frequencies, fp32 (dim / 2,)."""

    def __call__(self, inv_freq: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: all frequencies divided by `factor` (Chen et al., 2023)."""

    factor: float

    def __call__(self, inv_freq: Tensor) -> Tensor:
        return inv_freq / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between.

    With w = 2 pi / inv_freq and L the original context: w > L / low -> / factor; w < L / high -> kept; else blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __call__(self, inv_freq: Tensor) -> Tensor:
        wavelength = 2 * math.pi / inv_freq
        ramp = self.original_context / wavelength - self.low_freq_factor
        keep = ramp / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - keep) * inv_freq / self.factor + keep * inv_freq
        scaled = torch.where(wavelength > self.original_context / self.low_freq_factor, inv_freq / self.factor, blended)
        return torch.where(wavelength < self.original_context / self.high_freq_factor, inv_freq, scaled)


@dataclass(frozen=True)
class RopeConfig:
    """`dim` rotated channels of each head (even), base `theta`, and an optional scaling of the frequencies."""

    dim: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None


def inverse_frequencies(config: RopeConfig, device: torch.device | str | None = None) -> Tensor:
    """theta ** (-2 i / dim) for i < dim / 2, scaled: fp32 (dim / 2,) (Su et al., 2021)."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float32, device=device) / config.dim
    inv_freq = 1.0 / (config.theta**exponents)
    return inv_freq if config.scaling is None else config.scaling(inv_freq)


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin for given positions."""

    inv_freq: Tensor

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", inverse_frequencies(config), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Frequencies stay fp32 whatever the model is cast to, and are made afresh on leaving the meta device.
        super()._apply(fn, recurse)
        self.inv_freq = inverse_frequencies(self.config, self.inv_freq.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions (B, T) -> cos, sin (B, T, dim / 2): computed in fp32, then cast to `dtype` as HF models do."""
        # Under autocast a matmul would round the angles; a product is elementwise and stays fp32.
        angles = positions[..., None].float() * self.inv_freq
        return angles.cos().to(dtype), angles.sin().to(dtype)
