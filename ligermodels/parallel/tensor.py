"""Tensor parallelism: projections, the embedding and the head are sharded over ranks, as DTensors.

Attention is split by key/value heads, Gated DeltaNet by key heads, feed-forward layers and experts by intermediate
channels, embedding and head by the vocabulary (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053). Norms and
routers are replicated. Between projections each rank has some of the tokens (`layers.sequence_parallel`). In decoding,
each rank has all tokens, and a block sums over ranks twice.

A layer's config (`LayerConfig.tensor_shard`) and its class (`tensor_parallel`) define how it is split. This file knows
no kind of layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import Block, Layer, Linear
from ligermodels.layers.initialization import allocate, skip_init
from ligermodels.layers.modules import modules_of
from ligermodels.layers.sequence_parallel import divide_tokens
from ligermodels.layers.sharding import TensorSharding, is_sharded
from ligermodels.layers.tensor_shard import RULES, TensorShard
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.decoder import DecoderConfig

Result = TypeVar("Result")
MOST_RANKS = 256
"""The largest number of ranks that error messages suggest."""

Planned = tuple[Any, Mapping[str, TensorSharding], "str | None"]
"""A module, the rules of its own parameters, and how it is split if it is a linear layer."""


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = True) -> None:
    """Distribute the parameters of a model over the ranks of a mesh, in place.

    All ranks must call this with the same model, and later pass the same inputs. Parameters get the values of rank 0.
    Loss, hidden states and logits are plain tensors, the same on all ranks. No rank computes all logits for a loss.
    Call it after `add_lora` and before an optimizer is created. FSDP2 can be added with `fully_shard` over another
    dimension of the same mesh.

    Args:
        model: a `CausalLM` or `MedusaModel`, not sharded.
        mesh: a mesh with one dimension, such as `DeviceMesh.from_group` makes of a process group that is there.
        sequence_parallel: divide the tokens between projections over the ranks too, in passes without a decoding state.
            False where an inference engine keeps the states: most of its passes are decode steps.

    Raises (before the model is changed):
        InputError: another kind of model or mesh, or the model is sharded already.
        ConfigError: the ranks do not divide a size, or a layer has no rule; the message names it.
    """
    bases = modules_of(model, CausalLM)
    if len(bases) != 1:
        raise InputError(
            f"tensor_parallel: takes a native CausalLM, or a model around one, got a {type(model).__name__} with "
            f"{len(bases)}"
        )
    if mesh.ndim != 1:
        raise InputError(f"mesh: must have one dimension, got {mesh.ndim}; take one by its name, as mesh['tensor']")
    if is_sharded(model):
        raise InputError("tensor_parallel: the model is sharded already; distribute it first, then put FSDP2 on top")
    ranks = mesh.size()
    check_tensor_parallel(bases[0].config, ranks)
    distributed = list(modules_with_rules(model, "", ranks))
    parameters: dict[int, nn.Parameter] = {}  # tied ones stay one
    for module, rules, _ in distributed:
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in parameters:
                parameters[id(parameter)] = _distribute(parameter, rules[name], mesh)
            module.register_parameter(name, parameters[id(parameter)])
    divide(distributed, mesh)
    bases[0].decoder._tensor_ranks = ranks
    if sequence_parallel:
        divide_tokens(bases[0].decoder, mesh)


def divide(distributed: Iterable[Planned], mesh: Any) -> None:
    """Make modules compute with this rank's shards of their parameters.

    Args:
        distributed: modules and their rules, from `modules_with_rules`.
        mesh: a DeviceMesh with one dimension.
    """
    for module, _, split in distributed:
        module._tensor_mesh = mesh
        if split is not None:
            module.split = TensorShard(split, mesh)


def tensor_placements(model: nn.Module, ranks: int) -> dict[int, int]:
    """Id of a parameter -> the dimension in which `tensor_parallel` shards it, without replicated parameters.

    Raises ConfigError if the ranks do not divide a size, or a layer has no rule."""
    return {
        id(parameter): rule
        for module, rules, _ in modules_with_rules(model, "", ranks)
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(rule := rules[name], int)
    }


def check_tensor_parallel(config: DecoderConfig, ranks: int) -> None:
    """Raise ConfigError unless models with this config can be split over this number of `ranks`.

    The message names the field, and the numbers of ranks that work.
    """
    try:
        _check(config, ranks)
    except ConfigError as error:
        numbers = ", ".join(str(number) for number in range(1, MOST_RANKS + 1) if _works(config, number))
        raise ConfigError(f"{error}. Numbers of ranks that work for this model: {numbers}") from None


def _check(config: DecoderConfig, ranks: int) -> None:
    if ranks == 1:
        return
    seen = set()
    for i, block in enumerate(config.blocks):
        for part, layer in block.layers.items():
            if layer not in seen:
                seen.add(layer)
                try:
                    layer.tensor_shard(ranks)
                except ConfigError as error:
                    raise ConfigError(f"blocks[{i}].{part}.{error}") from None
    if -(-config.vocab_size // ranks) * (ranks - 1) >= config.vocab_size:
        raise ConfigError(f"vocab_size: {config.vocab_size} is too small for each of {ranks} ranks to have some")


def _works(config: DecoderConfig, ranks: int) -> bool:
    try:
        _check(config, ranks)
    except ConfigError:
        return False
    return True


def modules_with_rules(module: nn.Module, name: str, ranks: int) -> Iterator[Planned]:
    """The modules with parameters, in the order of the model, and their rules.

    Args:
        module: the module to search.
        name: its name, for messages.
        ranks: number of ranks that parameters are sharded over.

    Raises:
        ConfigError: a module has no rule; the message names it.
    """
    rules: Mapping[str, TensorSharding] | None = getattr(type(module), "tensor_parallel", None)
    if rules is None and isinstance(module, nn.ModuleList | nn.Sequential):
        rules = {}
    if rules is None:
        if next(module.parameters(), None) is not None:
            raise ConfigError(
                f"{name} ({type(module).__name__}): has no rule for tensor parallelism; give its class a "
                "`tensor_parallel`, see ligermodels.layers.sharding, or shard the model by FSDP2 alone"
            )
        return
    own = dict(module.named_parameters(recurse=False))
    if unknown := [key for key in own if key not in rules]:
        raise ConfigError(f"{name}.{unknown[0]}: tensor_parallel of {type(module).__name__} has no rule for it")
    if isinstance(module, Layer):
        _of_ranks(name, ranks, partial(module.check_tensor_parallel, ranks))
    yield module, rules, None
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if (split := rules.get(key)) is None:
            yield from modules_with_rules(child, path, ranks)
        elif isinstance(child, Linear):
            yield from _linear_with_rules(path, child, str(split), ranks)
        else:
            raise ConfigError(
                f"{path} ({type(child).__name__}): is in the place of a linear layer, which it is not, and has no rule "
                "for tensor parallelism; use ligermodels.layers.Linear"
            )


def _linear_with_rules(name: str, linear: Linear, split: str, ranks: int) -> Iterator[Planned]:
    """A linear layer and its parts, with their rules. Raises ConfigError if the ranks do not divide the layer."""
    yield linear, RULES[split], split
    if linear.compute is not None:
        sizes, dim = [linear.out_features, linear.in_features], RULES[split]["weight"]
        if isinstance(dim, int):
            sizes[dim] //= ranks
        yield linear.compute, _of_ranks(name, ranks, partial(linear.compute.rules, split, *sizes)), None
    if linear.update is not None:
        yield linear.update, {key: "replicated" for key, _ in linear.update.named_parameters()}, None


def _of_ranks(name: str, ranks: int, call: Callable[[], Result]) -> Result:
    """The result of `call`, whose errors become a ConfigError that names the layer and the number of ranks."""
    try:
        return call()
    except (ConfigError, InputError) as error:
        raise ConfigError(f"{name}, of {ranks} ranks: {error}") from None


def _distribute(parameter: nn.Parameter, rule: TensorSharding, mesh: DeviceMesh) -> nn.Parameter:
    placement = Shard(rule) if isinstance(rule, int) else Replicate()
    return nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement]), parameter.requires_grad)


def tensor_part(model: CausalLM, mesh: Any) -> CausalLM:
    """A model with the sizes of one rank's shard of `model`, on the meta device.

    It computes the tokens of that rank (`layers.sequence_parallel`), with the same trainable parameters and activation
    checkpointing as `model`.

    Args:
        model: the whole model.
        mesh: a DeviceMesh, or an object with its methods `size`, `get_local_rank` and `get_group`.

    Raises:
        ConfigError: the ranks do not divide a size of the model, or a layer has no rule.
    """
    config, ranks = model.config, mesh.size()
    check_tensor_parallel(config, ranks)
    list(modules_with_rules(model, "", ranks))  # raises for modules without rules

    per_layer, blocks = config.per_layer_inputs, [block.tensor_shard(ranks) for block in config.blocks]
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
