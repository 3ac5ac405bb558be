"""Modules with parameters that are too sensitive for bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def at_least_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Change the function of a module's `_apply`, such as a cast, so that floating tensors are at least float32."""

    def widened(tensor: Tensor) -> Tensor:
        new = fn(tensor)
        dtype = torch.promote_types(new.dtype, torch.float32)
        if dtype == new.dtype or not new.is_floating_point():
            return new
        if tensor.is_meta:
            return torch.empty_like(new, dtype=dtype)
        return tensor.to(new.device, dtype)  # not `new.to(dtype)`: `new` has been rounded

    return widened


class FullPrecision(nn.Module):
    """Base class of modules that stay float32 when the model is loaded in, or cast to, a narrower dtype.

    FSDP2 requires one dtype for all trainable parameters of a group. `parallelize` makes these modules a group of their
    own. Without it, call `fully_shard([m for m in block.modules() if isinstance(m, FullPrecision)])` before the block's
    `fully_shard`. Checkpoints are written with the dtypes of the checkpoint that was loaded (`WeightMap.dtypes`).
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(at_least_float32(fn), recurse)
