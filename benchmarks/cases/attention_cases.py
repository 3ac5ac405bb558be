"""Cases of attention: shapes of models, with windows, softcaps and packed documents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, product

import torch
from torch import Tensor

from benchmarks.timing import measure

WINDOW, SOFTCAP = 4096, 50.0
DOCUMENTS = (4500, 1, 1811, 37, 700, 1143)
"""Lengths; the first is longer than the window."""


@dataclass(frozen=True)
class Case:
    """Shapes and options, as `ops.attention` has them; `documents` are the lengths of those packed into a row."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    documents: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Shape and options."""
        options = ("window", self.window), ("softcap", self.softcap), ("packed", "" if self.documents else None)
        shape = f"{self.batch}x{self.length} {self.heads}+{self.kv_heads} heads of {self.head_dim}"
        return shape + "".join(
            f" {name} {value:g}" if value else f" {name}" for name, value in options if value is not None
        )

    @property
    def shorter(self) -> Case:
        """The same of one row of an odd length, or of fewer documents."""
        documents = self.documents[1:] + self.documents[:1]
        documents = documents[: len(documents) // 2]
        return replace(self, batch=1, length=sum(documents) or self.length // 3 | 1, documents=documents)

    @property
    def bounds(self) -> Tensor | None:
        """cu_seqlens of the documents."""
        if not self.documents:
            return None
        return torch.tensor([0, *accumulate(self.documents)], dtype=torch.int32, device=measure.DEVICE)

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a visible key, in all heads and sequences."""
        reach = self.window or self.length
        alone = [sum(min(t + 1, reach) for t in range(n)) for n in self.documents or (self.length,)]
        return sum(alone) * self.batch * self.heads

    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, v and the gradient of the result. With a softcap the scores are large enough to reach it."""
        shapes = [(self.batch, self.length, heads, self.head_dim) for heads in (self.heads, *[self.kv_heads] * 2)]
        q, k, v, seed = (
            torch.randn(shape, dtype=torch.bfloat16, device=measure.DEVICE) for shape in (*shapes, shapes[0])
        )
        return q * (4 if self.softcap else 1), k, v, seed


def cases() -> list[Case]:
    """Every head_dim with every option, padded and packed."""
    options = ((None, None), (WINDOW, None), (None, SOFTCAP), (WINDOW, SOFTCAP))
    shapes = ((32, 8, 128), (32, 8, 64), (8, 4, 256))
    every = list(product(shapes, options))
    fixed = [Case(2, 8192, *shape, window, softcap) for shape, (window, softcap) in every]
    packed = [Case(1, sum(DOCUMENTS), *shape, window, softcap, DOCUMENTS) for shape, (window, softcap) in every]
    return [*fixed, Case(8, 2048, 32, 8, 128), *packed]
