"""A transformers model computes natively, in place: its class, parameters, names and methods stay."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, cast, get_args

import torch
from torch import nn
from transformers import modeling_outputs
from transformers.utils import ModelOutput

from ligermodels.archs import family_of
from ligermodels.archs.compose import STACKED_EXPERTS
from ligermodels.errors import ConfigError, InputError
from ligermodels.integrations.gated_delta_net import FORWARDS
from ligermodels.integrations.models import backbone_forward, causal_lm_forward, head_forward
from ligermodels.integrations.modules import (
    Native,
    experts_forward,
    layer_forward,
    mixer_forward,
    mlp_forward,
    norm_forward,
    set_forward,
    unset_forward,
    within_adapter,
)
from ligermodels.integrations.multimodal import inputs_beside_text, multimodal_forward
from ligermodels.layers import (
    AttentionConfig,
    BlockConfig,
    DenseMoEConfig,
    GatedDeltaNetConfig,
    MLPConfig,
    MoEConfig,
    PerLayerInputConfig,
    RotaryEmbedding,
)
from ligermodels.layers.ungated_mlp import UngatedMLPConfig
from ligermodels.models.decoder import DecoderConfig

Model = TypeVar("Model", bound=nn.Module)


def nativize(model: Model) -> Model:
    """Let a transformers language model, alone or within a multimodal model, compute natively; returns the same object.

    The model keeps its class, config, parameters, `state_dict` names, `generate` and `save_pretrained`. Forward passes
    without a cache run on native layers: fused norms, rotary embeddings, gated activations and attention. In training
    with `labels`, the loss is computed without logits, and `logits` of the output are None; in evaluation they are
    there. What the native pass does not give runs transformers' code, with native norms, gated activations and experts:
    passes with a cache (`generate`), requests for attentions or hidden states of all layers, hooks within layers, and
    others that docs/transformers.md lists. Of a mixture of experts the router is transformers'.

    Adapters (PEFT), quantised projections (bitsandbytes), `fully_shard` and gradient checkpointing work as before:
    every module is called by its forward. Nothing but this object changes.

    Args:
        model: a `...ForCausalLM` of a supported family, a `...ForConditionalGeneration` around its language model, or
            a PEFT model around either. Any dtype, on any device.

    Raises:
        ConfigError: a field of its config is not supported (named).
        InputError: it is no such model, computes natively already, or something else (Liger) has replaced forwards.
    """
    hf: Any = base_model(model)
    config, names, prefix = _composed(hf)
    backbone, inner = hf.get_decoder(), getattr(hf, prefix.partition(".")[0])
    if "native" in hf.__dict__:
        raise InputError("nativize: this model computes natively already; restore(model) undoes it")
    if len(backbone.layers) != len(config.blocks):
        raise InputError(f"nativize: the model has {len(backbone.layers)} layers, its config {len(config.blocks)}")
    for layer, block in zip(backbone.layers, config.blocks, strict=True):
        _nativize_layer(layer, block, config.hidden_size, names)
    set_forward(backbone.norm, norm_forward, Native(config.norm))
    if (inputs := config.per_layer_inputs) is not None:
        set_forward(backbone.get_submodule(inputs.NAMES["norm"]), norm_forward, Native(inputs.norm))
    ropes = dict.fromkeys(rope for block in config.blocks for rope in block.mixer.ropes)
    with torch.device("cpu"):
        rotary = nn.ModuleList(RotaryEmbedding(rope) for rope in ropes)
    thresholds = [rope.scaling.context_thresholds for rope in ropes if rope.scaling is not None]
    by_length = any(each.switch is not None or each.moving is not None for each in thresholds)
    by_length |= any(getattr(block.mixer, "query_scaling", None) is not None for block in config.blocks)
    whole = config
    if hasattr(within_adapter(backbone.embed_tokens), "embed_scale"):  # it scales what it gives
        config = replace(config, embed_scale=None)
    set_forward(backbone, backbone_forward, Native(config, {}, rotary, by_length, _output_of(backbone)))
    set_forward(hf.lm_head, head_forward, Native(config.head))
    beside = frozenset() if inner is backbone else inputs_beside_text(inner)
    if inner is not backbone:
        set_forward(inner, multimodal_forward, Native(whole))
    paths = {"backbone": prefix, "inner": prefix.partition(".")[0]}
    set_forward(hf, causal_lm_forward, Native(whole, paths, output=_output_of(hf), inputs=beside), as_class=True)
    hf.__dict__["_replicate_for_data_parallel"] = _no_replica
    return model


def restore(model: Model) -> Model:
    """Undo `nativize`: the model computes as its class does; returns the same object.

    Raises InputError when it does not compute natively.
    """
    hf: Any = base_model(model)
    if "native" not in hf.__dict__:
        raise InputError("restore: this model does not compute natively; nativize(model) makes it")
    for module in hf.modules():
        unset_forward(module)
    del hf.__dict__["_replicate_for_data_parallel"]
    return model


def _output_of(module: nn.Module) -> type | None:
    """The class of its outputs by the annotation of its forward, if that is the model's own."""
    annotated = inspect.signature(type(module).forward).return_annotation
    kinds = [each for each in get_args(annotated) or (annotated,) if isinstance(each, type)]
    own = [each for each in kinds if issubclass(each, ModelOutput) and each.__module__ != modeling_outputs.__name__]
    return own[0] if own else None


def _no_replica() -> NoReturn:
    raise InputError(
        "nn.DataParallel cannot copy a model that computes natively: start one process for each GPU (torchrun, "
        "accelerate launch), show this one a single GPU (CUDA_VISIBLE_DEVICES), or restore(model)"
    )


def base_model(model: Any) -> Any:
    """The transformers model within a PEFT model, or itself."""
    hf = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(getattr(hf, "config", None), "to_dict") or not hasattr(hf, "get_decoder"):
        raise InputError(f"expected a transformers causal language model, got {type(model).__name__}")
    return hf


_MLPS = (MLPConfig, UngatedMLPConfig, MoEConfig, DenseMoEConfig)
"""Kinds of feed-forward layers with one."""


def _is_at(module: nn.Module, whole: nn.Module, path: str) -> bool:
    try:
        return whole.get_submodule(path) is module
    except AttributeError:
        return False


def _composed(hf: Any) -> tuple[DecoderConfig, Mapping[str, str], str]:
    """What the model's config composes to; and the names of a layer's parts, and of the backbone, in memory."""
    fields = {name: value for name, value in hf.config.to_dict().items() if name != "quantization_config"}
    family = family_of(fields)
    layouts = [each for each in family.layouts if _is_at(hf.get_decoder(), hf, each.get("prefix", "model"))]
    if not layouts or not hasattr(hf, "lm_head"):
        raise InputError(f"nativize: {type(hf).__name__} is not a ...ForCausalLM, or a multimodal model around one")
    layout = layouts[0]
    prefix = layout.get("prefix", "model")
    if family.text is not None and "." not in prefix:
        raise InputError(f"nativize: of {type(hf).__name__} the language model cannot compute natively by itself")
    config = family.decoder_config(fields)
    if config.norm.kind != "rms":
        raise ConfigError(f"nativize: norms of kind {config.norm.kind!r} are not supported")
    for block in config.blocks:
        if not isinstance(block.mixer, AttentionConfig | GatedDeltaNetConfig):
            raise ConfigError(f"nativize: a mixer of {type(block.mixer).__name__} is not supported")
        if not isinstance(block.mlp, _MLPS):
            raise ConfigError(f"nativize: a feed-forward layer of {type(block.mlp).__name__} is not supported")
        if not isinstance(block.after, PerLayerInputConfig | None):
            raise ConfigError(f"nativize: a layer of {type(block.after).__name__} is not supported")
    return config, layout.get("names", {}), prefix


def _nativize_layer(layer: nn.Module, block: BlockConfig, hidden_size: int, names: Mapping[str, str]) -> None:
    config = cast(AttentionConfig | GatedDeltaNetConfig, block.mixer)  # see `_composed`
    parts = {**config.NAMES, **MLPConfig.NAMES, **names}
    output = "attention.o" if isinstance(config, AttentionConfig) else "delta.out"
    mixer, mlp = parts[output].rpartition(".")[0], parts["mlp.down"].rpartition(".")[0]
    found = {"mixer": mixer, "mlp": mlp}
    for mapping in block.weight_mappings(hidden_size, "block", "layer", names):
        part = mapping.target.removeprefix("block.").removesuffix(".weight")
        if part.endswith("_norm") and "." not in part:
            found[f"norm.{part}"] = mapping.views[0].source.removeprefix("layer.").removesuffix(".weight")
    for name, path in found.items():
        if name.startswith("norm."):
            set_forward(layer.get_submodule(path), norm_forward, Native(block.norm))
    within = {name: path.removeprefix(f"{mixer}.") for name, path in parts.items() if path.startswith(f"{mixer}.")}
    if "attention.qkv" not in names:
        within.pop("attention.qkv", None)
    if isinstance(config, AttentionConfig) and config.qk_norm is not None:
        for name in ("attention.q_norm", "attention.k_norm")[: 1 if config.state_from is not None else 2]:
            set_forward(layer.get_submodule(f"{mixer}.{within[name]}"), norm_forward, Native(config.qk_norm.norm))
    for name, forward in FORWARDS.items() if isinstance(config, GatedDeltaNetConfig) else ():
        set_forward(layer.get_submodule(f"{mixer}.{within[name]}"), forward, Native(config))
    set_forward(layer.get_submodule(mixer), mixer_forward, Native(config, within))
    dense = block.mlp.dense if isinstance(block.mlp, DenseMoEConfig) else block.mlp
    mixture = block.mlp.experts if isinstance(block.mlp, DenseMoEConfig) else block.mlp
    if isinstance(dense, MLPConfig):
        within = {name: path.removeprefix(f"{mlp}.") for name, path in parts.items() if path.startswith(f"{mlp}.")}
        set_forward(layer.get_submodule(mlp), mlp_forward, Native(dense, within))
    if isinstance(mixture, MoEConfig):
        stacked = names if isinstance(block.mlp, DenseMoEConfig) else STACKED_EXPERTS
        places = {name: stacked[name].rpartition(".") for name in ("experts.gate_up", "experts.down")}
        within = {name: attribute for name, (_, _, attribute) in places.items()}
        if "experts.gate_up_pairs" in names:
            within["experts.gate_up_pairs"] = within["experts.gate_up"]
        experts, _, _ = places["experts.down"]
        set_forward(layer.get_submodule(experts), experts_forward, Native(mixture, within))
        if mixture.shared is not None:
            shared, _, template = {**MoEConfig.NAMES, **names}["experts.shared"].rpartition(".")
            within = {f"mlp.{part}": template.format(part=part) for part in ("gate", "up", "down")}
            set_forward(layer.get_submodule(shared), mlp_forward, Native(mixture.shared, within))
        if isinstance(block.mlp, DenseMoEConfig):
            found |= {"experts": experts, "experts.router": names["experts.router"].partition(".")[0]}
            for name, path in DenseMoEConfig.NAMES.items():
                found[name] = path
                set_forward(layer.get_submodule(path), norm_forward, Native(block.mlp.norm))
    if block.after is not None:
        after = cast(PerLayerInputConfig, block.after)
        found["norm.after"] = after.NAMES["norm"]
        set_forward(layer.get_submodule(found["norm.after"]), norm_forward, Native(after.norm))
    set_forward(layer, layer_forward, Native(block, found))
