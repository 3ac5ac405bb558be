"""The modules of a class within a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from torch import nn

Kind = TypeVar("Kind", bound=nn.Module)


class HasModules(Protocol):
    """The method of nn.Module that this function calls."""

    def modules(self) -> Iterator[nn.Module]: ...


def modules_of(root: HasModules, kind: type[Kind]) -> list[Kind]:
    """The modules of a class in `root`, itself among them, each once, in the order of `nn.Module.modules`."""
    return [module for module in root.modules() if isinstance(module, kind)]
