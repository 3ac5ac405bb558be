"""The training loop, for any model with a loss."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ligermodels.arguments import check_count
from ligermodels.convert.ranks import Ranks
from ligermodels.data.batches import Batch, count_targets
from ligermodels.errors import InputError
from ligermodels.generation.context_length import context_length, warn_beyond_context
from ligermodels.parallel.ranks import DataRanks, gloo_group, parallelism_of
from ligermodels.training.callback import Callback, Event, Hook, callbacks_of, is_due, trained_model
from ligermodels.training.cuda_graph import CudaGraph, make_step
from ligermodels.training.renamed import renamed_arguments
from ligermodels.training.reports import TARGETS, OutputMetrics, PendingStep, StepLog, StepMetrics
from ligermodels.training.step import EagerStep, StepResult, Trainable


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
    callbacks: Sequence[Callback] = (),
    start: int = 0,
    targets: int = 0,
    loss_options: Callable[[int], Mapping[str, Any]] | None = None,
    output_metrics: Callable[[Any], OutputMetrics] | None = None,
    cuda_graph: CudaGraph = "off",
    router_bias_update_rate: float = 0.0,
    hooks: Sequence[Hook] = (),
    stop: Callable[[], bool] | None = None,
) -> int:
    """Take optimizer steps `start` + 1 to `steps`.

    The gradient of a step is the gradient of one batch of all its micro-batches: losses are summed and divided by the
    number of targets in all micro-batches, not averaged per micro-batch. Gradients from before the call are dropped. If
    FSDP2 shards the model (`parallelize`), all ranks call this function together; gradients and reports then cover the
    micro-batches of all ranks.

    Args:
        model: the model; calling it with a batch returns an object with `loss`.
        batches: micro-batches of this rank, `accumulation_steps` per step.
        steps: number of the last step.
        optimizer: optimizer of the parameters to train.
        schedule: learning-rate schedule, stepped after each step; None for constant learning rates.
        max_grad_norm: largest norm of the gradient; None: gradients are not clipped.
        accumulation_steps: micro-batches per step.
        on_step: called with each report, as `Callback.on_report`.
        report_every: steps between reports. Only a report waits for the GPU.
        callbacks: called after steps and with reports, in this order. The model is set to training mode again
            afterwards.
        start: number of the last step of an earlier run; 0 for a new run.
        targets: `StepMetrics.targets` of the earlier run; 0 for a new run.
        loss_options: further keyword arguments of the model's forward, by the number of the step.
        output_metrics: metrics to log, from an output of the model.
        cuda_graph: "on": each step is one CUDA graph, see `graph_step`; "auto": where this is faster; "off".
        router_bias_update_rate: change of the selection biases of a mixture's routers after each step, towards an even
            load of the experts: see `update_router_bias`. Needs `output_metrics` with `tokens_per_expert`. Default: 0.
        hooks: deprecated: (period, function), for `Callback.on_step_end`.
        stop: deprecated: function for `Callback.should_stop`.

    Returns:
        The number of the last step taken.

    Raises:
        TrainingError: the loss or the gradient is not finite (the message names the step and the data), or there is no
            target in the first steps. Checked with each report.
        InputError: the batches end too early, a batch has no labels, or a number is out of range; or ranks of tensor
            or context parallelism have different batches in the first step.

    Warns:
        SequenceLengthWarning: once, if a sequence is longer than the model's `max_position_embeddings` and the context
            that its rotary scaling extends it to. Boundaries of packed sequences on a GPU are not read for this.

    Examples:
        >>> optimizer = adamw(model.parameters(), 2e-5)
        >>> schedule = warmup_cosine(optimizer, 1000, warmup_steps=40)
        >>> train(model, batches, steps=1000, optimizer=optimizer, schedule=schedule, on_step=print)
        1000
    """
    callbacks = [*callbacks, *callbacks_of(on_step, hooks, stop)]
    _check_counts(callbacks, steps=steps, accumulation_steps=accumulation_steps, report_every=report_every)
    eager_step = EagerStep(model, optimizer, max_grad_norm, output_metrics, router_bias_update_rate)
    take_step: Callable[..., StepResult] | None = None
    device, ranks = eager_step.device, eager_step.ranks
    micro_batches, check_length = iter(batches), ContextLengthCheck(model)
    model.train()
    optimizer.zero_grad(set_to_none=True)  # of a pass before this call, whose gradients the first step would add
    log = StepLog(steps, targets, device, ranks, getattr(model, "loss_unit", TARGETS))
    for step in range(start + 1, steps + 1):
        parts = list(islice(micro_batches, accumulation_steps))
        if len(parts) < accumulation_steps:
            raise InputError(f"the batches ended at step {step} of {steps}: give more text, more epochs or fewer steps")
        if step == start + 1:
            check_same_batches(model, parts)
        num_targets = ranks.sum(count_targets(model, parts).to(device, non_blocking=True))
        check_length(parts, step)
        options = {"num_items_in_batch": num_targets.clamp(min=1), **(loss_options(step) if loss_options else {})}
        take_step = take_step or make_step(eager_step, cuda_graph, parts)
        learning_rate = optimizer.param_groups[0]["lr"]
        result = take_step(parts, **options)
        if schedule is not None:
            schedule.step()
        log.add(PendingStep.of(step, learning_rate, parts, num_targets, *result))
        _on_step(callbacks, Event(step, steps, trained_model(model)), learning_rate, result)
        _keep_training(model)

        is_last = step == steps or _should_stop(callbacks)
        due = [callback for callback in callbacks if is_due(step, callback.every, steps)]
        if is_last or due or step % report_every == 0:
            _call(callbacks, due, log.report())
            is_last = is_last or _should_stop(callbacks)
            model.train()
            log.start()
        if is_last:
            return step
    return start


def _on_step(callbacks: Iterable[Callback], event: Event, learning_rate: float, result: StepResult) -> None:
    losses = result.losses
    loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
    event = replace(event, metrics={"loss": loss, "grad_norm": result.grad_norm, "learning_rate": learning_rate})
    for callback in callbacks:
        callback.on_step(event)


def _keep_training(model: Trainable) -> None:
    """Set the model to training mode if a callback has left it in evaluation mode."""
    if not (getattr(model, "training", True) and getattr(trained_model(model), "training", True)):
        model.train()


def _call(callbacks: Iterable[Callback], due: Iterable[Callback], report: StepMetrics) -> None:
    for callback in callbacks:
        callback.on_report(report)
    for callback in due:
        callback.on_step_end(report.step)


def _should_stop(callbacks: Iterable[Callback]) -> bool:
    return any([callback.should_stop() for callback in callbacks])  # a list: every callback is asked


def _check_counts(callbacks: Iterable[Callback], **counts: int) -> None:
    periods = [(f"{type(each).__name__}.every", each.every) for each in callbacks if each.every is not None]
    for name, count in (*counts.items(), *periods):
        check_count(name, count)


def check_same_batches(model: Any, batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Check that ranks of tensor and context parallelism have the same batches: with others the loss would be of parts
    of each, or a collective call would wait for ever. All ranks call this.

    Args:
        model: the model.
        batches: micro-batches of this rank.

    Raises:
        InputError: on all ranks, if one has other batches than another with which it shares the model or sequences.
    """
    spread = parallelism_of(model)
    if spread is None or spread.plan.tensor * spread.plan.context == 1:
        return
    own = [{name: _checksum(x) for name, x in batch.items() if isinstance(x, Tensor)} for batch in batches]
    first: dict[int, tuple[int, Any]] = {}  # number of the share of the data -> its first rank and the rank's batches
    ranks = Ranks.of_group(gloo_group("main"))
    for rank, (share, found) in enumerate(ranks.gather((DataRanks.of(model).rank, own))):
        other, expected = first.setdefault(share, (rank, found))
        if found != expected:
            raise InputError(
                f"batches: rank {rank} has other batches than rank {other}, with which it shares the model (tensor) or "
                "each sequence (context); give both the same: divide the data by `DataRanks.of(model)`, not by all "
                "ranks"
            )


def _checksum(tensor: Tensor) -> tuple[Any, ...]:
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return tuple(tensor.shape), str(tensor.dtype), zlib.crc32(content.numpy().tobytes())


class ContextLengthCheck:
    """Warns once (SequenceLengthWarning) about a sequence that is longer than the context of `model`."""

    def __init__(self, model: Any) -> None:
        self._context = context_length(model)

    def __call__(self, batches: Iterable[Batch], step: int) -> None:
        """Check the batches of `step`. The warning names the caller of `train`."""
        if self._context is None or (longest := max(map(_longest_sequence, batches))) <= self._context:
            return
        warn_beyond_context(f"step {step}: a sequence of {longest:,} tokens", self._context, stacklevel=4)
        self._context = None


def _longest_sequence(batch: Batch) -> int:
    """Tokens of the longest sequence in a batch; of packed sequences by their boundaries. 0 for boundaries on a GPU:
    reading them would wait for it."""
    if (boundaries := batch.get("cu_seqlens")) is not None:
        return 0 if boundaries.is_cuda or boundaries.numel() < 2 else int(boundaries.diff().max())
    if (positions := batch.get("position_ids")) is not None:
        return 0 if positions.is_cuda or not positions.numel() else int(positions.max()) + 1
    return batch["labels"].shape[-1] if batch["labels"].ndim else 0
