"""How DFlash and DSpark heads are trained: anchors, weights of slots and of losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ligermodels.arguments import check_count, check_number
from ligermodels.errors import InputError, short
from ligermodels.ops.loss.divergences import DIVERGENCES, Divergence


@dataclass(frozen=True)
class BlockTraining:
    """How a head is trained on blocks. Slot k of the K that propose tokens has the weight exp(-k / gamma).

    Args:
        num_anchors: most blocks for each sequence of a batch.
        gamma: decay of the slots' weights; None for equal weights.
        ce_weight: weight of the cross entropy to the text.
        divergence: from the model's distribution: a name of `ops.linear_distillation`.
        divergence_weight: weight of the divergence.
        confidence_weight: weight of the confidence head's loss.
        dpace_alpha: constant of D-PACE in [0, 1]: its weights replace the weights of `gamma`, see `SlotLoss`. None: no
            D-PACE.
        seed: seed of the anchors.

    Raises:
        InputError: a value is out of range; or D-PACE is given with a divergence.
    """

    num_anchors: int = 512
    gamma: float | None = 4.0
    ce_weight: float = 1.0
    divergence: Divergence = "l1"
    divergence_weight: float = 0.0
    confidence_weight: float = 1.0
    dpace_alpha: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("num_anchors", self.num_anchors)
        check_count("seed", self.seed, least=0)
        for name in ("ce_weight", "divergence_weight", "confidence_weight"):
            check_number(name, getattr(self, name))
        if self.gamma is not None:
            check_number("gamma", self.gamma, positive=True)
        check_divergence(self.divergence)
        if self.dpace_alpha is not None:
            if not check_number("dpace_alpha", self.dpace_alpha) <= 1:
                raise InputError(f"dpace_alpha: must be at most 1, got {self.dpace_alpha}")
            if self.divergence_weight or not self.ce_weight:
                raise InputError("dpace_alpha: D-PACE weighs the cross entropy; give ce_weight, no divergence_weight")

    def slot_weights(self, count: int) -> list[float]:
        """The weights of `count` slots, before D-PACE."""
        weights: list[float] = self.slot_weights_on(torch.device("cpu"), torch.float64, count).tolist()
        return weights

    def slot_weights_on(self, device: torch.device, dtype: torch.dtype, count: int) -> Tensor:
        """`slot_weights` (count,) on a device in a dtype, computed there: a CUDA graph takes no copy from the host."""
        if self.gamma is None or self.dpace_alpha is not None:
            return torch.ones(count, dtype=dtype, device=device)
        return torch.exp(-torch.arange(count, dtype=torch.float64, device=device) / self.gamma).to(dtype)


def check_divergence(divergence: object) -> None:
    """InputError unless `divergence` is a name of `ops.linear_distillation`."""
    if divergence not in DIVERGENCES:
        raise InputError(f"divergence: must be one of {', '.join(DIVERGENCES)}, got {short(divergence)}")


def default_layer_ids(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """The ids of the layers that DFlash heads read by default: `round(1 + i (N - 4) / (n - 1))`, or N // 2 for n = 1.

    Layers that a small model does not have, or has once, are left out.

    Args:
        num_layers: n, layers of the head.
        num_target_layers: N, layers of the model.
    """
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    ids = (round(1 + i * span / (num_layers - 1)) for i in range(num_layers))
    return tuple(sorted({min(max(layer, 0), num_target_layers - 1) for layer in ids}))
