"""Linear layers that compute in float8, and how they and what computes their inputs agree on float8.

A class of modules says by `float8_linears` which of its linear layers can compute in float8: INPUT for one that takes
the module's own input, else None. A block asks its layers by `float8_input` in what form they want their inputs, and
tells its norms; what can write float8 marks its forward by `writes_float8`. Any other linear layer in float8 casts its
input itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ligermodels import ops
from ligermodels.layers import token_parts
from ligermodels.ops import Float8Form, Float8Recipe, Float8Tensor, PendingLinear

INPUT = "input"
planned_processes: ContextVar[bool | None] = ContextVar("planned_processes", default=None)
"""Whether a step that is only planned runs in several processes; None where nothing is planned."""


def in_float8(module: nn.Module) -> bool:
    """Whether a module with a recipe computes in float8 now: in training mode, or where gradients are recorded. So an
    evaluation in eval mode, and generation, are those of the weights as they are stored."""
    return module.training or torch.is_grad_enabled()


class FrozenWeight:
    """The float8 form of a weight that needs no gradient, made once, row-major alone: backward passes transpose it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget it: the weight's module is moved or cast."""
        self._of: tuple[Any, ...] = ()
        self._weight: Callable[[], Tensor | None] = lambda: None
        self._cast: Float8Tensor | None = None

    @torch.compiler.disable
    def get(self, weight: Tensor, recipe: Float8Recipe, tail: int = 0) -> Float8Tensor | None:
        """Its rows, with a tail. None for a weight that is trained, that was made in inference mode, or in a group of
        processes, which may shard it."""
        several = planned_processes.get()
        if several is None:
            several = dist.is_available() and dist.is_initialized()
        if several or weight.requires_grad or weight.is_inference():
            self.clear()
            return None
        of = (weight.data_ptr(), weight._version, weight.device, recipe, tail)
        if self._cast is None or of != self._of or self._weight() is not weight:
            # Another tensor may have come to be where the weight was.
            self._of, self._weight = of, weakref.ref(weight)
            # Apart from activation checkpointing: what is computed again will find this, and cast nothing. On the meta
            # device, where memory is planned, all is to be seen.
            apart = nullcontext() if weight.is_meta else _disable_current_modes()
            with torch.inference_mode(False), apart:  # or training after inference could not use this
                self._cast = ops.float8_cast(weight, recipe.dtype, tail=tail)
        return self._cast

    def __deepcopy__(self, memo: Any) -> FrozenWeight:
        return FrozenWeight()

    def __reduce__(self) -> Any:
        return FrozenWeight, ()


class Float8Linear(nn.Linear):
    """weight x + bias in float8, forward and backward: see `ops.float8_linear`. In eval mode without gradients it is
    the linear layer whose weight and bias it has, and whose place it takes.

    Under tensor parallelism each rank has scales of its own, of its part of the weight and of what it multiplies with
    it: scales are powers of two, so that but for numbers near zero they change no rounding."""

    stored_as: ClassVar[type[nn.Module]] = nn.Linear
    """What it is in a checkpoint."""

    def __init__(self, linear: nn.Linear, recipe: Float8Recipe) -> None:
        nn.Module.__init__(self)  # nn.Linear's own makes a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.float8, self._frozen = recipe, FrozenWeight()
        self.train(linear.training)

    @property
    def float8_input(self) -> Float8Form | None:
        """The form in which it takes its input as a Float8Tensor now, or None where it computes without float8."""
        return self.float8.form(self.weight) if in_float8(self) else None

    def init_weights(self, std: float) -> None:
        """The weight normal(0, std) and the bias zero."""
        nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, float8"

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out), in the dtype of x."""
        return self.product(x, self.weight, self.bias)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """weight x + bias, by parameters that are given: those of the layer, or the parts of them that a rank of tensor
        parallelism has.

        Args:
            x: (..., in), a tensor, or a Float8Tensor that its producer has cast.
            weight: (out, in), of any floating dtype; in float8 `out` and `in`, which may be of a rank's part, must be
                multiples of 16 (InputError).
            bias: (out,) or None.

        Returns (..., out) in the dtype of x.
        """
        if not in_float8(self):
            return F.linear(x, weight, bias)
        frozen = self._frozen.get(weight, self.float8)
        return ops.float8_linear(x, weight, bias, recipe=self.float8, frozen=frozen)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._frozen.clear()
        return super()._apply(fn, recurse)


def slots(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linear layers of a block that can compute in float8, by name."""
    for name, module in block.named_modules():
        for part in _rules(module):
            if isinstance(linear := getattr(module, part, None), nn.Module):
                yield f"{name}.{part}", linear


def float8_input(module: nn.Module) -> Float8Form | None:
    """The form in which `module` wants its input as a Float8Tensor now: that of its linear layers that take the input,
    if all of them do so in float8 and in the same form. Else None, and each casts for itself; so it does what it
    gathers of parts of the tokens."""
    # What takes the input need not be a module.
    may_be_float8 = torch.is_grad_enabled() or getattr(module, "training", True)
    if token_parts.current() is not None or not may_be_float8:
        return None
    taking = [getattr(module, part, None) for part, source in _rules(module).items() if source == INPUT]
    forms = {own_float8_input(linear) for linear in taking if linear is not None}
    return forms.pop() if len(forms) == 1 else None


def own_float8_input(linear: nn.Module) -> Float8Form | None:
    """The form in which a linear layer itself wants its input as a Float8Tensor now."""
    if not hasattr(type(linear), "float8_input"):  # a module that lacks an attribute takes long to say so
        return None
    return cast("Float8Form | None", linear.float8_input)


Forward = TypeVar("Forward", bound=Callable[..., Any])


def writes_float8(forward: Forward) -> Forward:
    """Mark a module's forward that takes a form `float8`, in which its result is a Float8Tensor: a class that
    overrides it is then not taken for one that can."""
    forward.writes_float8 = True  # type: ignore[attr-defined]
    return forward


def produce(producer: nn.Module, form: Float8Form | None, *inputs: Tensor | PendingLinear | None) -> Any:
    """`producer(*inputs)`, which writes float8 in this form, if there is one and the producer can."""
    if form is None or not getattr(producer.forward, "writes_float8", False):
        return producer(*inputs)
    return producer(*inputs, float8=form)


def _rules(module: nn.Module) -> Mapping[str, str | None]:
    found: Mapping[str, str | None] = getattr(module, "float8_linears", {})
    return found
