"""The training loop, for any model with a loss."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ligermodels.data.batches import Batch, CountsTargets, count_targets, on_device
from ligermodels.errors import InputError, SequenceLengthWarning, TrainingError
from ligermodels.layers.rope import RotaryEmbedding
from ligermodels.parallel.ranks import DataRanks
from ligermodels.training.clipping import clip_gradients
from ligermodels.training.renamed import renamed_arguments

PATIENCE = 10
"""Steps at the start that may have no target at all; then it is an error."""

Value = float | list[float]


class Trainable(CountsTargets, Protocol):
    """A model as the loop uses it, such as `CausalLM`. Calling it gives an object with `loss`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def parameters(self) -> Iterable[nn.Parameter]: ...

    def train(self, mode: bool = True) -> Any: ...


@dataclass(frozen=True)
class OutputMetrics:
    """What to log of a model's output beside its loss, by name; scalars or vectors.

    `losses` are summed over the micro-batches of a step. `ratios`, (numerator, denominator), are summed over the steps
    of a report and then divided.
    """

    losses: Mapping[str, Tensor] = field(default_factory=dict)
    ratios: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """An optimizer step: `grad_norm` is that before clipping, `learning_rate` that of the first group, `losses` as of
    `OutputMetrics`."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    losses: Mapping[str, Value]


@dataclass(frozen=True)
class StepMetrics:
    """A report after `step` of `steps`: `loss` is the mean since the last report, `grad_norm` (before clipping) and
    `learning_rate` are those of the last step, and `each` lists the steps since then. `ratios` are those of
    `OutputMetrics`. `peak_memory`, in bytes, is that of the GPU or, on a CPU, of the process; None where it is unknown.
    `targets` counts the targets since step 1."""

    step: int
    steps: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    each: tuple[Step, ...]
    ratios: Mapping[str, Value]
    peak_memory: int | None
    targets: int


Hook = tuple[int, Callable[[int], object]]
"""(n, call): called with the step's number every n steps, and after the last one."""


def is_due(step: int, every: int, steps: int) -> bool:
    """Whether a hook of period `every` is called after `step` of `steps`."""
    return step == steps or step % every == 0


@renamed_arguments(grad_clip="max_grad_norm", accumulate="accumulation_steps")
def train(
    model: Trainable,
    batches: Iterable[Batch],
    *,
    steps: int,
    optimizer: Optimizer,
    schedule: LRScheduler | None = None,
    max_grad_norm: float | None = 1.0,
    accumulation_steps: int = 1,
    on_step: Callable[[StepMetrics], object] | None = None,
    report_every: int = 10,
    hooks: Sequence[Hook] = (),
    start: int = 0,
    targets: int = 0,
    stop: Callable[[], bool] | None = None,
    loss_options: Callable[[int], Mapping[str, Any]] | None = None,
    output_metrics: Callable[[Any], OutputMetrics] | None = None,
) -> int:
    """Take optimizer steps up to number `steps`; returns the number of the last one taken.

    The gradient of a step is that of one batch of all its micro-batches: losses are summed and divided by the number of
    targets in all of them, not averaged per micro-batch. Of a model that FSDP2 shards (`parallelize`) these are the
    micro-batches of all ranks, which call this together, and so are the numbers of reports.

    Args:
        batches: micro-batches of this rank, `accumulation_steps` per step.
        schedule: stepped after each step.
        max_grad_norm: the gradient is clipped to this norm; None does not clip.
        on_step: gets a report every `report_every` steps, before each hook, and at the end. Only a report waits for
            the GPU.
        hooks: called after their steps; the model is set to training mode again afterwards.
        start: number of the last step of an earlier run; the first one here is start + 1.
        targets: `StepMetrics.targets` of the earlier run.
        stop: called after each step and after its hooks; training ends when it returns True, which it must on all ranks
            alike.
        loss_options: further arguments of the model's forward, by step.
        output_metrics: what to log of the model's output.

    Raises:
        TrainingError: loss or gradient is not finite, with the step and the batch; or there is no target in the first
            steps or in all. Checked with each report.
        InputError: the batches end too early, one has no labels, or a number is out of its range.

    Warns once (SequenceLengthWarning) of a sequence that is longer than the model's `max_position_embeddings` and than
    its rotary scaling extends them to; bounds of packed sequences that are on a GPU are not read for that.
    """
    if min(steps, accumulation_steps, report_every, *(every for every, _ in hooks)) < 1:
        raise InputError(f"must be at least 1: {steps=}, {accumulation_steps=}, {report_every=} and periods of hooks")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise InputError(f"max_grad_norm: must be above 0, or None not to clip, got {max_grad_norm}")
    device, ranks = next(iter(model.parameters())).device, DataRanks.of(model)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    source, context = iter(batches), _context(model)
    model.train()
    pending: list[_Pending] = []
    began = time.perf_counter()
    for step in range(start + 1, steps + 1):
        parts = list(islice(source, accumulation_steps))
        if len(parts) < accumulation_steps:
            raise InputError(f"the batches ended at step {step} of {steps}: give more text, more epochs or fewer steps")
        counts = ranks.sum(count_targets(model, parts).to(device, non_blocking=True))
        if context is not None and (longest := max(map(_longest, parts))) > context:
            _warn_of_length(longest, context, step)
            context = None
        items = counts.clamp(min=1)
        learning_rate = optimizer.param_groups[0]["lr"]
        options = loss_options(step) if loss_options is not None else {}
        losses, logged = [], []
        for part in parts:
            out = model(**on_device(part, device), num_items_in_batch=items, **options)
            (out.loss if ranks.size == 1 else out.loss * ranks.size).backward()  # FSDP2 averages
            losses.append(out.loss.detach())
            logged.append(output_metrics(out) if output_metrics is not None else OutputMetrics())
        norm = clip_gradients(trained, math.inf if max_grad_norm is None else max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if schedule is not None:
            schedule.step()
        tokens = sum(part["labels"].numel() for part in parts)
        wheres = [getattr(part, "where", None) for part in parts]
        pending.append(_Pending(step, learning_rate, tokens, counts.sum(), wheres, losses, norm, _summed(logged)))
        is_last = step == steps or (stop is not None and stop())
        due = [call for every, call in hooks if is_due(step, every, steps)]
        if is_last or due or step % report_every == 0:
            targets += int(torch.stack([one.targets for one in pending]).sum())
            if not targets and step >= min(steps, PATIENCE):
                raise _no_target(pending)
            metrics = _report(pending, steps, targets, device, began, ranks)
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


def _context(model: Any) -> int | None:
    """The `max_position_embeddings` of a model, or of that within it, or what its rotary scaling extends the original
    context to, if that is more; None where no config has one."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else [model]
    found = (getattr(getattr(each, "config", None), "max_position_embeddings", None) for each in modules)
    context = next((each for each in found if isinstance(each, int)), None)
    scalings = [each.config.scaling for each in modules if isinstance(each, RotaryEmbedding)]
    extended = (getattr(each, "factor", 1) * getattr(each, "original_context", 0) for each in scalings)
    return None if context is None else max(context, *map(int, extended), 0)


def _longest(batch: Batch) -> int:
    """Tokens of the longest sequence in a batch: of packed ones by their bounds. 0 for bounds on a GPU, reading which
    would wait for it."""
    if (bounds := batch.get("cu_seqlens")) is not None:
        return 0 if bounds.is_cuda or bounds.numel() < 2 else int(bounds.diff().max())
    if (positions := batch.get("position_ids")) is not None:
        return 0 if positions.is_cuda or not positions.numel() else int(positions.max()) + 1
    return batch["labels"].shape[-1] if batch["labels"].ndim else 0


def _warn_of_length(longest: int, context: int, step: int) -> None:
    warnings.warn(
        f"step {step}: a sequence of {longest:,} tokens is longer than the model's max_position_embeddings, "
        f"{context:,}; the model does not know positions beyond it: make seq_len smaller, or extend the "
        "context by rope_parameters (rope_scaling) and max_position_embeddings in config.json",
        SequenceLengthWarning,
        stacklevel=4,
    )


class _Pending(NamedTuple):
    """A step that the GPU may not have finished. Its tensors are read with the next report."""

    step: int
    learning_rate: float
    tokens: int
    targets: Tensor
    wheres: list[Callable[[], str] | None]
    losses: list[Tensor]
    norm: Tensor
    logged: OutputMetrics


def _report(
    pending: Sequence[_Pending], steps: int, targets: int, device: torch.device, began: float, ranks: DataRanks
) -> StepMetrics:
    """Synchronise with the pending steps and sum them up. Raises TrainingError for a value that is not finite."""
    tensors = (tensor for one in pending for tensor in (*one.losses, one.norm, *one.logged.losses.values()))
    found: Iterator[Any] = iter(_to_host(list(tensors)))
    values = []  # of each step: the losses of the micro-batches, the norm, and what is logged
    for one in pending:
        losses, norm = [next(found) for _ in one.losses], next(found)
        values.append((losses, norm, {name: next(found) for name in one.logged.losses}))
    sums = [
        [math.fsum(losses), one.tokens, *_flat(logged)]
        for one, (losses, _, logged) in zip(pending, values, strict=True)
    ]
    sums, each = _over_ranks(sums, ranks, device), []
    for one, (losses, norm, logged), (loss, tokens, *others) in zip(pending, values, sums, strict=True):
        _check_finite(one, losses, loss, norm)
        logged = _like(logged, others)
        each.append(Step(one.step, loss, norm, one.learning_rate, int(tokens), logged))
    seconds = time.perf_counter() - began
    totals = _summed([one.logged for one in pending]).ratios
    ratios = {
        name: (ranks.sum(hits) / ranks.sum(counts).clamp(min=1)).tolist() for name, (hits, counts) in totals.items()
    }
    return StepMetrics(
        each[-1].step,
        steps,
        math.fsum(one.loss for one in each) / len(each),
        each[-1].grad_norm,
        each[-1].learning_rate,
        sum(one.tokens for one in each) / seconds,
        tuple(each),
        ratios,
        _peak_memory(device),
        targets,
    )


def _over_ranks(rows: list[list[float]], ranks: DataRanks, device: torch.device) -> list[list[float]]:
    """The sums over the ranks of each number."""
    if ranks.size == 1:
        return rows
    found: list[list[float]] = ranks.sum(torch.tensor(rows, dtype=torch.float64, device=device)).tolist()
    return found


def _flat(values: Mapping[str, Value]) -> list[float]:
    return [number for value in values.values() for number in (value if isinstance(value, list) else [value])]


def _like(values: Mapping[str, Value], numbers: Iterable[float]) -> dict[str, Value]:
    """`numbers` in the form of `values`, of which they are those of `_flat`."""
    left = iter(numbers)
    return {k: [next(left) for _ in value] if isinstance(value, list) else next(left) for k, value in values.items()}


def _summed(logged: Sequence[OutputMetrics]) -> OutputMetrics:
    losses = {name: _sum(one.losses[name] for one in logged) for name in logged[0].losses}
    ratios = {
        name: (_sum(one.ratios[name][0] for one in logged), _sum(one.ratios[name][1] for one in logged))
        for name in logged[0].ratios
    }
    return OutputMetrics(losses, ratios)


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.detach() for tensor in tensors]).sum(0)


def _to_host(tensors: Sequence[Tensor]) -> list[Value]:
    """Values of scalars and vectors, by one copy from the device, in the dtype of the first."""
    values = iter(torch.cat([tensor.to(tensors[0].dtype).flatten() for tensor in tensors]).tolist())
    return [list(islice(values, tensor.numel())) if tensor.ndim else next(values) for tensor in tensors]


def _peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _check_finite(one: _Pending, losses: Sequence[float], total: float, norm: float) -> None:
    """`losses` are those of this rank, `total` is that of all."""
    if all(map(math.isfinite, (*losses, total, norm))):
        return
    # The first micro-batch with such a loss; all of the step's, if only the gradient is at fault.
    wrong = [i for i, loss in enumerate(losses) if not math.isfinite(loss)][:1] or range(len(losses))
    if not math.isfinite(total) and len(wrong) == len(losses) and all(map(math.isfinite, losses)):
        raise TrainingError(f"step {one.step}: the loss is {total}, by a batch of another rank; training stopped")
    wheres = [where() for i in wrong if (where := one.wheres[i]) is not None]
    batch = f"batch {wrong[0] + 1} of {len(losses)}" if len(wrong) == 1 else "all its batches"
    raise TrainingError(
        f"step {one.step}: the loss is {total} and the gradient norm {norm}; training stopped. "
        f"At fault: {batch}{', made of ' + '; '.join(wheres) if wheres else ''}. "
        "Try a lower learning rate, a longer warm-up or a lower max_grad_norm, and look at that data"
    )


def _no_target(pending: Sequence[_Pending]) -> TrainingError:
    where = next((where for one in pending for where in one.wheres if where is not None), None)
    return TrainingError(
        f"step {pending[-1].step}: there has not been a single target to learn{f' in {where()}' if where else ''}; "
        "training stopped. Only the assistant's turns of a chat are trained on, and targets lie one or more tokens "
        "ahead in the same document: give other data"
    )
