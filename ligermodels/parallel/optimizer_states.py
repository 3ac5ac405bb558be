"""Bytes of an optimizer's states on a rank."""

from __future__ import annotations

from torch import nn

from ligermodels.arguments import OptimizerName
from ligermodels.errors import ConfigError
from ligermodels.ops.optimizer.blockwise import num_blocks


def state_bytes(
    parameter: nn.Parameter, columns: int, kept: int, optimizer: OptimizerName, *, orthogonalized: bool
) -> int:
    """Bytes of the states of a parameter on a rank.

    AdamW has two moments, and Muon one for the matrices that it orthogonalises: in the dtype of the parameter, or of
    matrices in 8 bits with a float32 scale for every 256 columns. Adafactor has a row and a column per matrix.

    Args:
        parameter: the whole parameter.
        columns: size of the last dimension of its shard.
        kept: bytes of its shard.
        optimizer: name of the optimizer.
        orthogonalized: whether Muon orthogonalises it, see `hidden_matrices`.

    Raises:
        ConfigError: Adafactor on a sharded parameter.
    """
    if optimizer == "adafactor":
        if kept < parameter.nbytes:
            raise ConfigError("optimizer: adafactor does not work on sharded parameters; use adamw")
        rows = parameter.numel() if parameter.ndim < 2 else sum(parameter.shape[-2:]) * parameter.shape[:-2].numel()
        return rows * parameter.itemsize
    moments = 1 if orthogonalized and optimizer.startswith("muon") else 2
    if not optimizer.endswith("8bit") or parameter.ndim < 2:
        return moments * kept
    elements = kept // parameter.itemsize
    return moments * (elements + 4 * (elements // max(1, columns)) * num_blocks(columns))
