"""Tensor parallelism: each rank has a part of every projection, of the embedding and of the head, by DTensors.

Attention is split by key/value heads, Gated DeltaNet by key heads, feed-forward layers and experts by their
intermediate channels, embedding and head by the vocabulary (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053).
Norms and routers are the same on all ranks, of which each has a part of the tokens between projections
(`layers.token_parts`), or, where they are decoded, all of them: then a block sums its output over ranks twice.

How a layer is split is said by its config (`LayerConfig.tensor_shard`) and by its module (`tensor_parallel`): nothing
here knows which layers there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, _random, distribute_tensor

from ligermodels.errors import ConfigError, InputError
from ligermodels.layers.float8 import Float8Linear
from ligermodels.layers.lora import LoRALinear
from ligermodels.layers.sharding import TensorSharding, is_sharded
from ligermodels.layers.token_parts import divide_tokens
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.decoder import DecoderConfig
from ligermodels.ops import check_float8_sizes
from ligermodels.parallel import linears

MOST_RANKS = 256  # that are tried for what would work


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
    for module, _, kind in distributed:
        if kind is None:
            module._tensor_mesh = mesh  # type: ignore[assignment]
        else:
            linears.divide(module, kind, mesh)
    bases[0].decoder._tensor_ranks = ranks
    divide_tokens(bases[0].decoder, mesh)
    _keep_random_states(mesh)


def _keep_random_states(mesh: DeviceMesh) -> None:
    """Keep DTensor from setting the random state of every rank of the process group to the first one's.

    It does so at its first random op, here of LoRA's dropout. Ranks with other sequences would drop the same places,
    and a checkpointed block would be computed again from the state before. Ranks of one tensor group need equal states:
    they have them by default, and by `ligermodels train`.
    """
    if _random.is_rng_supported_mesh(mesh) and not _random._rng_tracker:  # CPUs have none
        _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


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


Planned = tuple[nn.Module, Mapping[str, TensorSharding], "str | None"]
"""A module, the rules of its own parameters, and, of a linear layer, its kind."""


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
        if (kind := rules.get(key)) is None:
            yield from modules_with_rules(child, path, ranks)
        elif type(child) in (nn.Linear, LoRALinear, Float8Linear):
            _check_float8(path, child, str(kind), ranks)
            others = {key: "replicated" for key, _ in child.named_parameters()}
            yield child, {**others, **linears.RULES[str(kind)]}, str(kind)  # type: ignore[dict-item]
        else:
            raise ConfigError(
                f"{path} ({type(child).__name__}): is in the place of a linear layer, which it is not, and has no rule "
                "for tensor parallelism"
            )


def _check_float8(name: str, linear: Any, kind: str, ranks: int) -> None:
    """ConfigError unless this rank's part of a linear layer in float8 has sizes that float8 takes."""
    if getattr(linear, "float8", None) is None:
        return
    rows, columns = linear.out_features, linear.in_features
    shards: Mapping[TensorSharding, tuple[int, int]] = {0: (rows // ranks, columns), 1: (rows, columns // ranks)}
    try:
        check_float8_sizes(f"{name}, of {ranks} ranks", *shards.get(linears.RULES[kind]["weight"], (rows, columns)))
    except InputError as error:
        raise ConfigError(str(error)) from None


def _distribute(parameter: nn.Parameter, rule: TensorSharding, mesh: DeviceMesh) -> nn.Parameter:
    placement = Shard(rule) if isinstance(rule, int) else Replicate()
    return nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement]), parameter.requires_grad)
