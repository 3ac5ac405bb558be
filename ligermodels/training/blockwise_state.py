"""States of optimizers in 8 bits: two tensors in the state, `NAME_codes` and `NAME_scales`; see `Blockwise`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ligermodels.convert.shards import is_dtensor, sharded_like
from ligermodels.errors import ConfigError
from ligermodels.ops.optimizer.blockwise import BLOCK_SIZE, Average, Blockwise, num_blocks

CODES, SCALES = "_codes", "_scales"


def new_blockwise(name: str, parameter: Tensor) -> dict[str, Tensor]:
    """Zeros in 8 bits, of the shape and sharding of `parameter`.

    Raises ConfigError if a shard does not consist of whole blocks.
    """
    codes = torch.zeros_like(parameter, dtype=torch.uint8, memory_format=torch.contiguous_format)
    columns = parameter.shape[-1]
    shape = (*parameter.shape[:-1], num_blocks(columns))
    if not is_dtensor(parameter):
        return {name + CODES: codes, name + SCALES: torch.zeros(shape, device=parameter.device)}
    local = local_tensor(parameter).shape[-1]
    if local != columns and (local % BLOCK_SIZE or columns % BLOCK_SIZE):
        raise ConfigError(
            f"optimizer: 8-bit states have blocks of {BLOCK_SIZE} columns, and a rank holds {local} of {columns} "
            "columns of a weight; use fewer tensor-parallel ranks, or an optimizer without 8-bit states"
        )
    return {name + CODES: codes, name + SCALES: sharded_like(parameter, shape, torch.float32).zero_()}


def average_of(state: Mapping[str, Any], name: str) -> Average:
    """This rank's shard of a running average in the state of a parameter: in 8 bits, or a tensor."""
    if name in state:
        return local_tensor(state[name])
    return Blockwise(local_tensor(state[name + CODES]), local_tensor(state[name + SCALES]))


def local_tensor(x: Any) -> Tensor:
    """This process's shard of a sharded tensor, or the tensor itself."""
    return x.to_local() if is_dtensor(x) else x
