"""What a CUDA graph of an optimizer step takes for constant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ligermodels.ops.runtime.dispatch import set_backend, set_batch_invariant
from ligermodels.training.blockwise_state import local_tensor
from ligermodels.training.step import EagerStep


@torch.no_grad()  # to_local of each tensor would otherwise be an autograd function, milliseconds of each step
def graph_state(step: EagerStep) -> Any:
    """What a graph takes for constant, beside its inputs: addresses of parameters and states, which parameters are
    trained, settings of the optimizer, settings of modules (training mode, dropout, weights of routers' losses),
    functions that were set as the `forward` of a module, as hooks of accelerate are, addresses of buffers, hooks, and
    settings of the process by which kernels are chosen."""
    groups, modules = step.optimizer.param_groups, [vars(module) for module in step.module.modules()]
    parameters = list(step.model.parameters())
    states = (step.optimizer.state.get(p, {}) for group in groups for p in group["params"])
    return (
        [(local_tensor(p).data_ptr(), p.requires_grad) for p in parameters],
        [local_tensor(x).data_ptr() for state in states for x in state.values() if isinstance(x, Tensor)],
        [{name: value for name, value in group.items() if name not in _RATES} for group in groups],
        [len(group["params"]) for group in groups],
        [value for module in modules for value in module.values() if isinstance(value, _PLAIN)],
        [(module.get("config"), module.get("forward")) for module in modules],
        [buffer.data_ptr() for buffer in step.module.buffers()],
        [*chain.from_iterable(_hooks_of(modules, parameters, step.optimizer))],
        (set_backend.value, set_batch_invariant.value),
        (_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
    )


def _matmul_precision() -> str:
    """The precision of float32 matrix products on GPUs, by whichever of torch's settings it was chosen. torch 2.8 has
    one, which newer releases refuse to read where `torch.backends.cuda.matmul.fp32_precision` was set."""
    precision: str = getattr(torch.backends.cuda.matmul, "fp32_precision", "")
    return precision or torch.get_float32_matmul_precision()


def _hooks_of(
    modules: Sequence[Mapping[str, Any]], parameters: Sequence[Any], optimizer: Optimizer
) -> Iterator[Iterable[int]]:
    """The ids of hooks, which no two hooks of a process share; `modules` are their attributes."""
    yield from (module[name] for module in modules for name in _HOOKS if module[name])
    yield from (getattr(nn.modules.module, f"_global{name}") for name in _HOOKS)
    yield from (each for p in parameters for each in (p._backward_hooks, p._post_accumulate_grad_hooks) if each)
    yield from (vars(optimizer).get(f"_optimizer_step_{when}_hooks", ()) for when in ("pre", "post"))


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module with its hooks."""
_PLAIN = (int, float, str)
"""Types of the attributes that are settings of a module."""
_RATES = ("params", "lr", "initial_lr", "weight_decay")
"""Options of groups that may change from step to step: see `RecordableOptimizer`."""
