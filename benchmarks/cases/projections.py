"""GEMMs of a linear layer, forward and for its gradients, in bf16 and in float8, on operands that are already cast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.timing.case import random
from ligermodels import ops

BOTH = ("input", "weight")
"""Gradients of a projection."""

Call = Callable[[], object]
Shape = tuple[int, int, int]


def gemms(shape: Shape, gradients: Sequence[str] = BOTH) -> list[Call]:
    """GEMMs in bf16: x (rows, width) times weight (size, width), and the gradients. `shape`: rows, size, width."""
    rows, size, width = shape
    x, weight, gradient = random(rows, width), random(size, width) * width**-0.5, random(rows, size)
    of_gradients: dict[str, Call] = {"input": lambda: gradient @ weight, "weight": lambda: gradient.t() @ x}
    return [lambda: x @ weight.t(), *(of_gradients[name] for name in gradients)]


def float8_gemms(shape: Shape, gradients: Sequence[str] = BOTH, recipe: ops.Float8Recipe | None = None) -> list[Call]:
    """GEMMs in float8 with results in bf16, as `ops.float8_linear` computes them, on operands that are already cast in
    the layouts that these products take.

    Args:
        shape: Rows, size and width: x (rows, width), weight (size, width).
        gradients: Gradients to compute. Without "weight" the weight is frozen, and x is scaled by row.
        recipe: Recipe of float8; the default recipe if None.
    """
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
    """Precision of projections.

    `calls` creates their GEMMs. `layout` is None in bf16, where all products read the same layout of an operand;
    otherwise each product reads a layout of its own, of `layout` bytes per element.
    """

    calls: Callable[[Shape, Sequence[str]], list[Call]]
    layout: int | None = None

    def operand(self, products: int) -> int:
        """Bytes written per element of an operand that only `products` products read."""
        return 2 if self.layout is None else products * self.layout

    def beside(self, products: int) -> int:
        """Bytes written per element for `products` products, beside a result in bf16 that is written anyway."""
        return 0 if self.layout is None else products * self.layout


IN_BF16 = Products(gemms)
IN_FLOAT8 = Products(float8_gemms, layout=1)
"""On Hopper the summed dimension of a float8 operand must be last: an operand of two products needs two layouts."""
