"""LoRA (Hu et al., 2021, https://arxiv.org/abs/2106.09685): a linear layer with a trainable low-rank update."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.convert.mappings import TensorView, WeightMapping, concat, rename
from ligermodels.errors import InputError
from ligermodels.layers.float8 import Float8Linear, FrozenWeight, in_float8
from ligermodels.layers.initialization import skip_init
from ligermodels.ops import Float8Form, Float8Recipe

MOST_RANKS = 65536
"""Highest rank: no layer of a language model has a larger side that ranks could make use of."""


@dataclass(frozen=True)
class LoRAPart:
    """A linear layer of the checkpoint, which is a native one or a part of it (q, k or v of a fused weight).

    Args:
        name: of the module in transformers, such as "model.layers.0.self_attn.q_proj".
        views: its rows in the native weight, from first to last; see `TensorView`.
        r: rank of the update.
        lora_alpha, use_rslora: the update is scaled by lora_alpha / r, or with `use_rslora` by lora_alpha / sqrt(r)
            (Kalajdzievski, 2023).
    """

    name: str
    views: tuple[TensorView, ...]
    r: int
    lora_alpha: float
    use_rslora: bool = False

    @property
    def scaling(self) -> float:
        """What B A is multiplied by."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def scatter(self, native: Tensor, rows: Tensor) -> None:
        """Add `rows` (out, n), in the checkpoint's order, to the rows of `native` (out of the native weight, n)."""
        for view in self.views:
            into = view.view(native)
            count = into.numel() // native.shape[1]
            into.add_(rows[view.start : view.start + count].view(into.shape))


class LoRALinear(nn.Linear):
    """weight x + bias + scaling * B A dropout(x), for one or several parts of the rows of the weight.

    Each part has an A (r, in) and a B (out, r) of its own, as where the checkpoint has a layer for each. All A are one
    parameter, `lora_A` (sum of r, in), and one GEMM. `lora_B_<part>` has its rows in the checkpoint's order; forward
    puts them into the native order, in a matrix (native out, sum of r) that is zero off the blocks of the parts. The
    parts share a dropout mask.

    `weight` and `bias` are those of `linear`, which this takes the place of. A and B have `dtype` and compute in the
    dtype of x. With a `float8` recipe, that of `linear` if it has one, and as `in_float8` has it, the weight's products
    are float8, and A and B multiply what these read: the gradient of the result and, without dropout, x, as float8.
    """

    unexportable: ClassVar[str] = (
        "the model has LoRA, which is no part of a checkpoint: save it by lm.save_adapter(model, folder), or add "
        "it to the weights by lm.merge_lora(model) first"
    )
    float8: Float8Recipe | None

    def __init__(
        self, linear: nn.Linear, parts: Sequence[LoRAPart], *, dropout: float = 0.0, dtype: torch.dtype | None = None
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own makes a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.parts, self.dropout = tuple(parts), dropout
        self.float8, self._frozen = getattr(linear, "float8", None), FrozenWeight()
        order = torch.arange(self.out_features, device="cpu")
        sizes = [sum(view.view(order).numel() for view in part.views) for part in self.parts]
        only = self.parts[0].views
        # Where a weight is one layer of the checkpoint, in its order, B is used as it is.
        self._whole = len(parts) == len(only) == 1 and torch.equal(only[0].view(order), order)
        self._names = [f"lora_B_{name}" for name in _short([part.name for part in self.parts])]
        place: Any = {"dtype": dtype or self.weight.dtype, "device": self.weight.device}
        self.lora_A = nn.Parameter(torch.empty(sum(part.r for part in self.parts), self.in_features, **place))
        for name, part, size in zip(self._names, self.parts, sizes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(size, part.r, **place)))
        self.init_update()
        self.train(linear.training)

    def init_weights(self, std: float) -> None:
        """The weight normal(0, std) and the bias zero; the update as in PEFT: A kaiming_uniform(a=sqrt(5)), B zero."""
        nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        self.init_update()

    @torch.no_grad()
    def init_update(self) -> None:
        """A kaiming_uniform(a=sqrt(5)), B zero, as in PEFT."""
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        for name in self._names:
            nn.init.zeros_(self.get_parameter(name))

    def lora_parameters(self) -> dict[str, nn.Parameter]:
        """A, and B of each part, by name: what is trained."""
        return {name: self.get_parameter(name) for name in ("lora_A", *self._names)}

    def extra_repr(self) -> str:
        parts = ", ".join(f"{part.name.rpartition('.')[2]} (r={part.r})" for part in self.parts)
        return f"{super().extra_repr()}, {parts}, dropout={self.dropout}"

    @property
    def float8_input(self) -> Float8Form | None:
        """The form in which it takes its input as a Float8Tensor now, or None: without float8, and with dropout."""
        if self.float8 is None or (self.training and self.dropout) or not in_float8(self):
            return None
        return self.float8.form(self.weight, tail=self._tail)

    @property
    def _tail(self) -> int:
        return ops.tail_of(self.lora_A.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in), or a Float8Tensor that its producer has cast -> (..., out), in the dtype of x."""
        a, *b = self.lora_parameters().values()
        return self.product(x, self.weight, self.bias, a, self.native_b(b))

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        drop: Callable[[Tensor, float], Tensor] = F.dropout,
    ) -> Tensor:
        """weight x + bias + scaling * b a dropout(x), by parameters that are given: those of the layer, or the parts of
        them that a rank of tensor parallelism has.

        Args:
            x: (..., in), a tensor, or a Float8Tensor that its producer has cast.
            weight: (out, in), of any dtype; with a `float8` recipe, in training, it must need no gradient (InputError).
            bias: (out,) or None.
            a: (R, in), the A of all parts, R the sum of their ranks; cast to the dtype of x.
            b: (out, R), their B in the native order: see `native_b`; cast to the dtype of x.
            drop: dropout of x by a probability.

        Returns (..., out) in the dtype of x. `out` and `in` may be of a rank's part.
        """
        dropped = drop(x, self.dropout) if self.training and self.dropout else None
        a, b, scaling = a.to(x.dtype), b.to(x.dtype), self.parts[0].scaling
        if self.float8 is not None and in_float8(self):
            if weight.requires_grad:
                raise InputError(
                    "LoRA in float8: the weight must need no gradient; freeze it, or exclude it from float8"
                )
            frozen = self._frozen.get(weight, self.float8, self._tail)
            if frozen is None:
                frozen = ops.float8_cast(weight, self.float8.dtype, tail=self._tail)
            return ops.float8_lora_linear(x, frozen, a, b, bias, recipe=self.float8, scaling=scaling, dropped=dropped)
        return ops.lora_linear(x, weight, a, b, bias, scaling=scaling, dropped=dropped)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._frozen.clear()
        return super()._apply(fn, recurse)

    def native_b(self, parameters: Sequence[Tensor]) -> Tensor:
        """B of all parts, (native out, sum of r), zero off the blocks; relative to the first part's scaling."""
        if self._whole:
            return parameters[0]
        found = parameters[0].new_zeros(self.out_features, sum(part.r for part in self.parts))
        start = 0
        for part, b in zip(self.parts, parameters, strict=True):
            ratio = part.scaling / self.parts[0].scaling
            part.scatter(found[:, start : start + part.r], b if ratio == 1 else b * ratio)
            start += part.r
        return found

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A linear layer of the same weight, to which scaling * B A was added: rounded as PEFT does it."""
        a = self.lora_A.split([part.r for part in self.parts])
        for part, name, down in zip(self.parts, self._names, a, strict=True):
            up, dtype = self.get_parameter(name), self.lora_A.dtype
            wide = torch.promote_types(dtype, torch.float32) if up.device.type == "cpu" else dtype
            part.scatter(self.weight, ((up.to(wide) @ down.to(wide)) * part.scaling).to(dtype))
        with torch.device("meta"), skip_init():
            linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        linear.weight, linear.bias = self.weight, self.bias
        linear.train(self.training)
        return linear if self.float8 is None else Float8Linear(linear, self.float8)

    def weight_mappings(self, native: str) -> list[WeightMapping]:
        """Where PEFT's files have the parameters of the layer that the model calls `native`."""
        there = [f"base_model.model.{part.name}.lora_" for part in self.parts]
        sizes = [part.r for part in self.parts]
        found = [concat(f"{native}.lora_A", [f"{name}A.weight" for name in there], sizes)]
        pairs = zip(self._names, there, strict=True)
        return found + [rename(f"{native}.{name}", f"{source}B.weight") for name, source in pairs]


def _short(names: Sequence[str]) -> list[str]:
    """The last component of each dotted name; where two are the same, all components."""
    last = [name.rpartition(".")[2] for name in names]
    twice = max(Counter(last).values()) > 1
    return [name.replace(".", "_") for name in names] if twice else last


def check_exportable(model: nn.Module) -> None:
    """InputError when a checkpoint has no place for the weights of one of the modules: its class says why, and what to
    do, by `unexportable`."""
    for module in model.modules():
        if (reason := getattr(module, "unexportable", None)) is not None:
            raise InputError(reason)
