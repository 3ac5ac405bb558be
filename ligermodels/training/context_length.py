"""A warning for sequences that are longer than a model's context."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from ligermodels.data.batches import Batch
from ligermodels.errors import SequenceLengthWarning
from ligermodels.layers.rope import RotaryEmbedding


class ContextLengthCheck:
    """Warns once (SequenceLengthWarning) about a sequence that is longer than the context of `model`."""

    def __init__(self, model: Any) -> None:
        self._context = context_length(model)

    def __call__(self, batches: Iterable[Batch], step: int) -> None:
        """Check the batches of `step`. The warning names the caller of `train`."""
        if self._context is None or (longest := max(map(_longest_sequence, batches))) <= self._context:
            return
        warnings.warn(
            f"step {step}: a sequence of {longest:,} tokens is longer than the model's max_position_embeddings, "
            f"{self._context:,}; the model does not know positions beyond it: make seq_len smaller, or extend the "
            "context by rope_parameters (rope_scaling) and max_position_embeddings in config.json",
            SequenceLengthWarning,
            stacklevel=4,
        )
        self._context = None


def context_length(model: Any) -> int | None:
    """`max_position_embeddings` of a model or of a model inside it, or the longer context of its rotary
    scaling; None where no config has this field."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else [model]
    lengths = (getattr(getattr(module, "config", None), "max_position_embeddings", None) for module in modules)
    length = next((length for length in lengths if isinstance(length, int)), None)
    scalings = [module.config.scaling for module in modules if isinstance(module, RotaryEmbedding)]
    extended = (getattr(scaling, "factor", 1) * getattr(scaling, "original_context", 0) for scaling in scalings)
    return None if length is None else max(length, *map(int, extended), 0)


def _longest_sequence(batch: Batch) -> int:
    """Tokens of the longest sequence in a batch; of packed sequences by their boundaries. 0 for boundaries on a GPU:
    reading them would wait for it."""
    if (boundaries := batch.get("cu_seqlens")) is not None:
        return 0 if boundaries.is_cuda or boundaries.numel() < 2 else int(boundaries.diff().max())
    if (positions := batch.get("position_ids")) is not None:
        return 0 if positions.is_cuda or not positions.numel() else int(positions.max()) + 1
    return batch["labels"].shape[-1] if batch["labels"].ndim else 0
