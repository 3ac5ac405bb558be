"""Tensor parallelism: each rank has a part of every projection, of the embedding and of the head, by DTensors.

Attention is split by key/value heads, Gated DeltaNet by key heads, feed-forward layers and experts by their
intermediate channels, embedding and head by the vocabulary (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053).
Norms and routers are the same on all ranks, of which each has a part of the tokens between projections
(`layers.token_parts`), or, where they are decoded, all of them: then a block sums its output over ranks twice.

How a layer is split is said by its config (`LayerConfig.tensor_shard`) and by its module (`tensor_parallel`): nothing
here knows which layers there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import Linear
from ligermodels.layers.sharding import TensorSharding, is_sharded
from ligermodels.layers.tensor_share import RULES, TensorShare
from ligermodels.layers.token_parts import divide_tokens
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.decoder import DecoderConfig

MOST_RANKS = 256  # that are tried for what would work


Planned = tuple[Any, Mapping[str, TensorSharding], "str | None"]
"""A module, the rules of its own parameters, and how it is split if it is a linear layer."""


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Distribute the parameters of a model over the ranks of a mesh, in place.

    All ranks call it with the same model, and then give it the same inputs. Values become those of the first rank.
    Loss, hidden states and logits are plain tensors, the same on all ranks; no rank computes all logits for a loss.
    Make optimizers afterwards, add LoRA before, and put FSDP2 on top by `fully_shard` over another dimension of the
    same mesh.

    Args:
        model: a `CausalLM`, or a `MedusaModel`, not sharded yet.
        mesh: of one dimension.

    Raises, before anything is changed:
        InputError: another model or mesh; a model that is sharded already.
        ConfigError: a size that the ranks do not divide, or a layer without a rule; it is named.
    """
    bases = [module for module in model.modules() if isinstance(module, CausalLM)]
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
    divide_tokens(bases[0].decoder, mesh)


def divide(distributed: Iterable[Planned], mesh: Any) -> None:
    """Let modules compute with this rank's part of their parameters.

    Args:
        distributed: modules and their rules, see `modules_with_rules`.
        mesh: a DeviceMesh of one dimension.
    """
    for module, _, split in distributed:
        module._tensor_mesh = mesh
        if split is not None:
            module.split = TensorShare(split, mesh)


def tensor_placements(model: nn.Module, ranks: int) -> dict[int, int]:
    """The dimension in which `tensor_parallel` shards a parameter, by its id, for those that it does not replicate;
    ConfigError as there."""
    return {
        id(parameter): rule
        for module, rules, _ in modules_with_rules(model, "", ranks)
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(rule := rules[name], int)
    }


def check_tensor_parallel(config: DecoderConfig, ranks: int) -> None:
    """Raises ConfigError, naming the field and what would work, unless models of this config can be split over so many
    ranks."""
    try:
        _check(config, ranks)
    except ConfigError as error:
        found = ", ".join(str(each) for each in range(1, MOST_RANKS + 1) if _works(config, each))
        raise ConfigError(f"{error}. Numbers of ranks that work for this model: {found}") from None


def _check(config: DecoderConfig, ranks: int) -> None:
    if ranks == 1:
        return
    seen = set()
    for i, block in enumerate(config.blocks):
        for part, layer in (("mixer", block.mixer), ("mlp", block.mlp), ("after", block.after)):
            if layer is not None and layer not in seen:
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
    """All modules that have parameters, in the order of the model; ConfigError, naming it, for one without a rule."""
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
    """A linear layer that is split, and its parts. ConfigError, naming it, where the ranks cannot divide it."""
    yield linear, RULES[split], split
    if linear.compute is not None:
        sizes, dim = [linear.out_features, linear.in_features], RULES[split]["weight"]
        if isinstance(dim, int):
            sizes[dim] //= ranks
        try:
            rules = linear.compute.rules(split, *sizes)
        except (ConfigError, InputError) as error:
            raise ConfigError(f"{name}, of {ranks} ranks: {error}") from None
        yield linear.compute, rules, None
    if linear.update is not None:
        yield linear.update, {key: "replicated" for key, _ in linear.update.named_parameters()}, None


def _distribute(parameter: nn.Parameter, rule: TensorSharding, mesh: DeviceMesh) -> nn.Parameter:
    placement = Shard(rule) if isinstance(rule, int) else Replicate()
    return nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement]), parameter.requires_grad)
