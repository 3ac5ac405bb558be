"""Weights quantised for decoding: which of a model's linear layers, in place and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ligermodels.adapt.exclusion import Exclusion
from ligermodels.adapt.lora import lora_layers
from ligermodels.arguments import Quantized, check_format
from ligermodels.errors import InputError
from ligermodels.layers import Linear, LMHead, MoE
from ligermodels.layers.quantized import QuantizedWeight, quantized_layers
from ligermodels.layers.sharding import is_sharded
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.native import check_native
from ligermodels.models.untie import untie

Model = TypeVar("Model", bound=CausalLM)


def quantize(model: Model, kind: Quantized, *, exclude: Sequence[str] = (), head: Quantized | None = None) -> Model:
    """Quantise the weights of the linear layers of the blocks, in place, layer by layer, and freeze the model.

    "float8" is E4M3 with a scale for each output channel, half of bfloat16's bytes; "int4" has a scale for each 128
    inputs of an output channel, and 4.25 bits a weight. Weights are dequantised as they are used; activations, the
    decoding state, embeddings, norms, routers and biases stay in the model's dtype. The projections of attention
    of any kind, of Gated DeltaNet (with those of its decay and step size) and of dense feed-forward layers are
    quantised, of mixtures the shared expert's, and of Gemma 4 those of inputs per layer ("after.*"). Linear layers of
    one output, as the gate of a shared expert, are not.

    Gradients pass through the quantised layers, so that LoRA (`add_lora`), heads on the model, embeddings given as
    `inputs_embeds` and the like can be trained; quantised weights cannot.

    Args:
        model: stays the same object; also on the meta device, as in `prepare` of `from_pretrained`.
        kind: "float8" or "int4".
        exclude: patterns (`fnmatch`) of names, whole ("decoder.blocks.3.mlp.down") or within a block ("mlp.*"), of
            linear layers and of modules around them ("mlp"), which are left as they are; "mlp.experts" are the experts
            of a mixture, which have no quantised form.
        head: "float8" or "int4": quantise the head too. One that is tied to the embedding gets a weight of its own, and
            the model's config says so; the embedding stays as it is.

    Returns `model`. `dequantize` is the way back, to the rounded weights.

    Raises InputError, and leaves the model as it is: an unknown `kind` or `head`; a pattern that matches nothing, or
    nothing left; experts that are not excluded; a head that is no `LMHead`; a model that is quantised or in float8
    already, is sharded, or computes by the modules of another one; weights that are not finite in float32.
    """
    _check(model, kind, head)
    excluded = Exclusion(exclude)
    chosen: dict[str, nn.Linear] = {}
    for i, block in enumerate(model.decoder.blocks):
        prefix = f"decoder.blocks.{i}"
        for name, module in block.named_modules():
            if isinstance(module, MoE) and not excluded(prefix, experts := f"{name}.experts"):
                raise InputError(f"{prefix}.{name}: weights of experts have no quantised form; {_left_by(experts)}")
            # A gate of one channel decides more than it weighs.
            if isinstance(module, nn.Linear) and module.out_features > 1 and not excluded(prefix, name):
                chosen[f"{prefix}.{name}"] = module
    excluded.check_used()
    if not chosen and head is None:
        raise InputError("exclude: leaves no linear layer to quantise")
    for name, linear in chosen.items():
        if not isinstance(linear, Linear) or type(linear).forward is not Linear.forward:
            raise InputError(f"{name}: is a {type(linear).__name__}, which has no quantised form; {_left_by(name)}")
        _check_finite(name, linear.weight, _left_by(name))
    if head is not None:
        _check_head(model.head)
    for name in list(chosen):
        layer: Any = chosen.pop(name)
        layer.store(QuantizedWeight.of(layer.weight, kind))
    if head is not None:
        model.head.store(QuantizedWeight.of(model.head.weight, head))
        if model.config.head.tied:
            untie(model)
    trained = [p for update in lora_layers(model).values() for p in update.parameters() if p.requires_grad]
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_()
    return model


def dequantize(model: Model) -> Model:
    """Give the quantised layers of a model plain weights again, the rounded ones, in the model's dtype and in place.

    They are frozen, as `quantize` has left the model; `model.requires_grad_()` makes them trainable, and
    `save_pretrained` writes them. LoRA stays. A quantised head that was tied to the embedding stays apart from it, and
    is written with it. Returns `model`. Raises InputError, and leaves the model as it is, where nothing is quantised.
    """
    check_native(model, "dequantize")
    layers = quantized_layers(model)
    if not layers:
        raise InputError("dequantize: the model has no quantised weights")
    for layer in layers.values():
        layer.make_dense(model.dtype)
    return model


def _left_by(name: str) -> str:
    """How a layer is not quantised."""
    return (
        f"leave it in the model's dtype by exclude={[name]!r} of lm.quantize, quantize_exclude={[name]!r} of "
        f"from_pretrained, or --quantize-exclude {name}"
    )


def _check_finite(name: str, weight: Tensor, advice: str) -> None:
    if not weight.is_meta and not torch.stack(weight.detach().aminmax()).float().isfinite().all():
        raise InputError(f"{name}: has weights that are not finite in float32; {advice}")


def _check_head(head: nn.Module) -> None:
    if type(head) is not LMHead:
        raise InputError(f"head: is a {type(head).__name__}, which has no quantised form; {_HEAD_LEFT_BY}")
    _check_finite("head", head.weight, _HEAD_LEFT_BY)


_HEAD_LEFT_BY = "leave it in the model's dtype: quantise the model without a format of its head"


def _check(model: CausalLM, kind: Quantized, head: Quantized | None) -> None:
    check_native(model, "quantize")
    check_format("quantize", kind)
    if head is not None:
        check_format("head", head)
    if quantized_layers(model):
        raise InputError("quantize: the model is quantised already")
    if getattr(model.decoder, "exported_by", None) is not None:
        raise InputError(
            "quantize: this model computes by the modules of a transformers model; load another one to quantise"
        )
    if any(isinstance(each, Linear) and each.compute is not None for each in model.modules()):
        raise InputError("quantize: the model is in float8 training; load another one to quantise")
    if is_sharded(model):
        raise InputError("quantize: the model is sharded, and quantised weights cannot be")
