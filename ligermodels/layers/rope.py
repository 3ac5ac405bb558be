"""Rotary position embedding: inverse frequencies with their scalings, and the cos/sin tables of a forward pass."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import ConfigError
from ligermodels.layers.config_checks import check_numbers, check_sizes
from ligermodels.ops.runtime.tensors import as_dtype


class RopeScaling(ABC):
    """A change of the plain frequencies. Subclasses are frozen dataclasses, because RopeConfigs are dict keys."""

    @property
    def context_thresholds(self) -> ContextThresholds:
        """Sequence lengths at which the frequencies change; by default there are none."""
        return ContextThresholds()

    @abstractmethod
    def frequencies(self, rope: RopeConfig, wavelengths: Tensor) -> Tensor:
        """The part of the computation that does not depend on positions.

        Args:
            rope: the config of the rope.
            wavelengths: plain wavelengths in tokens per radian, fp32 (dim / 2,).

        Returns:
            fp32 (..., dim / 2).
        """

    def scaled_inv_freq(self, rope: RopeConfig, frequencies: Tensor, positions: Tensor) -> Tensor:
        """The inverse frequencies of a forward pass; by default they do not depend on positions.

        Does not synchronise with the device.

        Args:
            rope: the config of the rope.
            frequencies: the result of `frequencies`.
            positions: positions of the tokens, (B, T) or a scalar.

        Returns:
            (dim / 2,), or (B, 1, dim / 2) if they differ between rows.
        """
        return frequencies


@dataclass(frozen=True)
class ContextThresholds:
    """Sequence lengths, in tokens, at which the frequencies change.

    Args:
        switch: longer sequences use a second set of frequencies for all tokens, cached tokens included.
        moving: for longer sequences the frequencies depend on the length.
    """

    switch: int | None = None
    moving: int | None = None


def _lengths(positions: Tensor) -> Tensor:
    """The length of each row, its highest position plus 1: (B, 1, 1), or (1,) for a scalar."""
    return positions.amax(dim=-1, keepdim=True)[..., None] + 1


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Position interpolation: all frequencies are divided by `factor` (Chen et al., 2023)."""

    factor: float

    def __post_init__(self) -> None:
        check_numbers(self, "factor", positive=True)

    def frequencies(self, rope: RopeConfig, wavelengths: Tensor) -> Tensor:
        return 1.0 / wavelengths / self.factor


@dataclass(frozen=True)
class ProportionalScaling(RopeScaling):
    """Only the fraction `part` of the pairs rotate, at the frequencies of a whole rope divided by `factor`; the other
    pairs have frequency zero (Gemma 4). The number of pairs is rounded down."""

    part: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, "part", "factor", positive=True)
        if self.part > 1:
            raise ConfigError(f"part: must be a fraction of at most 1, got {self.part}")

    def frequencies(self, rope: RopeConfig, wavelengths: Tensor) -> Tensor:
        pairs = torch.arange(len(wavelengths), device=wavelengths.device)
        turning = pairs < int(self.part * rope.dim // 2)
        return torch.where(turning, 1.0 / wavelengths / self.factor, 0.0)


@dataclass(frozen=True)
class DynamicScaling(RopeScaling):
    """Dynamic NTK: beyond the original context L0 the base grows with the length L of the sequence.

    The base is theta * (factor * L / L0 - (factor - 1)) ** (dim / (dim - 2)), for dim above 2. L is the highest
    position of a row in this forward pass, plus 1. transformers instead keeps the base of the longest sequence so far,
    until a sequence within the original context comes. Both are equal as long as no longer sequence came before.

    Keys in a cache are not updated when the base grows, as in transformers.
    """

    factor: float
    original_context: int

    def __post_init__(self) -> None:
        check_numbers(self, "factor", positive=True)
        check_sizes(self, "original_context")

    @property
    def context_thresholds(self) -> ContextThresholds:
        return ContextThresholds(moving=self.original_context)

    def frequencies(self, rope: RopeConfig, wavelengths: Tensor) -> Tensor:
        return 1.0 / wavelengths

    def scaled_inv_freq(self, rope: RopeConfig, frequencies: Tensor, positions: Tensor) -> Tensor:
        length = _lengths(positions)
        growth = self.factor * length / self.original_context - (self.factor - 1)
        grown = 1.0 / _wavelengths(rope.theta * growth ** (rope.dim / (rope.dim - 2)), rope.dim, positions.device)
        return torch.where(length > self.original_context, grown, frequencies)


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1: long wavelengths are divided by `factor`, short ones are kept, with a ramp between.

    With w = 2 pi / inv_freq and L the original context: w > L / low is divided, w < L / high is kept, and others are
    blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        check_numbers(self, "factor", "low_freq_factor", "high_freq_factor", positive=True)
        check_sizes(self, "original_context")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(f"low_freq_factor: must be below high_freq_factor, {self.high_freq_factor}")

    def frequencies(self, rope: RopeConfig, wavelengths: Tensor) -> Tensor:
        inv_freq = 1.0 / wavelengths
        wavelength = 2 * math.pi / inv_freq
        ramp = self.original_context / wavelength - self.low_freq_factor
        keep = ramp / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - keep) * inv_freq / self.factor + keep * inv_freq
        scaled = torch.where(wavelength > self.original_context / self.low_freq_factor, inv_freq / self.factor, blended)
        return torch.where(wavelength < self.original_context / self.high_freq_factor, inv_freq, scaled)


@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN (Peng et al., 2023): channels with many turns in the original context are kept, channels with few turns are
    divided by `factor`, with a ramp between.

    The ramp runs from the channel with `beta_fast` turns to the channel with `beta_slow` turns; with `truncate`, both
    are rounded outwards to whole channels. Use it with `yarn_attention_factor`.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        check_numbers(self, "factor", "beta_fast", "beta_slow", positive=True)
        check_sizes(self, "original_context")

    def frequencies(self, rope: RopeConfig, wavelengths: Tensor) -> Tensor:
        low, high = (self._channel(rope, turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.dim - 1)
        if low == high:
            high += 0.001
        channels = torch.arange(len(wavelengths), dtype=torch.float32, device=wavelengths.device)
        keep = 1 - ((channels - low) / (high - low)).clamp(0, 1)
        return 1.0 / (self.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep

    def _channel(self, rope: RopeConfig, turns: float) -> float:
        """The (fractional) channel with this number of turns in the original context."""
        wavelength = self.original_context / (turns * 2 * math.pi)
        return rope.dim * math.log(wavelength) / (2 * math.log(rope.theta))


@dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE (Ding et al., 2024): each frequency is divided by its own factor.

    The factors are `long` for rows that go beyond the original context in this forward pass, and `short` for others,
    with dim / 2 factors each. Use it with `longrope_attention_factor`.

    Cached keys must be recomputed when a sequence grows beyond the original context; `generate` does it.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int

    @property
    def context_thresholds(self) -> ContextThresholds:
        return ContextThresholds(switch=self.original_context)

    def frequencies(self, rope: RopeConfig, wavelengths: Tensor) -> Tensor:
        """Frequencies for short and for long sequences, (2, dim / 2). ConfigError for another number of factors."""
        for name, factors in (("short", self.short), ("long", self.long)):
            if len(factors) != len(wavelengths):
                raise ConfigError(f"{name}: must have {len(wavelengths)} factors, dim / 2; got {len(factors)}")
        return 1.0 / (
            torch.tensor([self.short, self.long], dtype=torch.float32, device=wavelengths.device) * wavelengths
        )

    def scaled_inv_freq(self, rope: RopeConfig, frequencies: Tensor, positions: Tensor) -> Tensor:
        return torch.where(_lengths(positions) > self.original_context, frequencies[1], frequencies[0])


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1 for a factor above 1, otherwise 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """YaRN's attention factor: `yarn_mscale(factor)`; or, if neither `mscale` nor `mscale_all_dim` is 0 (DeepSeek), the
    ratio yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)."""
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor)


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """sqrt(1 + ln(factor) / ln(original_context)) for a factor (new / original context) above 1, otherwise 1."""
    return math.sqrt(1 + math.log(factor) / math.log(original_context)) if factor > 1 else 1.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of a layer.

    Args:
        dim: number of leading channels of each head that are rotated; an odd number is rounded up.
        theta: the base.
        scaling: change of the frequencies, or None.
        attention_factor: factor of cos and sin, so scores are multiplied by its square. A scaling does not set it:
            `yarn_attention_factor` and `longrope_attention_factor` compute the usual factors.
    """

    dim: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        check_sizes(self, "dim")
        check_numbers(self, "theta", "attention_factor", positive=True)

    @property
    def channels(self) -> int:
        """Number of rotated channels of a head; it is even."""
        return self.dim + self.dim % 2

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        """The part of the computation that does not depend on positions: see `RopeScaling.frequencies`."""
        wavelengths = _wavelengths(self.theta, self.dim, device)
        return 1.0 / wavelengths if self.scaling is None else self.scaling.frequencies(self, wavelengths)

    def inv_freq(self, frequencies: Tensor, positions: Tensor) -> Tensor:
        """The inverse frequencies of a forward pass over `positions`: see `RopeScaling.scaled_inv_freq`."""
        return frequencies if self.scaling is None else self.scaling.scaled_inv_freq(self, frequencies, positions)


def pairs_to_halves(x: Tensor, channels: int) -> Tensor:
    """Reorder channels that are rotated as neighbours for ops that rotate halves.

    Args:
        x: (..., D). Channels 2 i and 2 i + 1 move to i and channels / 2 + i.
        channels: number of leading channels that are rotated.
    """
    return torch.cat([x[..., :channels:2], x[..., 1:channels:2], x[..., channels:]], dim=-1)


def _wavelengths(theta: float | Tensor, dim: int, device: torch.device | str | None) -> Tensor:
    """theta ** (2 i / dim) for i < dim / 2: fp32 (dim / 2,)."""
    wavelengths: Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    return wavelengths


def inverse_frequencies(
    config: RopeConfig, device: torch.device | str | None = None, length: int | None = None
) -> Tensor:
    """Inverse frequencies theta ** (-2 i / dim) for i < dim / 2, scaled (Su et al., 2021).

    Args:
        config: config of the rope.
        device: device of the result.
        length: length of the sequence in tokens, for scalings that depend on it. Default: within the original context.

    Returns:
        fp32 (dim / 2,).
    """
    frequencies = config.frequencies(device)
    return config.inv_freq(frequencies, torch.tensor(length or 1, device=frequencies.device) - 1)


class RotaryEmbedding(nn.Module):
    """Computes tables of cos and sin. The buffer `frequencies` holds the part that does not depend on positions."""

    frequencies: Tensor

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("frequencies", self._made(torch.get_default_device()), persistent=False)

    def _made(self, device: torch.device) -> Tensor:
        # On the CPU, for the same bits on every device; arithmetic on the meta device would import half of torch.
        return self.config.frequencies("cpu").to(device)

    def init_weights(self, std: float = 0.0) -> None:
        """Recompute the frequencies."""
        self.frequencies = self._made(self.frequencies.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Frequencies stay fp32 when the model is cast, and are recomputed when it leaves the meta device.
        super()._apply(fn, recurse)
        self.frequencies = self._made(self.frequencies.device)
        return self

    @property
    def inv_freq(self) -> Tensor:
        """The inverse frequencies within the original context, fp32 (dim / 2,)."""
        position = torch.zeros((), dtype=torch.long, device=self.frequencies.device)
        return self.config.inv_freq(self.frequencies, position)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables of cos and sin, computed in fp32 and then cast to `dtype`, as in transformers.

        Scalings that depend on the length use the highest position of each row, over all documents packed in it.
        transformers uses the highest position of the batch.

        Args:
            positions: positions of the tokens, (B, T).
            dtype: dtype of the tables.

        Returns:
            cos and sin, (B, T, dim / 2) each.
        """
        # An elementwise product stays fp32 under autocast; a matmul would round the angles.
        angles = positions[..., None].float() * self.config.inv_freq(self.frequencies, positions)
        cos, sin, factor = angles.cos(), angles.sin(), self.config.attention_factor
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return as_dtype(cos, dtype), as_dtype(sin, dtype)
