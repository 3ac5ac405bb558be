"""Compose the rotary embedding of a config: a reader for each `rope_type`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ligermodels.errors import ConfigError, ConfigWarning, warn_caller
from ligermodels.layers import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
    inverse_frequencies,
    longrope_attention_factor,
    yarn_attention_factor,
)

if TYPE_CHECKING:
    from ligermodels.archs.fields import Fields

KNOWN = {
    "rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor",
    "mscale", "mscale_all_dim", "truncate", "finetuned",
}  # fmt: skip
"""Settings that are read, or that change nothing: `finetuned`, and settings for other rope types."""


def read_rope(settings: Fields, head_dim: int, context: int, partial: bool) -> RopeConfig:
    """The RopeConfig of a config's rotary settings.

    Args:
        settings: the settings, from `convert.rope_settings.rope_parameters`.
        head_dim: channels of a head.
        context: context length, the default of `original_max_position_embeddings`.
        partial: whether the family can rotate a part of each head only.

    Raises:
        ConfigError: a setting is missing, bad or not implemented; the message names it.
    """
    settings.ignore(*KNOWN)
    settings.check_unread()
    rope_type = settings.choices("rope_type", *READERS, default="default")
    if rope_type == "default" and settings.number("factor", 1.0) != 1:
        message = f"{settings.where}: factor has no effect without a rope_type that scales, such as 'linear' or 'yarn'"
        warn_caller(message, ConfigWarning)
    theta = settings.number("rope_theta", positive=True)
    if theta <= 1:
        raise ConfigError(f"{settings.where}: rope_theta must be above 1, got {theta}")
    part = settings.number("partial_rotary_factor", 1.0, positive=True)
    part = 1.0 if rope_type == "proportional" else part  # here the factor is the part of frequencies above 0
    if part != 1 and not partial:
        raise ConfigError(f"{settings.where}: partial_rotary_factor = {part} is not implemented for this model_type")
    dim = int(head_dim * part)
    if not 0 < dim + dim % 2 <= head_dim:
        raise ConfigError(
            f"{settings.where}: partial_rotary_factor {part} of head_dim {head_dim} gives {dim} channels to rotate; "
            f"it must be at least 1, and an even number within the head"
        )
    try:
        rope = READERS[rope_type](settings, RopeConfig(dim, theta), context)
        frequencies = inverse_frequencies(rope, "cpu")
    except (ArithmeticError, RuntimeError) as error:
        raise ConfigError(f"{settings.where}: {rope_type} rope cannot be computed: {error}") from None
    turning = frequencies > 0 if rope_type != "proportional" else frequencies >= 0
    if not (frequencies.isfinite() & turning).all():
        raise ConfigError(f"{settings.where}: {rope_type} rope gives frequencies that are not finite and above 0")
    return rope


def _linear(settings: Fields, plain: RopeConfig, context: int) -> RopeConfig:
    return replace(plain, scaling=LinearScaling(settings.number("factor", positive=True)))


def _proportional(settings: Fields, plain: RopeConfig, context: int) -> RopeConfig:
    part = settings.number("partial_rotary_factor", 1.0, positive=True)
    if part > 1:
        raise ConfigError(f"{settings.where}: partial_rotary_factor must be at most 1, got {part}")
    return replace(plain, scaling=ProportionalScaling(part, settings.number("factor", 1.0, positive=True)))


def _dynamic(settings: Fields, plain: RopeConfig, context: int) -> RopeConfig:
    if plain.dim <= 2:
        raise ConfigError(f"{settings.where}: dynamic rope needs more than 2 rotated channels, got {plain.dim}")
    # As in transformers, max_position_embeddings is the original context, also if the settings name another.
    return replace(plain, scaling=DynamicScaling(settings.number("factor", positive=True), context))


def _llama3(settings: Fields, plain: RopeConfig, context: int) -> RopeConfig:
    low, high = (settings.number(f"{end}_freq_factor", positive=True) for end in ("low", "high"))
    if high <= low:
        raise ConfigError(f"{settings.where}: high_freq_factor must be above low_freq_factor")
    scaling = Llama3Scaling(
        factor=settings.number("factor", positive=True),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=settings.size("original_max_position_embeddings", context),
    )
    return replace(plain, scaling=scaling)


def _yarn(settings: Fields, plain: RopeConfig, context: int) -> RopeConfig:
    if plain.dim % 2:
        # transformers' ramp is then a channel shorter than the frequencies: an error, or for 3 channels a ramp of one.
        raise ConfigError(
            f"{settings.where}: YaRN needs an even number of rotated channels, got {plain.dim} by head_dim and "
            "partial_rotary_factor"
        )
    scaling = YarnScaling(
        factor=settings.number("factor", positive=True),
        original_context=settings.size("original_max_position_embeddings", context),
        beta_fast=settings.number("beta_fast", 32.0, positive=True),
        beta_slow=settings.number("beta_slow", 1.0, positive=True),
        truncate=settings.flag("truncate", True),
    )
    if scaling.beta_fast < scaling.beta_slow:
        raise ConfigError(f"{settings.where}: beta_fast must not be below beta_slow")
    mscales = [settings.number(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    if min(mscales) < 0:
        raise ConfigError(f"{settings.where}: mscale and mscale_all_dim must not be below 0")
    usual = yarn_attention_factor(scaling.factor, *mscales)
    return replace(plain, scaling=scaling, attention_factor=settings.number("attention_factor", usual, positive=True))


def _longrope(settings: Fields, plain: RopeConfig, context: int) -> RopeConfig:
    original = settings.size("original_max_position_embeddings", context)
    if original == 1:
        raise ConfigError(f"{settings.where}: original_max_position_embeddings must be above 1")
    count, reason = (plain.dim + 1) // 2, f", for {plain.dim} channels by head_dim and partial_rotary_factor"
    scaling = LongRopeScaling(
        settings.numbers("short_factor", count, positive=True, reason=reason),
        settings.numbers("long_factor", count, positive=True, reason=reason),
        original,
    )
    usual = longrope_attention_factor(settings.number("factor", context / original, positive=True), original)
    return replace(plain, scaling=scaling, attention_factor=settings.number("attention_factor", usual, positive=True))


READERS: dict[str, Callable[[Fields, RopeConfig, int], RopeConfig]] = {
    "default": lambda settings, plain, context: plain,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "deepseek_yarn": _yarn,
    "longrope": _longrope,
}
"""Rope type -> its reader. Sarvam's configs call YaRN `deepseek_yarn`. Exports keep the name: servers read it to scale
the softmax of these models."""
