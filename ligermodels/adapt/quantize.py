"""Quantise the weights of a model's linear layers in place, and dequantise them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ligermodels.adapt.exclusion import Exclusion
from ligermodels.adapt.lora import lora_layers
from ligermodels.adapt.saved_modules import whole_tensors
from ligermodels.arguments import QuantizedFormat, check_format
from ligermodels.errors import InputError
from ligermodels.layers import Linear, LMHead, MoE
from ligermodels.layers.modules import modules_of
from ligermodels.layers.quantized import QuantizedCompute, QuantizedExperts, quantized_layers
from ligermodels.layers.sharding import is_sharded
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.native import check_native, check_own_modules
from ligermodels.models.untie import untie

Model = TypeVar("Model", bound=CausalLM)


def quantize(
    model: Model, kind: QuantizedFormat, *, exclude: Sequence[str] = (), head: QuantizedFormat | None = None
) -> Model:
    """Quantise the weights of the linear layers of the blocks, in place and layer by layer, and freeze the model.

    "float8" is E4M3 with a scale for each output channel, half of the bytes of bfloat16. "int4" has a scale for each
    group of 128 inputs of an output channel, 4.25 bits per weight. "nf4" is QLoRA's format, as in bitsandbytes, with a
    scale for each block of 64 inputs, 4.5 bits per weight. "mxfp4" is gpt-oss's format, with a power of two for each
    block of 32 inputs, 4.25 bits per weight; experts that are stored in it keep their values.
    Weights are dequantised when they are used. Activations, the decoding state, embeddings, norms, routers and biases
    keep the model's dtype.

    Quantised are the projections of attention layers, Gated DeltaNet (with its decay and step size), dense feed-forward
    layers, experts, and Gemma 4's inputs per layer ("after.*"). Linear layers with one output, such as the gate
    of a shared expert, are not quantised. With "nf4" neither are layers that a 4-bit checkpoint of bitsandbytes stores
    unquantised, and with "mxfp4" those that an mxfp4 checkpoint does.

    Quantised weights are frozen, but gradients pass through the layers. So LoRA (`add_lora`), draft heads or
    `inputs_embeds` can be trained.

    Args:
        model: the model, also on the meta device, as in `prepare` of `from_pretrained`.
        kind: format of the weights, "float8", "int4", "nf4" or "mxfp4".
        exclude: `fnmatch` patterns for names of linear layers, or of modules that contain them ("mlp"), that are not
            quantised. A name is whole ("decoder.blocks.3.mlp.down") or relative to its block ("mlp.*"). The experts
            of a mixture are called "mlp.experts". Default: none.
        head: format of the head, "float8", "int4", "nf4" or "mxfp4". A tied head then gets a weight of its own, also
            in the model's config; the embedding is not changed. Default: None, the head is not quantised.

    Returns:
        `model`. `dequantize` turns the rounded weights into plain ones.

    Raises (before the model is changed):
        InputError: an unknown format; a pattern that matches nothing; no layer to quantise; a head that is not an
            `LMHead`; a model that is quantised, in float8 training or sharded, or that computes with the modules of a
            transformers model; weights that are not finite in float32, or are pruned or parametrised.

    Examples:
        >>> model = lm.from_pretrained("Qwen/Qwen3-0.6B", dtype=torch.bfloat16)  # doctest: +SKIP
        >>> lm.quantize(model, "int4", exclude=["*.down"])  # doctest: +SKIP
    """
    _check(model, kind, head)
    layers = _layers_to_quantize(model, exclude, _stored_unquantized(model, kind))
    if not layers and head is None:
        raise InputError("exclude: leaves no linear layer to quantise")
    _check_trained_whole(model, {*layers, *(["head"] if head is not None else [])})
    if head is not None:
        _check_head(model.head)
    for name in list(layers):
        if isinstance(layer := layers.pop(name), MoE):
            weights: Any = layer
            layer.store(QuantizedExperts.of(weights.gate_up, weights.down, kind))
        else:
            layer.store(QuantizedCompute.of(layer.weight, kind))
    if head is not None:
        model.head.store(QuantizedCompute.of(model.head.weight, head))
        if model.config.head.tied:
            untie(model)
    trained: list[Tensor] = [p for each in lora_layers(model).values() for p in each.parameters() if p.requires_grad]
    tensors = whole_tensors(model)
    trained += [tensors[name] for name in _trained_whole(model) if tensors[name].requires_grad]
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_()
    return model


def _trained_whole(model: CausalLM) -> list[str]:
    """Native names of the parameters that are trained whole beside LoRA."""
    return [mapping.target for mapping in model.modules_to_save]


def _check_trained_whole(model: CausalLM, layers: Collection[str]) -> None:
    """Raise InputError if one of these layers is trained whole."""
    if whole := [name for name in _trained_whole(model) if name.rpartition(".")[0] in layers]:
        raise InputError(f"exclude: {', '.join(whole)} are trained whole (modules_to_save); exclude these layers")


def _stored_unquantized(model: CausalLM, kind: QuantizedFormat) -> Collection[str]:
    """Names of weights that the checkpoint of the model, if it is in the format `kind`, stores unquantised."""
    source = None if model.export_spec is None else model.export_spec.source
    encodings = {"nf4": "bitsandbytes 4 bits", "mxfp4": "mxfp4"}
    if source is None or source.quantization is None or source.quantization.encoding != encodings.get(kind):
        return ()
    return source.unquantized


def _layers_to_quantize(model: CausalLM, exclude: Sequence[str], kept: Collection[str]) -> dict[str, Any]:
    """Name -> linear layer or mixture, for all layers of the blocks that are not excluded. Weights in `kept` are not
    quantised. Raises the errors of `quantize`."""
    excluded = Exclusion(exclude)
    layers: dict[str, Any] = {}
    for i, block in enumerate(model.decoder.blocks):
        prefix = f"decoder.blocks.{i}"
        for name, module in block.named_modules():
            experts = isinstance(module, MoE) and not excluded(prefix, f"{name}.experts")
            if experts and f"{prefix}.{name}.gate_up" not in kept:
                layers[f"{prefix}.{name}"] = module
            # A gate with one output is small, and rounding it would change the output the most.
            linear = isinstance(module, nn.Linear) and module.out_features > 1 and not excluded(prefix, name)
            if linear and f"{prefix}.{name}.weight" not in kept:
                layers[f"{prefix}.{name}"] = module
    excluded.check_used()
    for name, layer in layers.items():
        _check_quantizable(name, layer)
    return layers


def _check_quantizable(name: str, layer: Any) -> None:
    """Raises InputError for a class of its own without a quantised form, and for weights that are not finite."""
    experts = isinstance(layer, MoE)
    advice = _advice(f"{name}.experts" if experts else name)
    if type(layer).forward is not (MoE.forward if experts else Linear.forward):
        raise InputError(f"{name}: is a {type(layer).__name__}, which has no quantised form; {advice}")
    layer.check_own_weights(name)
    for weight in (layer.gate_up, layer.down) if experts else (layer.weight,):
        _check_finite(name, weight, advice)


def dequantize(model: Model) -> Model:
    """Give the quantised layers of a model plain weights with the rounded values, in the model's dtype and in place.

    The weights stay frozen; `model.requires_grad_()` makes them trainable, and `save_pretrained` writes them. LoRA is
    not changed. A quantised head that was tied to the embedding keeps a weight of its own. Returns `model`.

    Raises InputError if no layer is quantised, or the model is sharded: each rank would get whole weights.
    """
    check_native(model, "dequantize")
    if is_sharded(model):
        raise InputError("dequantize: the model is sharded; dequantise it first, then shard it")
    layers = quantized_layers(model)
    if not layers:
        raise InputError("dequantize: the model has no quantised weights")
    for layer in layers.values():
        layer.make_dense(model.dtype)
    return model


def _advice(name: str) -> str:
    """How to exclude a layer, for error messages."""
    return (
        f"leave it in the model's dtype by exclude={[name]!r} of lm.quantize, quantize_exclude={[name]!r} of "
        f"from_pretrained, or --quantize-exclude {name}"
    )


def _check_finite(name: str, weight: Tensor, advice: str) -> None:
    if not weight.is_meta and not torch.stack(weight.detach().aminmax()).float().isfinite().all():
        raise InputError(f"{name}: has weights that are not finite in float32; {advice}")


def _check_head(head: nn.Module) -> None:
    if type(head) is not LMHead:
        raise InputError(f"head: is a {type(head).__name__}, which has no quantised form; {_HEAD_ADVICE}")
    head.check_own_weights("head")
    _check_finite("head", head.weight, _HEAD_ADVICE)


_HEAD_ADVICE = "leave it in the model's dtype: quantise the model without a format of its head"


def _check(model: CausalLM, kind: QuantizedFormat, head: QuantizedFormat | None) -> None:
    check_native(model, "quantize")
    check_format("quantize", kind)
    if head is not None:
        check_format("head", head)
    if quantized_layers(model):
        raise InputError("quantize: the model is quantised already")
    check_own_modules(model.decoder, "quantize")
    if any(layer.compute is not None for kind in (Linear, MoE) for layer in modules_of(model, kind)):
        raise InputError("quantize: the model is in float8 training; load another one to quantise")
    if is_sharded(model):
        raise InputError("quantize: the model is sharded already; quantise it first, then shard it")
