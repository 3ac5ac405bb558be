"""A plan carried out on a model."""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import FullPrecision
from ligermodels.layers.context_parallel import check_context_parallel
from ligermodels.layers.initialization import allocate, initialize_buffers, persistent_tensors, skip_init
from ligermodels.layers.sharding import is_tensor_parallel
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.decoder import Decoder
from ligermodels.parallel.expert import check_expert_parallel, expert_parallel
from ligermodels.parallel.fsdp import fsdp
from ligermodels.parallel.plan import ParallelPlan
from ligermodels.parallel.ranks import Meshes, Parallelism, join, parallelism_of, rank_device, world_size
from ligermodels.parallel.tensor import check_tensor_parallel, tensor_parallel

Model = TypeVar("Model", bound=nn.Module)


def parallelize(model: Model, plan: ParallelPlan | None = None) -> Model:
    """Spread a model over all ranks by FSDP2, and by what else the plan has, in place; returns `model`.

    Each block, an embedding and a head of its own, and the rest are gathered one after another, the next one while one
    computes. Modules that stay float32 (`FullPrecision`) are groups of their own. Gradients are averaged over the
    ranks, as FSDP2 does it: `training.train` makes of them those of one process on the batches of all ranks. All ranks
    then call `forward`, `generate` and `save_pretrained` together. Give all the same values: each has its part of its
    own model's. Replicas take those of the first one.

    Call it before an optimizer is made, and after `add_lora`. What has been spread already (the base of a
    `MedusaModel`) stays as it is. On one process without a process group, nothing is sharded.

    Args:
        model: a `CausalLM`, `MedusaModel` or any module with a `Decoder` in it, also on the meta device: then
            `model.to_empty(device=...)` gives it memory afterwards.
        plan: by default all ranks shard. On torchrun's processes the process group is started if need be.

    Raises, before the model is changed:
        ConfigError: the degrees do not make up the number of ranks, or do not divide the model.
        InputError: there is no native decoder in the model, or no process group; or another plan than the one by which
            a part has been spread.
    """
    if not isinstance(plan, ParallelPlan | None):
        raise InputError(
            f"plan: must be a ParallelPlan, got a {type(plan).__name__}; ParallelPlan(tensor=2), say, makes one"
        )
    if not isinstance(model, nn.Module):
        raise InputError(f"parallelize: takes a model, got a {type(model).__name__}")
    before = parallelism_of(model)
    plan = plan or (before.plan if before else ParallelPlan())
    if before is not None and before.plan != plan:
        raise InputError("plan: a part of the model has been spread by another one; give the same")
    decoders = [module for module in model.modules() if isinstance(module, Decoder)]
    if not decoders:
        raise InputError(
            f"parallelize: takes a native CausalLM or a model around one, got a {type(model).__name__} without; "
            "accelerate spreads models of transformers, and lm.from_transformers(model) makes a native one"
        )
    for decoder in decoders:
        check_tensor_parallel(decoder.config, plan.tensor)
        if plan.context > 1:
            check_context_parallel(decoder)
    if plan.expert > 1:
        check_expert_parallel(model, plan.expert)
    _check_compile(decoders, plan)
    _join_for(model)
    plan.degrees(world_size())
    if world_size() == 1 and not torch.distributed.is_initialized():
        if plan.param_dtype or plan.reduce_dtype:
            raise InputError(
                "param_dtype, reduce_dtype: mixed precision is FSDP2's, which needs a process group; start by torchrun"
            )
        _set_modes(decoders, plan)
        return model
    meshes = before.meshes if before else Meshes.of(plan, _device_type(model))
    if plan.tensor > 1:
        if before is not None and vars(model).get("_parallelism") is None:
            raise InputError(
                "tensor: the base of this model has been spread by itself; make the model on a base that has not, and "
                "spread them together"
            )
        if before is None or not any(map(is_tensor_parallel, model.modules())):
            tensor_parallel(model, meshes.parameters["tensor"])
    if plan.expert > 1:
        expert_parallel(model, cast(DeviceMesh, meshes.experts)["expert"])
    if plan.context > 1:
        for decoder in decoders:
            decoder._context_mesh = meshes.ranks["context"]
    _set_modes(decoders, plan)
    fsdp(model, _sharding(meshes.parameters), plan, None if meshes.experts is None else _sharding(meshes.experts))
    _same_replicas(model, meshes.parameters)
    for module in (model, *decoders):
        vars(module)["_parallelism"] = Parallelism(plan, meshes)
    return model


def parallel_copy(model: CausalLM) -> CausalLM:
    """A copy of a model that `parallelize` has spread, spread alike and frozen, in evaluation mode.

    Raises InputError for one that was sharded by other means.
    """
    spread = parallelism_of(model)
    if spread is None:
        raise InputError("the model was sharded without a plan, and cannot be copied; use lm.parallelize(model, plan)")
    with torch.device("meta"), skip_init():
        found = CausalLM(model.config, model.export_spec)
    allocate(found, model.dtype, "meta")
    vars(found)["_parallelism"] = spread
    parallelize(found)
    found.to_empty(device=model.device)
    initialize_buffers(found, model.config.initializer_range)
    there = persistent_tensors(found)
    with torch.no_grad():
        for name, tensor in persistent_tensors(model).items():
            there[name].copy_(tensor)
    return found.requires_grad_(False).eval()


def _sharding(mesh: DeviceMesh) -> DeviceMesh:
    """The dimensions that FSDP2 has."""
    return mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"]


@torch.no_grad()
def _same_replicas(model: nn.Module, mesh: DeviceMesh) -> None:
    """Gradients alone are exchanged between replicas, so that what differs at the start would differ for ever."""
    if mesh["replicate"].size() > 1:
        for parameter in model.parameters():
            if isinstance(parameter, DTensor) and not parameter.is_meta:
                torch.distributed.broadcast(parameter.to_local(), group=mesh.get_group("replicate"), group_src=0)


def _join_for(model: nn.Module) -> None:
    kinds = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    join("cpu" if kinds == {"cpu"} and not torch.cuda.is_available() else None)


def _device_type(model: nn.Module) -> str:
    """Where the model is; of one on the meta device where it will be. One on the CPU is moved to the ranks' GPUs."""
    kinds = {parameter.device.type for parameter in model.parameters()} - {"meta", "cpu"}
    return kinds.pop() if kinds else rank_device().type


def _check_compile(decoders: list[Decoder], plan: ParallelPlan) -> None:
    blocks = [block for decoder in decoders for block in decoder.blocks]
    if plan.compile != "none" and any(isinstance(m, FullPrecision) for block in blocks for m in block.modules()):
        raise ConfigError(
            "compile: blocks of this model hold modules that stay float32 and are gathered within the block, which "
            "torch.compile cannot do; leave it 'none'"
        )


def _set_modes(decoders: list[Decoder], plan: ParallelPlan) -> None:
    for decoder in decoders:
        if plan.activation_checkpointing is not None:
            decoder.activation_checkpointing = plan.activation_checkpointing
        for block in decoder.blocks if plan.compile != "none" else ():
            block.compile()
