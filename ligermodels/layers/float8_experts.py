"""Experts of mixtures that compute in float8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, cast

from torch import Tensor, nn

from ligermodels import ops
from ligermodels.layers.expert_parts import ComposedExperts, ExpertCompute
from ligermodels.layers.float8 import Float8
from ligermodels.ops import Float8Recipe, GLUOptions


class Float8Experts(ExpertCompute):
    """Experts' products in float8, forward and backward: see `ops.float8_mix_experts`. It is active as `Float8`, and
    keeps the float8 forms of frozen weights likewise.

    Args:
        recipe: formats.
    """

    holds_weight: ClassVar[bool] = False

    def __init__(self, recipe: Float8Recipe) -> None:
        super().__init__()
        self.gate_up, self.down = Float8(recipe), Float8(recipe)

    def check_shard(self, hidden: int, size: int) -> None:
        ops.check_float8_sizes("float8", hidden, size)

    def extra_repr(self) -> str:
        return f"{self.gate_up.recipe}"

    def mix(
        self,
        tokens: Tensor,
        weights: Tensor,
        experts: Tensor,
        gate_up: Tensor | None,
        down: Tensor | None,
        activation: GLUOptions,
        biases: tuple[Tensor | None, Tensor | None],
    ) -> Tensor | None:
        """See `ExpertCompute.mix`. The channels of experts, of a rank's part too, must be multiples of 16."""
        if not self.gate_up.active:
            return None
        own = cast(Tensor, gate_up), cast(Tensor, down)
        frozen = self.gate_up.frozen(own[0]), self.down.frozen(own[1])
        return ops.float8_mix_experts(
            tokens, weights, experts, *own, *biases, activation=activation, recipe=self.gate_up.recipe, frozen=frozen
        )


def float8_expert_slots(block: nn.Module) -> Iterator[tuple[str, ComposedExperts]]:
    """The mixtures of a block whose experts can compute in float8, named as their `experts`."""
    for name, module in block.named_modules():
        if isinstance(module, ComposedExperts):
            yield f"{name}.experts", module
