"""The process group that torchrun starts, and the ranks that divide the data among them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ligermodels.errors import InputError
from ligermodels.ops.runtime.library import is_dtensor
from ligermodels.parallel.plan import ParallelPlan

TIMEOUT = timedelta(minutes=10)
"""Timeout of collectives. When a rank is killed, torchrun ends the run at once, without waiting for it."""
DATA = ("replicate", "shard")
"""Dimensions of a mesh along which ranks have different data."""


class HasParameters(Protocol):
    def parameters(self) -> Iterable[nn.Parameter]: ...


def launched() -> bool:
    """Whether torchrun, or another launcher that sets its variables, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


_planned: list[int] = []


@contextmanager
def planned_ranks(count: int) -> Iterator[None]:
    """Context manager in which `world_size` is `count`, and this process rank 0: for a plan without processes."""
    _planned.append(count)
    try:
        yield
    finally:
        _planned.pop()


def world_size() -> int:
    """Number of processes, also before they join a group."""
    if _planned:
        return _planned[-1]
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def is_alone() -> bool:
    """Whether there is one process, and no process group."""
    return world_size() == 1 and not dist.is_initialized()


def check_precision(plan: ParallelPlan) -> None:
    """Raise InputError for a plan with mixed precision in one process without a process group."""
    if is_alone() and (plan.param_dtype or plan.reduce_dtype):
        raise InputError(
            "param_dtype, reduce_dtype: mixed precision is FSDP2's, which needs a process group; start by torchrun, or "
            "a command with --gpus of at least 2, or leave them out"
        )


def is_sharded(plan: ParallelPlan) -> bool:
    """Whether a model with this plan is sharded: there are several processes, or the plan is not the default."""
    return world_size() > 1 or plan != ParallelPlan()


def join(device: torch.device | str | None = None) -> bool:
    """Join the launcher's process group, if there is one and this process has not joined it.

    With GPUs the group has NCCL beside gloo, and this process's GPU becomes the current device.

    Args:
        device: "cpu" to use gloo alone although there are GPUs.

    Returns:
        Whether this call has joined the group.
    """
    if dist.is_initialized() or not launched():
        return False
    if torch.cuda.is_available() and (device is None or torch.device(device).type == "cuda"):
        local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT, device_id=local)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    return True


def rank_device_type() -> str:
    """ "cuda" if this rank has a GPU; "cpu" if it has none, or if the group has gloo alone. Does not start CUDA."""
    on_gpu = torch.cuda.is_available() and (not dist.is_initialized() or "nccl" in dist.get_backend_config())
    return "cuda" if on_gpu else "cpu"


def rank_device() -> torch.device:
    """The device of this rank: the current GPU, or the CPU: see `rank_device_type`."""
    on_gpu = rank_device_type() == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


class Meshes(NamedTuple):
    """The meshes of a plan over all ranks.

    Args:
        ranks: mesh with the plan's AXES as dimensions.
        parameters: mesh that parameters are distributed over, with dimensions ("replicate", "shard", "tensor"). Context
            ranks hold different tokens but the same weights, so "shard" includes them.
        experts: mesh that parameters of experts are distributed over, with dimensions ("replicate", "shard", "expert",
            "tensor"); None if they are distributed like the others.
    """

    ranks: DeviceMesh
    parameters: DeviceMesh
    experts: DeviceMesh | None = None

    @classmethod
    def of(cls, plan: ParallelPlan, device_type: str) -> Meshes:
        """The meshes of `plan` on devices of `device_type` ("cuda"), the same ones in every call: their process groups
        take memory that a GPU never gets back.

        ConfigError if its degrees do not divide the number of ranks, InputError without a process group.
        """
        if not dist.is_initialized():
            raise InputError(
                "plan: there is no process group; start the program by torchrun --nproc-per-node N, or call "
                "torch.distributed.init_process_group first"
            )
        key = (*plan.degrees(dist.get_world_size()).items(), plan.expert, device_type)
        known = _MESHES.setdefault(dist.group.WORLD, {})
        if key not in known:
            known[key] = cls._new(plan, device_type)
        return known[key]

    @classmethod
    def _new(cls, plan: ParallelPlan, device_type: str) -> Meshes:
        degrees = plan.degrees(dist.get_world_size())
        ranks = parameters = dist.init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
        replicate, shard, context, tensor = ranks.shape
        experts = None
        if context > 1:
            sizes = replicate, shard * context, tensor
            parameters = dist.init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard", "tensor"))
        if plan.expert > 1:
            names = ("replicate", "shard", "expert", "tensor")
            degrees_of_experts = replicate, shard * context // plan.expert, plan.expert, tensor
            experts = dist.init_device_mesh(device_type, degrees_of_experts, mesh_dim_names=names)
        return cls(ranks, parameters, experts)


_MESHES: WeakKeyDictionary[Any, dict[Any, Meshes]] = WeakKeyDictionary()
"""Meshes by the process group of all ranks, and by plan and device."""


def gloo_group(thread: Literal["main", "checkpoints"]) -> Any:
    """A gloo group of all ranks beside the default group, for the collectives of one thread: the same one in every
    call. None for a single process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    groups = _GLOO.setdefault(dist.group.WORLD, {})
    if thread not in groups:
        groups[thread] = dist.new_group(backend="gloo")
    return groups[thread]


_GLOO: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Gloo groups of `gloo_group` by the process group of all ranks, and by thread."""


def largest_of_ranks(number: int) -> int:
    """The largest `number` that any rank gives. All ranks call it; no rank waits for a GPU."""
    group = gloo_group("main")
    if group is None:
        return number
    largest = torch.tensor(number, device="cpu")  # not on torch's default device
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return int(largest)


class Parallelism(NamedTuple):
    """The plan and the meshes of a model that has been spread."""

    plan: ParallelPlan
    meshes: Meshes


def parallelism_of(model: object) -> Parallelism | None:
    """The plan and meshes of a model that `parallelize` has spread, or that contains such a model; otherwise None."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    spread = (vars(module).get("_parallelism") for module in modules)
    return next((parallelism for parallelism in spread if parallelism is not None), None)


def data_share(plan: ParallelPlan, axes: tuple[str, ...] = DATA) -> tuple[int, int]:
    """This rank's share of the data, from the plan alone, before there are meshes.

    Args:
        plan: the plan.
        axes: dimensions of the mesh whose ranks have different data.

    Returns:
        Number of the share, and the number of shares.
    """
    degrees = plan.degrees(world_size())
    rank, share = dist.get_rank() if dist.is_initialized() else 0, 0
    coordinates = dict(zip(degrees, np.unravel_index(rank, tuple(degrees.values())), strict=True))
    for name in axes:
        share = share * degrees[name] + int(coordinates[name])
    return share, math.prod(degrees[name] for name in axes)


class DataRanks:
    """The ranks that divide a batch: this process is number `rank` of `size`; a single process is 0 of 1.

    Args:
        mesh: the mesh, or None for a single process. Its dimensions DATA count; without these names, all dimensions
            except the plan's other AXES, since their ranks share data.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.rank, self.size, self._mesh = 0, 1, mesh
        self._dims: list[int] = []
        if mesh is None:
            return
        names = mesh.mesh_dim_names or ()
        self._dims = [i for i, name in enumerate(names) if name in DATA]
        if not self._dims:
            self._dims = [i for i in range(mesh.ndim) if not names or names[i] not in ParallelPlan.AXES]
        for dim in self._dims:
            self.rank = self.rank * mesh.size(dim) + mesh.get_local_rank(dim)
            self.size *= mesh.size(dim)

    @classmethod
    def of(cls, model: HasParameters) -> DataRanks:
        """The data ranks of a model: from its plan if `parallelize` has spread it, otherwise from the mesh of its first
        sharded parameter, where FSDP2 averages gradients."""
        if (spread := parallelism_of(model)) is not None:
            return cls(spread.meshes.ranks)
        return cls(next((cast(Any, p).device_mesh for p in model.parameters() if is_dtensor(p)), None))

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks, on the device of `x`. Does not synchronise with a GPU."""
        if self._mesh is None or self.size == 1:
            return x
        total = x.detach().to(self._mesh.device_type, copy=True)
        for dim in self._dims:
            if self._mesh.size(dim) > 1:
                dist.all_reduce(total, group=self._mesh.get_group(dim))
        return total.to(x.device)
