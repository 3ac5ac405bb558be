"""Base class of layers with optional parts: how weights are kept and multiplied, and what is added to the products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import nn

from ligermodels.errors import InputError, short
from ligermodels.layers.linear_parts import ComputePart, UpdatePart

AnyCompute = TypeVar("AnyCompute", bound=ComputePart)
AnyUpdate = TypeVar("AnyUpdate", bound=UpdatePart)


class Composed(nn.Module, Generic[AnyCompute, AnyUpdate]):
    """A layer with the optional parts `compute` and `update`, which are assigned and removed (None) at any time.

    A part gets the training mode of the layer. A `compute` that holds the weights replaces the parameters; `make_dense`
    brings them back.
    """

    part_classes: ClassVar[Mapping[str, type[nn.Module]]]
    """The class of `compute` and the class of `update`."""
    weight_keys: ClassVar[Mapping[str, tuple[str, ...]]]
    """Names of the parameters that a `compute` may hold -> the arguments by which the methods `dense`, `fill` and
    `add_to` of parts are told which parameter is meant: none if there is one."""

    @property
    def compute(self) -> AnyCompute | None:
        """How the weights are kept and multiplied; None: as parameters, in their dtype."""
        return cast("AnyCompute | None", self._modules.get("compute"))

    @property
    def update(self) -> AnyUpdate | None:
        """What is added to the products; None for nothing."""
        return cast("AnyUpdate | None", self._modules.get("update"))

    def __setattr__(self, name: str, value: Any) -> None:
        # Not by setters of the properties: nn.Module assigns modules without them.
        if name not in self.part_classes:
            return super().__setattr__(name, value)
        if value is not None and not isinstance(value, self.part_classes[name]):
            raise InputError(f"{name}: must be None or of class {self.part_classes[name].__name__}, got {short(value)}")
        self.check_part(name, value)
        if value is None:
            self._modules.pop(name, None)
            return None
        super().__setattr__(name, value.train(self.training))
        if name == "compute" and value.holds_weight:
            for weight in self.weight_keys:
                setattr(self, weight, None)
        return None

    def check_part(self, name: str, part: Any) -> None:
        """Raise InputError for a part that this layer cannot have.

        Args:
            name: "compute" or "update".
            part: the new part, of the class in `part_classes`, or None.
        """
        if name == "compute" and not (part is not None and part.holds_weight):
            missing = " and ".join(weight for weight in self.weight_keys if getattr(self, weight) is None)
            if missing:
                raise InputError(f"compute: holds {missing}, which would be lost; call make_dense(dtype) first")

    def store(self, compute: AnyCompute | None) -> None:
        """Set `compute`: the same as an assignment."""
        self.compute = compute  # type: ignore[misc]

    @property
    def _holder(self) -> Any:
        """`compute` if it holds the weights, else None."""
        return self.compute if self.compute is not None and self.compute.holds_weight else None

    @torch.no_grad()
    def make_dense(self, dtype: torch.dtype) -> None:
        """Keep the weights as frozen parameters of `dtype` again, and remove a `compute` that holds them."""
        holder = self._holder
        if holder is not None:
            for name, key in self.weight_keys.items():
                setattr(self, name, nn.Parameter(holder.dense(*key, dtype), requires_grad=False))
            self.store(None)

    @torch.no_grad()
    def merge_update(self, dense: torch.dtype | None = None) -> None:
        """Add the update to the weights, rounded once, and remove the update.

        Args:
            dense: keep weights that `compute` holds as frozen parameters of this dtype. Default: None, their codes are
                rounded anew.
        """
        holder, update = self._holder, cast(Any, self.update)
        if update is None:
            return
        for name, key in self.weight_keys.items():
            if holder is None:
                weight = getattr(self, name).detach()
            elif dense is None and name not in update.projections:
                continue
            else:
                weight = holder.dense(*key, torch.float32)
            if name in update.projections:
                update.add_to(*key, weight)
            if holder is not None and dense is None:
                holder.fill(*key, weight)
            elif holder is not None:
                setattr(self, name, nn.Parameter(weight.to(dense), requires_grad=False))
        if holder is not None and dense is not None:
            self.store(None)
        self.update = None  # type: ignore[misc]
