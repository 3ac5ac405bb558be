"""Compose a decoder from the fields that most Hugging Face configs have.

A family's file states its defaults and its differences, with the names of this file. This file knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from ligermodels.archs.fields import Fields
from ligermodels.errors import ConfigError
from ligermodels.layers import AttentionConfig, BlockConfig, HeadConfig, LayerConfig, MLPConfig, NormConfig
from ligermodels.models.decoder import DecoderConfig
from ligermodels.models.families import Family

__all__ = ["STACKED_EXPERTS", "Config", "DecoderConfig", "Family", "Fields", "decoder", "gate_activation"]

Config: TypeAlias = Mapping[str, Any]
"""A Hugging Face config, as in config.json."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}
"""Hugging Face's name of an activation -> our name."""


def gate_activation(fields: Fields, name: str = "hidden_act") -> str:
    """Our name of the activation in field `name`; ConfigError, naming the field, if it is not implemented."""
    return ACTIVATIONS[fields.choices(name, *ACTIVATIONS, default=None)]


def decoder(
    fields: Fields,
    *,
    activation: str = "hidden_act",
    mlp_bias: bool = False,
    default_theta: float | Mapping[str, Any] = 10_000.0,
    partial_rotary: bool = False,
    norm: NormConfig | None = None,
    final_norm: NormConfig | None = None,
    attention: Callable[[int, AttentionConfig], Mapping[str, Any]] = lambda layer, common: {},
    mlp: Callable[[int, MLPConfig], LayerConfig] = lambda layer, common: common,
    feed_forward: Callable[[int], LayerConfig | None] | None = None,
    mixer: Callable[[int, AttentionConfig], LayerConfig | None] = lambda layer, common: common,
    block: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None = None,
    head: Mapping[str, Any] | None = None,
    **more: Any,
) -> DecoderConfig:
    """The DecoderConfig that a Hugging Face config describes.

    Args:
        fields: the config, with the family's defaults.
        activation: name of the field with the activation of the gate.
        mlp_bias: whether feed-forward projections have biases.
        default_theta: rotary base of a config that names none, or a dict as in `rope_settings.rope_parameters`.
        partial_rotary: whether the family can rotate a part of each head only.
        norm: config of the norms; by default Llama's RMSNorm with `rms_norm_eps`.
        final_norm: config of the final norm, if it differs from `norm`.
        attention: function (layer number, common AttentionConfig) -> fields in which this layer differs.
        mlp: function (layer number, common MLPConfig) -> config of this layer's feed-forward layer.
        feed_forward: function (layer number) -> config of this layer's feed-forward layer, for families without gated
            layers of `intermediate_size` channels; None for a layer without one. `activation`, `mlp_bias` and `mlp` are
            then not used.
        mixer: function (layer number, its AttentionConfig) -> config of this layer's token mixer; None for a layer
            without one.
        block: further fields of all BlockConfigs, or a function (layer number) -> such fields of this layer's.
        head: further fields of HeadConfig.
        more: further fields of DecoderConfig.

    Raises:
        ConfigError: a field is missing, bad or not implemented; the message names it.
    """
    fields.check_token("eos_token_id", several=True)
    fields.check_token("pad_token_id")
    vocab_size, pad = fields.size("vocab_size"), fields.config.get("pad_token_id")
    hidden, layers = fields.size("hidden_size"), fields.size("num_hidden_layers")
    heads, kv_heads, head_dim = _heads(fields, hidden)
    context = fields.size("max_position_embeddings")
    norm = norm or NormConfig(fields.number("rms_norm_eps", negative=False))
    common = AttentionConfig(heads, kv_heads, head_dim, rope=None)
    if feed_forward is None:
        gated = MLPConfig(fields.size("intermediate_size"), gate_activation(fields, activation), mlp_bias)
        feed_forward = partial(lambda common, layer: mlp(layer, common), gated)
    differences = [dict(attention(layer, common)) for layer in range(layers)]
    if any("rope" not in difference for difference in differences):
        common = replace(common, rope=fields.rope(head_dim, context, default_theta, partial=partial_rotary))
    further = block if callable(block) else lambda layer: block or {}
    composed = DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        blocks=tuple(
            BlockConfig(
                mixer(layer, replace(common, **differences[layer])), feed_forward(layer), norm, **further(layer)
            )
            for layer in range(layers)
        ),
        norm=final_norm or norm,
        head=HeadConfig(tied=fields.flag("tie_word_embeddings", False), **(head or {})),
        # A negative id counts from the end, as in torch. Published configs also have ids beyond the vocabulary.
        padding_idx=None if pad is None or not -vocab_size <= pad < vocab_size else pad % vocab_size,
        initializer_range=fields.number("initializer_range", 0.02, negative=False),
        max_position_embeddings=context,
        dropout=fields.dropout(),
        **more,
    )
    fields.check_unread()
    return composed


def _heads(fields: Fields, hidden: int) -> tuple[int, int, int]:
    """Query heads, key/value heads and channels of a head."""
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"{fields.where}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    is_stated = fields.config.get("head_dim") is not None
    if not is_stated and hidden % heads:
        raise ConfigError(
            f"{fields.where}: hidden_size {hidden} is no multiple of num_attention_heads {heads}; set head_dim"
        )
    head_dim = fields.size("head_dim", hidden // heads)
    if head_dim % 2:
        source = "" if is_stated else " (hidden_size / num_attention_heads)"
        raise ConfigError(f"{fields.where}: head_dim {head_dim}{source} must be even for rotary positions")
    return heads, kv_heads, head_dim


STACKED_EXPERTS = {
    "experts.router": "mlp.gate.weight",
    "experts.gate_up": "mlp.experts.gate_up_proj",
    "experts.down": "mlp.experts.down_proj",
}
"""Part of a mixture -> name of its tensor, where the experts of a layer are one tensor (transformers 5)."""
