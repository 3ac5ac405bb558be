"""The contract of optimizers whose steps a CUDA graph can hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch import nn


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
