"""What one of several tensor-parallel ranks has of a model, on the meta device, where no ranks are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ligermodels.layers.config import LayerConfig
from ligermodels.layers.float8 import Float8Linear
from ligermodels.layers.initialization import allocate, skip_init
from ligermodels.layers.lora import LoRALinear
from ligermodels.layers.token_parts import divide_tokens
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel import linears
from ligermodels.parallel.tensor import check_tensor_parallel, modules_with_rules


def tensor_part(model: CausalLM, mesh: Any) -> CausalLM:
    """A model of the sizes that a rank of `mesh` has of `model`, which computes that rank's part of the tokens
    (`layers.token_parts`); with gradients and activation checkpointing as those of `model`.

    mesh: a DeviceMesh, or what has its `size`, `get_local_rank` and `get_group`.

    Raises ConfigError as of `check_tensor_parallel`.
    """
    config, ranks = model.config, mesh.size()
    check_tensor_parallel(config, ranks)

    def split(layer: LayerConfig) -> LayerConfig:
        return layer.tensor_shard(ranks)

    per_layer, blocks = config.per_layer_inputs, []
    for block in config.blocks:
        after = None if block.after is None else split(block.after)
        blocks.append(replace(block, mixer=split(block.mixer), mlp=split(block.mlp), after=after))
    if per_layer is not None:
        per_layer = replace(per_layer, vocab_size=-(-per_layer.vocab_size // ranks), padding_idx=None)
    vocab_size = -(-config.vocab_size // ranks)
    sizes = replace(config, blocks=tuple(blocks), vocab_size=vocab_size, padding_idx=None, per_layer_inputs=per_layer)
    with torch.device("meta"), skip_init():
        part = CausalLM(sizes)
    allocate(part, model.dtype, "meta")
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear | Float8Linear):
            part.set_submodule(name, _like(module, part.get_submodule(name)))
    for ours, theirs in zip(part.parameters(), model.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    part.activation_checkpointing = model.activation_checkpointing
    divide_tokens(part.decoder, mesh)
    for module, _, kind in modules_with_rules(part.decoder.blocks, "decoder.blocks", 1):
        if kind is None:
            module._tensor_mesh = mesh
        else:
            linears.divide(module, kind, mesh)
    return part


def _like(whole: LoRALinear | Float8Linear, linear: Any) -> nn.Module:
    """What stands for `linear`, this rank's part, as `whole` does in its place: A and B are those of the whole."""
    if isinstance(whole, Float8Linear):
        return Float8Linear(linear, whole.float8)
    with torch.device("meta"), skip_init():
        found = LoRALinear(whole, whole.parts, dropout=whole.dropout, dtype=whole.lora_A.dtype)
    found.weight, found.bias = linear.weight, linear.bias
    return found
