"""What a benchmark of an op is made of: inputs, the fewest bytes it must move, and who computes it."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ParamSpec

import torch
from torch import Tensor

from benchmarks import measure

P = ParamSpec("P")
Call = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """`inputs()` makes tensors, bf16 unless integer; floating ones get gradients but for those at `frozen`.

    `providers` compute the same function; `limit`, forward and both passes, only what nobody can leave out; `bytes` are
    the fewest to move, forward and in both passes, or None where arithmetic is the limit. With `overwritten` the first
    input is lost in a call, so that no graph of calls can be timed. Of `small` cases the time to launch them matters.
    `other()` is the same of another number of tokens. Checks multiply the first input by `change`, which must be exact
    and give other outputs.
    """

    name: str
    inputs: Callable[[], tuple[Tensor, ...]]
    bytes: tuple[int, int] | None
    providers: dict[str, Call]
    limit: tuple[Call, Call] | None = None
    frozen: tuple[int, ...] = ()
    overwritten: bool = False
    small: bool = False
    change: float = -2.0
    other: Callable[[], Case] | None = None


def of_tokens(make: Callable[P, Case]) -> Callable[P, Case]:
    """For what makes cases and has an argument `tokens`: the cases get an `other`, of fewer tokens and an odd count."""

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Case:
        call = inspect.signature(make).bind(*args, **kwargs)
        tokens = call.arguments["tokens"]
        call.arguments["tokens"] = (tokens // 3 or 2 * tokens) | 1
        return replace(make(*args, **kwargs), other=lambda: make(*call.args, **call.kwargs))

    return made


class Passes:
    """Calls of a provider on copies of `inputs`: `forward` without gradients, `both` giving outputs and gradients.
    `seeds` are the gradients of the outputs, normal but for those of scalars, by default; they are copied too."""

    def __init__(
        self, case: Case, provider: Call, inputs: tuple[Tensor, ...], seeds: list[Tensor] | None = None
    ) -> None:
        self.case, self.provider, self.inputs = case, provider, inputs
        self.leaves = [x.detach().clone() for x in inputs]
        self.trained = [x for i, x in enumerate(self.leaves) if x.is_floating_point() and i not in case.frozen]
        for leaf in self.trained:
            leaf.requires_grad_()
        self.kept_seeds = self._seeds() if seeds is None else seeds
        self.seeds = [seed.clone() for seed in self.kept_seeds]
        self.reset()

    def another(self) -> Passes:
        """The same with tensors of its own."""
        return Passes(self.case, self.provider, self.inputs, self.kept_seeds)

    def _seeds(self) -> list[Tensor]:
        outputs = self._outputs()
        return [torch.ones_like(y) if y.ndim == 0 else torch.randn_like(y) for y in outputs]

    @torch.no_grad()
    def reset(self, changed: bool = False) -> None:
        """Write inputs and seeds anew, for a call may write over both; the first input times `change` if `changed`."""
        for leaf, x in zip(self.leaves, self.inputs, strict=True):
            leaf.copy_(x)
        if changed:
            self.leaves[0].mul_(self.case.change)
        for seed, kept in zip(self.seeds, self.kept_seeds, strict=True):
            seed.copy_(kept)

    def _outputs(self) -> tuple[Tensor, ...]:
        found = self.provider(*self.leaves)
        return found if isinstance(found, tuple) else (found,)

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
