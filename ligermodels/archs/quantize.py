"""Weights quantised for decoding: which of a model's linear layers, in place and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from ligermodels.archs.causal_lm import CausalLM
from ligermodels.archs.exclusion import Exclusion
from ligermodels.archs.lora import check_untouched, lora_layers
from ligermodels.errors import InputError
from ligermodels.layers import MoE
from ligermodels.layers.quantized import QuantizedLinear, is_quantized
from ligermodels.layers.sharding import is_sharded
from ligermodels.ops import Quantized
from ligermodels.ops.quantized.weights import check_format

Model = TypeVar("Model", bound=CausalLM)


def quantize(model: Model, kind: Quantized, *, exclude: Sequence[str] = ()) -> Model:
    """Quantise the weights of the linear layers of the blocks, in place, layer by layer, and freeze the model.

    "float8" is E4M3 with a scale for each output channel, half of bfloat16's bytes; "int4" has a scale for each 128
    inputs of an output channel, and 4.125 bits a weight. Weights are dequantised as they are used; activations, the
    decoding state, embeddings, head, norms, routers and biases stay in the model's dtype. The projections of attention
    of any kind, of Gated DeltaNet and of dense feed-forward layers are quantised, and of mixtures the shared expert's.

    Gradients pass through the quantised layers, so that heads on the model, embeddings given as `inputs_embeds` and the
    like can be trained; quantised weights cannot.

    Args:
        model: stays the same object; also on the meta device, as in `prepare` of `from_pretrained`.
        kind: "float8" or "int4".
        exclude: patterns (`fnmatch`) of names, whole ("decoder.blocks.3.mlp.down") or within a block ("mlp.*"), of
            linear layers and of modules around them ("mlp"), which are left as they are; "mlp.experts" are the experts
            of a mixture, which have no quantised form.

    Returns `model`. `dequantize` is the way back, to the rounded weights.

    Raises InputError, and leaves the model as it is: an unknown `kind`; a pattern that matches nothing, or nothing
    left; experts that are not excluded; a model that is quantised or in float8 already,
    has LoRA, is sharded, or computes by the modules of another one; hooks on a linear layer; weights that are not
    finite.
    """
    _check(model, kind)
    excluded = Exclusion(exclude)
    chosen: dict[str, nn.Linear] = {}
    for i, block in enumerate(model.decoder.blocks):
        prefix = f"decoder.blocks.{i}"
        for name, module in block.named_modules():
            if isinstance(module, MoE) and not excluded(prefix, experts := f"{name}.experts"):
                raise InputError(
                    f"{prefix}.{name}: weights of experts have no quantised form; leave them in the model's dtype by "
                    f"exclude={[experts]!r}"
                )
            # A gate of one channel decides more than it weighs.
            if isinstance(module, nn.Linear) and module.out_features > 1 and not excluded(prefix, name):
                chosen[f"{prefix}.{name}"] = module
    excluded.check_used()
    if not chosen:
        raise InputError("exclude: leaves no linear layer to quantise")
    for name, linear in chosen.items():
        if type(linear) is not nn.Linear:
            raise InputError(
                f"{name}: is a {type(linear).__name__}, which has no quantised form; leave it as it is by "
                f"exclude={[name]!r}"
            )
        if not linear.weight.is_meta and not linear.weight.isfinite().all():
            raise InputError(f"{name}: has weights that are not finite")
    check_untouched(chosen, "quantize")
    for name in list(chosen):
        model.set_submodule(name, QuantizedLinear.of(chosen.pop(name), kind))
    return model.requires_grad_(False)


def dequantize(model: Model) -> Model:
    """Give the quantised layers of a model plain weights again, the rounded ones, in the model's dtype and in place.

    They are frozen, as `quantize` has left the model; `model.requires_grad_()` makes them trainable, and
    `save_pretrained` writes them. Returns `model`. Raises InputError where nothing is quantised.
    """
    if not is_quantized(model):
        raise InputError("dequantize: the model has no quantised weights")
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            model.set_submodule(name, module.dequantized(model.dtype))
    return model


def _check(model: CausalLM, kind: Quantized) -> None:
    if not isinstance(model, CausalLM):
        raise InputError(
            f"quantize: takes a native CausalLM, got a {type(model).__name__}; of heads on a model, their base"
        )
    check_format("quantize", kind)
    if is_quantized(model):
        raise InputError("quantize: the model is quantised already")
    if getattr(model.decoder, "exported_by", None) is not None:
        raise InputError(
            "quantize: this model computes by the modules of a transformers model; load another one to quantise"
        )
    if lora_layers(model):
        raise InputError("quantize: the model has LoRA; merge_lora it first")
    if is_sharded(model):
        raise InputError("quantize: the model is sharded, and quantised weights cannot be")
