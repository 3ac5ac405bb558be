"""What a benchmark of an op is made of: inputs, the fewest bytes it must move, and who computes it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure

Call = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """`inputs()` makes tensors, bf16 unless integer; floating ones get gradients but for those at `frozen`.

    `providers` compute the same function; `limit`, forward and both passes, only what nobody can leave out; `bytes` are
    the fewest to move, forward and in both passes, or None where arithmetic is the limit. With `overwritten` the first
    input may be lost in a call, and is written anew before each, outside of what is timed. Of `small` cases the time to
    launch them matters.
    """

    name: str
    inputs: Callable[[], tuple[Tensor, ...]]
    bytes: tuple[int, int] | None
    providers: dict[str, Call]
    limit: tuple[Call, Call] | None = None
    frozen: tuple[int, ...] = ()
    overwritten: bool = False
    small: bool = False


class Passes:
    """Calls of a provider on inputs: `forward` without gradients, `both` giving outputs and gradients; `before` is to
    be called ahead of each. `seeds` are the gradients of the outputs, normal but for those of scalars, by default."""

    def __init__(
        self, case: Case, provider: Call, inputs: tuple[Tensor, ...], seeds: list[Tensor] | None = None
    ) -> None:
        self.case, self.provider = case, provider
        self.leaves = [x.detach() for x in inputs]
        self.trained = [x for i, x in enumerate(self.leaves) if x.is_floating_point() and i not in case.frozen]
        for leaf in self.trained:
            leaf.requires_grad_()
        self.target, self.kept = inputs[0], inputs[0].clone() if case.overwritten else None
        self.seeds = self._seeds() if seeds is None else seeds

    def another(self) -> Passes:
        """The same with copies of all inputs and seeds."""
        inputs = tuple(x.detach().clone() for x in self.leaves)
        return Passes(self.case, self.provider, inputs, [seed.clone() for seed in self.seeds])

    def _seeds(self) -> list[Tensor]:
        outputs = self._outputs()
        self.before()
        return [torch.ones_like(y) if y.ndim == 0 else torch.randn_like(y) for y in outputs]

    def _outputs(self) -> tuple[Tensor, ...]:
        found = self.provider(*self.leaves)
        return found if isinstance(found, tuple) else (found,)

    def before(self) -> None:
        """Write what a call has lost."""
        if self.kept is not None:
            self.target.copy_(self.kept)

    def forward(self) -> tuple[Tensor, ...]:
        """The outputs."""
        with torch.no_grad():
            return self._outputs()

    def both(self) -> list[Tensor]:
        """The outputs, then the gradients."""
        found = self._outputs()
        return [*found, *torch.autograd.grad(found, self.trained, self.seeds)]


def random(*shape: int) -> Tensor:
    """Normal bf16 values."""
    return torch.randn(*shape, dtype=torch.bfloat16, device=measure.DEVICE)


def integers(bound: int, count: int) -> Tensor:
    """`count` of 0 to bound - 1."""
    return torch.randint(bound, (count,), device=measure.DEVICE)


def optional(module: str, name: str) -> Any:
    """A name in a module that may not be installed, or None."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


def providers(ours: Call, torch_eager: Call, compiled: bool = True, **peers: Call | None) -> dict[str, Call]:
    """By name, those that are installed. Compiled code is of one size: it would be slower if it served several."""
    by_compiler = {"torch.compile": torch.compile(torch_eager, dynamic=False)} if compiled else {}
    found = {name: peer for name, peer in peers.items() if peer is not None}
    return {"ligermodels": ours, "torch": torch_eager, **by_compiler, **found}
