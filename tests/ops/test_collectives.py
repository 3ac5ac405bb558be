"""Exchanges between ranks: values and gradients on two ranks, beside one process that has the tensors of both."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import WORLD, in_two_ranks

from ligermodels.ops.runtime.collectives import Ranks


class Exchange(NamedTuple):
    """An exchange in one process.

    Args:
        results: from the tensors of all ranks, (4, 3) each, the results of all ranks.
        same_input: all ranks have the same tensor, and so the same gradient.
        same_use: all ranks use the result alike, as one process does once; else the loss is the sum over ranks.
    """

    results: Callable[[list[Tensor]], list[Tensor]]
    same_input: bool = False
    same_use: bool = False


EXCHANGES = {
    "take": Exchange(lambda xs: list(xs[0].chunk(WORLD)), same_input=True),
    "whole": Exchange(lambda xs: [torch.cat(xs)] * WORLD, same_use=True),
    "gather": Exchange(lambda xs: [torch.cat(xs)] * WORLD),
    "reduce_scatter": Exchange(lambda xs: list(torch.stack(xs).sum(0).chunk(WORLD))),
    "swap": Exchange(lambda xs: [torch.cat([x.chunk(WORLD)[rank] for x in xs]) for rank in range(WORLD)]),
    "all_reduce": Exchange(lambda xs: [torch.stack(xs).sum(0)] * WORLD),
    "total": Exchange(lambda xs: [torch.stack(xs).sum(0)] * WORLD, same_use=True),
    "sum_gradients": Exchange(lambda xs: [xs[0]] * WORLD, same_input=True),
}


def check(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    ranks = Ranks.of(mesh)
    for name, (results, same_input, same_use) in EXCHANGES.items():
        torch.manual_seed(0)
        xs = [torch.randn(4, 3, dtype=torch.float64).requires_grad_() for _ in range(WORLD)]
        xs = [xs[0]] * WORLD if same_input else xs
        wanted = results(xs)
        uses = [torch.randn_like(y) for y in wanted]
        uses = [uses[0]] * WORLD if same_use else uses
        losses = [(use * y.sin()).sum() for use, y in zip(uses, wanted, strict=True)]
        (gradient,) = torch.autograd.grad(losses[0] if same_use else sum(losses), xs[rank])

        x = xs[rank].detach().requires_grad_()
        found = getattr(ranks, name)(x)
        torch.testing.assert_close(found, wanted[rank], msg=lambda m, n=name: f"{n}: {m}")
        (found_gradient,) = torch.autograd.grad((uses[rank] * found.sin()).sum(), x)
        torch.testing.assert_close(found_gradient, gradient, msg=lambda m, n=name: f"gradient of {n}: {m}")


def test_exchanges_and_their_gradients(tmp_path: Path) -> None:
    in_two_ranks(check, tmp_path)
