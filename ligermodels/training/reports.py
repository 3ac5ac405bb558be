"""Reports of the training loop: metrics of the steps since the last report, and errors for steps that went wrong."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from ligermodels.data.batches import Batch
from ligermodels.errors import TrainingError
from ligermodels.parallel.ranks import DataRanks
from ligermodels.speculative.acceptance import chain_length
from ligermodels.training.router_bias import load_metrics

PATIENCE = 10
"""Training ends with an error if the first PATIENCE steps have no target at all."""

Value = float | list[float]


@dataclass(frozen=True)
class OutputMetrics:
    """Metrics of a model's output to log beside its loss, by name; scalars or vectors.

    losses: summed over the micro-batches of a step.
    ratios: (numerator, denominator); both are summed over the steps of a report, then divided. For shares.
    means: the same, for other means.
    chains: name of a further mean -> name of a ratio with a share for each drafted token: `chain_length` of it.
    tokens_per_expert: long (layers, experts), how many tokens each expert of a mixture computed; summed over the
        micro-batches of a step. None without experts.
    """

    losses: Mapping[str, Tensor] = field(default_factory=dict)
    ratios: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    means: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    chains: Mapping[str, str] = field(default_factory=dict)
    tokens_per_expert: Tensor | None = None

    @classmethod
    def sum(cls, metrics: Sequence[OutputMetrics]) -> OutputMetrics:
        """The sums of losses, numerators and denominators over several outputs with the same names."""
        losses = {name: _sum(one.losses[name] for one in metrics) for name in metrics[0].losses}
        ratios, means = _sums([one.ratios for one in metrics]), _sums([one.means for one in metrics])
        counts = [one.tokens_per_expert for one in metrics if one.tokens_per_expert is not None]
        return cls(losses, ratios, means, metrics[0].chains, _sum(counts) if counts else None)


@dataclass(frozen=True)
class LossUnit:
    """What the loss of a model is a mean over: an attribute `loss_unit` of models, by default their targets.

    name: the plural, for messages.
    index: position of its number in `num_targets`; None for the sum of all numbers there, as of several heads.
    """

    name: str = "targets"
    index: int | None = None

    def count(self, num_targets: Tensor) -> Tensor:
        """The number of terms of the mean, (), in the result of `num_targets`."""
        return num_targets.sum() if self.index is None else num_targets[self.index]


TARGETS = LossUnit()


@dataclass(frozen=True)
class Step:
    """Metrics of one optimizer step.

    step: its number, from 1.
    loss: mean over the targets of the step.
    grad_norm: norm of the gradient before clipping.
    learning_rate: learning rate of the first parameter group.
    tokens: number of tokens.
    targets: number of targets, the sum over the heads of a model with several; or of another `LossUnit`.
    losses: `OutputMetrics.losses`.
    load: metrics of the load of a mixture's experts: see `load_metrics`.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    targets: int
    losses: Mapping[str, Value]
    load: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepMetrics:
    """A report on the steps since the last report.

    step, steps: number of the last step, and the number of steps in all.
    loss: mean over the targets of the report (all steps since the last one), or over another `LossUnit`.
    grad_norm: norm of the gradient of the last step, before clipping.
    learning_rate: learning rate of the last step.
    tokens_per_second: tokens of the report per second, of all ranks together.
    each: metrics of each step of the report.
    ratios: `OutputMetrics.ratios`, divided.
    means: `OutputMetrics.means`, divided, and `OutputMetrics.chains`.
    peak_memory: bytes allocated on the GPU, or by the process on a CPU, at most; None where it is unknown.
    targets: number of targets since step 1.
    report_targets: number of targets of the report.
    unit: what is counted as `targets`: "targets", or the name of the model's `LossUnit`, such as "pairs".
    """

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
    report_targets: int
    means: Mapping[str, Value] = field(default_factory=dict)
    unit: str = TARGETS.name


@dataclass(frozen=True)
class PendingStep:
    """A step that the GPU may not have finished. Its tensors are read with the next report; its batches are not kept,
    which may be large.

    tokens: number of tokens of this rank.
    origins: functions that name the lines of data in each micro-batch, where that is known.
    num_targets: number of targets of all ranks, for each head.
    losses, outputs: one entry for each micro-batch of this rank.
    """

    step: int
    learning_rate: float
    tokens: int
    origins: list[Callable[[], str] | None]
    num_targets: Tensor
    losses: list[Tensor]
    outputs: OutputMetrics
    grad_norm: Tensor

    @classmethod
    def of(cls, step: int, learning_rate: float, micro_batches: Iterable[Batch], *results: Any) -> PendingStep:
        """A step on these micro-batches; `results` are the other fields."""
        batches = list(micro_batches)
        tokens = sum(batch["labels"].numel() for batch in batches)
        return cls(step, learning_rate, tokens, [getattr(batch, "where", None) for batch in batches], *results)


class StepLog:
    """The steps since the last report. Only `report` waits for the GPU."""

    def __init__(
        self, steps: int, targets: int, device: torch.device, ranks: DataRanks, unit: LossUnit = TARGETS
    ) -> None:
        self._steps, self._targets, self._device, self._ranks, self._unit = steps, targets, device, ranks, unit
        self.start()

    def start(self) -> None:
        """Forget the steps so far, and time the following steps from now on."""
        self._pending: list[PendingStep] = []
        self._start_time = time.perf_counter()

    def add(self, step: PendingStep) -> None:
        """Add a step."""
        self._pending.append(step)

    def report(self) -> StepMetrics:
        """The metrics of the pending steps, summed over the ranks.

        Raises:
            TrainingError: a loss or a gradient is not finite, or there was no target in the first steps.
        """
        pending = self._pending
        pairs = [(self._unit.count(step.num_targets), step.num_targets.sum()) for step in pending]
        counts, sums = torch.stack([torch.stack(pair) for pair in pairs]).T.tolist()
        report_targets = sum(counts)
        self._targets += report_targets
        if not (self._targets or any(sums)) and pending[-1].step >= min(self._steps, PATIENCE):
            raise _no_target(pending)
        steps = self._metrics_of_steps(counts)
        seconds = time.perf_counter() - self._start_time
        totals = OutputMetrics.sum([step.outputs for step in pending])
        ratios = self._divided(totals.ratios)
        chains = {name: chain_length(listed(ratios[share])) for name, share in totals.chains.items() if share in ratios}
        return StepMetrics(
            steps[-1].step,
            self._steps,
            math.fsum(step.loss * step.targets for step in steps) / max(1, report_targets),
            steps[-1].grad_norm,
            steps[-1].learning_rate,
            sum(step.tokens for step in steps) / seconds,
            tuple(steps),
            ratios,
            _peak_memory(self._device),
            self._targets,
            report_targets,
            {**self._divided(totals.means), **chains},
            self._unit.name,
        )

    def _divided(self, totals: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Value]:
        """The sums over all ranks, each divided by the number of its terms: NaN for an element without terms, none
        if no element has any."""
        sums = {name: (self._ranks.sum(total), self._ranks.sum(count)) for name, (total, count) in totals.items()}
        return {name: (total / count).tolist() for name, (total, count) in sums.items() if count.any()}

    def _metrics_of_steps(self, counts: Sequence[int]) -> list[Step]:
        """Metrics of the pending steps, which have `counts` targets."""
        tensors = (tensor for s in self._pending for tensor in (*s.losses, s.grad_norm, *s.outputs.losses.values()))
        numbers: Iterator[Any] = iter(_to_host(list(tensors)))
        local = []  # of each step: the losses of its micro-batches, the gradient norm, and the logged losses
        for step in self._pending:
            losses, norm = [next(numbers) for _ in step.losses], next(numbers)
            local.append((losses, norm, {name: next(numbers) for name in step.outputs.losses}))
        rows = [
            [math.fsum(losses), step.tokens, *_flat(logged)]
            for step, (losses, _, logged) in zip(self._pending, local, strict=True)
        ]
        if self._ranks.size > 1:
            rows = self._ranks.sum(torch.tensor(rows, dtype=torch.float64, device=self._device)).tolist()
        metrics = []
        for step, count, load, (losses, norm, logged), (loss, tokens, *others) in zip(
            self._pending, counts, self._loads(), local, rows, strict=True
        ):
            _check_finite(step, losses, loss, norm)
            shaped = _shaped_like(logged, others)
            metrics.append(Step(step.step, loss, norm, step.learning_rate, int(tokens), count, shaped, load))
        return metrics

    def _loads(self) -> list[dict[str, float]]:
        """The metrics of the experts' load in each pending step, summed over the ranks; empty without experts."""
        loads = [step.outputs.tokens_per_expert for step in self._pending]
        counts = [load for load in loads if load is not None]
        if not counts or len(counts) < len(loads):
            return [{} for _ in loads]
        return load_metrics(self._ranks.sum(torch.stack(counts)))


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.detach() for tensor in tensors]).sum(0)


def _sums(pairs: Sequence[Mapping[str, tuple[Tensor, Tensor]]]) -> dict[str, tuple[Tensor, Tensor]]:
    """The sums of the numerators and of the denominators under each name, over the pairs that have it."""
    with_name = {name: [p[name] for p in pairs if name in p] for name in dict.fromkeys(chain.from_iterable(pairs))}
    return {
        name: (_sum(each[0] for each in found), _sum(each[1] for each in found)) for name, found in with_name.items()
    }


def listed(value: Value) -> list[float]:
    """The numbers of a value."""
    return value if isinstance(value, list) else [value]


def _flat(values: Mapping[str, Value]) -> list[float]:
    return [number for value in values.values() for number in listed(value)]


def _shaped_like(values: Mapping[str, Value], numbers: Iterable[float]) -> dict[str, Value]:
    """`numbers`, in the order of `_flat(values)`, under the names and in the shapes of `values`."""
    rest = iter(numbers)
    return {k: [next(rest) for _ in value] if isinstance(value, list) else next(rest) for k, value in values.items()}


def _to_host(tensors: Sequence[Tensor]) -> list[Value]:
    """Values of scalars and vectors, by one copy from the device."""
    # At least float32: the norm of gradients may exceed the range of a loss in float16.
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    values = iter(torch.cat([tensor.to(dtype).flatten() for tensor in tensors]).tolist())
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


def _check_finite(step: PendingStep, losses: Sequence[float], total: float, norm: float) -> None:
    """Raise TrainingError unless the losses of this rank's micro-batches, their total over all ranks and the gradient
    norm are finite."""
    if all(map(math.isfinite, (*losses, total, norm))):
        return
    # The first micro-batch with such a loss; all micro-batches if only the gradient is not finite.
    wrong = [i for i, loss in enumerate(losses) if not math.isfinite(loss)][:1] or range(len(losses))
    if not math.isfinite(total) and len(wrong) == len(losses) and all(map(math.isfinite, losses)):
        raise TrainingError(f"step {step.step}: the loss is {total}, by a batch of another rank; training stopped")
    lines = [origin() for i in wrong if (origin := step.origins[i]) is not None]
    batch = f"batch {wrong[0] + 1} of {len(losses)}" if len(wrong) == 1 else "all its batches"
    raise TrainingError(
        f"step {step.step}: the loss is {total} and the gradient norm {norm}; training stopped. "
        f"At fault: {batch}{', made of ' + '; '.join(lines) if lines else ''}. "
        "Try a lower learning rate, a longer warm-up or a lower max_grad_norm, and look at that data"
    )


def _no_target(pending: Sequence[PendingStep]) -> TrainingError:
    origin = next((origin for step in pending for origin in step.origins if origin is not None), None)
    return TrainingError(
        f"step {pending[-1].step}: there has not been a single target to learn{f' in {origin()}' if origin else ''}; "
        "training stopped. Only the assistant's turns of a chat are trained on, and targets lie one or more tokens "
        "ahead in the same document: give other data"
    )
