"""Metrics of the load of a mixture's experts."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def load_metrics(tokens_per_expert: Tensor) -> list[dict[str, float]]:
    """Metrics of the load of several steps, each a mean over layers.

    Args:
        tokens_per_expert: long (steps, layers, E), how many tokens each expert computed in each step.

    Returns:
        For each step:

        router_max_violation: the highest load divided by the mean load, less 1: 0 for an even load, E / top_k - 1 if
            all tokens go to the same experts (MaxVio of Wang et al., 2024).
        router_load_entropy: entropy of the load, divided by log(E): 1 for an even load.
        router_unused_experts: fraction of the experts that computed no token.
    """
    load = tokens_per_expert.double()
    share = load / load.sum(-1, keepdim=True)
    size = load.shape[-1]
    metrics = {
        "router_max_violation": share.amax(-1) * size - 1,
        "router_load_entropy": torch.special.entr(share).sum(-1) / math.log(max(size, 2)),
        "router_unused_experts": (load == 0).double().mean(-1),
    }
    rows = torch.stack([value.mean(-1) for value in metrics.values()], dim=1).tolist()
    return [dict(zip(metrics, row, strict=True)) for row in rows]
