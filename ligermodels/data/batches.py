"""Batches, their number of targets, and their copies to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from ligermodels.arguments import IGNORE_INDEX
from ligermodels.errors import InputError, short


class Batch(dict[str, Tensor]):
    """Keyword arguments of a model's forward.

    Args:
        tensors: tensors by argument name, with `labels`.
        where: returns the files and lines of the documents, for messages; None if unknown.
    """

    def __init__(self, tensors: Mapping[str, Tensor], where: Callable[[], str] | None = None) -> None:
        super().__init__(tensors)
        self.where = where

    def pinned(self) -> Batch:
        """The batch in page-locked memory, from which `on_device` copies without waiting."""
        return Batch({name: tensor.pin_memory() for name, tensor in self.items()}, self.where)

    def without_targets(self) -> Batch:
        """A batch of the same shapes in which nothing is trained on, for a rank that has no batch of its own."""
        return Batch({**self, "labels": torch.full_like(self["labels"], IGNORE_INDEX)}, self.where)


class CountsTargets(Protocol):
    """A model that counts the targets of its loss, such as `CausalLM`."""

    def num_targets(
        self,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor: ...


def count_targets(model: CountsTargets, parts: Iterable[Batch]) -> Tensor:
    """Total number of targets of several batches, with the shape that `num_targets` returns.

    The summed loss of the batches, divided by it, is their mean loss. Raises InputError for a batch without labels, or
    that is no dict of tensors.
    """
    counts = []
    for batch in parts:
        _check_batch(batch)
        if "labels" not in batch:
            raise InputError(f"labels: a batch has none, only {', '.join(batch)}")
        bounds = {name: batch[name] for name in ("position_ids", "cu_seqlens", "attention_mask") if name in batch}
        counts.append(model.num_targets(batch["labels"], **bounds))
    return torch.stack(counts).sum(0)


def on_device(batch: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """Copy a batch to `device`; asynchronously from the CPU to a GPU. Raises InputError unless it is a dict of
    tensors."""
    _check_batch(batch)
    device = torch.device(device)
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    pinned = {name: tensor.pin_memory() if tensor.device.type == "cpu" else tensor for name, tensor in batch.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in pinned.items()}


def _check_batch(batch: object) -> None:
    if not isinstance(batch, Mapping):
        raise InputError(f"batches: must be a list of dicts of tensors, got {short(batch)} as a batch")
    for name, tensor in batch.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name}: a batch has tensors alone, got {short(tensor)}")
