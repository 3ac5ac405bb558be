"""A transformers model computes natively, in place: its class, parameters, names and methods stay."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar, get_args

import torch
from torch import nn
from transformers import modeling_outputs
from transformers.utils import ModelOutput

from ligermodels.archs import family_of
from ligermodels.errors import ConfigError, InputError, warn_caller
from ligermodels.integrations.backbone import backbone_forward
from ligermodels.integrations.causal_lm import causal_lm_forward, head_forward
from ligermodels.integrations.decoder import HFDecoder
from ligermodels.integrations.modules import FINAL_NORM, Native, part, set_forward, unset_forward, within_adapter
from ligermodels.integrations.multimodal import inputs_beside_text, multimodal_forward
from ligermodels.integrations.nativize_layer import check_supported, nativize_layer, set_norm
from ligermodels.integrations.settings import as_built, changed_setting, config_settings, expect_settings, set_rotary
from ligermodels.layers import AttentionConfig, LatentAttentionConfig, RotaryEmbedding
from ligermodels.models.decoder import DecoderConfig
from ligermodels.models.families import warn_of_other_family

Model = TypeVar("Model", bound=nn.Module)


def nativize(model: Model) -> Model:
    """Let a transformers language model, alone or within a multimodal model, compute natively; returns the same object.

    The model keeps its class, config, parameters, `state_dict` names, `generate` and `save_pretrained`. Forward passes
    without a cache run on native layers: fused norms, rotary embeddings, gated activations and attention. In training
    with `labels`, the loss is computed without logits, and `logits` of the output are None; in evaluation they are
    there. Some passes run transformers' code, with native norms, gated activations and experts: passes with a cache
    (`generate`), requests for the attentions or hidden states of all layers, hooks within layers, and others that
    docs/transformers.md lists. Mixtures of experts keep transformers' router.

    Adapters (PEFT), quantised projections (bitsandbytes), `fully_shard` and gradient checkpointing work as before:
    every module is called by its forward. Nothing but this object changes.

    Args:
        model: a `...ForCausalLM` of a supported family, a `...ForConditionalGeneration` around its language model, or
            a PEFT model around either. Any dtype, on any device.

    Raises:
        ConfigError: a field of its config is not supported (named).
        InputError: it is no such model, computes natively already, or another library (Liger) has replaced forwards.

    Examples:
        >>> model = nativize(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"))
        >>> trainer = Trainer(model, train_dataset=dataset)
    """
    nativize_as(base_model(model), lambda config: config)
    return model


def nativize_as(hf: Any, adjust: Callable[[DecoderConfig], DecoderConfig]) -> None:
    """Nativize a transformers model by its config as `adjust` returns it. After an error it is as before."""
    config, names, prefix = composed(hf)
    if "native" in hf.__dict__:
        raise InputError("nativize: this model computes natively already; restore(model) undoes it")
    if (count := len(hf.get_decoder().layers)) != len(config.blocks):
        raise InputError(f"nativize: the model has {count} layers, its config {len(config.blocks)}")
    try:
        read = _set_forwards(hf, adjust(config), names, prefix)
    except BaseException:
        _unset_forwards(hf)
        raise
    if name := changed_setting(hf, read):
        warn_caller(
            f"nativize: {name} is not what transformers builds from the config. The class's own code computes with it, "
            "which is slower; to compute natively, change the config before the model is built",
            UserWarning,
        )


def _set_forwards(hf: Any, config: DecoderConfig, names: Mapping[str, str], prefix: str) -> Mapping[str, Any]:
    """Give a model and its modules their native forwards. Returns the `config_settings` that they read."""
    backbone, inner = hf.get_decoder(), getattr(hf, prefix.partition(".")[0])
    for layer, block in zip(backbone.layers, config.blocks, strict=True):
        nativize_layer(layer, block, config.hidden_size, names)
    if (inputs := config.per_layer_inputs) is not None:
        set_norm(backbone.get_submodule(inputs.NAMES["norm"]), inputs.norm)
    read, built = config_settings(hf.config.get_text_config()), as_built(backbone)
    native = replace(_native_backbone(backbone, config, names), config_settings=read)
    set_forward(backbone, backbone_forward, native, as_class=True)
    set_norm(part(backbone, FINAL_NORM), config.norm)
    expect_settings(backbone, built, within_adapter)
    set_rotary(backbone, built, partial(Native, None))
    set_forward(hf.lm_head, head_forward, Native(config.head))
    further_inputs = frozenset() if inner is backbone else inputs_beside_text(inner)
    if inner is not backbone:
        set_forward(inner, multimodal_forward, Native(config), as_class=True)
    paths = {"backbone": prefix, "inner": prefix.partition(".")[0]}
    native = Native(config, paths, output=_output_of(hf), inputs=further_inputs, config_settings=read)
    set_forward(hf, causal_lm_forward, native, as_class=True)
    hf.__dict__["_replicate_for_data_parallel"] = _no_replica
    return read


def restore(model: Model) -> Model:
    """Undo `nativize`: the model computes as its class does; returns the same object.

    Raises InputError if the model does not compute natively.
    """
    hf: Any = base_model(model)
    if "native" not in hf.__dict__:
        raise InputError("restore: this model does not compute natively; nativize(model) makes it")
    _unset_forwards(hf)
    return model


def _unset_forwards(hf: nn.Module) -> None:
    for module in hf.modules():
        unset_forward(module)
    hf.__dict__.pop("_replicate_for_data_parallel", None)


def _native_backbone(backbone: Any, config: DecoderConfig, names: Mapping[str, str]) -> Native:
    """The native counterpart of a backbone; `names` are the family's names of parts."""
    ropes = dict.fromkeys(rope for block in config.blocks for rope in block.ropes)
    with torch.device("cpu"):
        rotary = nn.ModuleList(RotaryEmbedding(rope) for rope in ropes)
    thresholds = [rope.scaling.context_thresholds for rope in ropes if rope.scaling is not None]
    by_length = any(threshold.switch is not None or threshold.moving is not None for threshold in thresholds)
    mixers = [block.mixer for block in config.blocks]
    scaled = [mixer for mixer in mixers if isinstance(mixer, AttentionConfig | LatentAttentionConfig)]
    by_length |= any(mixer.query_scaling is not None for mixer in scaled)
    norms = [mixer.qk_norm for mixer in mixers if isinstance(mixer, AttentionConfig)]
    by_length |= any(norm is not None and norm.after_rope for norm in norms)
    if hasattr(within_adapter(backbone.embed_tokens), "embed_scale"):  # the embedding scales its result
        config = replace(config, embed_scale=None)
    decoder = HFDecoder(backbone, config, rotary)
    paths = {FINAL_NORM: names.get(FINAL_NORM, "norm")}
    return Native(config, paths, decoder, rope_by_length=by_length, output=_output_of(backbone))


def _output_of(module: nn.Module) -> type | None:
    """The class of a module's outputs, by the annotation of its forward, if it is defined for this model alone."""
    annotated = inspect.signature(type(module).forward).return_annotation
    classes = [cls for cls in get_args(annotated) or (annotated,) if isinstance(cls, type)]
    own = [cls for cls in classes if issubclass(cls, ModelOutput) and cls.__module__ != modeling_outputs.__name__]
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


def _is_at(module: nn.Module, whole: nn.Module, path: str) -> bool:
    try:
        return whole.get_submodule(path) is module
    except AttributeError:
        return False


def composed(hf: Any) -> tuple[DecoderConfig, Mapping[str, str], str]:
    """The native config of a model, the names of a layer's parts, and the path of the backbone."""
    fields = {name: value for name, value in hf.config.to_dict().items() if name != "quantization_config"}
    family = family_of(fields)
    layouts = [each for each in family.layouts if _is_at(hf.get_decoder(), hf, each.get("prefix", "model"))]
    if not layouts or not hasattr(hf, "lm_head"):
        raise InputError(
            f"nativize: {type(hf).__name__} does not have its backbone and head where a ...ForCausalLM, or a "
            "multimodal model around one, has them"
        )
    # Modules of transformers 5 have the names of the first layout with one tensor for all experts, if there is one.
    layout = next((each for each in layouts if each in family.stacked_layouts), layouts[0])
    prefix = layout.get("prefix", "model")
    if family.text is not None and "." not in prefix:
        raise InputError(f"nativize: of {type(hf).__name__} the language model cannot compute natively by itself")
    warn_of_other_family(fields)
    config = family.decoder_config(fields)
    if config.norm.kind != "rms":
        raise ConfigError(f"nativize: norms of kind {config.norm.kind!r} are not supported")
    for block in config.blocks:
        check_supported(block)
    return config, layout.get("names", {}), prefix
