"""Batches, their number of targets, and copies to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from ligermodels.errors import InputError


class Batch(dict[str, Tensor]):
    """Arguments of a model's forward, always with `labels`. `where()` names the files and lines."""

    def __init__(self, tensors: Mapping[str, Tensor], where: Callable[[], str] | None = None) -> None:
        super().__init__(tensors)
        self.where = where


class CountsTargets(Protocol):
    """A model that counts the targets of its loss, as `CausalLM` does."""

    def num_targets(
        self,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor: ...


def count_targets(model: CountsTargets, parts: Iterable[Batch]) -> Tensor:
    """Number of targets in several batches together, of the shape of `num_targets`: divides their summed loss."""
    counts = []
    for part in parts:
        if "labels" not in part:
            raise InputError(f"labels: a batch has none, only {', '.join(part)}")
        bounds = {name: part[name] for name in ("position_ids", "cu_seqlens", "attention_mask") if name in part}
        counts.append(model.num_targets(part["labels"], **bounds))
    return torch.stack(counts).sum(0)


def on_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The batch on `device`; copies from a CPU to a GPU are asynchronous."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    pinned = {name: tensor.pin_memory() if tensor.device.type == "cpu" else tensor for name, tensor in batch.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in pinned.items()}
