"""Which attention layer of vLLM each block of a native model needs, or why vLLM cannot run the model."""

from __future__ import annotations

from dataclasses import dataclass

from ligermodels.errors import ConfigError
from ligermodels.layers import AttentionConfig, LatentAttentionConfig, RopeConfig
from ligermodels.models.decoder import DecoderConfig


@dataclass(frozen=True)
class AttentionPlan:
    """The attention of one block, in vLLM's terms.

    Args:
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: channels of a query or key.
        value_dim: channels of a value.
        scale: factor of the scores.
        window: number of tokens that a token attends to, itself included; None for all.
        softcap: cap of the scores, or None.
        kv_from: number of the block whose keys and values this one attends to; None if the block has keys and values of
            its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    kv_from: int | None = None

    @property
    def cache_dim(self) -> int:
        """Channels of a key and of a value in the cache, which has the same number for both."""
        return max(self.head_dim, self.value_dim)


def plan_attention(config: DecoderConfig, max_length: int) -> dict[int, AttentionPlan]:
    """The attention layers that vLLM has to provide for a model.

    Args:
        config: config of the model.
        max_length: tokens of the longest request (vLLM's `max_model_len`).

    Returns:
        A plan for each block that has a token mixer, by the number of the block.

    Raises:
        ConfigError: a mixer is not softmax attention, or a rotary scaling changes within `max_length` tokens; the
            message names it.
    """
    plans = {}
    for number, block in enumerate(config.blocks):
        mixer = block.mixer
        for rope in block.ropes:
            _check_rope(rope, max_length)
        if mixer is None:
            continue
        if not isinstance(mixer, AttentionConfig | LatentAttentionConfig):
            name = type(mixer).__name__.removesuffix("Config")
            raise ConfigError(
                f"blocks[{number}].mixer: {name} does not run inside vLLM, where only softmax attention is "
                "implemented; leave out --hf-overrides to serve the checkpoint with vLLM's own model"
            )
        if isinstance(mixer, AttentionConfig) and mixer.chunk is not None and max_length > mixer.chunk:
            raise ConfigError(
                f"blocks[{number}].mixer: chunk (attention_chunk_size) = {mixer.chunk} is not implemented for longer "
                f"requests; give --max-model-len {mixer.chunk} or less (it is {max_length})"
            )
        plans[number] = _of_latents(mixer) if isinstance(mixer, LatentAttentionConfig) else _of_heads(mixer)
    if config.token_scale != 1.0:
        raise ConfigError("token_scale: vLLM may embed tokens itself, without this factor")
    return plans


def _of_heads(mixer: AttentionConfig) -> AttentionPlan:
    scale = mixer.head_dim**-0.5 if mixer.softmax_scale is None else mixer.softmax_scale
    return AttentionPlan(
        mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.head_dim, scale,
        window=mixer.window, softcap=mixer.softcap, kv_from=mixer.state_from,
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
