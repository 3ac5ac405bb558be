"""Llama 2, 3, 3.1, 3.2 (text) and 3.3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligermodels.archs.family import Family
from ligermodels.archs.fields import Fields
from ligermodels.convert.weight_map import WeightMap, concat, grouped_qkv, rename
from ligermodels.errors import ConfigError
from ligermodels.layers import AttentionConfig, BlockConfig, HeadConfig, MLPConfig, NormConfig
from ligermodels.model import DecoderConfig


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The composed config of a `LlamaConfig` dict; fields left out take that class's defaults."""
    fields = Fields(config)
    fields.only("attention_dropout", 0, 0.0, default=0.0)
    hidden = fields.size("hidden_size", 4096)
    heads = fields.size("num_attention_heads", 32)
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"config.json: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    if config.get("head_dim") is None and hidden % heads:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} does not divide hidden_size {hidden}; set head_dim"
        )
    head_dim = fields.size("head_dim", hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim {head_dim} must be even for rotary positions")
    context = fields.size("max_position_embeddings", 2048)
    bias = fields.flag("attention_bias", False)
    norm = NormConfig(fields.number("rms_norm_eps", 1e-6))
    block = BlockConfig(
        attention=AttentionConfig(
            heads, kv_heads, head_dim, fields.rope(head_dim, context), bias=bias, output_bias=bias
        ),
        mlp=MLPConfig(
            fields.size("intermediate_size", 11008),
            fields.only("hidden_act", "silu", default="silu"),
            bias=fields.flag("mlp_bias", False),
        ),
        norm=norm,
    )
    return DecoderConfig(
        vocab_size=fields.size("vocab_size", 32000),
        hidden_size=hidden,
        blocks=(block,) * fields.size("num_hidden_layers", 32),
        norm=norm,
        head=HeadConfig(tied=fields.flag("tie_word_embeddings", False)),
        initializer_range=fields.number("initializer_range", 0.02),
        max_position_embeddings=context,
    )


def weight_map(config: DecoderConfig) -> WeightMap:
    """Native names to Llama's, for the layers and biases that `config` has."""
    entries = [rename("embed.weight", "model.embed_tokens.weight")]
    for i, block in enumerate(config.blocks):
        here, there = f"blocks.{i}", f"model.layers.{i}"
        attention = block.attention
        entries += [
            rename(f"{here}.attention_norm.weight", f"{there}.input_layernorm.weight"),
            rename(f"{here}.mlp_norm.weight", f"{there}.post_attention_layernorm.weight"),
        ]
        for part in ("weight", "bias") if attention.bias else ("weight",):
            q, k, v = (f"{there}.self_attn.{name}_proj.{part}" for name in "qkv")
            shape = (attention.num_kv_heads, attention.group_size, attention.head_dim)
            entries.append(grouped_qkv(f"{here}.attention.qkv.{part}", q, k, v, *shape))
        for part in ("weight", "bias") if attention.output_bias else ("weight",):
            entries.append(rename(f"{here}.attention.o.{part}", f"{there}.self_attn.o_proj.{part}"))
        for part in ("weight", "bias") if block.mlp.bias else ("weight",):
            gate_up = [f"{there}.mlp.{name}_proj.{part}" for name in ("gate", "up")]
            entries.append(concat(f"{here}.mlp.gate_up.{part}", gate_up, [block.mlp.size] * 2))
            entries.append(rename(f"{here}.mlp.down.{part}", f"{there}.mlp.down_proj.{part}"))
    entries.append(rename("norm.weight", "model.norm.weight"))
    aliases = {"lm_head.weight": "model.embed_tokens.weight"} if config.head.tied else {}
    if not config.head.tied:
        entries.append(rename("head.weight", "lm_head.weight"))
    return WeightMap(entries, ignored=[r"rotary_emb\.inv_freq$"], aliases=aliases)


FAMILY = Family("llama", decoder_config, weight_map)
