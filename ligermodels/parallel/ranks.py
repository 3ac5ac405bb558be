"""The process group that torchrun starts, and the ranks that divide the data among them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ligermodels.errors import InputError
from ligermodels.parallel.plan import ParallelPlan

TIMEOUT = timedelta(minutes=10)
"""Of a collective call. It is not what ends a run whose rank was killed: torchrun does that at once."""
DATA = ("replicate", "shard")
"""Dimensions of a mesh whose ranks have data of their own."""


class HasParameters(Protocol):
    def parameters(self) -> Iterable[nn.Parameter]: ...


def launched() -> bool:
    """Whether torchrun, or another launcher that sets its variables, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def world_size() -> int:
    """The number of processes, also before they are a group."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def join(device: torch.device | str | None = None) -> bool:
    """Join the process group of the launcher, if there is one and it was not joined; returns whether this did it.

    device: "cpu", for gloo alone; otherwise, and where there are GPUs, NCCL beside it, and the GPU of the process is
    the current one.
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


def rank_device() -> torch.device:
    """The device of this rank: the current GPU, without one, or in a group of gloo alone, the CPU."""
    on_gpu = torch.cuda.is_available() and (not dist.is_initialized() or "nccl" in dist.get_backend_config())
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


class Meshes(NamedTuple):
    """The meshes of a plan over all ranks.

    ranks: its dimensions are the plan's AXES.
    parameters: that which parameters are distributed over, ("replicate", "shard", "tensor"): the ranks of a context
        have the same weights, and so divide them as those do that have data of their own.
    experts: that of parameters of experts, ("replicate", "shard", "expert"); None where these are as the others.
    """

    ranks: DeviceMesh
    parameters: DeviceMesh
    experts: DeviceMesh | None = None

    @classmethod
    def of(cls, plan: ParallelPlan, device_type: str) -> Meshes:
        """ConfigError as of `ParallelPlan.degrees`, InputError without a process group."""
        ranks = parameters = _mesh(plan, device_type)
        replicate, shard, context, tensor = ranks.shape
        experts = None
        if context > 1:
            sizes = replicate, shard * context, tensor
            parameters = dist.init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard", "tensor"))
        if plan.expert > 1:
            sizes = replicate, shard * context // plan.expert, plan.expert
            experts = dist.init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard", "expert"))
        return cls(ranks, parameters, experts)


class Parallelism(NamedTuple):
    """How a model was spread."""

    plan: ParallelPlan
    meshes: Meshes


def parallelism_of(model: object) -> Parallelism | None:
    """The plan and meshes of a model, or of a part of it, that `parallelize` has spread."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = (vars(module).get("_parallelism") for module in modules)
    return next((each for each in found if each is not None), None)


def _mesh(plan: ParallelPlan, device_type: str) -> DeviceMesh:
    if not dist.is_initialized():
        raise InputError(
            "plan: there is no process group; start the program by torchrun --nproc-per-node N, or call "
            "torch.distributed.init_process_group first"
        )
    degrees = plan.degrees(dist.get_world_size())
    return dist.init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def data_share(plan: ParallelPlan, axes: tuple[str, ...] = DATA) -> tuple[int, int]:
    """Which share of the data this rank takes, and how many there are, before there is a mesh."""
    degrees = plan.degrees(world_size())
    rank, share = dist.get_rank() if dist.is_initialized() else 0, 0
    places = dict(zip(degrees, np.unravel_index(rank, tuple(degrees.values())), strict=True))
    for name in axes:
        share = share * degrees[name] + int(places[name])
    return share, math.prod(degrees[name] for name in axes)


class DataRanks:
    """The ranks that divide a batch among them: `rank` of `size`; one process alone is 0 of 1.

    They are those of the dimensions DATA of a mesh; of one that has none of these names all, but for those that are a
    plan's other AXES, whose ranks share their data.
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
        """Those of the plan of a model that `parallelize` has spread; else those over which FSDP2 averages gradients,
        of the mesh of its first sharded parameter."""
        if (spread := parallelism_of(model)) is not None:
            return cls(spread.meshes.ranks)
        return cls(next((p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")), None))

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, on the device of x; a GPU does not wait for it."""
        if self._mesh is None or self.size == 1:
            return x
        found = x.detach().to(self._mesh.device_type, copy=True)
        for dim in self._dims:
            if self._mesh.size(dim) > 1:
                dist.all_reduce(found, group=self._mesh.get_group(dim))
        return found.to(x.device)
