"""A case of an op: its inputs, the fewest bytes it must move, and the providers that compute it."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec

import torch
from torch import Tensor

from benchmarks.timing import measure

P = ParamSpec("P")
Call = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One size of an op.

    Attributes:
        name: Name of the op and its sizes.
        inputs: Creates the inputs: bf16 or integer tensors. Floating-point inputs need gradients.
        bytes: Fewest bytes to move, forward and in both passes; None for ops that are bound by arithmetic.
        providers: Name -> a function of the inputs. All compute the same outputs.
        limit: Functions for the lower bound, forward and both passes: only the unavoidable work.
        frozen: Indices of floating-point inputs without a gradient.
        small: Launches take most of the time: the case is timed from Python and in a CUDA graph.
        change: Checks multiply the first input by it. The product must be exact and change the outputs.
        other: Creates the case for another number of tokens.
    """

    name: str
    inputs: Callable[[], tuple[Tensor, ...]]
    bytes: tuple[int, int] | None
    providers: dict[str, Call]
    limit: tuple[Call, Call] | None = None
    frozen: tuple[int, ...] = ()
    small: bool = False
    change: float = -2.0
    other: Callable[[], Case] | None = None


def of_tokens(make: Callable[P, Case]) -> Callable[P, Case]:
    """Decorator for functions of `tokens` that return a case: adds the case `other`, of fewer tokens, an odd number."""

    @functools.wraps(make)
    def with_other(*args: P.args, **kwargs: P.kwargs) -> Case:
        call = inspect.signature(make).bind(*args, **kwargs)
        tokens = call.arguments["tokens"]
        call.arguments["tokens"] = (tokens // 3 or 2 * tokens) | 1
        return replace(make(*args, **kwargs), other=lambda: make(*call.args, **call.kwargs))

    return with_other


class Passes:
    """Calls of a provider on copies of `inputs`: `forward` without gradients, `both` with outputs and gradients.

    Args:
        case: The case of the op.
        provider: Function of the inputs.
        inputs: Inputs; they are copied.
        seeds: Gradients of the outputs; they are copied. By default normal values, and ones for scalars.
    """

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
        """A copy with tensors of its own."""
        return Passes(self.case, self.provider, self.inputs, self.kept_seeds)

    def _seeds(self) -> list[Tensor]:
        outputs = self._outputs()
        like = partial(torch.randn_like, memory_format=torch.contiguous_format)  # not in the layout of one provider
        return [torch.ones_like(y) if y.ndim == 0 else like(y) for y in outputs]

    @torch.no_grad()
    def reset(self, changed: bool = False) -> None:
        """Rewrite inputs and seeds, since calls may overwrite both. `changed`: multiply the first input by `change`."""
        for leaf, x in zip(self.leaves, self.inputs, strict=True):
            leaf.copy_(x)
        if changed:
            self.leaves[0].mul_(self.case.change)
        for seed, kept in zip(self.seeds, self.kept_seeds, strict=True):
            seed.copy_(kept)

    def _outputs(self) -> tuple[Tensor, ...]:
        outputs = self.provider(*self.leaves)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def forward(self) -> tuple[Tensor, ...]:
        """The outputs."""
        with torch.no_grad():
            return self._outputs()

    def both(self) -> list[Tensor]:
        """The outputs, then the gradients."""
        outputs = self._outputs()
        return [*outputs, *torch.autograd.grad(outputs, self.trained, self.seeds)]


def random(*shape: int) -> Tensor:
    """Normal bf16 values."""
    return torch.randn(*shape, dtype=torch.bfloat16, device=measure.DEVICE)


def integers(bound: int, count: int) -> Tensor:
    """`count` random integers from 0 to bound - 1."""
    return torch.randint(bound, (count,), device=measure.DEVICE)


def optional(module: str, name: str) -> Any:
    """An attribute of a module, or None if the module is not installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


def providers(ours: Call, torch_eager: Call, compiled: bool = True, **peers: Call | None) -> dict[str, Call]:
    """Providers by name, without peers that are None. torch.compile compiles for one shape, which is faster."""
    by_compiler = {"torch.compile": torch.compile(torch_eager, dynamic=False)} if compiled else {}
    installed = {name: peer for name, peer in peers.items() if peer is not None}
    return {"ligermodels": ours, "torch": torch_eager, **by_compiler, **installed}
