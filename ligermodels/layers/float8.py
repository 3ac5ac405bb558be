"""Linear layers that compute in float8, and how a layer and the producer of its input agree on float8.

A class of modules says by `float8_linears` which of its linear layers can compute in float8: INPUT for a layer that
takes the module's own input, else None. `adapt.float8` marks blocks and layers as `in_float8`: such a block asks its
layers by `Layer.input_form` for the form of their input, and passes it to its norms; a norm that can write float8 marks
its forward by `writes_float8`. Any other linear layer in float8 casts its input itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.layers.linear_parts import UNSHARDED, Compute, Shard
from ligermodels.layers.lora import LoRA
from ligermodels.layers.sharding import TensorSharding
from ligermodels.ops import Float8Form, Float8Recipe, Float8Tensor, GLUOptions

INPUT = "input"


class Float8(Compute):
    """Products in float8, forward and backward: see `ops.float8_linear`.

    It is active in training mode, and where gradients are recorded. So an evaluation in eval mode, and generation,
    compute with the weight as it is stored. Tensor-parallel ranks have scales of their own, of their part of the
    weight and of its operands: scales are powers of two, so that except near zero they change no rounding.

    Args:
        recipe: formats and scales.
    """

    def __init__(self, recipe: Float8Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self._frozen: _FrozenCast | None = None

    @property
    def active(self) -> bool:
        """Whether products are float8 now. InputError in `torch.export`, whose programs do not train."""
        active = self.training or torch.is_grad_enabled()
        if active and torch.compiler.is_exporting():
            raise InputError(
                "float8: products are float8 in training mode and where gradients are recorded, but exported programs "
                "do not train; call model.eval(), and torch.export.export under torch.no_grad()"
            )
        return active

    def extra_repr(self) -> str:
        return f"{self.recipe}"

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shard: Shard = UNSHARDED,
        *,
        activation: GLUOptions | None = None,
    ) -> Tensor:
        """See `Compute.forward` for weight, bias, shard and activation. x may be a `Float8Tensor`. In float8 both
        features of the weight, which may be a rank's part, must be multiples of 16 (InputError)."""
        weight = cast(Tensor, weight)
        if not self.active:
            return ops.linear(x, weight, bias, activation=activation)
        y = ops.float8_linear(x, weight, bias, recipe=self.recipe, frozen=self.frozen(weight))
        return ops.gated_activation(y, activation)

    def input_form(self, weight: Tensor | None) -> Float8Form | None:
        return self.recipe.form(cast(Tensor, weight)) if self.active else None

    def rules(self, split: str, out_features: int, in_features: int) -> Mapping[str, TensorSharding]:
        """No parameters; InputError unless both sizes of a rank's shard are multiples of 16.

        Args:
            split: how the layer is divided; not used.
            out_features: rows of a rank's shard.
            in_features: columns of a rank's shard.
        """
        ops.check_float8_sizes("float8", out_features, in_features)
        return {}

    @torch.compiler.disable
    def frozen(self, weight: Tensor, tail: int = 0) -> Float8Tensor | None:
        """The float8 form of a weight that needs no gradient, cast once, row-major: backward passes transpose it.

        Args:
            weight: (out_features, in_features).
            tail: further columns of memory after each row, see `ops.float8.tail`.

        Returns None for a weight that is trained, that was made in inference mode, or that a process group may shard.
        """
        keeps = self.keeps_frozen
        if keeps is None:
            keeps = not (dist.is_available() and dist.is_initialized())
        if not keeps or weight.requires_grad or weight.is_inference():
            self._frozen = None
            return None
        if self._frozen is None or not self._frozen.is_of(weight, self.recipe, tail):
            self._frozen = _FrozenCast(weight, self.recipe, tail)
        return self._frozen.cast

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._frozen = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_frozen": None}


class _FrozenCast:
    """The float8 form of a weight, and what it was cast from."""

    def __init__(self, weight: Tensor, recipe: Float8Recipe, tail: int) -> None:
        self._key = self._key_of(weight, recipe, tail)
        self._weight = weakref.ref(weight)  # another tensor may come to have the same address
        # Apart from activation checkpointing: what is computed again finds this, and casts nothing. On the meta
        # device, where memory is planned, all allocations are to be seen.
        apart = nullcontext() if weight.is_meta else _disable_current_modes()
        with torch.inference_mode(False), apart:  # or training after inference could not use this
            self.cast = ops.float8_cast(weight, recipe.dtype, tail=tail)

    @staticmethod
    def _key_of(weight: Tensor, recipe: Float8Recipe, tail: int) -> tuple[Any, ...]:
        return weight.data_ptr(), weight._version, weight.device, recipe, tail

    def is_of(self, weight: Tensor, recipe: Float8Recipe, tail: int) -> bool:
        """Whether a cast of these arguments would give the same.

        Args:
            weight: the weight.
            recipe: dtypes of float8.
            tail: number of columns of the tail.
        """
        return self._weight() is weight and self._key == self._key_of(weight, recipe, tail)


@torch.compiler.disable  # as `ops.float8_lora_linear`: one break of the graph for each layer
def float8_lora(
    compute: Float8, update: LoRA, x: Tensor, weight: Tensor, bias: Tensor | None, shard: Shard
) -> Tensor | None:
    """`ops.float8_lora_linear`: product and LoRA of a frozen weight, in one op; None where the weight is trained, or
    the layer computes without float8.

    Args:
        compute: the computation in float8.
        update: the LoRA.
        x: (..., in_features).
        weight: (out_features, in_features), this rank's.
        bias: (out_features,), this rank's, or None.
        shard: this rank's shard of the layer.
    """
    if not compute.active or weight.requires_grad or (bias is not None and bias.requires_grad):
        return None
    tail = ops.tail_of(update.rank)
    frozen = compute.frozen(weight, tail)
    if frozen is None:
        frozen = ops.float8_cast(weight, compute.recipe.dtype, tail=tail)
    return ops.float8_lora_linear(x, frozen, bias=bias, recipe=compute.recipe, **update.operands(x, shard))


def float8_lora_form(compute: Float8, update: LoRA, weight: Tensor) -> Float8Form | None:
    """The form of x for `float8_lora`; None where it is computed part after part, or x is dropped.

    Args:
        compute: the computation in float8.
        update: the LoRA.
        weight: (out_features, in_features).
    """
    if not compute.active or weight.requires_grad or update.drops:
        return None
    return compute.recipe.form(weight, tail=ops.tail_of(update.rank))


def float8_slots(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linear layers of a block that can compute in float8, by name."""
    for name, module in block.named_modules():
        for part in _rules(module):
            if isinstance(linear := getattr(module, part, None), nn.Module):
                yield f"{name}.{part}", linear


Forward = TypeVar("Forward", bound=Callable[..., Any])


def writes_float8(forward: Forward) -> Forward:
    """Mark a norm's forward that takes a `form`, in which its result is a Float8Tensor: a class that overrides the
    forward is then not given one."""
    forward.writes_float8 = True  # type: ignore[attr-defined]
    return forward


def _rules(module: nn.Module) -> Mapping[str, str | None]:
    rules: Mapping[str, str | None] = getattr(module, "float8_linears", {})
    return rules
