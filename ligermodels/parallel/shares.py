"""The shard of each parameter that a rank would hold, by arithmetic; nothing is distributed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ligermodels.errors import ConfigError
from ligermodels.layers import KeepsDtype
from ligermodels.layers.modules import modules_of
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.expert import check_expert_parallel, mixtures, of_experts
from ligermodels.parallel.tensor import check_tensor_parallel, tensor_placements


@dataclass(frozen=True)
class Share:
    """The shard of a parameter on rank 0, the largest of all shards.

    Args:
        parameter: the whole parameter.
        shape: shape of the shard while FSDP2 keeps it gathered.
        dtype: its dtype then, and of its whole gradient.
        of_experts: whether it has a row per expert, and experts are spread.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    dtype: torch.dtype
    of_experts: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the shard while FSDP2 keeps it gathered."""
        return math.prod(self.shape) * self.dtype.itemsize

    def sharded(self, ranks: int) -> int:
        """Bytes on rank 0 if FSDP2 shards its rows over this number of `ranks`; the first ranks may have a row more."""
        rows, *others = self.shape or (1,)
        return -(-rows // ranks) * math.prod(others) * self.parameter.itemsize

    def summed(self, ranks: int, reduce_dtype: torch.dtype | None) -> int:
        """Bytes that FSDP2 takes to sum the gradient over `ranks` in `reduce_dtype`, by default in its own dtype: the
        whole gradient, and if it is cast afterwards this rank's part of the sum."""
        elements, dtype = math.prod(self.shape), reduce_dtype or self.dtype
        if reduce_dtype is None or reduce_dtype == self.parameter.dtype:
            return elements * dtype.itemsize
        return (elements + self.sharded(ranks) // self.parameter.itemsize) * dtype.itemsize


class Shares:
    """The shards of all parameters of a model, in the order of `model.parameters()`.

    `mixtures` lists the modules with experts that are spread.

    Args:
        model: the model, on any device.
        tensor: ranks that projections are divided over.
        expert: ranks that experts are divided over.
        param_dtype: `ParallelPlan.param_dtype`, dtype of gathered parameters but those of `KeepsDtype` modules.

    Raises:
        ConfigError: the model cannot be divided in this way; the message names the degree.
    """

    def __init__(
        self, model: CausalLM, *, tensor: int = 1, expert: int = 1, param_dtype: torch.dtype | None = None
    ) -> None:
        if tensor > 1 and expert > 1:
            raise ConfigError(
                "expert: the memory of a plan with both expert and tensor is not estimated; leave one of them out"
            )
        self.tensor, self.expert, self.param_dtype = tensor, expert, param_dtype
        self.mixtures: list[Any] = []
        dims: dict[int, int] = {}
        spread: set[int] = set()
        if expert > 1:
            check_expert_parallel(model, expert)
            self.mixtures = [module for _, module in mixtures(model)]
            spread = {id(p) for module in self.mixtures for p in of_experts(module).values()}
            dims = dict.fromkeys(spread, 0)
        if tensor > 1:
            check_tensor_parallel(model.config, tensor)
            dims = tensor_placements(model, tensor)
        kept = {id(p) for module in modules_of(model, KeepsDtype) for p in module.parameters()}
        self._all = []
        for p in model.parameters():
            dtype = p.dtype if param_dtype is None or id(p) in kept else param_dtype
            self._all.append(Share(p, self._shape(p, dims.get(id(p))), dtype, id(p) in spread))
        self._by_id = {id(share.parameter): share for share in self._all}

    def _shape(self, parameter: nn.Parameter, dim: int | None) -> tuple[int, ...]:
        ranks = self.tensor * self.expert
        return tuple(-(-size // ranks) if i == dim else size for i, size in enumerate(parameter.shape))

    def __iter__(self) -> Iterator[Share]:
        return iter(self._all)

    def of(self, module: nn.Module) -> list[Share]:
        """The shards of the parameters of `module`, a part of the model."""
        return [self._by_id[id(p)] for p in module.parameters()]
