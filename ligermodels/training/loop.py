"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ligermodels.errors import InputError, TrainingError
from ligermodels.training.data import Batch


class Trainable(Protocol):
    """What the loop needs of a model; `CausalLM` and `MedusaModel` are such."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def num_targets(
        self, labels: Tensor, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor: ...

    def parameters(self) -> Iterable[nn.Parameter]: ...

    def train(self, mode: bool = True) -> Any: ...


@dataclass(frozen=True)
class StepMetrics:
    """The state after `step` of `steps`: `loss` is the mean over the steps since the last report, `grad_norm` (before
    clipping) and `learning_rate` those of the last step."""

    step: int
    steps: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float


def train(
    model: Trainable,
    batches: Iterable[Batch],
    *,
    steps: int,
    optimizer: Optimizer,
    schedule: LRScheduler | None = None,
    grad_clip: float | None = 1.0,
    accumulate: int = 1,
    on_step: Callable[[StepMetrics], object] | None = None,
    report_every: int = 10,
) -> None:
    """Take `steps` optimiser steps, each on `accumulate` batches.

    A step's gradient is that of one batch of all its tokens: losses are summed, and divided by the number of targets in
    all of them (for Medusa, by each head's own), not averaged batch by batch.

    Args:
        batches: on the CPU; they are moved to the model's device.
        optimizer: over the parameters to train (`adamw`).
        schedule: stepped once a step.
        grad_clip: largest norm of the whole gradient; None for any.
        on_step: called every `report_every` steps and after the last. Only then does a GPU have to be waited for.

    Raises:
        TrainingError: loss or gradient is not finite, which is looked at when there is a report; it names the step.
        InputError: the batches end too early.
    """
    if min(steps, accumulate, report_every) < 1:
        raise InputError(f"must be at least 1: {steps=}, {accumulate=}, {report_every=}")
    device = next(iter(model.parameters())).device
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    source = iter(batches)
    model.train()
    pending: list[Tensor] = []
    tokens, start = 0, time.perf_counter()
    for step in range(1, steps + 1):
        parts = list(islice(source, accumulate))
        if len(parts) < accumulate:
            raise InputError(f"the batches ended at step {step} of {steps}: give more text, more epochs or fewer steps")
        items = count_targets(model, parts).clamp(min=1).to(device, non_blocking=True)
        learning_rate = optimizer.param_groups[0]["lr"]
        losses = []
        for part in parts:
            loss = model(**on_device(part, device), num_items_in_batch=items).loss
            loss.backward()
            losses.append(loss.detach())
            tokens += part["input_ids"].numel()
        norm = nn.utils.clip_grad_norm_(trained, math.inf if grad_clip is None else grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if schedule is not None:
            schedule.step()
        pending.append(torch.stack([torch.stack(losses).sum(), norm.to(losses[0].dtype)]))
        if step % report_every == 0 or step == steps:
            values = torch.stack(pending).tolist()
            _check_finite(values, step - len(pending) + 1)
            if on_step is not None:
                mean = math.fsum(loss for loss, _ in values) / len(values)
                speed = tokens / (time.perf_counter() - start)
                on_step(StepMetrics(step, steps, mean, values[-1][1], learning_rate, speed))
            pending, tokens, start = [], 0, time.perf_counter()


def count_targets(model: Trainable, parts: Iterable[Batch]) -> Tensor:
    """Targets in batches taken together, of the shape of `num_targets`: what to divide their summed loss by."""
    bounds = ("position_ids", "cu_seqlens")
    counts = [model.num_targets(part["labels"], **{k: part[k] for k in bounds if k in part}) for part in parts]
    return torch.stack(counts).sum(0)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`; to a GPU it goes without waiting."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}


def _check_finite(values: list[list[float]], first_step: int) -> None:
    for step, (loss, norm) in enumerate(values, start=first_step):
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(
                f"step {step}: the loss is {loss} and the gradient's norm {norm}; training stopped. "
                "Try a lower learning rate, a longer warm-up or a lower grad_clip, and look at the data of that step"
            )
