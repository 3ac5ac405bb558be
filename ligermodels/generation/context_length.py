"""The context of a model, and a warning for text that is longer."""

from __future__ import annotations

import warnings
import weakref
from typing import Any, ClassVar

from torch import nn

from ligermodels.errors import SequenceLengthWarning
from ligermodels.layers.rope import RotaryEmbedding


def context_length(model: Any) -> int | None:
    """`max_position_embeddings` of a model or of a model inside it, or the longer context of its rotary
    scaling; None where no config has this field."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else [model]
    lengths = (getattr(getattr(module, "config", None), "max_position_embeddings", None) for module in modules)
    length = next((length for length in lengths if isinstance(length, int)), None)
    scalings = [module.config.scaling for module in modules if isinstance(module, RotaryEmbedding)]
    extended = (getattr(scaling, "factor", 1) * getattr(scaling, "original_context", 0) for scaling in scalings)
    return None if length is None else max(length, *map(int, extended), 0)


class GenerationLimit:
    """Warns once for a model (SequenceLengthWarning) when generated text becomes longer than the model's context."""

    _warned: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self, model: Any) -> None:
        self._model = model
        self._context = None if model in self._warned else context_length(model)

    def __call__(self, length: int) -> None:
        """Check the number of tokens that the model has read of the longest sequence."""
        if self._context is not None and length > self._context:
            self._warned.add(self._model)
            warn_beyond_context(f"generate: a sequence of {length:,} tokens", self._context, stacklevel=2)
            self._context = None


def warn_beyond_context(text: str, context: int, *, stacklevel: int) -> None:
    """Warn with SequenceLengthWarning.

    Args:
        text: the sequence in the message, such as "a sequence of 9 tokens".
        context: `max_position_embeddings`.
        stacklevel: frames between this function and the caller that the warning names, as in `warnings.warn`.
    """
    warnings.warn(
        f"{text} is longer than the model's max_position_embeddings, {context:,}; the model does not know positions "
        "beyond it: make sequences shorter, or extend the context by rope_parameters (rope_scaling) and "
        "max_position_embeddings in config.json",
        SequenceLengthWarning,
        stacklevel=stacklevel + 1,
    )
