"""Gemma 4: the text models alone and within multimodal checkpoints."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ligermodels.archs.compose import ACTIVATIONS, Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.fields import FULL, SLIDING, UNREAD_ROPE
from ligermodels.archs.heads import heads_by_type
from ligermodels.archs.multimodal import TextModel, layouts, wrapper
from ligermodels.archs.shared_kv import kv_sources, with_shared_kv
from ligermodels.errors import ConfigError
from ligermodels.layers import (
    AttentionConfig,
    DenseMoEConfig,
    MLPConfig,
    MoEConfig,
    NormConfig,
    PerLayerInputConfig,
    PerLayerInputsConfig,
    QKNormConfig,
    RouterConfig,
    ValueConfig,
)

UNIFIED = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
}
GEMMA4 = {**UNIFIED, "max_position_embeddings": 131072, "sliding_window": 512}
GEMMA4 |= {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""The ropes of a config that names none."""
EXPERTS = {
    "experts.router": "router.proj.weight",
    "experts.router_norm": "router.scale",
    "experts.scales": "router.per_expert_scale",
    "experts.gate_up": "experts.gate_up_proj",
    "experts.down": "experts.down_proj",
}


def gemma4(config: Config, *, unified: bool) -> DecoderConfig:
    """The composed config of a `Gemma4TextConfig` dict, or of a `Gemma4UnifiedTextConfig` dict."""
    fields = Fields(config, UNIFIED if unified else GEMMA4)
    fields.choices("use_bidirectional_attention", None, "vision", default=None)
    norm = NormConfig(fields.number("rms_norm_eps", negative=False), casting_mode="gemma")
    windows = fields.windows(lambda layer: (layer + 1) % 6 != 0)
    windows[-1] = None  # as transformers has it, whatever layer_types says
    heads = heads_by_type(fields, config, windows)
    for name in UNREAD_ROPE if fields.config.get("rope_parameters") is None else ():
        fields.choices(name, None, default=None)
    ropes = fields.ropes(
        {layer_type: head_dim for layer_type, (head_dim, _) in heads.items()}, ROPES, windows, UNREAD_ROPE
    )
    bias, same = fields.flag("attention_bias", False), fields.flag("attention_k_eq_v", False)
    sources = kv_sources(fields, windows)
    doubled = fields.flag("use_double_wide_mlp", False)
    experts = None if unified else _experts(fields, norm)

    def attention(layer: int, common: AttentionConfig) -> dict[str, Any]:
        head_dim, kv_heads = heads[FULL if windows[layer] is None else SLIDING]
        own = {"head_dim": head_dim, "num_kv_heads": kv_heads, "rope": ropes[layer], "window": windows[layer]}
        own |= {"bias": bias, "o_bias": bias, "qk_norm": QKNormConfig(norm), "softmax_scale": 1.0}
        values = ValueConfig(norm.eps, from_keys=same and windows[layer] is None)
        return {**own, "values": values, "shares_kv": layer in sources.values()}

    def mlp(layer: int, gated: MLPConfig) -> MLPConfig | DenseMoEConfig:
        gated = replace(gated, size=2 * gated.size) if doubled and layer in sources else gated
        return gated if experts is None else DenseMoEConfig(gated, replace(experts, activation=gated.activation), norm)

    size = 0 if unified else fields.size("hidden_size_per_layer_input", zero=True)
    vocab_size = 0 if unified else fields.size("vocab_size_per_layer_input", zero=not size)
    if size and vocab_size < fields.size("vocab_size"):
        raise ConfigError(f"{fields.where}: vocab_size_per_layer_input {vocab_size} is below vocab_size")
    composed = decoder(
        fields,
        activation="hidden_activation",
        norm=norm,
        attention=attention,
        mlp=mlp,
        block={"post_norm": True, "layer_scalar": True},
        head={"softcap": fields.optional_number("final_logit_softcapping")},
        embed_scale=fields.size("hidden_size") ** 0.5,
    )
    blocks = [with_shared_kv(block, sources.get(layer)) for layer, block in enumerate(composed.blocks)]
    inputs = None
    if size:
        inputs = PerLayerInputsConfig(vocab_size, len(blocks), size, norm, composed.padding_idx)
        per_layer = partial(PerLayerInputConfig, activation=ACTIVATIONS[fields.config["hidden_activation"]])
        blocks = [replace(block, after=per_layer(i, size, norm)) for i, block in enumerate(blocks)]
    return replace(composed, blocks=tuple(blocks), per_layer_inputs=inputs)


def _experts(fields: Fields, norm: NormConfig) -> MoEConfig | None:
    """The mixture of experts beside each dense layer, or None."""
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    fields.ignore(*names)
    if not fields.flag("enable_moe_block", False):
        return None
    own = Fields(fields.config, where=f"{fields.where}: enable_moe_block")
    (count, chosen), size = own.experts(*names[:2]), own.size(names[2])
    scaled = NormConfig(norm.eps)  # here rounded values are multiplied by the weight
    factor = fields.size("hidden_size") ** -0.5
    router = RouterConfig(count, chosen, norm=scaled, input_scale=factor, expert_scales=True)
    return MoEConfig(router, size, aux_loss=False)


LAYOUTS = layouts(
    ("model.language_model", "lm_head.weight"),
    ignored=(r"^model\.(vision_tower|vision_embedder|audio_tower|embed_vision|embed_audio)\.",),
    names=(EXPERTS,),
)


def families(name: str, *, unified: bool) -> tuple[Family, Family]:
    """The families of the text model alone, and of multimodal checkpoints.

    Args:
        name: `model_type` of the multimodal checkpoints.
        unified: the argument of `gemma4`.
    """
    compose = partial(gemma4, unified=unified)
    text = Family(f"{name}_text", compose, [{"names": EXPERTS}], ROPES, attribute_map=dict.fromkeys(UNREAD_ROPE))
    return text, wrapper(name, {text.model_type: TextModel(text)}, LAYOUTS, tied=True)


FAMILIES = (*families("gemma4", unified=False), *families("gemma4_unified", unified=True))
