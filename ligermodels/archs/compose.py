"""What the families share: a decoder from the fields that most Hugging Face configs have, and the names of its tensors.

A family's file states its defaults and what differs; nothing here knows which family it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ligermodels.archs.fields import Fields
from ligermodels.convert.config_json import short
from ligermodels.convert.weight_map import (
    Entry,
    WeightMap,
    concat,
    experts_gate_up,
    grouped_qkv,
    grouped_qkv_in_one,
    rename,
    stack,
)
from ligermodels.errors import ConfigError
from ligermodels.layers import AttentionConfig, BlockConfig, HeadConfig, MLPConfig, MoEConfig, NormConfig
from ligermodels.model import DecoderConfig

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}
"""Hugging Face's names of activations, and ours."""


HARMLESS: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "per_layer_config": (None, {}),
    "quantization_config": (None,),
    "quantization": (None,),
    "compression_config": (None,),
    "transformers_weights": (None,),
}
"""Fields that any config may have and that change the model, or where its weights are, unless they have these values.

A quantised checkpoint is never taken for one of plain weights, whatever its tensors look like.
"""


def decoder(
    fields: Fields,
    *,
    activation: str = "hidden_act",
    mlp_bias: bool = False,
    default_theta: float = 10_000.0,
    partial_rotary: bool = False,
    norm: NormConfig | None = None,
    attention: Callable[[int, AttentionConfig], Mapping[str, Any]] = lambda layer, common: {},
    mlp: Callable[[int, MLPConfig], MLPConfig | MoEConfig] = lambda layer, common: common,
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
        block, head, more: further fields of BlockConfig, HeadConfig and DecoderConfig.

    Raises ConfigError naming the field that is missing, bad or not implemented.
    """
    for name, harmless in HARMLESS.items():
        if name in fields.config and fields.config[name] not in harmless:
            raise ConfigError(f"{fields.where}: {name} = {short(fields.config[name])} is not implemented")
    fields.only("attention_dropout", 0, 0.0, default=0.0)
    fields.check_token("eos_token_id", several=True)
    fields.check_token("pad_token_id")
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
    gated = MLPConfig(
        fields.size("intermediate_size"), ACTIVATIONS[fields.only(activation, *ACTIVATIONS, default=None)], mlp_bias
    )
    differing = [dict(attention(layer, common)) for layer in range(layers)]
    if any("rope" not in fields_ for fields_ in differing):
        common = replace(common, rope=fields.rope(head_dim, context, default_theta, partial=partial_rotary))
    return DecoderConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        blocks=tuple(
            BlockConfig(replace(common, **differing[layer]), mlp(layer, gated), norm, **(block or {}))
            for layer in range(layers)
        ),
        norm=norm,
        head=HeadConfig(tied=fields.flag("tie_word_embeddings", False), **(head or {})),
        initializer_range=fields.number("initializer_range", 0.02, negative=False),
        max_position_embeddings=context,
        **more,
    )


NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Names of a block's norms, where there is one before each sublayer."""

SANDWICH = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""Names of a block's norms, where there is one before and one after each sublayer, or only after."""


EXPERTS = {
    "router": "mlp.gate.weight",
    "gate": "mlp.experts.{expert}.gate_proj.weight",
    "up": "mlp.experts.{expert}.up_proj.weight",
    "down": "mlp.experts.{expert}.down_proj.weight",
}
"""Names of a mixture's parts, each expert's by itself."""

STACKED_EXPERTS = {"router": "mlp.gate.weight", "gate_up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj"}
"""The same where all experts are one tensor, as transformers 5 may save them."""


def weight_map(
    config: DecoderConfig,
    *,
    norms: Mapping[str, str] = NORMS,
    prefix: str = "model",
    head: str = "lm_head.weight",
    packed: bool = False,
    experts: Mapping[str, str] = EXPERTS,
    ignored: Sequence[str] = (),
) -> WeightMap:
    """Native names to those that Hugging Face's decoders share, for the layers, norms and biases that `config` has.

    Args:
        norms: native name of each norm of a block -> its name there.
        prefix: what stands before `layers`, `embed_tokens` and `norm`.
        head: name of the language-model head.
        packed: whether q, k and v are one tensor there, and gate and up another.
        experts: names of a mixture's parts: EXPERTS, STACKED_EXPERTS, or alike.
        ignored: patterns of further tensors to skip.
    """
    embedding = f"{prefix}.embed_tokens.weight"
    entries = [rename("embed.weight", embedding)]
    for layer, block in enumerate(config.blocks):
        here, there = f"blocks.{layer}", f"{prefix}.layers.{layer}"
        entries += _attention(f"{here}.attention", f"{there}.self_attn", block.attention, packed)
        if isinstance(block.mlp, MoEConfig):
            entries += _mixture(f"{here}.mlp", there, block.mlp, experts)
        else:
            entries += _gated(f"{here}.mlp", f"{there}.mlp", block.mlp, packed)
        before = ("attention_norm", "mlp_norm") if block.pre_norm else ()
        after = ("attention_post_norm", "mlp_post_norm") if block.post_norm else ()
        entries += [rename(f"{here}.{name}.weight", f"{there}.{norms[name]}.weight") for name in (*before, *after)]
    entries.append(rename("norm.weight", f"{prefix}.norm.weight"))
    if not config.head.tied:
        entries.append(rename("head.weight", head))
    aliases = {head: embedding} if config.head.tied else {}
    return WeightMap(entries, ignored=[r"rotary_emb\.inv_freq$", *ignored], aliases=aliases)


def _parts(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def _attention(here: str, there: str, config: AttentionConfig, packed: bool) -> list[Entry]:
    shape = (config.num_kv_heads, config.group_size, config.head_dim)
    entries = [
        grouped_qkv_in_one(f"{here}.qkv.{part}", f"{there}.qkv_proj.{part}", *shape)
        if packed
        else grouped_qkv(
            f"{here}.qkv.{part}", f"{there}.q_proj.{part}", f"{there}.k_proj.{part}", f"{there}.v_proj.{part}", *shape
        )
        for part in _parts(config.bias)
    ]
    entries += [rename(f"{here}.o.{part}", f"{there}.o_proj.{part}") for part in _parts(config.output_bias)]
    if config.qk_norm is not None:
        entries += [rename(f"{here}.{name}_norm.weight", f"{there}.{name}_norm.weight") for name in "qk"]
    return entries


def _gated(here: str, there: str, config: MLPConfig, packed: bool) -> list[Entry]:
    entries = []
    for part in _parts(config.bias):
        if packed:
            entries.append(rename(f"{here}.gate_up.{part}", f"{there}.gate_up_proj.{part}"))
        else:
            gate_up = [f"{there}.{name}_proj.{part}" for name in ("gate", "up")]
            entries.append(concat(f"{here}.gate_up.{part}", gate_up, [config.size] * 2))
        entries.append(rename(f"{here}.down.{part}", f"{there}.down_proj.{part}"))
    return entries


def _mixture(here: str, there: str, config: MoEConfig, names: Mapping[str, str]) -> list[Entry]:
    router = rename(f"{here}.router.weight", f"{there}.{names['router']}")
    if "gate_up" in names:
        return [router, *(rename(f"{here}.{part}", f"{there}.{names[part]}") for part in ("gate_up", "down"))]
    each = {
        part: [f"{there}.{names[part].format(expert=expert)}" for expert in range(config.num_experts)]
        for part in ("gate", "up", "down")
    }
    gate_up = experts_gate_up(f"{here}.gate_up", each["gate"], each["up"], config.size)
    return [router, gate_up, stack(f"{here}.down", each["down"])]
