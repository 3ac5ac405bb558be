"""The contract of optimizers whose steps a CUDA graph can hold, and the numbers of FusedAdamW and Muon for graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ligermodels.ops.optimizer.rounding import rounding_key

if TYPE_CHECKING:
    from ligermodels.training.fused_adamw import FusedAdamW


class Recording(Protocol):
    """The numbers of an optimizer's step, in tensors on the device that keep their addresses.

    It is a context manager: within it `optimizer.step()` reads every number that changes from step to step (learning
    rate, weight decay, bias corrections, keys of random bits) from these tensors, counts no step, and reads nothing
    from the device. A graph records such a step, or on a CPU runs it again.
    """

    def advance(self) -> None:
        """Count a step of each parameter that the graph updates, and write the numbers of this step to the tensors.
        Called before each replay, outside of the context."""

    def __enter__(self) -> object: ...

    def __exit__(self, *exception: object) -> object: ...


def unrecordable_reasons(model: nn.Module) -> Iterator[str]:
    """Reasons of modules why their passes cannot be recorded in a CUDA graph: their attribute `unrecordable`."""
    return (str(reason) for module in model.modules() if (reason := getattr(module, "unrecordable", None)))


@runtime_checkable
class RecordableOptimizer(Protocol):
    """An optimizer whose step `graph_step` can record, such as `FusedAdamW` and `Muon`: a `torch.optim.Optimizer` with
    these two methods.

    The graph takes for constant: the parameters of the groups, their options except `lr` and `weight_decay`, and the
    addresses of the tensors in the state. When one of these changes, the step is recorded again.
    """

    def recording_refusal(self) -> str:
        """Why the step cannot be recorded now; "" if it can."""

    def recording(self) -> Recording:
        """The numbers of the step.

        Called once for each graph, when every parameter that the graph updates has a gradient. It creates the states
        that are missing, and runs on copies what cannot be recorded at its first call, such as compiling kernels; it
        changes no parameter and counts no step.
        """


class GraphNumbers:
    """The `Recording` of an optimizer: the numbers that change from step to step, in the device's memory.

    Args:
        optimizer: an optimizer. The graph updates the parameters that have a gradient now, or had one in the last
            backward pass with `step_in_backward`.
    """

    def __init__(self, optimizer: FusedAdamW) -> None:
        self._optimizer = optimizer
        indexed, norms = optimizer.indexed_parameters(), optimizer.backward_norms or ()
        self._updated = [each for each in indexed if each[2].grad is not None or each[0] in norms]
        for index, _, parameter in self._updated:
            optimizer.start_state(parameter, index)
        self._rows = {index: row for row, (index, _, _) in enumerate(self._updated)}
        device = self._updated[0][2].device
        # Rows of 16 bytes and more: kernels are compiled for tensors that begin at a multiple of 16.
        self._numbers = torch.zeros(len(self._updated), 4, dtype=torch.float64, device=device)
        self._keys = torch.zeros(len(self._updated), 2, dtype=torch.int64, device=device)
        self._warm_up()

    def advance(self) -> None:
        """Count a step of each updated parameter, and write its numbers to the device."""
        numbers, keys = [], []
        for index, group_index, parameter in self._updated:
            group, state = self._optimizer.param_groups[group_index], self._optimizer.state[parameter]
            state["step"] += 1
            step, seeds = int(state["step"]), self._optimizer.rounding_seeds(index)
            numbers.append([*self._optimizer.step_numbers(group, step, index), 0.0])
            keys.append([0 if seeds is None else rounding_key(seeds, step), 0])
        for target, rows in ((self._numbers, numbers), (self._keys, keys)):
            source = torch.tensor(rows, dtype=target.dtype, device="cpu")  # not on torch's default device
            target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)

    def of(self, index: int) -> tuple[Tensor, Tensor | None]:
        """The numbers and the key of the parameter of this index."""
        row, seeds = self._rows[index], self._optimizer.rounding_seeds(index)
        return self._numbers[row], None if seeds is None else self._keys[row]

    def _warm_up(self) -> None:
        """Compile the kernels of the step, on copies of parameters: one for each shape, dtype and kind of update."""
        seen, optimizer = set(), self._optimizer
        for index, group_index, parameter in self._updated:
            state = optimizer.state[parameter]
            key = (parameter.shape, parameter.dtype, group_index, *state)
            if key not in seen:
                seen.add(key)
                twin = torch.zeros_like(parameter)
                twin.grad = torch.zeros_like(parameter)
                optimizer.state[twin] = {name: torch.zeros_like(value) for name, value in state.items()}
                with self:
                    optimizer.update_parameters([(index, twin)], optimizer.param_groups[group_index])
                del optimizer.state[twin]

    def __enter__(self) -> None:
        self._optimizer.graph_numbers = self

    def __exit__(self, *_: object) -> None:
        self._optimizer.graph_numbers = None
