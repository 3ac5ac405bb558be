"""The optional parts of the experts of a mixture: how weights are kept and multiplied, and updates of the products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.layers.linear import Composed
from ligermodels.layers.linear_parts import ComputePart, UpdatePart
from ligermodels.ops import GLUOptions

Projection = Literal["gate_up", "down"]
"""A projection of all experts of a mixture, by the name of its parameter."""

Mix = Callable[[Tensor, Tensor, Tensor, "GLUOptions", "tuple[Tensor | None, Tensor | None]"], "Tensor | None"]
"""(tokens, weights, experts, activation, biases) -> (N, H); see `ExpertCompute.mix`."""

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


class ExpertCompute(ComputePart):
    """How the experts keep their weights and multiply by them: the parameters of the mixture are None."""

    holds_weight: ClassVar[bool] = True

    def forward(self, projection: Projection, rows: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
        """Rows (R, in), sorted by expert, times the weights of their experts: (R, out). See `plain_product`.

        Args:
            projection: "gate_up" or "down".
            rows: (R, in), sorted by expert.
            offsets: int32 (E,), where the rows of each expert end.
            bias: (E, out) or None.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def mix(
        self, tokens: Tensor, weights: Tensor, experts: Tensor, activation: GLUOptions,
        biases: tuple[Tensor | None, Tensor | None],
    ) -> Tensor | None:  # fmt: skip
        """Both products with the activation between, and the weighted sum of the choices, as `ops.mix_experts`; None
        where `forward` is to compute them one by one.

        Args:
            tokens: (N, H).
            weights: (N, top_k), weights of the chosen experts.
            experts: integers (N, top_k), the chosen experts.
            activation: the gated activation.
            biases: of gate_up (E, out) and down (E, out), or None.

        Returns (N, H).
        """
        return None

    def dense(self, projection: Projection, dtype: torch.dtype) -> Tensor:
        """The weight (E, out, in) in `dtype`."""
        raise NotImplementedError(f"{type(self).__name__} defines no dense")

    def fill(self, projection: Projection, weight: Tensor) -> None:
        """Keep `weight` (E, out, in)."""
        raise NotImplementedError(f"{type(self).__name__} defines no fill")


class ExpertUpdate(UpdatePart):
    """Summands of the products of experts, such as low-rank updates."""

    projections: tuple[Projection, ...] = ()

    def forward(self, projection: Projection, rows: Tensor, offsets: Tensor) -> Tensor:
        """The summand (R, out) for rows (R, in) that are sorted by expert, in their dtype. See `plain_product`.

        Args:
            projection: "gate_up" or "down".
            rows: (R, in), sorted by expert.
            offsets: int32 (E,), where the rows of each expert end.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def add_to(self, projection: Projection, weight: Tensor) -> None:
        """Add the update to a weight (E, out, in) in place."""
        raise NotImplementedError(f"{type(self).__name__} cannot be merged into a weight")


class ComposedExperts(Composed[ExpertCompute, ExpertUpdate]):
    """Optional parts for a mixture with the parameters `gate_up` (E, 2 * size, H) and `down` (E, H, size).

    As in `Linear`, every `compute` works with every `update`.
    """

    part_classes: ClassVar[Mapping[str, type[nn.Module]]] = {"compute": ExpertCompute, "update": ExpertUpdate}
    weight_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"gate_up": ("gate_up",), "down": ("down",)}
    gate_up: nn.Parameter | None
    down: nn.Parameter | None

    @property
    def product(self) -> Product:
        """The product of the experts with their parts."""
        return plain_product if self.compute is None and self.update is None else self._product

    @property
    def mix(self) -> Mix | None:
        """The whole computation of experts by their `compute`; None if they are computed product by product."""
        return None if self.compute is None or self.update is not None else self.compute.mix

    def _product(
        self, projection: Projection, rows: Tensor, offsets: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        compute, update = self.compute, self.update
        if compute is None:
            y = plain_product(projection, rows, offsets, weight, bias)
        else:
            y = compute(projection, rows, offsets, bias)
        return y if update is None or projection not in update.projections else y + update(projection, rows, offsets)
