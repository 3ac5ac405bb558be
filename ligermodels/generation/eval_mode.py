"""Eval mode for the time of a call, of one thread or several."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from ligermodels.layers.sharding import ModuleLike, reshard


@dataclass
class _Evaluation:
    """The number of `evaluating` contexts that are open for a module, and its training flag before the first."""

    training: bool
    count: int = 0


_LOCK = threading.Lock()
_EVALUATIONS: dict[nn.Module, _Evaluation] = {}
"""By module, as contexts may be open for a model and for a model inside it."""


@contextmanager
def evaluating(model: ModuleLike) -> Iterator[None]:
    """Put a model in eval mode; afterwards restore the training flag of each module and reshard FSDP2's parameters.

    If several contexts overlap, as in threads, the first saves the flag of a module and the last restores it.
    """
    modules = list(model.modules())
    with _LOCK:
        if _EVALUATIONS.keys().isdisjoint(modules):
            reshard(model)
        for module in modules:
            _EVALUATIONS.setdefault(module, _Evaluation(module.training)).count += 1
        if any(module.training for module in modules):
            model.eval()
    try:
        yield
    finally:
        with _LOCK:
            for module in modules:
                evaluation = _EVALUATIONS[module]
                evaluation.count -= 1
                if not evaluation.count:
                    module.training = evaluation.training
                    del _EVALUATIONS[module]
            if _EVALUATIONS.keys().isdisjoint(modules):
                reshard(model)
