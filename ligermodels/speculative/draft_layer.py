"""The layers of draft heads: Hugging Face configs with the sizes of the model's layers, and the context of a pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import ConfigError, InputError, short
from ligermodels.layers import AttentionConfig, ForwardContext, MLPConfig, RotaryEmbedding
from ligermodels.layers.packing import packed_positions
from ligermodels.layers.tokens import Tokens, layout_without_padding
from ligermodels.models.decoder import DecoderConfig


def layer_like(config: DecoderConfig, kind: str, num_layers: int = 1) -> dict[str, Any]:
    """The config of a head's layers, with the sizes of a model's layers.

    Args:
        config: the model's config.
        kind: `model_type` of the layers, "llama" or "qwen3".
        num_layers: number of layers.

    Returns:
        A Hugging Face config. Where the model has no ordinary attention or gated feed-forward layer, the heads have 128
        channels (or all), and the feed-forward layer 3 times the hidden size. The layers rotate the halves of a head,
        as all "llama" and "qwen3" layers do, even if the model rotates pairs of neighbouring channels (Cohere 2). The
        rotary base is that of the model's last layer of full attention with rotary positions, or of its last layer with
        a sliding window and rotary positions if full attention has none; 10,000 for a model without rotary positions.
    """
    size = config.hidden_size
    parts = [part for block in config.blocks if block.mixer is not None for part in block.mixer.parts]
    mixers = [mixer for mixer in parts if isinstance(mixer, AttentionConfig)]
    sizes = [block.mlp.size for block in config.blocks if isinstance(block.mlp, MLPConfig)]
    mixer = _last_with_full_attention(mixers)
    rotated = _last_with_full_attention([mixer for mixer in mixers if mixer.rope is not None])
    head_dim = (128 if size % 128 == 0 else size) if mixer is None else mixer.head_dim
    heads = size // head_dim if mixer is None else mixer.num_heads
    theta = 10_000.0 if rotated is None or rotated.rope is None else rotated.rope.theta
    return {
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": size,
        "intermediate_size": sizes[-1] if sizes else 3 * size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if mixer is None else mixer.num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings or 4096,
        "rms_norm_eps": config.norm.eps,
        "initializer_range": config.initializer_range,
        "rope_theta": theta,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def _last_with_full_attention(mixers: Sequence[AttentionConfig]) -> AttentionConfig | None:
    """The last of `mixers` without a sliding window, or of all of them if each has one; None without mixers."""
    return next((mixer for mixer in reversed(mixers) if mixer.window is None), mixers[-1] if mixers else None)


def check_ascending(boundaries: Sequence[int]) -> None:
    """ConfigError unless `boundaries` are different layers in ascending order."""
    if not boundaries or list(boundaries) != sorted(set(boundaries)) or min(boundaries) < 0:
        raise ConfigError(f"boundaries: must be different layers in ascending order, got {tuple(boundaries)}")


def check_layers(name: str, layers: Any, kinds: Sequence[str]) -> None:
    """Checks the config of a head's layers.

    Args:
        name: name of the argument, for the message.
        layers: a Hugging Face config.
        kinds: the allowed values of its `model_type`.

    Raises:
        InputError: it is no dict, or of another kind.
    """
    found = layers.get("model_type") if isinstance(layers, Mapping) else layers
    if not isinstance(layers, Mapping) or found not in kinds:
        raise InputError(
            f"{name}: must be a Hugging Face config, a dict with model_type {' or '.join(kinds)}; got {short(found)}"
        )


def following(x: Tensor, ahead: int) -> Tensor:
    """x (B, T, ...) at t + `ahead`, which may be negative, and zeros (False) beyond the ends of the row."""
    length = x.shape[1]
    ahead = max(min(ahead, length), -length)
    kept = x[:, ahead:] if ahead >= 0 else x[:, :ahead]
    return F.pad(kept, (*(0, 0) * (x.ndim - 2), max(-ahead, 0), max(ahead, 0)))


def head_context(
    ropes: nn.ModuleList, embeds: Tensor, dtype: torch.dtype, position_ids: Tensor | None = None, **context: Any
) -> tuple[Tokens, ForwardContext]:
    """The layout of a pass of a head over (B, T) tokens, and its context.

    Args:
        ropes: the rotary embeddings of the head's layers, each a `RotaryEmbedding`.
        embeds: (B, T, H), the embeddings of the tokens.
        dtype: dtype of the rotary tables.
        position_ids: long (B or 1, T); by default counted from 0 in each row or document.
        context: `cu_seqlens`, `seq_lens`, `cache_seqlens` and `tree` of `ForwardContext`.
    """
    shape, bounds = (embeds.shape[0], embeds.shape[1]), context.get("cu_seqlens")
    tokens = layout_without_padding(shape, bounds)
    if position_ids is not None:
        positions = tokens.take(position_ids) if position_ids.shape[0] == shape[0] else position_ids
    elif bounds is not None:
        positions = packed_positions(bounds, shape[0] * shape[1])
    else:
        positions = torch.arange(shape[1], device=embeds.device)[None]
    tables = {rope.config: rope(positions, dtype) for rope in cast(Iterable[RotaryEmbedding], ropes)}
    return tokens, ForwardContext(rope_tables=tables, positions=positions, **context)
