"""One optimizer step: forward and backward passes, clipping and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ligermodels.arguments import check_number, is_number
from ligermodels.data.batches import CountsTargets, on_device
from ligermodels.errors import InputError, short
from ligermodels.layers.sharding import check_not_freed, gathered, reshard
from ligermodels.ops.runtime.library import is_dtensor
from ligermodels.parallel.ranks import DataRanks
from ligermodels.training.reports import OutputMetrics
from ligermodels.training.router_bias import biased_routers, update_router_bias

Parts = Sequence[Mapping[str, Tensor]]
Options = Mapping[str, Any]


class Trainable(CountsTargets, Protocol):
    """A model that the loop can train, such as `CausalLM`. Calling it returns an object with `loss`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def parameters(self) -> Iterable[nn.Parameter]: ...

    def train(self, mode: bool = True) -> Any: ...


class StepResult(NamedTuple):
    """The results of a step.

    losses: scalars, one for each micro-batch.
    metrics: metrics of the outputs, summed over the micro-batches.
    grad_norm: scalar, the norm of the gradient before clipping.
    """

    losses: list[Tensor]
    metrics: OutputMetrics
    grad_norm: Tensor


class EagerStep:
    """An optimizer step as separate operations.

    Args:
        model: the model; calling it with a batch returns an object with `loss`.
        optimizer: optimizer of the parameters to train.
        max_grad_norm: largest norm of the gradient; None: gradients are not clipped.
        output_metrics: metrics to log, from an output of the model; None for no metrics.
        router_bias_update_rate: change of the selection biases of routers after the optimizer's step, by the
            `tokens_per_expert` of the metrics: see `update_router_bias`; 0 for none.

    Raises:
        InputError: a `max_grad_norm` that is no number above 0. With an optimizer that steps in the backward pass: any
            `max_grad_norm`, or (when called) several micro-batches. An optimizer of parameters that FSDP2 had gathered
            when it was made. A `router_bias_update_rate` that is negative, or for routers without a selection bias.
    """

    def __init__(
        self,
        model: Trainable,
        optimizer: Optimizer,
        max_grad_norm: float | None = None,
        output_metrics: Callable[[Any], OutputMetrics] | None = None,
        router_bias_update_rate: float = 0.0,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._router_bias_update_rate = check_number("router_bias_update_rate", router_bias_update_rate)
        # For questions about its modules; a model that is none has no modules.
        self.module = model if isinstance(model, nn.Module) else nn.Module()
        if router_bias_update_rate:
            biased_routers(self.module)
            if output_metrics is None:
                raise InputError("router_bias_update_rate: needs output_metrics with tokens_per_expert")
        reshard(self.module)
        check_not_freed(parameter for group in optimizer.param_groups for parameter in group["params"])
        self.device, self.ranks = next(iter(model.parameters())).device, DataRanks.of(model)
        self.in_backward: bool = getattr(optimizer, "steps_in_backward", False)
        if self.in_backward and max_grad_norm is not None:
            raise InputError(
                f"max_grad_norm: is {max_grad_norm}, and the optimizer updates parameters in the backward pass "
                "(step_in_backward), before the norm of all gradients is known; give max_grad_norm=None"
            )
        if max_grad_norm is not None and not (is_number(max_grad_norm) and max_grad_norm > 0):
            raise InputError(f"max_grad_norm: must be above 0, or None not to clip, got {short(max_grad_norm)}")
        self._max_grad_norm = math.inf if max_grad_norm is None else max_grad_norm
        self._output_metrics = output_metrics or (lambda out: OutputMetrics())

    def __call__(self, parts: Parts, options: Options) -> StepResult:
        """Take a step.

        Args:
            parts: micro-batches, keyword arguments of the model.
            options: further keyword arguments of the model.

        Returns:
            The results. No parameter has a gradient afterwards, also after an error: the next step would add it.
        """
        try:
            result = self.backward(parts, options)
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        if self._router_bias_update_rate:
            counts = result.metrics.tokens_per_expert
            if counts is None:
                raise InputError("router_bias_update_rate: needs output_metrics with tokens_per_expert")
            update_router_bias(cast(nn.Module, self.model), counts, self._router_bias_update_rate)
        return result

    def backward(self, parts: Parts, options: Options) -> StepResult:
        """Compute the clipped gradients of the micro-batches, without the optimizer's update. An optimizer that steps
        in the backward pass has then updated the parameters."""
        check_parts(parts)
        if self.in_backward and len(parts) > 1:
            raise InputError(
                f"accumulation_steps: there are {len(parts)} micro-batches, and the optimizer updates parameters in "
                "the backward pass of each (step_in_backward); give one micro-batch per step"
            )
        losses, metrics = [], []
        for part in parts:
            out = self.model(**on_device(part, self.device), **options)
            loss = out.loss if self.ranks.size == 1 else out.loss * self.ranks.size  # FSDP2 averages over ranks
            # Not in autograd's own thread, where operations in Python are slower (docs/benchmark-log.md).
            with torch.autograd.set_multithreading_enabled(False):
                loss.backward()
            losses.append(out.loss.detach())
            metrics.append(self._output_metrics(out))
        return StepResult(losses, OutputMetrics.sum(metrics), self._clipped())

    def _clipped(self) -> Tensor:
        """Clip the gradients; returns their norm before."""
        if self.in_backward:
            optimizer: Any = self.optimizer
            norms = [norm for _, norm in sorted(optimizer.backward_norms.items())]
            return norm_of_norms(norms).to(self.device)
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        return clip_gradients(parameters, self._max_grad_norm)


def check_parts(parts: Parts) -> None:
    """Raise InputError unless there are micro-batches, of tensors only."""
    if not parts:
        raise InputError("micro_batches: there are none; give at least one")
    for name, value in (item for part in parts for item in part.items()):
        if not isinstance(value, Tensor):
            raise InputError(
                f"{name}: a micro-batch has tensors only, got {short(value)}; leave out what is None, and give other "
                "arguments of the model as options of the step"
            )


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients to a norm of at most `max_norm`, if it is finite; returns their norm before.

    `torch.nn.utils.clip_grad_norm_` accepts only DTensors of one mesh, but under expert parallelism experts have a mesh
    of their own. The norm is computed for each mesh, then the norm of these norms.
    """
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(_mesh_of(parameter.grad), []).append(parameter)
    groups = list(by_mesh.values())
    norms = [gathered(nn.utils.get_total_norm([p.grad for p in group])) for group in groups]  # type: ignore[misc]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms or [torch.zeros(())]))
    for group in groups if max_norm != math.inf else ():  # a product with 1 reads and writes every gradient
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def _mesh_of(x: Tensor) -> Any:
    """The mesh of a DTensor; None for other tensors."""
    return cast(Any, x).device_mesh if is_dtensor(x) else None


def norm_of_norms(norms: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients, from the norm () of each; 0 without any. Norms of sharded gradients are DTensors, also
    of several meshes."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for norm in norms:
        by_mesh.setdefault(_mesh_of(norm), []).append(norm)
    totals = [gathered(torch.linalg.vector_norm(torch.stack(group))) for group in by_mesh.values()]
    if len(totals) < 2:
        return totals[0] if totals else torch.zeros(())
    return torch.linalg.vector_norm(torch.stack(totals))
