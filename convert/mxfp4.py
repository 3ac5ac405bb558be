"""Tensors in MXFP4: 4 bits per element, and one scale for each 32 elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.convert.encoded import Encoded, as_float, check_dtype, look_up, matrix_of
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.weight_map import raise_faults

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes (OCP Microscaling Formats, E2M1)."""
FP4_BLOCK = 32
"""Elements with one scale; they take 16 bytes."""


class MXFP4(NamedTuple):
    """Matrices that are stored by columns, in blocks of 32 elements of one column (gpt_oss).

    Args:
        shape: (..., rows, columns).
        blocks: checkpoint tensor of the codes, uint8 (..., columns, rows / 32, 16): two elements per byte, the first in
            the low bits.
        scales: checkpoint tensor of the scales, uint8 (..., columns, rows / 32).
    """

    shape: tuple[int, ...]
    blocks: str
    scales: str

    @property
    def stored(self) -> Sequence[str]:
        return self.blocks, self.scales

    def decode(self, files: Checkpoint, matrix: int, first: int, last: int) -> Tensor:
        span = slice(first // FP4_BLOCK, -(-last // FP4_BLOCK))
        rows, columns = matrix_of(self.shape)
        shape = columns, rows // FP4_BLOCK
        blocks = files.read(self.blocks).view(-1, *shape, FP4_BLOCK // 2)[matrix, :, span]
        scales = as_float(files.read(self.scales).view(-1, *shape)[matrix, :, span])
        pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(2)
        values = look_up(torch.tensor(FP4, device="cpu"), pairs).mul_(scales[..., None])
        return values.flatten(1).T[first - span.start * FP4_BLOCK :][: last - first]


def mxfp4_tensors(files: Checkpoint, block: tuple[int, int] | None) -> dict[str, Encoded]:
    """Name X -> MXFP4 tensor, for all pairs X_blocks and X_scales of a checkpoint.

    Args:
        files: the checkpoint.
        block: not used; the format has blocks of 32.

    Raises:
        CheckpointError: blocks without scales or the reverse, wrong dtypes, or shapes that do not match; the message
            lists all of them.
    """
    headers = files.headers
    tensors: dict[str, Encoded] = {}
    faults: defaultdict[str, list[str]] = defaultdict(list)
    ends = ("_blocks", "_scales")
    for name in dict.fromkeys(name.removesuffix(end) for name in headers for end in ends if name.endswith(end)):
        pair = [name + end for end in ends]
        if missing := [stored for stored in pair if stored not in headers]:
            faults["missing from the checkpoint"] += missing
            continue
        for stored in pair:
            check_dtype(stored, headers[stored], (torch.uint8,), faults)
        blocks, scales = (headers[stored].shape for stored in pair)
        if len(blocks) < 3 or blocks != (*scales, FP4_BLOCK // 2):
            faults["of shapes that do not match"].append(f"{pair[0]} {list(blocks)} and {pair[1]} {list(scales)}")
        else:
            *lead, columns, groups = scales
            tensors[name] = MXFP4((*lead, groups * FP4_BLOCK, columns), *pair)
    raise_faults("the checkpoint's mxfp4 blocks and scales do not match", faults)
    return tensors
