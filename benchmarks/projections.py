"""The GEMMs of a linear layer, forward and for its gradients, in bf16 and in float8, on operands that are ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.case import random
from ligermodels import ops

BOTH = ("input", "weight")
"""The gradients of a projection."""

Call = Callable[[], object]
Shape = tuple[int, int, int]


def gemms(shape: Shape, gradients: Sequence[str] = BOTH) -> list[Call]:
    """x (rows, width) times a weight (size, width), and the gradients named."""
    rows, size, width = shape
    x, weight, gradient = random(rows, width), random(size, width) * width**-0.5, random(rows, size)
    of_gradients: dict[str, Call] = {"input": lambda: gradient @ weight, "weight": lambda: gradient.t() @ x}
    return [lambda: x @ weight.t(), *(of_gradients[name] for name in gradients)]


def float8_gemms(shape: Shape, gradients: Sequence[str] = BOTH, recipe: ops.Float8Recipe | None = None) -> list[Call]:
    """The same in float8 as `ops.float8_linear` computes it, by its default recipe or another, to bf16: of operands
    that are cast already, in the layouts that these products take; without the gradient of the weight, which is frozen
    then, by row."""
    rows, size, width = shape
    recipe = recipe or ops.Float8Recipe()
    to_input, to_weight = ("input" in gradients), ("weight" in gradients)
    x8 = ops.float8_cast(random(rows, width), recipe.dtype, columns=to_weight, by_row=not to_weight)
    w8 = ops.float8_cast(random(size, width) * width**-0.5, recipe.dtype, columns=to_input)
    calls = [_product(x8, x8.rows, w8, w8.rows, recipe.forward_fast)]
    if gradients:
        options: dict[str, bool] = {"rows": to_input, "columns": to_weight, "by_row": not to_weight}
        dy8 = ops.float8_cast(random(rows, size), recipe.gradient_dtype, **options)
    for name in gradients:
        pair = (dy8.rows, w8, w8.columns) if name == "input" else (dy8.columns, x8, x8.columns)
        calls.append(_product(dy8, *pair, recipe.backward_fast))
    return calls


def _product(of_a: ops.Float8Tensor, a: Tensor | None, of_b: ops.Float8Tensor, b: Tensor | None, fast: bool) -> Call:
    assert a is not None and b is not None
    return partial(ops.float8_mm, a, b, of_a.scale, of_b.scale, torch.bfloat16, fast_accumulation=fast)


class Products(NamedTuple):
    """In which precision projections are computed: `calls` makes their GEMMs. `layout` is None where operands are bf16,
    of which every product reads the same one; else the bytes of an element in a layout that serves one product."""

    calls: Callable[[Shape, Sequence[str]], list[Call]]
    layout: int | None = None

    def operand(self, products: int) -> int:
        """Bytes that are written of an element of what so many products take, and nothing else."""
        return 2 if self.layout is None else products * self.layout

    def beside(self, products: int) -> int:
        """Bytes that are written for them of an element that is written in bf16 anyway."""
        return 0 if self.layout is None else products * self.layout


IN_BF16 = Products(gemms)
IN_FLOAT8 = Products(float8_gemms, layout=1)
"""Hopper multiplies float8 with the dimension that is summed over last: an operand of two products needs two layouts.
"""
