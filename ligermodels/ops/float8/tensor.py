"""A tensor of float8 values with a scale."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ligermodels.errors import InputError
from ligermodels.ops.runtime.tensors import count_rows

_aten = torch.ops.aten


class Float8Tensor(Tensor):
    """A tensor (..., N) stored as float8, between the layer that computes it and the linear layer that reads it.

    It has the shape and dtype of the unquantised tensor. A float8 linear layer reads the float8 values; every other
    operation gets `dequantize()`, so hooks and other modules see ordinary tensors.

    Args:
        rows: float8 (M, N + tail), row-major, M being the product of the other dimensions; None without this layout.
            The tail columns hold no values of the tensor: see `ops.float8.tail`. Kept as `wide`; the attribute `rows`
            is (M, N), without the tail.
        columns: the transpose, float8 (N, M'), M' being M rounded up to a multiple of 16, with zeros beyond M; None
            without this layout.
        scale: float32, the factor of the float8 values: shape (), or (M,) for a scale per row, without `columns`.
        shape: (..., N).
        dtype: dtype of the unquantised tensor.

    Raises:
        InputError: neither rows nor columns, or columns with a scale per row.
    """

    wide: Tensor | None
    columns: Tensor | None
    scale: Tensor

    @staticmethod
    def __new__(
        cls, rows: Tensor | None, columns: Tensor | None, scale: Tensor, shape: torch.Size, dtype: torch.dtype
    ) -> "Float8Tensor":
        if rows is None and columns is None:
            raise InputError("Float8Tensor: needs rows, columns, or both")
        if columns is not None and scale.dim():
            raise InputError("Float8Tensor: columns have one scale; a scale for each row goes with rows alone")
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=scale.device)
        self.wide, self.columns, self.scale = rows, columns, scale
        return self

    @property
    def rows(self) -> Tensor | None:
        """float8 (M, N), without the tail; None if the tensor has columns only."""
        return self.wide[:, : self.shape[-1]] if self.wide is not None and self.tail else self.wide

    @property
    def tail(self) -> int:
        """Number of tail columns."""
        return 0 if self.wide is None else self.wide.shape[1] - self.shape[-1]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        layouts = [name for name, x in (("rows", self.wide), ("columns", self.columns)) if x is not None]
        return f"Float8Tensor({tuple(self.shape)}, {self.dtype}, {' and '.join(layouts)})"

    def dequantize(self) -> Tensor:
        """float8 * scale: an ordinary tensor (..., N) in this tensor's dtype."""
        if self.rows is not None:
            q = self.rows
        else:
            assert self.columns is not None
            q = self.columns[:, : count_rows(self)].t()
        scale = self.scale.unsqueeze(1) if self.scale.dim() else self.scale
        return (q.float() * scale).to(self.dtype).reshape(self.shape)

    def __coerce_same_metadata_as_tangent__(self, expected_metadata: Any, expected_type: type | None = None) -> Any:
        """The dequantised gradient for torch.compile, if its graph was traced with plain gradients."""
        return self.dequantize() if expected_type is Tensor else None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (_aten.detach.default, _aten.alias.default):
            x = args[0]
            return cls(x.wide, x.columns, x.scale, x.shape, x.dtype)
        args, kwargs = pytree.tree_map_only(Float8Tensor, Float8Tensor.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)
