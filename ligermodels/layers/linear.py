"""The linear layer of all models: `torch.nn.Linear` with optional parts.

`compute` says how the weight is kept and multiplied (None: the parameter `weight`, in its dtype), `update` what is
added (LoRA), `split` how the layer is divided over tensor-parallel ranks. Parts are assigned and removed at any time;
no class changes. FUSED lists the pairs of parts that have one op together. Every other pair is computed part after
part, so that a new part works with all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.errors import InputError, short
from ligermodels.layers.activation import GatedActivation
from ligermodels.layers.float8 import Float8, float8_lora, float8_lora_form
from ligermodels.layers.linear_parts import UNSHARDED, Compute, ComputePart, Shard, Update, UpdatePart
from ligermodels.layers.lora import LoRA, lora
from ligermodels.layers.tensor_shard import TensorShard
from ligermodels.ops import Float8Form, GLUOptions

AnyCompute = TypeVar("AnyCompute", bound=ComputePart)
AnyUpdate = TypeVar("AnyUpdate", bound=UpdatePart)


class Composed(nn.Module, Generic[AnyCompute, AnyUpdate]):
    """A layer with the optional parts `compute` and `update`, which are assigned and removed (None) at any time.

    A part gets the training mode of the layer. A `compute` that holds the weights replaces the parameters; `make_dense`
    brings them back.
    """

    part_classes: ClassVar[Mapping[str, type[nn.Module]]]
    """The class of `compute` and the class of `update`."""
    weight_keys: ClassVar[Mapping[str, tuple[str, ...]]]
    """Names of the parameters that a `compute` may hold -> the arguments by which the methods `dense`, `fill` and
    `add_to` of parts are told which parameter is meant: none if there is one."""

    @property
    def compute(self) -> AnyCompute | None:
        """How the weights are kept and multiplied; None: as parameters, in their dtype."""
        return cast("AnyCompute | None", self._modules.get("compute"))

    @property
    def update(self) -> AnyUpdate | None:
        """What is added to the products; None for nothing."""
        return cast("AnyUpdate | None", self._modules.get("update"))

    def __setattr__(self, name: str, value: Any) -> None:
        # Not by setters of the properties: nn.Module assigns modules without them.
        if name not in self.part_classes:
            return super().__setattr__(name, value)
        if value is not None and not isinstance(value, self.part_classes[name]):
            raise InputError(f"{name}: must be None or of class {self.part_classes[name].__name__}, got {short(value)}")
        self.check_part(name, value)
        if value is None:
            self._modules.pop(name, None)
            return None
        super().__setattr__(name, value.train(self.training))
        if name == "compute" and value.holds_weight:
            for weight in self.weight_keys:
                setattr(self, weight, None)
        return None

    def check_part(self, name: str, part: Any) -> None:
        """Raise InputError for a part that this layer cannot have.

        Args:
            name: "compute" or "update".
            part: the new part, of the class in `part_classes`, or None.
        """
        if name == "compute" and not (part is not None and part.holds_weight):
            missing = " and ".join(weight for weight in self.weight_keys if getattr(self, weight) is None)
            if missing:
                raise InputError(f"compute: holds {missing}, which would be lost; call make_dense(dtype) first")

    def check_own_weights(self, name: str) -> None:
        """Raise InputError, with the layer's `name`, if a weight is computed from other parameters: it is computed
        anew in each pass, and a change of it would be lost."""
        for weight in self.weight_keys:
            if not isinstance(getattr(self, weight), nn.Parameter | None):
                raise InputError(
                    f"{name}.{weight}: is no parameter, but computed from others (pruned or parametrised); make it one "
                    "first, by torch.nn.utils.prune.remove or torch.nn.utils.parametrize.remove_parametrizations"
                )

    def store(self, compute: AnyCompute | None) -> None:
        """Set `compute`: the same as an assignment."""
        self.compute = compute  # type: ignore[misc]

    @property
    def _holder(self) -> Any:
        """`compute` if it holds the weights, else None."""
        return self.compute if self.compute is not None and self.compute.holds_weight else None

    @torch.no_grad()
    def make_dense(self, dtype: torch.dtype) -> None:
        """Keep the weights as frozen parameters of `dtype` again, and remove a `compute` that holds them."""
        holder = self._holder
        if holder is not None:
            for name, key in self.weight_keys.items():
                setattr(self, name, nn.Parameter(holder.dense(*key, dtype), requires_grad=False))
            self.store(None)

    @torch.no_grad()
    def merge_update(self, dense: torch.dtype | None = None) -> None:
        """Add the update to the weights, rounded once, and remove the update.

        Args:
            dense: keep weights that `compute` holds as frozen parameters of this dtype. Default: None, their codes are
                rounded anew.
        """
        holder, update = self._holder, cast(Any, self.update)
        if update is None:
            return
        for name, key in self.weight_keys.items():
            if holder is None:
                weight = getattr(self, name).detach()
            elif dense is None and name not in update.projections:
                continue
            else:
                weight = holder.dense(*key, torch.float32)
            if name in update.projections:
                update.add_to(*key, weight)
            if holder is not None and dense is None:
                holder.fill(*key, weight)
            elif holder is not None:
                setattr(self, name, nn.Parameter(weight.to(dense), requires_grad=False))
        if holder is not None and dense is not None:
            self.store(None)
        self.update = None  # type: ignore[misc]


class FusedPair(NamedTuple):
    """How a compute and an update are computed by one op.

    product: (compute, update, x, weight, bias, shard) -> their sum, or None where this op does not apply.
    input_form: (compute, update, weight) -> the form of x as a `Float8Tensor`, or None.
    """

    product: Callable[..., Tensor | None]
    input_form: Callable[..., Float8Form | None] = lambda *_: None


FUSED: Mapping[tuple[type, type], FusedPair] = {
    (type(None), LoRA): FusedPair(lora),
    (Float8, LoRA): FusedPair(float8_lora, float8_lora_form),
}


class Linear(Composed[Compute, Update], nn.Linear):
    """y = x W^T + bias + update(x), then perhaps an activation.

    Where `compute` holds the weight itself, the parameter `weight` is None.

    Examples:
        >>> layer = Linear(32, 64)
        >>> layer.store(QuantizedCompute.of(layer.weight, "int4"))   # frozen, 4 bits
        >>> layer.update = LoRA(layer, [part])                # trained
    """

    part_classes: ClassVar[Mapping[str, type[nn.Module]]] = {"compute": Compute, "update": Update}
    weight_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": ()}
    split: TensorShard | None = None

    def forward(
        self, input: Tensor, *, activation: Callable[..., Tensor] | None = None, form: Float8Form | None = None
    ) -> Tensor:
        """The layer and the activation after it. Hooks see the result of the whole call.

        Args:
            input: (..., in_features), or a `Float8Tensor` in the `input_form` of this layer.
            activation: called with the result; a `GatedActivation` is passed to the op of the product, which may
                compute it in its kernel, unless there is an update, a `split` or a `form`.
            form: the activation writes a `Float8Tensor` in this form, for the layer after it.

        Returns (..., out_features) of the dtype of `input`, or the result of the activation.
        """
        gated = None if activation is None or form is not None else options_of(activation)
        if self.split is None and (activation is None or gated is not None):
            if not self._modules:  # neither compute nor update
                return ops.linear(input, self.weight, self.bias, activation=gated)
            if self.update is None:
                return self._product(input, self.weight, self.bias, UNSHARDED, activation=gated)
        if self.split is None:
            y = self.local_sum(input, self.weight, self.bias, UNSHARDED)
        else:
            y = self.split.call(self, input)
        return activate(y, activation, form)

    def local_sum(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, shard: Shard) -> Tensor:
        """Product and update of this rank's `shard`; weight and bias are this rank's. `TensorShard.call` calls it.

        Args:
            x: (..., in_features), this rank's.
            weight: (out_features, in_features), or None if `compute` holds it.
            bias: (out_features,) or None.
            shard: this rank's shard of the layer.
        """
        if self.update is None:
            return self._product(x, weight, bias, shard)
        fused = FUSED.get((type(self.compute), type(self.update)))
        y = None if fused is None else fused.product(self.compute, self.update, x, weight, bias, shard)
        return self._product(x, weight, bias, shard) + self.update(x, shard) if y is None else y

    def _product(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, shard: Shard, activation: GLUOptions | None = None
    ) -> Tensor:
        if self.compute is not None:
            return cast(Tensor, self.compute(x, weight, bias, shard, activation=activation))
        return ops.linear(x, cast(Tensor, weight), bias, activation=activation)

    def input_form(self) -> Float8Form | None:
        """The form in which the layer takes its input as a `Float8Tensor` now; None if it takes numbers."""
        if self.compute is None:
            return None
        if self.update is None:
            return self.compute.input_form(self.weight)
        fused = FUSED.get((type(self.compute), type(self.update)))
        return None if fused is None else fused.input_form(self.compute, self.update, self.weight)

    def init_weights(self, std: float) -> None:
        """Weight normal(0, std) and bias zero. A weight that `compute` holds is drawn by `compute.init_weights`."""
        if self.weight is not None:
            nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def call_linear(
    linear: nn.Module, x: Tensor, *, activation: Callable[..., Tensor] | None = None, form: Float8Form | None = None
) -> Tensor:
    """`linear(x)` and the activation after it, for a `Linear` or for any module that a user has put in its place.

    Args:
        linear: maps (..., in_features) to (..., out_features).
        x: (..., in_features).
        activation, form: see `Linear.forward`; called with the result of another module.
    """
    if isinstance(linear, Linear):
        return cast(Tensor, linear(x, activation=activation, form=form))
    return activate(linear(x), activation, form)


def input_form(linear: nn.Module) -> Float8Form | None:
    """`Linear.input_form`; None for any module that a user has put in the place of a `Linear`."""
    return linear.input_form() if isinstance(linear, Linear) else None


def activate(y: Tensor, activation: Callable[..., Tensor] | None, form: Float8Form | None) -> Tensor:
    """`activation(y)`, as a `Float8Tensor` where there is a `form` and it can write one; y without an activation."""
    if activation is None:
        return y
    if form is None or options_of(activation) is None:
        return activation(y)
    return activation(y, form=form)


def options_of(activation: Callable[..., Tensor] | None) -> GLUOptions | None:
    """The options of a `GatedActivation`, with which an op computes it in its own kernel; None for any other function,
    and for a subclass, whose call may do something else."""
    return activation.options if type(activation) is GatedActivation else None
