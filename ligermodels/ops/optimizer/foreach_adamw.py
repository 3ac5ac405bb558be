"""One step of AdamW for many parameters in one kernel launch: for small ones a launch takes longer than the step."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.optimizer.adamw import adamw_block, adamw_numbers, adamw_step, checked
from ligermodels.ops.optimizer.blockwise import Average, Blockwise
from ligermodels.ops.optimizer.rounding import BLOCK, Shard, rounding_key, shard_rows
from ligermodels.ops.runtime.dispatch import is_recording, tl, use_kernels
from ligermodels.ops.runtime.launcher import ALIGNED, kernel

BLOCKS = 8
"""Blocks of a program, one after another."""
COLUMNS = 8
"""Of the table: addresses of the four tensors, number of elements, first draw, key, first program."""


class AdamWUpdate(NamedTuple):
    """Arguments of `adamw_step` for one parameter, without those that many parameters share."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Average
    exp_avg_sq: Average
    step: int
    rounding_seeds: Sequence[int] | None = None
    shard: Shard | None = None


@torch.no_grad()
def foreach_adamw_step(
    updates: Sequence[AdamWUpdate], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    """Updates parameters and the averages of their gradients in place: the bits of `adamw_step` for each of them.

    Parameters of the same dtypes on one GPU share one launch. It reads a table of their addresses, which is copied to
    the GPU. A single parameter, those with 8-bit averages, without elements or with shards of several rows, and all
    while a CUDA graph is recorded, have launches of their own.

    Args:
        updates: parameters with their gradients, averages, number of the step, seeds and shard, as `adamw_step` takes
            them.
        lr: learning rate.
        betas: decay of exp_avg and of exp_avg_sq per step.
        eps: added to the root of exp_avg_sq.
        weight_decay: weight decay per step, relative to the learning rate.

    Raises:
        InputError: as `adamw_step`. Parameters before may have been updated.

    Examples:
        >>> weights, gradients = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
        >>> averages = torch.zeros(3, 4, 8), torch.zeros(3, 4, 8)
        >>> updates = [AdamWUpdate(*tensors, step=1) for tensors in zip(weights, gradients, *averages)]
        >>> foreach_adamw_step(updates, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    """
    numbers = {step: adamw_numbers(step, lr, betas, weight_decay) for step in {update.step for update in updates}}
    launches: defaultdict[Any, list[_Row]] = defaultdict(list)
    has_table = len(updates) > 1 and not is_recording()
    for update in updates:
        found = _row(update, numbers[update.step]) if has_table else None
        if found is None:
            adamw_step(
                update.parameter, update.gradient, update.exp_avg, update.exp_avg_sq, step=update.step, lr=lr,
                betas=betas, eps=eps, weight_decay=weight_decay, rounding_seeds=update.rounding_seeds,
                shard=update.shard,
            )  # fmt: skip
        else:
            kind, row = found
            launches[kind].append(row)
    for (device, _, is_even, is_stochastic), rows in launches.items():
        _launch(rows, device, (*betas, eps), is_even, is_stochastic)


class _Row(NamedTuple):
    """A parameter, and its columns of the table without the last; and the numbers of `adamw_numbers`."""

    tensors: tuple[Tensor, ...]
    addresses: tuple[int, int, int, int]
    size: int
    first: int
    key: int
    numbers: tuple[float, float, float]


def _row(update: AdamWUpdate, numbers: tuple[float, float, float]) -> tuple[Any, _Row] | None:
    """A key that is equal for all parameters of one launch, and the row of this one; None if it is launched alone."""
    parameter, gradient, m, v, step, seeds, shard = update
    if isinstance(m, Blockwise) or isinstance(v, Blockwise) or not use_kernels(parameter, gradient):
        return None
    first, size = 0, parameter.numel()
    if shard is not None and seeds is not None:
        first, size, distance = shard_rows("adamw_step", shard, parameter.shape)
        if first % 4 or distance:
            return None
    if not size:
        return None
    gradient = checked(*update[:4])[1]
    addresses = parameter.data_ptr(), gradient.data_ptr(), m.data_ptr(), v.data_ptr()
    if (addresses[0] | addresses[1] | addresses[2] | addresses[3]) % ALIGNED:
        return None
    key = 0 if seeds is None else rounding_key(seeds, step)
    dtypes = parameter.dtype, gradient.dtype, m.dtype, v.dtype
    row = _Row((parameter, gradient, m, v), addresses, size, first // 4, key, numbers)
    return (parameter.device, dtypes, size % 16 == 0, seeds is not None), row


def _launch(
    rows: Sequence[_Row], device: torch.device, numbers: Sequence[float], is_even: bool, is_stochastic: bool
) -> None:
    """One launch for parameters of the same dtypes. `numbers`: betas and eps."""
    cpu = torch.device("cpu")  # by name: torch's default device may be another
    programs = torch.tensor([-(-row.size // (BLOCK * BLOCKS)) for row in rows], device=cpu)
    firsts = (programs.cumsum(0) - programs).tolist()
    table = [(*row.addresses, row.size, row.first, row.key, first) for row, first in zip(rows, firsts, strict=True)]
    on_host = (
        torch.tensor(table, device=cpu),
        torch.tensor([row.numbers for row in rows], dtype=torch.float64, device=cpu),
        torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32, device=cpu), programs),
    )
    on_device = [(x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True) for x in on_host]
    with torch.cuda.device_of(rows[0].tensors[0]):
        _foreach_adamw_kernel[(len(on_host[2]),)](
            *rows[0].tensors, *on_device, *numbers, EVEN=is_even, STOCHASTIC=is_stochastic, COLUMNS=COLUMNS,
            BLOCKS=BLOCKS, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


@kernel
def _foreach_adamw_kernel(
    parameter, gradient, exp_avg, exp_avg_sq, table, numbers, row_of, beta1, beta2, eps, EVEN: tl.constexpr,
    STOCHASTIC: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCKS blocks of the parameter in row `row_of[program]` of the table. The first four arguments have the dtypes of
    all parameters."""
    row = tl.load(row_of + tl.program_id(0)).to(tl.int64)
    columns, factors = table + row * COLUMNS, numbers + row * 3
    parameter = tl.multiple_of(tl.load(columns).to(parameter.dtype), 16)
    gradient = tl.multiple_of(tl.load(columns + 1).to(gradient.dtype), 16)
    exp_avg = tl.multiple_of(tl.load(columns + 2).to(exp_avg.dtype), 16)
    exp_avg_sq = tl.multiple_of(tl.load(columns + 3).to(exp_avg_sq.dtype), 16)
    size = tl.load(columns + 4)
    if EVEN:
        size = tl.multiple_of(size, 16)
    first, key, start = tl.load(columns + 5), tl.load(columns + 6), tl.load(columns + 7)
    keep = tl.load(factors).to(tl.float32)
    step_size, root = tl.load(factors + 1).to(tl.float32), tl.load(factors + 2).to(tl.float32)
    begin = (tl.program_id(0) - start) * BLOCKS
    for block in range(begin, tl.minimum(begin + BLOCKS, tl.cdiv(size, BLOCK))):
        i = block * BLOCK + tl.arange(0, BLOCK)
        adamw_block(
            parameter, gradient, exp_avg, exp_avg_sq, i, i < size, first + block * (BLOCK // 4), keep, step_size, root,
            beta1, beta2, eps, key, STOCHASTIC, BLOCK,
        )  # fmt: skip
