"""The classes that top-k, top-p and min-p keep in each row of logits: a search for their cutoffs, without a sort.

Logits of a dtype have as many values as it has bit patterns. A binary search over these, ordered as the numbers are,
finds a cutoff exactly in as many steps as the dtype has bits, each with one sum over the row. Sums over a row whose
classes are sharded over ranks are sums over the ranks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ligermodels.ops.loss.row_statistics import effective
from ligermodels.ops.loss.sampler import SamplerOptions, pack_bits
from ligermodels.ops.loss.token_losses import LogitRows, LossOptions

if TYPE_CHECKING:
    from ligermodels.ops.runtime.class_shards import ClassShard

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a logit


def bytes_for_cutoffs(dtype: torch.dtype) -> int:
    """Bytes that the search needs for each logit: exponentials, their masked copy, and masks."""
    return 2 * max(dtype.itemsize, 4) + 3


def fill_dropped(
    logits: Tensor, rows: LogitRows, options: LossOptions, kept: SamplerOptions, shard: "ClassShard | None" = None
) -> None:
    """Fills the dropped classes and the kept masses of rows of logits.

    Args:
        logits: (M, n), which stay as they are.
        rows: fields (M,).
        options: the options of the loss.
        kept: the classes that are kept.
        shard: the classes of this rank, if those of a row are sharded over ranks. The bits are of its classes.
    """
    assert rows.dropped_bits is not None and rows.log_masses is not None
    first, num_classes = (0, logits.shape[1]) if shard is None else (shard.first, shard.num_classes)

    wide, given = rows.log_masses.dtype, logits.dtype

    def reduced(x: Tensor, op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM) -> Tensor:
        return x if shard is None else shard.all_reduce(x, op)

    def mass(mask: Tensor) -> Tensor:
        return reduced(torch.where(mask, exps, 0.0).sum(1))

    exps = effective(logits.to(wide, copy=True), options, rows.inverse_temperatures)[0]
    top = reduced(exps.amax(1), dist.ReduceOp.MAX)
    exps = exps.sub_(top.unsqueeze(1)).exp_()
    total, highest = reduced(exps.sum(1)), reduced(logits.amax(1).to(wide), dist.ReduceOp.MAX).to(given)
    cutoffs = torch.full_like(highest, -torch.inf)
    if 0 < kept.top_k < num_classes:
        cutoffs = _largest(cutoffs, highest, lambda value: reduced((logits >= value).sum(1)) >= kept.top_k)
    classes = torch.zeros_like(cutoffs, dtype=torch.int64)
    ids = torch.arange(first, first + logits.shape[1], device=logits.device)
    if kept.top_p < 1:
        least = cutoffs.unsqueeze(1)
        allowed = mass(logits >= least) * (1 - kept.top_p)  # the mass that may be dropped
        cutoffs = _largest(cutoffs, highest, lambda value: mass((logits >= least) & (logits < value)) <= allowed)
        equal = logits == cutoffs.unsqueeze(1)
        of_one = reduced(torch.where(equal, exps, 0.0).amax(1), dist.ReduceOp.MAX)
        left = allowed - mass((logits >= least) & (logits < cutoffs.unsqueeze(1)))
        num_dropped = torch.minimum((left / of_one).floor().clamp(min=0), reduced(equal.sum(1)) - 1)
        classes = _search(
            classes, torch.full_like(classes, num_classes - 1), num_classes.bit_length(),
            lambda end: reduced((equal & (ids < end.unsqueeze(1))).sum(1)) <= num_dropped,
        )  # fmt: skip
    if kept.min_p > 0:
        probable = torch.where(exps >= kept.min_p, logits, torch.inf)
        lowest = reduced(probable.amin(1).to(wide), dist.ReduceOp.MIN).to(given)
        classes, cutoffs = torch.where(lowest > cutoffs, 0, classes), torch.maximum(cutoffs, lowest)
    cutoffs, classes = cutoffs.unsqueeze(1), classes.unsqueeze(1)
    dropped = (logits < cutoffs) | ((logits == cutoffs) & (ids < classes))  # not NaN, which has to show
    rows.dropped_bits.copy_(pack_bits(dropped))
    of_dropped = mass(dropped) / total
    # Either way loses the digits of the smaller part.
    rows.log_masses.copy_(torch.where(of_dropped < 0.5, torch.log1p(-of_dropped), torch.log(mass(~dropped) / total)))


def _largest(low: Tensor, high: Tensor, fits: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest number from low to high (M,) that fits, where low does, and what fits is below what does not.

    fits: of numbers (M, 1), gives bool (M,)."""
    dtype, integer = low.dtype, INTEGERS[low.dtype.itemsize]
    mask = torch.iinfo(integer).max

    def key(x: Tensor) -> Tensor:  # in the order of the numbers; -0 becomes 0
        bits = (x + 0).view(integer).long()
        return torch.where(bits < 0, bits ^ mask, bits)

    def number(keys: Tensor) -> Tensor:
        return torch.where(keys < 0, keys ^ mask, keys).to(integer).view(dtype)

    return number(_search(key(low), key(high), 8 * dtype.itemsize, lambda keys: fits(number(keys).unsqueeze(1))))


def _search(low: Tensor, high: Tensor, steps: int, fits: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest integer from low to high (M,), int64, that fits; low does."""
    for _ in range(steps):
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up, without overflow
        right = fits(middle)
        low, high = torch.where(right, middle, low), torch.where(right, high, middle - 1)
    return low
