"""Distribute a model over ranks by a plan."""

from __future__ import annotations

from itertools import chain
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ligermodels.errors import ConfigError, InputError, warn_caller
from ligermodels.layers import KeepsDtype
from ligermodels.layers.context_parallel import check_context_parallel
from ligermodels.layers.initialization import allocate, initialize_buffers, persistent_tensors, skip_init
from ligermodels.layers.modules import modules_of
from ligermodels.layers.sharding import is_tensor_parallel
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.decoder import Decoder
from ligermodels.models.differences import module_difference
from ligermodels.models.native import check_own_modules
from ligermodels.parallel.expert import check_expert_parallel, expert_parallel, mixtures
from ligermodels.parallel.fsdp import check_one_unit, fsdp
from ligermodels.parallel.plan import ParallelPlan
from ligermodels.parallel.ranks import (
    Meshes,
    Parallelism,
    check_precision,
    is_alone,
    join,
    parallelism_of,
    rank_device,
    world_size,
)
from ligermodels.parallel.tensor import check_tensor_parallel, tensor_parallel

Model = TypeVar("Model", bound=nn.Module)


def parallelize(model: Model, plan: ParallelPlan | None = None) -> Model:
    """Distribute a model over all ranks with FSDP2 and the other forms of parallelism in `plan`, in place.

    FSDP2 gathers one group of parameters at a time: a block, an untied embedding, an untied head, the other parameters.
    It prefetches the next group while one computes. Modules that keep their dtypes (`KeepsDtype`) are groups of their
    own. FSDP2 averages gradients over the ranks; `training.train` scales them to the gradients of one process on the
    batches of all ranks. All ranks then call `forward`, `generate` and `save_pretrained` together.

    All ranks must pass the same values: each rank keeps its shard of its own copy. Replicas receive the values of the
    first replica. Call `parallelize` after `add_lora` and before an optimizer is created. Create the optimizer before a
    forward pass with gradients, or after its backward pass: in between, FSDP2 has gathered some parameters, whose
    copies would be trained in place of the shards. A part that is already distributed, such as the base of a
    `MedusaModel`, is not changed. On one process without a process group, nothing is sharded.

    Args:
        model: a `CausalLM`, `MedusaModel` or any module that contains a `Decoder`, also on the meta device: then
            `model.to_empty(device=...)` allocates it afterwards.
        plan: the degrees of parallelism and other settings. Default: FSDP2 over all ranks. In processes of torchrun the
            process group is started if there is none.

    Returns:
        `model`.

    Raises (before the model is changed):
        ConfigError: the product of the degrees differs from the number of ranks, or a degree does not divide the model.
        InputError: the model contains no native decoder; there is no process group; or a part of the model is
            distributed by a different plan.

    Examples:
        >>> import ligermodels as lm
        >>> model = lm.from_pretrained("Qwen/Qwen3-0.6B")  # under torchrun  # doctest: +SKIP
        >>> model = lm.parallelize(model, lm.ParallelPlan(tensor=2))  # doctest: +SKIP
    """
    if not isinstance(plan, ParallelPlan | None):
        raise InputError(
            f"plan: must be a ParallelPlan, got a {type(plan).__name__}; ParallelPlan(tensor=2), say, makes one"
        )
    before = parallelism_of(model)
    plan = plan or (before.plan if before else ParallelPlan())
    decoders = _decoders(model)
    for decoder in decoders:
        check_own_modules(decoder, "parallelize")
    _check(model, decoders, plan, before)
    _join_for(model)
    degrees = plan.degrees(world_size())
    if plan.fsdp_unit == "model":
        check_one_unit(model, {**degrees, "expert": plan.expert}, plan.param_dtype)
    if is_alone():
        check_precision(plan)
        fields = ParallelPlan.model_fields
        for name in ("reshard_after_forward", "fsdp_unit"):  # plans for any number of GPUs have them
            if getattr(plan, name) != fields[name].default:
                warn_caller(
                    f"{name}: has no effect in one process, which holds the whole model; start several by torchrun, or "
                    "a command with --gpus",
                    UserWarning,
                )
        _set_modes(decoders, plan)
        return model
    meshes = before.meshes if before else Meshes.of(plan, _device_type(model))
    _distribute(model, decoders, plan, meshes, before)
    for module in (model, *decoders):
        vars(module)["_parallelism"] = Parallelism(plan, meshes)
    return model


def _distribute(
    model: nn.Module, decoders: list[Decoder], plan: ParallelPlan, meshes: Meshes, before: Parallelism | None
) -> None:
    """Distribute the parts of a model that are not distributed yet. `before`: the parallelism of its other parts."""
    if plan.tensor > 1 and (before is None or not any(map(is_tensor_parallel, model.modules()))):
        tensor_parallel(model, meshes.parameters["tensor"])
    if meshes.experts is not None:
        expert_parallel(model, meshes.experts["expert", "tensor"] if plan.tensor > 1 else meshes.experts["expert"])
    if plan.context > 1:
        for decoder in decoders:
            decoder._context_mesh = meshes.ranks["context"]
    fsdp(model, _sharding(meshes.parameters), plan, None if meshes.experts is None else _sharding(meshes.experts))
    _set_modes(decoders, plan)
    _same_replicas(model, meshes.parameters)


def parallel_copy(model: CausalLM) -> CausalLM:
    """A frozen copy of a model in evaluation mode, distributed by the model's own plan.

    Raises InputError for a model that was sharded without a plan, or that is not as its config makes it: with LoRA,
    quantised weights or changed layers.
    """
    parallelism = parallelism_of(model)
    if parallelism is None:
        raise InputError("the model was sharded without a plan, and cannot be copied; use lm.parallelize(model, plan)")
    with torch.device("meta"), skip_init():
        copy = CausalLM(model.config, model.export_spec)
    sources = persistent_tensors(model)
    names = sorted(sources.keys() ^ persistent_tensors(copy).keys())
    difference = (names[0],) if names else module_difference(model, copy)
    if difference is not None:
        raise InputError(
            f"frozen_copy: model.{difference[0]} of the distributed model is not as its config makes it (LoRA, "
            "quantised weights, changed layers): call frozen_copy before lm.parallelize, and distribute the copy too"
        )
    allocate(copy, model.dtype, "meta")
    copy.batch_invariant = model.batch_invariant
    vars(copy)["_parallelism"] = parallelism
    parallelize(copy)
    copy.to_empty(device=model.device)
    initialize_buffers(copy, model.config.initializer_range)
    with torch.no_grad():
        for name, tensor in persistent_tensors(copy).items():
            tensor.copy_(sources[name])
    return copy.requires_grad_(False).eval()


def _decoders(model: nn.Module) -> list[Decoder]:
    """The native decoders in a model; InputError if there are none."""
    if not isinstance(model, nn.Module):
        raise InputError(f"parallelize: takes a model, got a {type(model).__name__}")
    decoders = modules_of(model, Decoder)
    if not decoders:
        raise InputError(
            f"parallelize: takes a native CausalLM or a model around one, got a {type(model).__name__} without; "
            "accelerate spreads models of transformers, and lm.from_transformers(model) makes a native one"
        )
    return decoders


def _check(model: nn.Module, decoders: list[Decoder], plan: ParallelPlan, before: Parallelism | None) -> None:
    """Raise the errors of `parallelize` that do not depend on the number of ranks.

    `before` is the parallelism of a part that is already distributed.
    """
    if before is not None and before.plan != plan:
        raise InputError("plan: a part of the model is distributed by another plan; pass that plan")
    if before is not None and plan.tensor > 1 and vars(model).get("_parallelism") is None:
        raise InputError(
            "tensor: the base of this model has been spread by itself; make the model on a base that has not, and "
            "spread them together"
        )
    for decoder in decoders:
        check_tensor_parallel(decoder.config, plan.tensor)
        if plan.context > 1:
            check_context_parallel(decoder, plan.context * plan.tensor)
    if plan.expert > 1:
        check_expert_parallel(model, plan.expert)
    if plan.compile != "none":
        _check_compile(decoders, plan)


def _check_compile(decoders: list[Decoder], plan: ParallelPlan) -> None:
    """ConfigError if no layer can be compiled."""
    layers = chain.from_iterable(_layers(block) for decoder in decoders for block in decoder.blocks)
    if all(modules_of(layer, KeepsDtype) for layer in layers):
        raise ConfigError(
            "compile: all layers of this model contain modules that keep their dtypes (quantised or float32 weights) "
            "and are gathered within the layer; torch.compile does not support that; leave it 'none'"
        )
    modes = {plan.activation_checkpointing or decoder.activation_checkpointing for decoder in decoders}
    if plan.expert > 1 and "selective" in modes:
        raise ConfigError(
            "activation_checkpointing: 'selective' is not supported where experts are spread over ranks and the other "
            "layers of their blocks are compiled; give 'full' or 'none'"
        )


def _sharding(mesh: DeviceMesh) -> DeviceMesh:
    """The submesh for FSDP2: the dimensions "shard" and, if there are replicas, "replicate"."""
    return mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"]


@torch.no_grad()
def _same_replicas(model: nn.Module, mesh: DeviceMesh) -> None:
    """Copy the parameters of the first replica to the others: later only gradients are exchanged between replicas."""
    if mesh["replicate"].size() > 1:
        for parameter in model.parameters():
            if isinstance(parameter, DTensor) and not parameter.is_meta:
                torch.distributed.broadcast(parameter.to_local(), group=mesh.get_group("replicate"), group_src=0)


def _join_for(model: nn.Module) -> None:
    """Join the launcher's process group; a model on the CPU, in a program without GPUs, needs gloo alone."""
    device_types = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    join("cpu" if device_types == {"cpu"} and not torch.cuda.is_available() else None)


def _device_type(model: nn.Module) -> str:
    """Device type of the distributed model. Models on the CPU or the meta device go to the device of the rank."""
    device_types = {parameter.device.type for parameter in model.parameters()} - {"meta", "cpu"}
    return device_types.pop() if device_types else rank_device().type


def _set_modes(decoders: list[Decoder], plan: ParallelPlan) -> None:
    for decoder in decoders:
        if plan.activation_checkpointing is not None:
            decoder.activation_checkpointing = plan.activation_checkpointing
        for block in decoder.blocks if plan.compile != "none" else ():
            _compile(block)


def _compile(block: nn.Module) -> None:
    """Compile a block; where FSDP2 gathers modules within it, or experts are spread over ranks and their exchanges wait
    for the device, the layers without them: torch.compile supports neither."""
    spread = [module for _, module in mixtures(block) if module._expert_mesh is not None]
    gathered = [module for module in block.modules() if module is not block and isinstance(module, FSDPModule)]
    if not spread and not gathered:
        return block.compile()
    for layer in _layers(block):
        if not {*spread, *gathered} & {*layer.modules()}:
            layer.compile()


def _layers(block: nn.Module) -> list[nn.Module]:
    """The layers of a block that are compiled one by one."""
    return [layer for layer in (block.mixer, block.mlp, block.after) if isinstance(layer, nn.Module)]
