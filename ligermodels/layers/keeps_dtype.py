"""Modules whose parameters keep their dtypes when the model is cast to another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def keeping(fn: Callable[[Tensor], Tensor], kept: Callable[[torch.dtype, torch.dtype], torch.dtype]) -> Any:
    """Change the function of a module's `_apply`, such as a cast, so that its results have other dtypes.

    Args:
        fn: the function that `_apply` received.
        kept: (dtype before fn, dtype after fn) -> dtype of the result.
    """

    def applied(tensor: Tensor) -> Tensor:
        new = fn(tensor)
        dtype = kept(tensor.dtype, new.dtype)
        if dtype == new.dtype:
            return new
        if tensor.is_meta:
            return torch.empty_like(new, dtype=dtype)
        return tensor.to(new.device, dtype)  # not `new.to(dtype)`: `new` has been rounded

    return applied


def at_least_float32(before: torch.dtype, after: torch.dtype) -> torch.dtype:
    """`after`, or float32 where it is a narrower floating dtype."""
    return torch.promote_types(after, torch.float32) if after.is_floating_point else after


class KeepsDtype(nn.Module):
    """Base class of modules whose parameters keep their dtypes when the model is loaded in, or cast to, another dtype.

    FSDP2 requires one dtype for all trainable parameters of a group. `parallelize` makes these modules a group of their
    own. Without it, call `fully_shard([m for m in block.modules() if isinstance(m, KeepsDtype)])` before the block's
    `fully_shard`. Checkpoints are written with the dtypes of the checkpoint that was loaded (`WeightMap.dtypes`).
    """

    kept_dtype = staticmethod(lambda before, after: before)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(keeping(fn, self.kept_dtype), recurse)


class FullPrecision(KeepsDtype):
    """Base class of modules that stay float32 in a model of a narrower dtype: their parameters are too sensitive for
    bfloat16."""

    kept_dtype = staticmethod(at_least_float32)
