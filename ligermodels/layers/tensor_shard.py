"""The shard of a linear layer that one rank of tensor parallelism has: some of its output or input channels.

Rank by rank, a layer is the same module with sharded parameters (DTensors): `split` says which channels these are,
what the rank does with the input and what with its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.layers import sequence_parallel
from ligermodels.layers.linear_parts import Shard
from ligermodels.layers.sharding import TensorSharding, gather_last, local, sum_over_ranks, used_in_parts
from ligermodels.ops.runtime.library import is_dtensor

if TYPE_CHECKING:
    from ligermodels.layers.linear import Linear

RULES: Mapping[str, Mapping[str, TensorSharding]] = {
    "columns": {"weight": 0, "bias": 0},
    "gathered_columns": {"weight": 0, "bias": 0},
    "columns_to_all": {"weight": 0, "bias": 0},
    "rows": {"weight": 1, "bias": "replicated"},
    "replicated": {"weight": "replicated", "bias": "replicated"},
}
"""How each kind of split distributes the parameters of the layer itself; those of updates are replicated."""


@dataclass(frozen=True)
class TensorShard(Shard):
    """This rank's shard of a linear layer.

    Args:
        kind: a key of RULES. "columns" shards output channels, and "rows" input channels, whose products are summed
            over ranks. "gathered_columns" is "columns" for an input that is a result of `used_in_parts`, and
            "columns_to_all" is "columns" whose outputs all ranks get.
        mesh: a DeviceMesh of one dimension.
    """

    kind: str
    mesh: Any

    @property
    def dim(self) -> int | None:
        """The dimension in which the weight is sharded, or None."""
        return rule if isinstance(rule := RULES[self.kind]["weight"], int) else None

    def call(self, linear: Linear, x: Tensor) -> Tensor:
        """The layer for x, this rank's input: (..., in_features), for "rows" this rank's input channels.

        Returns this rank's output channels, or all of them for "rows", "columns_to_all" and "replicated". Under
        sequence parallelism input and result are parts of the tokens where they have all channels.
        """
        parts = sequence_parallel.current()
        fused = parts is not None and linear.compute is None and linear.update is None
        weight, bias = local(linear, linear.weight), local(linear, linear.bias)
        if self.kind == "rows":
            if fused and parts is not None:
                y = parts.summed_linear(x, weight)
            else:
                y = sum_over_ranks(linear, linear.local_sum(x, weight, None, self))
            return y if bias is None else y + bias.to(y.dtype)
        if self.kind in ("columns", "columns_to_all"):
            if fused and parts is not None:
                y = parts.gathered_linear(x, weight, bias)
            else:
                y = linear.local_sum(used_in_parts(linear, x), weight, bias, self)
            if self.kind == "columns_to_all":
                return gather_last(linear, y, linear.out_features, partial=True)
            return y
        return linear.local_sum(x, weight, bias, self)

    def local(self, parameter: Any) -> Any:
        """This rank's shard of a parameter; of a replicated one all of it, with gradients summed over ranks."""
        from ligermodels.ops.runtime import local_tensors  # imports DTensors, which takes long

        if not is_dtensor(parameter):
            return parameter
        return local_tensors.local(parameter, partial=self.dim is not None or sequence_parallel.current() is not None)

    def inputs(self, parameter: Tensor) -> Tensor:
        """This rank's input channels of a tensor (..., in_features), such as a replicated parameter."""
        return self._own(self.local(parameter), -1) if self.dim == 1 else self.local(parameter)

    def outputs(self, parameter: Tensor) -> Tensor:
        """This rank's output channels of a tensor (out_features, ...), such as a replicated parameter."""
        return self._own(self.local(parameter), 0) if self.dim == 0 else self.local(parameter)

    def _own(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(self.mesh.size(), dim)[self.mesh.get_local_rank()]

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """The input x of this rank after dropout with probability p.

        The random numbers of all ranks are the same, as torch's generators of equal seeds have them. Each rank draws
        the mask of the whole input and takes its part, so that ranks with the same input drop the same elements.
        """
        dim = x.ndim - 1 if self.dim == 1 else None
        if self.dim is None and sequence_parallel.current() is not None:
            dim = x.ndim - 2
        if dim is None or x.is_meta:
            return F.dropout(x, p)
        shape = list(x.shape)
        shape[dim] *= self.mesh.size()
        kept = torch.empty(shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p)
        return x * self._own(kept, dim) / (1 - p)
