"""What the families share: a decoder from the fields that most Hugging Face configs have.

A family's file states its defaults and what differs; nothing here knows which family it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ligermodels.archs.fields import Fields
from ligermodels.errors import ConfigError
from ligermodels.layers import AttentionConfig, BlockConfig, HeadConfig, LayerConfig, MLPConfig, NormConfig
from ligermodels.models.decoder import DecoderConfig

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}
"""Hugging Face's names of activations, and ours."""


def gate_activation(fields: Fields, name: str = "hidden_act") -> str:
    """The activation of gates that field `name` says, by our name; ConfigError naming it if it is not implemented."""
    return ACTIVATIONS[fields.choices(name, *ACTIVATIONS, default=None)]


def decoder(
    fields: Fields,
    *,
    activation: str = "hidden_act",
    mlp_bias: bool = False,
    default_theta: float | Mapping[str, Any] = 10_000.0,
    partial_rotary: bool = False,
    norm: NormConfig | None = None,
    attention: Callable[[int, AttentionConfig], Mapping[str, Any]] = lambda layer, common: {},
    mlp: Callable[[int, MLPConfig], LayerConfig] = lambda layer, common: common,
    feed_forward: Callable[[int], LayerConfig] | None = None,
    mixer: Callable[[int, AttentionConfig], LayerConfig] = lambda layer, common: common,
    block: Mapping[str, Any] | None = None,
    head: Mapping[str, Any] | None = None,
    **more: Any,
) -> DecoderConfig:
    """The DecoderConfig of a config whose defaults are filled in.

    Args:
        fields: the config.
        activation: name of the field that holds the gate's activation.
        mlp_bias: whether feed-forward projections have biases.
        default_theta: the rotary base where the config names none.
        partial_rotary: whether the family can rotate only a part of each head.
        norm: by default RMSNorm as in Llama, with `rms_norm_eps`.
        attention: (layer, what all layers have) -> the fields of AttentionConfig that this layer has otherwise.
        mlp: (layer, what all layers have) -> the feed-forward layer of this layer.
        feed_forward: the same of the layer alone, in families without gated layers of `intermediate_size` channels;
            then `activation`, `mlp_bias` and `mlp` are not used.
        mixer: (layer, its attention) -> the token mixer of this layer.
        block, head, more: further fields of BlockConfig, HeadConfig and DecoderConfig.

    Raises ConfigError naming the field that is missing, bad or not implemented.
    """
    fields.choices("attention_dropout", 0, 0.0, default=0.0)
    fields.check_token("eos_token_id", several=True)
    fields.check_token("pad_token_id")
    vocab_size, pad = fields.size("vocab_size"), fields.config.get("pad_token_id")
    hidden, layers = fields.size("hidden_size"), fields.size("num_hidden_layers")
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"{fields.where}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    if fields.config.get("head_dim") is None and hidden % heads:
        raise ConfigError(
            f"{fields.where}: hidden_size {hidden} is no multiple of num_attention_heads {heads}; set head_dim"
        )
    head_dim = fields.size("head_dim", hidden // heads)
    if head_dim % 2:
        how = "" if fields.config.get("head_dim") else " (hidden_size / num_attention_heads)"
        raise ConfigError(f"{fields.where}: head_dim {head_dim}{how} must be even for rotary positions")
    context = fields.size("max_position_embeddings")
    norm = norm or NormConfig(fields.number("rms_norm_eps", negative=False))
    common = AttentionConfig(heads, kv_heads, head_dim, rope=None)
    if feed_forward is None:
        gated = MLPConfig(fields.size("intermediate_size"), gate_activation(fields, activation), mlp_bias)
        feed_forward = partial(lambda common, layer: mlp(layer, common), gated)
    differing = [dict(attention(layer, common)) for layer in range(layers)]
    if any("rope" not in fields_ for fields_ in differing):
        common = replace(common, rope=fields.rope(head_dim, context, default_theta, partial=partial_rotary))
    composed = DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        blocks=tuple(
            BlockConfig(mixer(layer, replace(common, **differing[layer])), feed_forward(layer), norm, **(block or {}))
            for layer in range(layers)
        ),
        norm=norm,
        head=HeadConfig(tied=fields.flag("tie_word_embeddings", False), **(head or {})),
        # As torch counts a negative index; ids beyond the vocabulary occur, and mean none.
        padding_idx=None if pad is None or not -vocab_size <= pad < vocab_size else pad % vocab_size,
        initializer_range=fields.number("initializer_range", 0.02, negative=False),
        max_position_embeddings=context,
        **more,
    )
    fields.check_unread()
    return composed


STACKED_EXPERTS = {
    "experts.router": "mlp.gate.weight",
    "experts.gate_up": "mlp.experts.gate_up_proj",
    "experts.down": "mlp.experts.down_proj",
}
"""Names of the parts of a mixture whose experts are one tensor, as transformers 5 may save them."""
