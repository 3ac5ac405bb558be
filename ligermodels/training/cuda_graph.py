"""A whole optimizer step as one CUDA graph: one launch in place of thousands of kernels.

It pays where the CPU needs longer to launch the kernels of a step than the GPU needs to run them: small models, and
short batches. `docs/cuda-graphs.md` has measurements.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from ligermodels.data.batches import Batch
from ligermodels.errors import GraphWarning, InputError
from ligermodels.generation.graph import Graphed, waits_for
from ligermodels.layers import Block
from ligermodels.layers.checkpointing import drops
from ligermodels.layers.modules import modules_of
from ligermodels.layers.sharding import reshard
from ligermodels.models.causal_lm import CausalLM
from ligermodels.ops.runtime.dispatch import as_recorded
from ligermodels.ops.runtime.library import is_dtensor
from ligermodels.parallel.model_size import ModelSize
from ligermodels.parallel.plan import ParallelPlan
from ligermodels.parallel.ranks import largest_of_ranks, parallelism_of
from ligermodels.training.example_padding import ExamplePadding
from ligermodels.training.graph_state import graph_state
from ligermodels.training.recording import RecordableOptimizer, Recording, unrecordable_reasons
from ligermodels.training.reports import OutputMetrics
from ligermodels.training.row_padding import RowPadding
from ligermodels.training.step import EagerStep, Options, Parts, StepResult, Trainable, check_parts

CudaGraph = Literal["auto", "on", "off"]

MAX_GRAPHS = 8
"""Graphs that are kept; each is for batches of other shapes. Preference data has one."""
FLOPS_PER_BLOCK = 1e12
"""With "auto", a step is recorded if a block has fewer operations. A block takes some 2.5 ms to launch, forward and
backward, in which an H100 has some 1e12 operations."""
FSDP_FLOPS_PER_BLOCK = 4e12
"""The same with FSDP2, whose gathers and reductions the CPU launches too."""


def graph_step(
    model: Trainable,
    optimizer: Optimizer,
    *,
    max_grad_norm: float | None = 1.0,
    output_metrics: Callable[[Any], OutputMetrics] | None = None,
) -> GraphStep:
    """A function that takes whole optimizer steps, each by one CUDA graph.

    The first call with batches of new shapes compiles the kernels and records the graph. Results are bit for bit those
    of a step without a graph, if that step computes the loss of all tokens: `model(...)` leaves tokens without a target
    out of the head's products where there are many of them, and a graph does not. FSDP2's gathers and reductions are
    part of the graph. All ranks call the function for the same steps; if batches of one rank have new shapes, all ranks
    record.

    Args:
        model: the model, on a GPU; calling it with a batch returns an object with `loss`.
        optimizer: a `RecordableOptimizer` of the parameters to train, such as `FusedAdamW` or `Muon`.
        max_grad_norm: largest norm of the gradient; None: gradients are not clipped. Must be None with
            `step_in_backward`.
        output_metrics: metrics to return, from an output of the model; None for no metrics.

    Returns:
        A function (micro_batches, **options) -> `StepResult`. `micro_batches` are keyword arguments of the model, and
        `options` further keyword arguments that are the same for all micro-batches, such as `num_items_in_batch`.
        The losses are on the GPU; reading them waits for the step.

    Raises:
        InputError: when called: the inputs do not fit the model, or the step of a sharded model does something that a
            graph cannot and that is found only while it is recorded.

    Warns:
        GraphWarning: once, if the step cannot be recorded, and runs without a graph; and if settings that a graph takes
            for constant change in one step after the other. These steps run without a graph.

    Examples:
        >>> step = graph_step(model, FusedAdamW(model.parameters(), lr=1e-5))
        >>> batch = {"input_ids": input_ids, "labels": labels}
        >>> result = step([batch], num_items_in_batch=model.num_targets(labels))
        >>> loss = result.losses[0]
    """
    return GraphStep(EagerStep(model, optimizer, max_grad_norm, output_metrics))


class GraphStep:
    """Takes steps by CUDA graphs, one for each set of shapes; see `graph_step`."""

    def __init__(self, step: EagerStep) -> None:
        self._step = step
        sequences = getattr(step.model, "sequences_per_item", None)
        self._pad = RowPadding(step.module) if sequences is None else ExamplePadding(sequences)
        self._graphs: dict[Any, _RecordedStep] = {}
        self._state: Any = None
        self._changes_in_a_row = 0
        self._pool = torch.cuda.graph_pool_handle() if step.device.type == "cuda" else None
        self._is_off, self._is_sharded = False, parallelism_of(step.module) is not None

    def __call__(self, parts: Parts, **options: Any) -> StepResult:
        """Take a step; see `graph_step`."""
        if self._is_off:
            return self._step(parts, options)
        check_parts(parts)
        try:
            return self._take(parts, options)
        except _CannotRecord as error:
            warnings.warn(f"steps run without a CUDA graph: {error}", GraphWarning, stacklevel=2)
        self._is_off = True
        self._graphs.clear()  # gives their memory back
        return self._step(parts, options)

    def _take(self, parts: Parts, options: Options) -> StepResult:
        if self._is_sharded:
            reshard(self._step.module)  # a graph gathers every parameter
        inputs, recorded, changes, reason = None, None, False, _unfit(self._step, parts, options)
        if not reason:
            inputs, changes = _Inputs.of(self._pad(parts), options), self._changes()
            recorded = self._graphs.get(inputs.key)
            reason = "" if recorded or changes else self._obstacle(parts)
        need = _Need.NEVER if reason else _Need.EAGER if changes else _Need.REPLAY if recorded else _Need.RECORD
        if self._is_sharded:
            need = _Need(largest_of_ranks(need))  # all ranks take the step in the same way
        if inputs is None or need is _Need.NEVER:
            raise _CannotRecord(reason or "another rank cannot record it")
        if need is _Need.EAGER:
            return self._step(parts, options)
        if recorded is None or need is _Need.RECORD:
            recorded = self._graphs[inputs.key] = _RecordedStep(self._step, inputs, self._pool)
            self._state = graph_state(self._step)
        return recorded(inputs.tensors)

    def _changes(self) -> bool:
        """Whether something has changed since the last step that graphs take for constant. Such a step is taken without
        a graph, and the next one recorded: what changes in each step would be recorded in each."""
        if self._state is None or self._state == (state := graph_state(self._step)):
            self._changes_in_a_row = 0
            return False
        self._graphs.clear()
        self._state = state
        self._changes_in_a_row += 1
        if self._changes_in_a_row == 2:
            reason = "settings of modules or the optimizer that a graph takes for constant change from step to step"
            warnings.warn(f"steps run without a CUDA graph until they stay: {reason}", GraphWarning, stacklevel=4)
        return True

    def _obstacle(self, parts: Parts) -> str:
        """Why there can be no further graph; "" if there can."""
        if self._pad.grows:
            self._graphs.clear()  # its sizes only grow
        if len(self._graphs) == MAX_GRAPHS:
            return f"the batches have more than {MAX_GRAPHS} sets of shapes"
        return refusal(self._step, parts)


class _Need(IntEnum):
    """How a step is taken; of several ranks the largest counts."""

    REPLAY = 0
    RECORD = 1
    EAGER = 2  # this time
    NEVER = 3


def _unfit(step: EagerStep, parts: Parts, options: Options) -> str:
    """Why this step cannot be taken by a graph; "" if it can."""
    if any(parameter.grad is not None for parameter in step.model.parameters()):
        return "there are gradients of an earlier backward pass"
    if torch.is_autocast_enabled(step.device.type):
        return "torch.autocast is on, and a graph would keep the casts of weights that it caches"
    if any(getattr(value, "requires_grad", False) for inputs in (*parts, options) for value in inputs.values()):
        return "an input requires a gradient, which a graph would compute for its copy"
    if any("labels" not in part for part in parts):
        return "a micro-batch has no labels"
    return ""


class _CannotRecord(Exception):
    """A step cannot be recorded; the message says why. No step was taken."""


class _Inputs(NamedTuple):
    """The inputs of a step.

    tensors: all tensors, in a fixed order.
    key: equal for inputs that one graph serves.
    rebuild: other tensors in this order -> (micro-batches, options).
    """

    tensors: list[Tensor]
    key: Any
    rebuild: Callable[[Sequence[Tensor]], tuple[list[dict[str, Tensor]], dict[str, Any]]]

    @classmethod
    def of(cls, parts: Sequence[dict[str, Tensor]], options: Options) -> _Inputs:
        groups = [*parts]
        numbers = {
            name: torch.tensor(value)
            for name, value in options.items()
            if name in _NUMBERS and isinstance(value, int | float)
        }
        tensors = {name: value for name, value in {**options, **numbers}.items() if isinstance(value, Tensor)}
        constants = {name: value for name, value in options.items() if name not in tensors}
        groups.append(tensors)

        def rebuild(flat: Sequence[Tensor]) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
            rest = iter(flat)
            *rebuilt, options = [{name: next(rest) for name in group} for group in groups]
            return rebuilt, {**options, **constants}

        shapes = tuple(tuple((name, tensor.shape, tensor.dtype) for name, tensor in group.items()) for group in groups)
        flat = [tensor for group in groups for tensor in group.values()]
        return cls(flat, (shapes, repr(sorted(constants.items()))), rebuild)


class _RecordedStep:
    """A step on tensors at fixed addresses, and its graph."""

    def __init__(self, step: EagerStep, inputs: _Inputs, pool: Any) -> None:
        self._static = [torch.empty_like(tensor, device=step.device) for tensor in inputs.tensors]
        self._load(inputs.tensors)
        parts, options = inputs.rebuild(self._static)
        self._run = Graphed(lambda: step(parts, options), step.device, is_warm=True, pool=pool)
        try:
            self._numbers = _warm_up(step, parts, options)
            with self._numbers:
                self._run.record()
        except RuntimeError as error:
            step.optimizer.zero_grad(set_to_none=True)
            failure = f"recording failed: {str(error).splitlines()[0]}"
            if parallelism_of(step.module):  # FSDP2 is in the middle of a step
                raise InputError(f"cuda_graph: {failure}; set it to 'off'") from error
            raise _CannotRecord(failure) from error

    def __call__(self, tensors: Sequence[Tensor]) -> StepResult:
        self._load(tensors)
        self._numbers.advance()
        with self._numbers:  # on a CPU the function runs itself
            losses, metrics, grad_norm = self._run()
        # The next replay overwrites these tensors.
        return StepResult([loss.clone() for loss in losses], OutputMetrics.sum([metrics]), grad_norm.clone())

    def _load(self, tensors: Sequence[Tensor]) -> None:
        for static, tensor in zip(self._static, tensors, strict=True):
            is_pinned = static.is_cuda and not tensor.is_cuda
            static.copy_(tensor.pin_memory() if is_pinned else tensor, non_blocking=True)


def _warm_up(step: EagerStep, parts: Parts, options: Options) -> Recording:
    """Compile all kernels of a step, and find out whether it waits for the GPU, which a graph cannot."""
    place = ""
    for _ in range(2):  # what is copied to the GPU once, such as a table, waits in the first pass only
        numbers, place = _dry_run(step, parts, options)
        if not _on_any_rank(step, bool(place)):
            return numbers
    raise _CannotRecord(f"{place} waits for the GPU" if place else "another rank waits for its GPU")


def _dry_run(step: EagerStep, parts: Parts, options: Options) -> tuple[Recording, str]:
    """Compile all kernels of a step without taking it: gradients are computed and dropped; random numbers and buffers
    are set back. Returns the optimizer's numbers, and where the passes first wait for the GPU, "" if they do not."""
    optimizer: Any = step.optimizer
    buffers = [(buffer, buffer.clone()) for buffer in step.module.buffers()]
    devices = [step.device] if step.device.type == "cuda" else []
    try:
        if step.in_backward:
            optimizer.traces_backward = True
        with torch.random.fork_rng(devices), as_recorded():
            with waits_for(step.device) as places:
                step.backward(parts, options)
            numbers: Recording = optimizer.recording()  # may wait: it is no part of the graph
    finally:
        if step.in_backward:
            optimizer.traces_backward = False
        optimizer.zero_grad(set_to_none=True)
        for buffer, value in buffers:
            buffer.copy_(value)
    return numbers, next(iter(places), "")


_NUMBERS = ("num_items_in_batch", "heads_loss_weight")
"""Options that change from step to step, and may be tensors."""


def refusal(step: EagerStep, parts: Parts) -> str:
    """Why a step cannot be recorded; "" if it may be."""
    return _sharding_refusal(step) or _optimizer_refusal(step) or _batch_refusal(parts) or _module_refusal(step)


def _sharding_refusal(step: EagerStep) -> str:
    if not any(map(is_dtensor, step.model.parameters())):
        return ""
    spread = parallelism_of(step.module)
    return "parameters are sharded without a plan (lm.parallelize)" if spread is None else plan_refusal(spread.plan)


def _optimizer_refusal(step: EagerStep) -> str:
    trained = {id(parameter) for group in step.optimizer.param_groups for parameter in group["params"]}
    if any(p.requires_grad and id(p) not in trained for p in step.model.parameters()):
        return (
            "the optimizer does not have all parameters that require a gradient; call requires_grad_(False) of others"
        )
    if not isinstance(step.optimizer, RecordableOptimizer):
        return f"{type(step.optimizer).__name__} does not support it: it has no `recording` (see RecordableOptimizer)"
    return step.optimizer.recording_refusal()


def _batch_refusal(parts: Parts) -> str:
    for name in ("attention_mask", "position_ids"):
        if any(name in part for part in parts):
            return f"batches with {name} have tokens that only the GPU can count; give packed rows with cu_seqlens"
    return ""


def _module_refusal(step: EagerStep) -> str:
    if reason := next(unrecordable_reasons(step.module), ""):
        return reason
    modules = list(step.module.modules())
    modes = {getattr(module, "activation_checkpointing", "none") for module in modules}
    if "offload" in modes:
        return "activation_checkpointing 'offload' uses host memory, which graphs cannot reuse"
    if modes != {"none"} and any(map(drops, modules)):
        return "dropout with activation checkpointing draws its random numbers twice"
    return ""


def plan_refusal(plan: ParallelPlan) -> str:
    """Why steps of a model with this plan cannot be recorded; "" if they may be."""
    divided = [name for name in ("context", "tensor", "expert") if getattr(plan, name) > 1]
    return f"the plan has {', '.join(divided)} parallelism" if divided else ""


def _on_any_rank(step: EagerStep, value: bool) -> bool:
    """Whether the value is true on any rank of a model that is spread over ranks, which all call this."""
    return value if parallelism_of(step.module) is None else bool(largest_of_ranks(value))


def pays(step: EagerStep, parts: Sequence[Batch], *, is_sharded: bool = False) -> bool:
    """Whether a step launches so little work at a time that a graph of it is faster; see FLOPS_PER_BLOCK."""
    blocks = modules_of(step.module, Block)
    if not blocks:
        return False
    tokens = max(part["labels"].numel() for part in parts)
    models = modules_of(step.module, CausalLM)
    of_models = {id(parameter) for model in models for parameter in model.parameters()}
    used = sum(ModelSize.of(model).used for model in models)  # by a token, of a mixture its own experts
    used += sum(p.numel() for p in step.model.parameters() if id(p) not in of_models)
    return 6 * used * tokens / len(blocks) < (FSDP_FLOPS_PER_BLOCK if is_sharded else FLOPS_PER_BLOCK)


def make_step(step: EagerStep, cuda_graph: CudaGraph, parts: Sequence[Batch]) -> Callable[..., StepResult]:
    """How a run takes its steps: (micro_batches, **options) -> `StepResult`.

    Args:
        step: the step without a graph.
        cuda_graph: "on", "off", or "auto": on where it pays and can be recorded, on all ranks. GraphWarning names why a
            step that would be faster by a graph has none.
        parts: the first micro-batches.
    """
    if cuda_graph not in get_args(CudaGraph):
        raise InputError(f"cuda_graph: must be 'auto', 'on' or 'off', got {cuda_graph!r}")
    is_on = cuda_graph == "on"
    if is_on and step.device.type != "cuda":
        warnings.warn(f"steps run without a CUDA graph: the model is on {step.device}", GraphWarning, stacklevel=3)
    is_sharded = parallelism_of(step.module) is not None
    if cuda_graph == "auto" and step.device.type == "cuda":
        is_on = _on_any_rank(step, pays(step, parts, is_sharded=is_sharded))
        if is_on and _on_any_rank(step, bool(reason := refusal(step, parts))):
            is_on, reason = False, reason or "another rank cannot record it"
            warnings.warn(f"steps run without a CUDA graph, and would be faster by it: {reason}", GraphWarning, 3)
    return GraphStep(step) if is_on and step.device.type == "cuda" else lambda parts, **options: step(parts, options)
