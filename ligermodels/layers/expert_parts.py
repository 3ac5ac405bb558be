"""The optional parts of the experts of a mixture: how weights are kept and multiplied, and updates of the products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.errors import InputError, short
from ligermodels.layers.linear_parts import Part

Projection = Literal["gate_up", "down"]
"""A projection of all experts of a mixture, by the name of its parameter."""

Product = Callable[[Projection, Tensor, Tensor, "Tensor | None", "Tensor | None"], Tensor]
"""(projection, rows (R, in), offsets (E,), weight (E, out, in), bias (E, out)) -> (R, out); see `plain_product`."""


def plain_product(
    projection: Projection, rows: Tensor, offsets: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The product of experts without parts.

    Args:
        projection: "gate_up" or "down".
        rows: (R, in), sorted by expert.
        offsets: int32 (E,), where the rows of each expert end.
        weight: (E, out, in).
        bias: (E, out) or None.

    Returns (R, out).
    """
    return ops.grouped_mm(rows, cast(Tensor, weight), offsets, bias)


class ExpertCompute(Part):
    """How the experts keep their weights and multiply by them; the parameters of the mixture are then None."""

    def forward(self, projection: Projection, rows: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
        """Rows (R, in), sorted by expert, times the weights of their experts: (R, out). See `plain_product`."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def dense(self, projection: Projection, dtype: torch.dtype) -> Tensor:
        """The weight (E, out, in) in `dtype`."""
        raise NotImplementedError(f"{type(self).__name__} defines no dense")

    def fill(self, projection: Projection, weight: Tensor) -> None:
        """Keep `weight` (E, out, in)."""
        raise NotImplementedError(f"{type(self).__name__} defines no fill")


class ExpertUpdate(Part):
    """Summands of the products of experts, such as low-rank updates."""

    projections: tuple[Projection, ...] = ()
    """The projections with an update."""

    def forward(self, projection: Projection, rows: Tensor, offsets: Tensor) -> Tensor:
        """The summand (R, out) for rows (R, in) that are sorted by expert, in their dtype. See `plain_product`."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def add_to(self, projection: Projection, weight: Tensor) -> None:
        """Add the update to a weight (E, out, in) in place."""
        raise NotImplementedError(f"{type(self).__name__} cannot be merged into a weight")


class ComposedExperts(nn.Module):
    """Optional parts for a mixture with the parameters `gate_up` (E, 2 * size, H) and `down` (E, H, size).

    As in `Linear`, every `compute` works with every `update`.
    """

    gate_up: nn.Parameter | None
    down: nn.Parameter | None

    @property
    def compute(self) -> ExpertCompute | None:
        """How the weights are kept and multiplied; None: the parameters `gate_up` and `down`. See `store`."""
        return cast("ExpertCompute | None", self._modules.get("compute"))

    @compute.setter
    def compute(self, compute: ExpertCompute | None) -> None:
        # nn.Module assigns modules, and None in place of a module, without this setter.
        if compute is not None:
            raise InputError(f"compute: must be an ExpertCompute, got {short(compute)}")

    @property
    def update(self) -> ExpertUpdate | None:
        """The summands of the products; None for none."""
        return cast("ExpertUpdate | None", self._modules.get("update"))

    @update.setter
    def update(self, update: ExpertUpdate | None) -> None:
        if update is not None:  # as for `compute`
            raise InputError(f"update: must be an ExpertUpdate, got {short(update)}")

    @property
    def product(self) -> Product:
        """The product of the experts with their parts."""
        return plain_product if self.compute is None and self.update is None else self._product

    def _product(
        self, projection: Projection, rows: Tensor, offsets: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        compute, update = self.compute, self.update
        if compute is None:
            y = plain_product(projection, rows, offsets, weight, bias)
        else:
            y = compute(projection, rows, offsets, bias)
        return y if update is None or projection not in update.projections else y + update(projection, rows, offsets)

    def store(self, compute: ExpertCompute | None) -> None:
        """Set `compute`, which replaces the parameters `gate_up` and `down`; `make_dense` removes it."""
        self._modules.pop("compute", None)
        if compute is not None:
            self.compute = compute.train(self.training)
            self.gate_up = self.down = None

    @torch.no_grad()
    def make_dense(self, dtype: torch.dtype) -> None:
        """Keep the weights as frozen parameters of `dtype` again, and remove `compute`."""
        compute = self.compute
        if compute is not None:
            self.store(None)
            for projection in ("gate_up", "down"):
                setattr(self, projection, nn.Parameter(compute.dense(projection, dtype), requires_grad=False))

    @torch.no_grad()
    def merge_update(self, dense: torch.dtype | None = None) -> None:
        """Add the update to the weights, rounded once, and remove the update; see `Linear.merge_update`.

        Args:
            dense: keep weights that `compute` holds as frozen parameters of this dtype. Default: None, their codes are
                rounded anew.
        """
        compute, update = self.compute, self.update
        if update is None:
            return
        if compute is not None and dense is not None:
            self.store(None)
        for projection in ("gate_up", "down"):
            if compute is None:
                weight = getattr(self, projection).detach()
            elif dense is None and projection not in update.projections:
                continue
            else:
                weight = compute.dense(projection, torch.float32)
            if projection in update.projections:
                update.add_to(projection, weight)
            if compute is not None and dense is None:
                compute.fill(projection, weight)
            elif compute is not None and dense is not None:
                setattr(self, projection, nn.Parameter(weight.to(dense), requires_grad=False))
        del self._modules["update"]
