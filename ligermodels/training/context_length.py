"""A warning for sequences that are longer than a model's context."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ligermodels.data.batches import Batch
from ligermodels.generation.context_length import context_length, warn_beyond_context


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
