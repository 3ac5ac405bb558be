"""Which cache of vLLM each mixer of a native model needs, or why vLLM cannot run the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ligermodels.errors import ConfigError
from ligermodels.layers import (
    AttentionConfig,
    GatedDeltaNetConfig,
    LatentAttentionConfig,
    LayerConfig,
    Mamba2Config,
    ParallelMixersConfig,
    RopeConfig,
    ShortConvConfig,
)
from ligermodels.models.decoder import DecoderConfig

RECURRENT = GatedDeltaNetConfig, Mamba2Config, ShortConvConfig


@dataclass(frozen=True)
class AttentionPlan:
    """The attention of one mixer, in vLLM's terms.

    Args:
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: channels of a query or key.
        value_dim: channels of a value.
        scale: factor of the scores.
        window: number of tokens that a token attends to, itself included; None for all.
        softcap: cap of the scores, or None.
        kv_from: name of the mixer whose keys and values this one attends to; None if it has keys and values of its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    kv_from: str | None = None

    @property
    def cache_dim(self) -> int:
        """Channels of a key and of a value in the cache, which has the same number for both."""
        return max(self.head_dim, self.value_dim)


@dataclass(frozen=True)
class StatePlan:
    """The state of one request in a recurrent mixer.

    Args:
        shapes: shape of each tensor of the state.
        dtypes: dtype of each tensor.
        make_state: makes the `state` of the mixer's `forward` of such tensors, with a dimension of requests before.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    make_state: Callable[..., Any]


def plan_mixers(config: DecoderConfig, max_length: int, dtype: torch.dtype) -> dict[str, AttentionPlan | StatePlan]:
    """The attention layers and states that vLLM has to provide for a model.

    Args:
        config: config of the model.
        max_length: tokens of the longest request (vLLM's `max_model_len`).
        dtype: dtype of the model's parameters.

    Returns:
        A plan for each mixer, by its name in the decoder, such as "blocks.0.mixer".

    Raises:
        ConfigError: a mixer is neither attention nor one of `RECURRENT`, or a rotary scaling changes within
            `max_length` tokens; the message names it.
    """
    for block in config.blocks:
        for rope in block.ropes:
            _check_rope(rope, max_length)
    return {name: _plan(name, mixer, config.hidden_size, dtype, max_length) for name, mixer in _mixers(config)}


def _mixers(config: DecoderConfig) -> Iterator[tuple[str, LayerConfig]]:
    """The names and configs of all mixers, with mixers side by side one by one."""
    for number, block in enumerate(config.blocks):
        name = f"blocks.{number}.mixer"
        if isinstance(block.mixer, ParallelMixersConfig):
            yield from ((f"{name}.mixers.{i}", mixer) for i, mixer in enumerate(block.mixer.mixers))
        elif block.mixer is not None:
            yield name, block.mixer


def _plan(
    name: str, mixer: LayerConfig, hidden_size: int, dtype: torch.dtype, max_length: int
) -> AttentionPlan | StatePlan:
    if isinstance(mixer, AttentionConfig):
        if mixer.chunk is not None and max_length > mixer.chunk:
            raise ConfigError(
                f"{name}: chunk (attention_chunk_size) = {mixer.chunk} is not implemented for longer requests; give "
                f"--max-model-len {mixer.chunk} or less (it is {max_length})"
            )
        return _of_heads(mixer)
    if isinstance(mixer, LatentAttentionConfig):
        return _of_latents(mixer)
    if isinstance(mixer, RECURRENT):
        options: dict[str, Any] = {"hidden_size": hidden_size, "dtype": dtype, "device": torch.device("meta")}
        state = mixer.new_state(1, 1, 1, **options).layer(0)
        tensors = state.tensors
        return StatePlan(tuple(tuple(x.shape[1:]) for x in tensors), tuple(x.dtype for x in tensors), type(state))
    raise ConfigError(
        f"{name}: {type(mixer).__name__.removesuffix('Config')} does not run inside vLLM, where softmax attention, "
        f"{', '.join(kind.__name__.removesuffix('Config') for kind in RECURRENT)} are implemented; leave out "
        "--hf-overrides to serve the checkpoint with vLLM's own model"
    )


def _of_heads(mixer: AttentionConfig) -> AttentionPlan:
    scale = mixer.head_dim**-0.5 if mixer.softmax_scale is None else mixer.softmax_scale
    kv_from = None if mixer.state_from is None else f"blocks.{mixer.state_from}.mixer"
    return AttentionPlan(
        mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.head_dim, scale,
        window=mixer.window, softcap=mixer.softcap, kv_from=kv_from,
    )  # fmt: skip


def _of_latents(mixer: LatentAttentionConfig) -> AttentionPlan:
    """All heads have keys and values of their own: the cache holds these, not the latents."""
    scale = mixer.key_dim**-0.5 if mixer.softmax_scale is None else mixer.softmax_scale
    return AttentionPlan(mixer.num_heads, mixer.num_heads, mixer.key_dim, mixer.value_dim, scale)


def _check_rope(rope: RopeConfig, max_length: int) -> None:
    """ConfigError if frequencies change within requests of `max_length` tokens.

    Keys in vLLM's cache would be rotated by other frequencies than later queries, and one batch holds requests of
    several lengths.
    """
    if rope.scaling is None:
        return
    thresholds = rope.scaling.context_thresholds
    for limit in (thresholds.switch, thresholds.moving):
        if limit is not None and max_length > limit:
            raise ConfigError(
                f"rope: {type(rope.scaling).__name__} changes its frequencies beyond {limit} tokens, and keys in "
                f"vLLM's cache cannot follow; give --max-model-len {limit} or less (it is {max_length})"
            )
