"""Linear layers that compute in float8, and which modules of a block write float8 for them.

A class of modules says by `float8_linears` which of its linear layers can, and what computes the input of each: None,
then the layer casts it; the name of a module beside it; or INPUT, the module's own input, which nothing else reads. So
norms and activations that feed nothing but such a layer write float8 themselves: they have its recipe as
`float8_output`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.ops import Float8Recipe, Float8Tensor

INPUT = "input"


def in_float8(module: nn.Module) -> bool:
    """Whether a module with a recipe computes in float8 now: in training mode, or where gradients are recorded. So an
    evaluation in eval mode, and generation, are those of the weights as they are stored."""
    return module.training or torch.is_grad_enabled()


class FrozenWeight:
    """The float8 form of a weight that needs no gradient, made once, in the layouts that were asked for."""

    def __init__(self) -> None:
        self._of: tuple[Any, ...] = ()
        self._cast: Float8Tensor | None = None

    def get(self, weight: Tensor, recipe: Float8Recipe, columns: bool) -> Float8Tensor | None:
        """None for a weight that is trained, or in a group of processes, which may shard it."""
        if weight.requires_grad or (dist.is_available() and dist.is_initialized()):
            self._of, self._cast = (), None
            return None
        of = (weight.data_ptr(), weight._version, weight.device, recipe)
        with torch.no_grad():
            known = weight.detach() if self._cast is None or of != self._of else self._cast
            self._cast = ops.float8_cast(known, recipe.dtype, columns=columns)
        self._of = of
        return self._cast

    def __deepcopy__(self, memo: Any) -> FrozenWeight:
        return FrozenWeight()

    def __reduce__(self) -> Any:
        return FrozenWeight, ()


class Float8Linear(nn.Linear):
    """weight x + bias in float8, forward and backward: see `ops.float8_linear`. In eval mode without gradients it is
    the linear layer whose weight and bias it has, and whose place it takes."""

    stored_as: ClassVar[type[nn.Module]] = nn.Linear
    """What it is in a checkpoint."""

    def __init__(self, linear: nn.Linear, recipe: Float8Recipe) -> None:
        nn.Module.__init__(self)  # nn.Linear's own makes a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.recipe, self._frozen = recipe, FrozenWeight()
        self.train(linear.training)

    def init_weights(self, std: float) -> None:
        """The weight normal(0, std) and the bias zero."""
        nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, float8"

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out), in the dtype of x."""
        if not in_float8(self):
            return F.linear(x, self.weight, self.bias)
        frozen = self._frozen.get(self.weight, self.recipe, x.requires_grad)
        return ops.float8_linear(x, self.weight, self.bias, recipe=self.recipe, frozen=frozen)


class Slot(NamedTuple):
    """A linear layer by its name in a block, and the module that alone computes its input and can write float8."""

    name: str
    linear: nn.Module
    producer: nn.Module | None


def slots(block: nn.Module) -> Iterator[Slot]:
    """The linear layers of a block that can compute in float8. A module that computes something for them is named only
    if it has a `float8_output`."""
    norms = {name.removesuffix("_norm"): norm for name, norm in block.named_children() if name.endswith("_norm")}
    for name, module in block.named_modules():
        rules: Mapping[str, str | None] = getattr(module, "float8_linears", {})
        for part, source in rules.items():
            linear = getattr(module, part, None)
            producer = norms.get(name) if source == INPUT else getattr(module, source or "", None)
            if isinstance(linear, nn.Module):
                yield Slot(f"{name}.{part}", linear, producer if hasattr(producer, "float8_output") else None)
