"""The optional parts of a `Linear`: how its weight is kept and multiplied, and what is added to the product."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.layers.sharding import TensorSharding
from ligermodels.ops import Float8Form, GLUOptions


class Shard:
    """One rank's shard of a linear layer and of its parts: here all of it. See `TensorShard` for tensor parallelism."""

    def local(self, parameter: Any) -> Any:
        """The tensor to compute with of a parameter that this rank has whole, or has a shard of."""
        return parameter

    def inputs(self, parameter: Tensor) -> Tensor:
        """This rank's input channels of a tensor (..., in_features)."""
        return parameter

    def outputs(self, parameter: Tensor) -> Tensor:
        """This rank's output channels of a tensor (out_features, ...)."""
        return parameter

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """The input x (..., in_features of this rank) after dropout with probability p."""
        return F.dropout(x, p)


UNSHARDED = Shard()


class Part(nn.Module):
    """A part of a linear layer, or of the experts of a mixture."""

    unexportable: ClassVar[str | None] = None
    """Why a model with such parts cannot be written as a checkpoint, and what to do; None if it can be."""


class ComputePart(Part):
    """Base of `Compute`, and of the same for experts."""

    holds_weight: ClassVar[bool] = False
    """Whether the part keeps the weight itself; the parameter of the layer is then None."""


class UpdatePart(Part):
    """Base of `Update`, and of the same for experts."""

    projections: tuple[str, ...] = ("weight",)
    """Names of the parameters that have an update."""
    dropout: float = 0.0
    """Probability that an element of the input is dropped, in training mode, unless all parameters are frozen."""

    @property
    def drops(self) -> bool:
        """Whether forward drops elements of its input now. A frozen part drops none: its results are inputs of what is
        trained, such as draft heads, and are used without dropout."""
        return bool(self.training and self.dropout) and any(p.requires_grad for p in self.parameters())


class Compute(ComputePart):
    """How a linear layer keeps its weight and multiplies by it; subclasses define `forward`.

    A class that keeps the weight itself (codes in place of numbers) sets `holds_weight`, and defines `dense` and
    `fill`: the `weight` of the layer is then None.
    """

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {}

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shard: Shard = UNSHARDED,
        *,
        activation: GLUOptions | None = None,
    ) -> Tensor:
        """x W^T + bias, then perhaps a gated activation.

        Args:
            x: (..., in_features).
            weight: (out_features, in_features); None if this module `holds_weight`.
            bias: (out_features,) or None.
            shard: this rank's shard. x, weight and bias are this rank's already; tensors of this module are not.
            activation: options of a gated activation of the result, or None.

        Returns (..., out_features) of the dtype of x, or half as many channels after an activation.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    keeps_frozen: bool | None = None
    """Whether the once made form of a frozen weight is kept; None: unless a process group may shard the weight."""

    def input_form(self, weight: Tensor | None) -> Float8Form | None:
        """The form in which the product takes x as a `Float8Tensor` now; None if it takes numbers."""
        return None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight (out_features, in_features) in `dtype`, for a class that `holds_weight`."""
        raise NotImplementedError(f"{type(self).__name__} holds no weight")

    def fill(self, weight: Tensor) -> None:
        """Keep `weight` (out_features, in_features), for a class that `holds_weight`."""
        raise NotImplementedError(f"{type(self).__name__} holds no weight")

    def of_sizes(self, out_features: int, in_features: int) -> Compute:
        """A copy for a weight of other sizes, on the meta device if it holds the weight: a rank's shard in a plan."""
        return copy.deepcopy(self)

    def rules(self, split: str, out_features: int, in_features: int) -> Mapping[str, TensorSharding]:
        """How the parameters of this module are distributed over tensor-parallel ranks; by default replicated.

        Args:
            split: how the layer is divided, a key of `tensor_shard.RULES`.
            out_features, in_features: sizes of one rank's shard of the weight.

        Raises ConfigError or InputError where shares of these sizes cannot be computed.
        """
        return {name: "replicated" for name, _ in self.named_parameters()}


class Update(UpdatePart):
    """What is added to the product of a linear layer, such as a low-rank update; subclasses define `forward`.

    Parameters are replicated over tensor-parallel ranks. `forward` takes this rank's channels of them by
    `shard.inputs` and `shard.outputs`.
    """

    def forward(self, x: Tensor, shard: Shard = UNSHARDED) -> Tensor:
        """The summand for the input x (..., in_features): (..., out_features), of the dtype of x."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def add_to(self, weight: Tensor) -> None:
        """Add the update to a weight (out_features, in_features) in place."""
        raise NotImplementedError(f"{type(self).__name__} cannot be merged into a weight")


def check_exportable(model: nn.Module) -> None:
    """InputError if a part of a layer has no place in a checkpoint: its class says why by `unexportable`."""
    for module in model.modules():
        if isinstance(module, Part) and module.unexportable is not None:
            raise InputError(module.unexportable)
