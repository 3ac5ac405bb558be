"""Eval mode for the time of a call, of one thread or several."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ligermodels.layers.sharding import ModuleLike, reshard


@dataclass
class _Evaluation:
    """The number of `evaluating` contexts that are open for a model, and its modules that were in training mode."""

    count: int = 0
    training: list[Any] = field(default_factory=list)


_LOCK = threading.Lock()
_EVALUATIONS: dict[int, _Evaluation] = {}
"""By the id of the model. A model lives as long as a context is open for it."""


@contextmanager
def evaluating(model: ModuleLike) -> Iterator[None]:
    """Put a model in eval mode; afterwards restore the training flag of each module and reshard FSDP2's parameters.

    If several threads do so at once, the first saves the flags and the last restores them.
    """
    with _LOCK:
        evaluation = _EVALUATIONS.setdefault(id(model), _Evaluation())
        if not evaluation.count:
            reshard(model)
            evaluation.training = [module for module in model.modules() if module.training]
            if evaluation.training:
                model.eval()
        evaluation.count += 1
    try:
        yield
    finally:
        with _LOCK:
            evaluation.count -= 1
            if not evaluation.count:
                del _EVALUATIONS[id(model)]
                reshard(model)
                for module in evaluation.training:
                    module.training = True
