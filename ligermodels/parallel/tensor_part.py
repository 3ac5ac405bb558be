"""Build, on the meta device, the shard of a model that one tensor-parallel rank would hold."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from ligermodels.layers import Block, Layer, Linear
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.initialization import allocate, skip_init
from ligermodels.layers.token_parts import divide_tokens
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.tensor import check_tensor_parallel, divide, modules_with_rules


def tensor_part(model: CausalLM, mesh: Any) -> CausalLM:
    """A model with the sizes of one rank's shard of `model`, on the meta device.

    It computes the tokens of that rank (`layers.token_parts`), with the same trainable parameters and activation
    checkpointing as `model`.

    Args:
        model: the whole model.
        mesh: a DeviceMesh, or an object with its methods `size`, `get_local_rank` and `get_group`.

    Raises:
        ConfigError: the ranks do not divide a size of the model.
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
        if isinstance(module, Linear):
            share: Any = part.get_submodule(name)
            if module.compute is not None:
                share.store(module.compute.of_sizes(share.out_features, share.in_features))
            share.update = copy.deepcopy(module.update)
        elif isinstance(module, Block | Layer):
            layer: Any = part.get_submodule(name)
            layer.in_float8 = module.in_float8
    for shard, parameter in zip(part.parameters(), model.parameters(), strict=True):
        shard.requires_grad_(parameter.requires_grad)
    part.activation_checkpointing = model.activation_checkpointing
    divide_tokens(part.decoder, mesh)
    divide(modules_with_rules(part.decoder.blocks, "decoder.blocks", 1), mesh)
    return part
