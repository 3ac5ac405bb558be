"""Stage 2: a model and its heads, trained together."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ligermodels.archs.medusa import MedusaModel, MedusaOutput
from ligermodels.model import CausalLM


def frozen_copy(model: CausalLM) -> CausalLM:
    """`model` as it is now, which is to stay so: the reference."""
    return copy.deepcopy(model).requires_grad_(False).eval()


class Joint:
    """What the loop trains in stage 2: `medusa`, whose base has its own loss then, or the divergence from `reference`.

    `heads_scale`, the heads' weight, comes with each call: `train(loss_options=...)`.
    """

    def __init__(self, medusa: MedusaModel, reference: CausalLM | None = None) -> None:
        """Let the base learn."""
        self._medusa, self._reference = medusa, reference
        medusa.base.requires_grad_()

    def __call__(self, *args: Any, **options: Any) -> MedusaOutput:
        """As `MedusaModel.forward`."""
        found: MedusaOutput = self._medusa(*args, base_loss=True, reference=self._reference, **options)
        return found

    def num_targets(
        self, labels: Tensor, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Long (K + 1,): of the base model, then of each head."""
        return self._medusa.num_targets(labels, position_ids, cu_seqlens, base_loss=True)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The base's, and the heads'."""
        return self._medusa.parameters()

    def train(self, mode: bool = True) -> MedusaModel:
        """As `nn.Module.train`."""
        return self._medusa.train(mode)
