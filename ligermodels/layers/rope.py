"""Rotary position embedding: inverse frequencies with their scalings, and the cos/sin tables of a forward pass."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.ops.runtime.tensors import as_dtype


class RopeScaling(ABC):
    """How frequencies depart from the plain ones. Subclasses are frozen dataclasses: a RopeConfig is a dict key."""

    @property
    def context_thresholds(self) -> ContextThresholds:
        """Where frequencies follow the length of a sequence: here nowhere."""
        return ContextThresholds()

    @abstractmethod
    def frequencies(self, rope: RopeConfig, wavelengths: Tensor) -> Tensor:
        """What does not depend on positions, fp32 (..., dim / 2), from the plain `wavelengths` (tokens per radian)."""

    def scaled_inv_freq(self, rope: RopeConfig, frequencies: Tensor, positions: Tensor) -> Tensor:
        """The inverse frequencies, (dim / 2,) or (B, 1, dim / 2), of a forward pass over `positions`, (B, T) or a
        scalar: here the same for all.

        Runs on the device alone, with no look at a value from the host.
        """
        return frequencies


@dataclass(frozen=True)
class ContextThresholds:
    """Lengths, in tokens, up to which one set of frequencies serves: past `switch` it is another, of all tokens, those
    in a cache too; past `moving` another for each length."""

    switch: int | None = None
    moving: int | None = None


def _lengths(positions: Tensor) -> Tensor:
    """The length of each row: its highest position, plus 1; (B, 1, 1), or (1,) of a scalar."""
    return positions.amax(dim=-1, keepdim=True)[..., None] + 1


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Position interpolation: all frequencies divided by `factor` (Chen et al., 2023)."""

    factor: float

    def frequencies(self, rope: RopeConfig, wavelengths: Tensor) -> Tensor:
        return 1.0 / wavelengths / self.factor


@dataclass(frozen=True)
class ProportionalScaling(RopeScaling):
    """Only the first `part` of the pairs turn, with the frequencies of a whole rope divided by `factor`; those of the
    others are zero (Gemma 4). `part` counts down to a whole pair."""

    part: float
    factor: float = 1.0

    def frequencies(self, rope: RopeConfig, wavelengths: Tensor) -> Tensor:
        pairs = torch.arange(len(wavelengths), device=wavelengths.device)
        turning = pairs < int(self.part * rope.dim // 2)
        return torch.where(turning, 1.0 / wavelengths / self.factor, 0.0)


@dataclass(frozen=True)
class DynamicScaling(RopeScaling):
    """Dynamic NTK: past the original context the base grows with the length L of the sequence.

    theta * (factor * L / L0 - (factor - 1)) ** (dim / (dim - 2)), for dim above 2. L is the highest position of a row
    in the forward pass, plus 1: it has no memory, where transformers keeps the base of the longest sequence seen until
    one shorter than the original context comes. The two agree on a model that has seen no longer one.

    Keys in a cache stay as they were when the base grows on, as in transformers.
    """

    factor: float
    original_context: int

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
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between.

    With w = 2 pi / inv_freq and L the original context: w > L / low -> / factor; w < L / high -> kept; else blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

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
    """YaRN (Peng et al., 2023): channels that turn often in the original context are kept, those that turn little are
    divided by `factor`, a ramp between.

    The ramp runs from the channel with `beta_fast` turns to that with `beta_slow`, both moved outwards to whole
    channels when `truncate`. Goes with `yarn_attention_factor`.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

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
        """The channel, fractional, that turns so many times in the original context."""
        wavelength = self.original_context / (turns * 2 * math.pi)
        return rope.dim * math.log(wavelength) / (2 * math.log(rope.theta))


@dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE (Ding et al., 2024): each frequency divided by its own factor, of `long` where a row of the forward pass
    goes past the original context, else of `short` (dim / 2 each). Goes with `longrope_attention_factor`.

    Keys in a cache have to be computed anew when the sequence outgrows the original context: `generate` does.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int

    @property
    def context_thresholds(self) -> ContextThresholds:
        return ContextThresholds(switch=self.original_context)

    def frequencies(self, rope: RopeConfig, wavelengths: Tensor) -> Tensor:
        """(2, dim / 2): short, long."""
        return 1.0 / (
            torch.tensor([self.short, self.long], dtype=torch.float32, device=wavelengths.device) * wavelengths
        )

    def scaled_inv_freq(self, rope: RopeConfig, frequencies: Tensor, positions: Tensor) -> Tensor:
        return torch.where(_lengths(positions) > self.original_context, frequencies[1], frequencies[0])


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1, for a factor above 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """`yarn_mscale` of 1, or the ratio of those of both mscales when neither is 0 (DeepSeek)."""
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor)


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """sqrt(1 + ln(factor) / ln(original_context)), for a factor (new context / original) above 1."""
    return math.sqrt(1 + math.log(factor) / math.log(original_context)) if factor > 1 else 1.0


@dataclass(frozen=True)
class RopeConfig:
    """The first `dim` channels of each head are rotated (an odd `dim` counts as one more), with base `theta`.

    `scaling` changes the frequencies; `attention_factor` multiplies cos and sin, hence scores by its square. A scaling
    does not bring its factor along: `yarn_attention_factor` and `longrope_attention_factor` give the customary ones.
    """

    dim: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    attention_factor: float = 1.0

    @property
    def channels(self) -> int:
        """How many channels of a head are rotated: an even number."""
        return self.dim + self.dim % 2

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        """What does not depend on positions: see `RopeScaling.frequencies`."""
        wavelengths = _wavelengths(self.theta, self.dim, device)
        return 1.0 / wavelengths if self.scaling is None else self.scaling.frequencies(self, wavelengths)

    def inv_freq(self, frequencies: Tensor, positions: Tensor) -> Tensor:
        """The inverse frequencies of a forward pass over `positions`: see `RopeScaling.scaled_inv_freq`."""
        return frequencies if self.scaling is None else self.scaling.scaled_inv_freq(self, frequencies, positions)


def pairs_to_halves(x: Tensor, channels: int) -> Tensor:
    """x (..., D), of which channels 2 i and 2 i + 1 of the first `channels` are to be rotated together: these are
    moved to i and channels / 2 + i, where the ops expect them."""
    return torch.cat([x[..., :channels:2], x[..., 1:channels:2], x[..., channels:]], dim=-1)


def _wavelengths(theta: float | Tensor, dim: int, device: torch.device | str | None) -> Tensor:
    """theta ** (2 i / dim) for i < dim / 2: fp32 (dim / 2,)."""
    wavelengths: Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    return wavelengths


def inverse_frequencies(
    config: RopeConfig, device: torch.device | str | None = None, length: int | None = None
) -> Tensor:
    """theta ** (-2 i / dim) for i < dim / 2, scaled: fp32 (dim / 2,) (Su et al., 2021).

    `length` in tokens matters to scalings that follow it; by default, one within the original context.
    """
    frequencies = config.frequencies(device)
    return config.inv_freq(frequencies, torch.tensor(length or 1, device=frequencies.device) - 1)


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin for given positions; `frequencies` is what the scaling computes ahead."""

    frequencies: Tensor

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("frequencies", self._made(torch.get_default_device()), persistent=False)

    def _made(self, device: torch.device) -> Tensor:
        # On the CPU first: the same bits on every device; and arithmetic on the meta device would import half of torch.
        return self.config.frequencies("cpu").to(device)

    def init_weights(self, std: float = 0.0) -> None:
        """Computes the frequencies."""
        self.frequencies = self._made(self.frequencies.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Frequencies stay fp32 whatever the model is cast to, and are made afresh on leaving the meta device.
        super()._apply(fn, recurse)
        self.frequencies = self._made(self.frequencies.device)
        return self

    @property
    def inv_freq(self) -> Tensor:
        """The inverse frequencies within the original context, fp32 (dim / 2,)."""
        position = torch.zeros((), dtype=torch.long, device=self.frequencies.device)
        return self.config.inv_freq(self.frequencies, position)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions (B, T) -> cos, sin (B, T, dim / 2): computed in fp32, then cast to `dtype` as HF models do.

        A scaling that follows the length takes the highest position of a row for it, over all documents packed there: a
        row does not depend on others, where transformers takes the highest of all.
        """
        # Under autocast a matmul would round the angles; a product is elementwise and stays fp32.
        angles = positions[..., None].float() * self.config.inv_freq(self.frequencies, positions)
        cos, sin, factor = angles.cos(), angles.sin(), self.config.attention_factor
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return as_dtype(cos, dtype), as_dtype(sin, dtype)
