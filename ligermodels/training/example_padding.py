"""Padding of preference data, so that batches have few shapes for CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.layers import IGNORE_INDEX

Part = Mapping[str, Tensor]


class ExamplePadding:
    """Pads batches of `ExampleBatches` to the largest sizes that have occurred, rounded up.

    Padding is items without labels, which count in no loss and no metric: empty sequences, and a last sequence with the
    missing tokens.

    Args:
        sequences: sequences of an item: 2 of pairs, 1 of single sequences.
    """

    grows = True  # the sizes that batches are padded to

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._sizes: dict[str, int] = {}

    def __call__(self, parts: Sequence[Part]) -> list[dict[str, Tensor]]:
        """The micro-batches of a step, padded to the same sizes."""
        for part in parts:
            for name, size in self._rounded_sizes(part):
                self._sizes[name] = max(size, self._sizes.get(name, 0))
        return [self._padded(part) for part in parts]

    def _rows(self, part: Part) -> Iterator[tuple[str, int]]:
        """Prefix of the names of each packed row, and its sequences per item."""
        yield "", self._sequences
        if "kl_input_ids" in part:
            yield "kl_", 1

    def _rounded_sizes(self, part: Part) -> Iterator[tuple[str, int]]:
        """Tokens up to a multiple of an eighth to a sixteenth of them, labels per sequence to a power of two, items to
        a higher power of two: there is a sequence for the missing tokens."""
        for prefix, sequences in self._rows(part):
            tokens, (count, labels) = part[f"{prefix}input_ids"].shape[1], part[f"{prefix}targets"].shape
            yield f"{prefix}tokens", tokens + -tokens % (1 << max(tokens.bit_length() - 4, 0))
            yield f"{prefix}labels", 1 << max(labels - 1, 0).bit_length()
            yield "items", 1 << (count // sequences).bit_length()

    def _padded(self, part: Part) -> dict[str, Tensor]:
        padded = dict(part)
        for prefix, sequences in self._rows(part):
            padded |= self._padded_row(part, prefix, sequences)
        for name in ("examples", "desirable"):
            if name in part:
                padded[name] = self._with_items(part[name], 1, 0)
        return padded

    def _padded_row(self, part: Part, prefix: str, sequences: int) -> dict[str, Tensor]:
        def of(name: str) -> Tensor:
            return part[prefix + name]

        missing = self._sizes[f"{prefix}tokens"] - of("input_ids").shape[1]
        lengths = self._with_items(of("cu_seqlens").diff(), sequences, 0)
        lengths[-1] += missing
        targets = F.pad(of("targets"), (0, self._sizes[f"{prefix}labels"] - of("targets").shape[1]), value=-1)
        row = {
            "input_ids": F.pad(of("input_ids"), (0, missing)),
            "labels": F.pad(of("labels"), (0, missing), value=IGNORE_INDEX),
            "cu_seqlens": F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
            "targets": self._with_items(targets, sequences, -1),
        }
        if f"{prefix}ref_log_probs" in part:
            row["ref_log_probs"] = self._with_items(of("ref_log_probs"), sequences, 0)
        if f"{prefix}completion_mask" in part:
            mask = F.pad(of("completion_mask"), (0, targets.shape[1] - of("completion_mask").shape[1]))
            row["completion_mask"] = self._with_items(mask, sequences, 0)
        return {prefix + name: value for name, value in row.items()}

    def _with_items(self, values: Tensor, sequences: int, fill: int) -> Tensor:
        """(sequences * items, ...) with further items: after the first sequences of all items, and so on."""
        sides = values.view(sequences, -1, *values.shape[1:])
        further = self._sizes["items"] - sides.shape[1]
        padding = sides.new_full((sequences, further, *values.shape[1:]), fill)
        return torch.cat([sides, padding], dim=1).flatten(0, 1)
