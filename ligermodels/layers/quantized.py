"""A linear layer whose weight is frozen and kept in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.layers.initialization import skip_init
from ligermodels.ops import Quantized

AT_A_TIME = 2**24
"""Elements of a weight that are compared, or dequantised, at a time."""

Layer = TypeVar("Layer", bound=nn.Module)


class QuantizedLinear(nn.Module):
    """weight x + bias, the weight quantised: see `ops.quantize_weight`.

    Buffers `codes` and `scales` are the weight; they are no parameters, are not trained, and keep their dtypes where
    the module is cast. Gradients of x and of the bias are those of a linear layer of the dequantised weight.
    """

    unexportable: ClassVar[str] = (
        "the model has quantised weights, which neither checkpoints nor models of transformers have: do this before it "
        "is quantised; or with the rounded weights, after lm.dequantize(model)"
    )

    codes: Tensor
    scales: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kind: Quantized,
        bias: nn.Parameter | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Not filled: see `fill`. `bias` (out_features,)."""
        super().__init__()
        self.in_features, self.out_features, self.kind = in_features, out_features, kind
        self.register_parameter("bias", bias)
        codes, scales = ops.empty_quantized(kind, out_features, in_features, device or torch.device("cpu"))
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    @classmethod
    def of(cls, linear: nn.Linear, kind: Quantized) -> QuantizedLinear:
        """What takes the place of `linear`, with its bias; on the meta device not filled. InputError for a weight that
        has values that are not finite."""
        found = cls(linear.in_features, linear.out_features, kind, linear.bias, linear.weight.device)
        found.fill(linear.weight)
        return found.train(linear.training)

    def fill(self, weight: Tensor) -> None:
        """Have the weight (out_features, in_features), rounded. InputError if it has values that are not finite."""
        codes, scales = ops.quantize_weight(weight, self.kind)
        if not codes.is_meta:
            self.codes.copy_(codes)
            self.scales.copy_(scales)

    def is_of(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether it is what `weight`, on any device and first cast to `dtype`, is rounded to."""
        if weight.shape != (self.out_features, self.in_features):
            return False
        for rows in self._rows():
            part = weight[rows].to(self.codes.device, dtype)
            if not part.isfinite().all():
                return False
            codes, scales = ops.quantize_weight(part, self.kind)
            if not torch.equal(codes.view(torch.uint8), self.codes[rows].view(torch.uint8)):
                return False
            if not torch.equal(scales, self.scales[rows]):
                return False
        return True

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """The rounded weight (out_features, in_features) in `dtype`; a part of it at a time is float32."""
        weight = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.codes.device)
        for rows in self._rows():
            weight[rows] = ops.dequantize_weight(self.codes[rows], self.scales[rows], self.in_features, dtype)
        return weight

    def _rows(self) -> Iterator[slice]:
        count = max(1, AT_A_TIME // self.in_features)
        return (slice(first, first + count) for first in range(0, self.out_features, count))

    def dequantized(self, dtype: torch.dtype) -> nn.Module:
        """A linear layer of the rounded weight, in `dtype`, frozen, and of the bias."""
        with torch.device("meta"), skip_init():
            linear = nn.Linear(self.in_features, self.out_features, bias=False)
        return self._give(linear, dtype)

    def _give(self, layer: Layer, dtype: torch.dtype) -> Layer:
        """`layer` with the rounded weight, frozen, and the bias of this one."""
        layer.weight = nn.Parameter(self.rounded(dtype), requires_grad=False)
        layer.bias = self.bias  # type: ignore[assignment]  # None as well
        return layer.train(self.training)

    def init_weights(self, std: float) -> None:
        """The weight normal(0, std), rounded, and the bias zero."""
        weight = torch.empty(self.out_features, self.in_features, device=self.codes.device)
        self.fill(nn.init.normal_(weight, std=std))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {self.kind}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        own = {id(self.codes), id(self.scales)}

        def moved(tensor: Tensor) -> Tensor:
            if id(tensor) not in own:
                return fn(tensor)
            # What fn makes of no elements tells the dtype and device: a cast of the codes would be a copy in vain.
            new = fn(tensor if tensor.is_meta else tensor.new_empty(0))
            if not tensor.is_meta and new.dtype == tensor.dtype:
                new = fn(tensor)
            if new.dtype == tensor.dtype:
                return new
            return torch.empty_like(new, dtype=tensor.dtype) if tensor.is_meta else tensor.to(new.device)

        return super()._apply(moved, recurse)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out), in the dtype of x. InputError for another shape."""
        if x.ndim == 0 or x.shape[-1] != self.in_features:  # several sizes have the same number of groups
            raise InputError(f"x must be floating, of shape (..., {self.in_features}); got {tuple(x.shape)}")
        return ops.quantized_linear(x, self.codes, self.scales, self.bias)


def is_quantized(module: nn.Module) -> bool:
    """Whether there is a quantised layer in it."""
    return any(isinstance(each, QuantizedLinear) for each in module.modules())


def check_unquantized(module: nn.Module, what: str, advice: str) -> None:
    """InputError if there is a quantised layer in the module, which is not for `what`."""
    for name, each in module.named_modules():
        if isinstance(each, QuantizedLinear):
            raise InputError(f"{what}: {name or 'the module'} has a weight quantised to {each.kind}; {advice}")
