"""Clipping of gradients that are spread over ranks in different ways."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.layers.sharding import gathered


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients to a norm of at most `max_norm`; returns their norm before.

    `torch.nn.utils.clip_grad_norm_` accepts only DTensors of one mesh, but under expert parallelism experts have a mesh
    of their own. The norm is computed for each mesh, then the norm of these norms.
    """
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    groups: Sequence[list[nn.Parameter]] = list(by_mesh.values())
    if len(groups) < 2:
        return gathered(nn.utils.clip_grad_norm_([p for group in groups for p in group], max_norm))
    norms = [gathered(nn.utils.get_total_norm([p.grad for p in group])) for group in groups]  # type: ignore[misc]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def norm_of_norms(norms: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients, 0 without any.

    Args:
        norms: norm of each gradient, (). Norms of sharded gradients are DTensors, also of several meshes.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for norm in norms:
        by_mesh.setdefault(getattr(norm, "device_mesh", None), []).append(norm)
    totals = [gathered(torch.linalg.vector_norm(torch.stack(group))) for group in by_mesh.values()]
    if len(totals) < 2:
        return totals[0] if totals else torch.zeros(())
    return torch.linalg.vector_norm(torch.stack(totals))
