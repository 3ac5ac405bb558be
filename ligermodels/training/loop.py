"""The training loop."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ligermodels.errors import InputError, TrainingError
from ligermodels.training.data import Batch

PATIENCE = 10
"""Steps that may be without a target at the start: of few tokens one or another is."""


class Trainable(Protocol):
    """What the loop needs of a model; `CausalLM` and `MedusaModel` are such."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def num_targets(
        self, labels: Tensor, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor: ...

    def parameters(self) -> Iterable[nn.Parameter]: ...

    def train(self, mode: bool = True) -> Any: ...


@dataclass(frozen=True)
class Step:
    """One step: its loss, the gradient's norm before clipping, the learning rate of the first group, its tokens; and of
    which losses its own is made: the base model's in stage 2, and each Medusa head's, undecayed."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    base_loss: float | None = None
    head_losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class StepMetrics:
    """The state after `step` of `steps`: `loss` is the mean over the steps since the last report, `grad_norm` (before
    clipping) and `learning_rate` those of the last step; `each` are the steps one by one. `accuracy` is how often each
    Medusa head was right since the last report; `memory` the most bytes that the GPU has held or, on the CPU, the
    process; None where that is not known. `targets` counts what there was to learn since
    the first step."""

    step: int
    steps: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    each: tuple[Step, ...] = ()
    accuracy: tuple[float, ...] = ()
    memory: int | None = None
    targets: int = 0


Hook = tuple[int, Callable[[int], object]]
"""What to do every so many steps; called with the number of the step."""


def is_due(step: int, every: int, steps: int) -> bool:
    """Whether it is time, after `step` of `steps`, for what is done `every` so many steps, and after the last."""
    return step == steps or step % every == 0


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
    hooks: Sequence[Hook] = (),
    start: int = 0,
    targets: int = 0,
    stop: Callable[[], bool] | None = None,
    loss_options: Callable[[int], Mapping[str, Any]] | None = None,
) -> int:
    """Take optimiser steps up to the one numbered `steps`, each on `accumulate` batches; the number of the last taken.

    A step's gradient is that of one batch of all its tokens: losses are summed, and divided by the number of targets in
    all of them (for Medusa, by each head's own), not averaged batch by batch.

    Args:
        batches: on the CPU; they are moved to the model's device.
        optimizer: over the parameters to train (`adamw`).
        schedule: stepped once a step.
        grad_clip: largest norm of the whole gradient; None for any.
        on_step: called every `report_every` steps, before hooks and after the last. Only then does a GPU have to be
            waited for.
        hooks: called after their number of steps, and after the last of `steps`, when all so far is known to be finite.
        start: steps that an earlier run took; the first of this one is numbered start + 1.
        targets: what there was to learn in these, as its last report says.
        stop: asked after each step, and again after its hooks; when it says so, that step was the last.
        loss_options: further arguments of the model's forward in a step, by its number.

    Raises:
        TrainingError: loss or gradient is not finite, or there was no target in the first steps or in all; it is looked
            at when there is a report, and names the step and the batch.
        InputError: the batches end too early.
    """
    if min(steps, accumulate, report_every, *(every for every, _ in hooks)) < 1:
        raise InputError(f"must be at least 1: {steps=}, {accumulate=}, {report_every=}, and the steps of hooks")
    device = next(iter(model.parameters())).device
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    source = iter(batches)
    model.train()
    pending: list[_Pending] = []
    began = time.perf_counter()
    for step in range(start + 1, steps + 1):
        parts = list(islice(source, accumulate))
        if len(parts) < accumulate:
            raise InputError(f"the batches ended at step {step} of {steps}: give more text, more epochs or fewer steps")
        counts = count_targets(model, parts)
        targets += int(counts.sum())
        items = counts.clamp(min=1).to(device, non_blocking=True)
        learning_rate = optimizer.param_groups[0]["lr"]
        options = loss_options(step) if loss_options is not None else {}
        losses, hits, own = [], [], []
        for part in parts:
            out = model(**on_device(part, device), num_items_in_batch=items, **options)
            out.loss.backward()
            losses.append(out.loss.detach())
            own.append(_own_losses(out))
            if getattr(out, "accuracy", None):
                hits.append(torch.stack([out.accuracy[1] * out.counts, out.counts]))
        norm = nn.utils.clip_grad_norm_(trained, math.inf if grad_clip is None else grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if schedule is not None:
            schedule.step()
        values = torch.cat([torch.stack([*losses, norm.to(losses[0].dtype)]), torch.stack(own).sum(0).to(losses[0])])
        has_base = getattr(out, "base_loss", None) is not None
        tokens = sum(part["input_ids"].numel() for part in parts)
        wheres = [getattr(part, "where", None) for part in parts]
        pending.append(
            _Pending(step, tokens, wheres, learning_rate, values, has_base, torch.stack(hits).sum(0) if hits else None)
        )
        is_last = step == steps or (stop is not None and stop())
        due = [call for every, call in hooks if is_due(step, every, steps)]
        if is_last or due or step % report_every == 0:
            if not targets and step >= min(steps, PATIENCE):
                raise _no_target(pending)
            metrics = _report(pending, steps, targets, device, began)
            if on_step is not None:
                on_step(metrics)
            for call in due:
                call(step)
            is_last = is_last or (stop is not None and stop())
            model.train()
            pending, began = [], time.perf_counter()
        if is_last:
            return step
    return start


@dataclass(frozen=True)
class _Pending:
    """A step that a GPU may still be at: what it was made of, and the tensors that tell how it went."""

    step: int
    tokens: int
    wheres: list[Callable[[], str] | None]
    learning_rate: float
    values: Tensor
    """Loss of each batch, then the gradient's norm, then what the loss is made of: `_own_losses` of all batches."""
    has_base: bool
    """Whether the first of these is the base model's."""
    hits: Tensor | None
    """(2, K): how often each head was right, and its targets."""


def _report(pending: Sequence[_Pending], steps: int, targets: int, device: torch.device, began: float) -> StepMetrics:
    """Wait for the pending steps, and sum them up. Raises TrainingError when one of their values is not finite."""
    each = []
    for one, values in zip(pending, torch.stack([one.values for one in pending]).tolist(), strict=True):
        count = len(one.wheres)
        losses, norm, own = values[:count], values[count], values[count + 1 :]
        _check_finite(one, losses, norm)
        base, heads = (own[0], own[1:]) if one.has_base else (None, own)
        each.append(Step(one.step, math.fsum(losses), norm, one.learning_rate, one.tokens, base, tuple(heads)))
    seconds = time.perf_counter() - began
    hits = [one.hits for one in pending if one.hits is not None]
    right, asked = torch.stack(hits).sum(0).tolist() if hits else ([], [])
    return StepMetrics(
        each[-1].step,
        steps,
        math.fsum(one.loss for one in each) / len(each),
        each[-1].grad_norm,
        each[-1].learning_rate,
        sum(one.tokens for one in each) / seconds,
        tuple(each),
        tuple(a / max(1, b) for a, b in zip(right, asked, strict=True)),
        _peak_memory(device),
        targets,
    )


def _own_losses(out: Any) -> Tensor:
    """What a loss is made of, (n,): the base model's, where it has a part, then each head's; (0,) for a plain model."""
    base, heads = getattr(out, "base_loss", None), getattr(out, "head_losses", None)
    found = [each.detach().flatten() for each in (base, heads) if each is not None]
    return torch.cat(found) if found else out.loss.new_empty(0)


def _peak_memory(device: torch.device) -> int | None:
    """Bytes: of the GPU that torch has held at most, or of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Only Unix knows.
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def count_targets(model: Trainable, parts: Iterable[Batch]) -> Tensor:
    """Targets in batches taken together, of the shape of `num_targets`: what to divide their summed loss by."""
    bounds = ("position_ids", "cu_seqlens")
    counts = [model.num_targets(part["labels"], **{k: part[k] for k in bounds if k in part}) for part in parts]
    return torch.stack(counts).sum(0)


def on_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The batch on `device`; to a GPU it goes without waiting."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}


def _check_finite(one: _Pending, losses: Sequence[float], norm: float) -> None:
    if all(map(math.isfinite, (*losses, norm))):
        return
    # The first batch whose loss is at fault; or all of the step, when it is only the gradient.
    wrong = [i for i, loss in enumerate(losses) if not math.isfinite(loss)][:1] or range(len(losses))
    wheres = [where() for i in wrong if (where := one.wheres[i]) is not None]
    batch = f"batch {wrong[0] + 1} of {len(losses)}" if len(wrong) == 1 else "all its batches"
    raise TrainingError(
        f"step {one.step}: the loss is {sum(losses)} and the gradient's norm {norm}; training stopped. "
        f"At fault: {batch}{', made of ' + '; '.join(wheres) if wheres else ''}. "
        "Try a lower learning rate, a longer warm-up or a lower grad_clip, and look at that data"
    )


def _no_target(pending: Sequence[_Pending]) -> TrainingError:
    where = next((where for one in pending for where in one.wheres if where is not None), None)
    return TrainingError(
        f"step {pending[-1].step}: there has not been a single target to learn{f' in {where()}' if where else ''}; "
        "training stopped. Of chats only what the assistant says is learned, and a head's targets lie some tokens "
        "ahead in the same document: give other data"
    )
