"""Modules whose parameters are too sensitive for bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def at_least_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What a module's `_apply` gives its tensors, such as a cast or a move, but no float dtype below float32."""

    def widened(tensor: Tensor) -> Tensor:
        new = fn(tensor)
        dtype = torch.promote_types(new.dtype, torch.float32)
        if dtype == new.dtype or not new.is_floating_point():
            return new
        if tensor.is_meta:
            return torch.empty_like(new, dtype=dtype)
        return tensor.to(new.device, dtype)  # of the tensor itself: `new` has been rounded

    return widened


class FullPrecision(nn.Module):
    """Base of modules whose tensors stay float32 where the model is loaded in, or cast to, a narrower dtype.

    FSDP2 wants one dtype for all trainable parameters of a group: `parallelize` makes these modules a group of their
    own; by hand, `fully_shard([m for m in block.modules() if isinstance(m, FullPrecision)])` before the block's.
    A checkpoint goes out with their tensors in the dtypes that it came in with (`WeightMap.dtypes`).
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(at_least_float32(fn), recurse)
