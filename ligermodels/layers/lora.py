"""LoRA (Hu et al., 2021, https://arxiv.org/abs/2106.09685): a linear layer with a trainable low-rank update."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.convert.mappings import TensorView, WeightMapping, concat, rename
from ligermodels.errors import InputError


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


class LoRALinear(nn.Module):
    """base_layer(x) + scaling * B A dropout(x), for one or several parts of the rows of the base layer.

    Each part has an A (r, in) and a B (out, r) of its own, as where the checkpoint has a layer for each. All A are one
    parameter, `lora_A` (sum of r, in), and one GEMM. `lora_B_<part>` has its rows in the checkpoint's order; forward
    puts them into the native order, in a weight (native out, sum of r) that is zero off the blocks of the parts, for a
    second GEMM that adds to the base layer's result. The parts share a dropout mask.

    The base layer is called by its forward. Parameters have `dtype` and compute in the dtype of x.
    """

    def __init__(
        self,
        base_layer: nn.Linear,
        parts: Sequence[LoRAPart],
        *,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.base_layer, self.parts, self.dropout = base_layer, tuple(parts), dropout
        self._rows, width = base_layer.weight.shape
        order = torch.arange(self._rows, device="cpu")
        sizes = [sum(view.view(order).numel() for view in part.views) for part in self.parts]
        only = self.parts[0].views
        # Where a weight is one layer of the checkpoint, in its order, B is used as it is.
        self._whole = len(parts) == len(only) == 1 and torch.equal(only[0].view(order), order)
        self._names = [f"lora_B_{name}" for name in _short([part.name for part in self.parts])]
        place: Any = {"dtype": dtype or base_layer.weight.dtype, "device": base_layer.weight.device}
        self.lora_A = nn.Parameter(torch.empty(sum(part.r for part in self.parts), width, **place))
        for name, part, size in zip(self._names, self.parts, sizes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(size, part.r, **place)))
        self.init_weights()
        self.train(base_layer.training)

    def init_weights(self, std: float = 0.0) -> None:
        """A kaiming_uniform(a=sqrt(5)), B zero, as PEFT has them: the update is zero."""
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        for name in self._names:
            nn.init.zeros_(self.get_parameter(name))

    def extra_repr(self) -> str:
        parts = ", ".join(f"{part.name.rpartition('.')[2]} (r={part.r})" for part in self.parts)
        return f"{parts}, dropout={self.dropout}"

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out of the base layer), in the base layer's dtype."""
        y: Tensor = self.base_layer(x)
        down = F.linear(F.dropout(x, self.dropout, self.training), self.lora_A.to(x.dtype)).to(y.dtype)
        up = self._native_b().to(y.dtype)
        update = torch.addmm(y.flatten(0, -2), down.flatten(0, -2), up.t(), alpha=self.parts[0].scaling)
        return update.view_as(y)

    def _native_b(self) -> Tensor:
        """B of all parts, (native out, sum of r), zero off the blocks; relative to the first part's scaling."""
        if self._whole:
            return self.get_parameter(self._names[0])
        found = self.lora_A.new_zeros(self._rows, self.lora_A.shape[0])
        start = 0
        for part, name in zip(self.parts, self._names, strict=True):
            ratio, b = part.scaling / self.parts[0].scaling, self.get_parameter(name)
            part.scatter(found[:, start : start + part.r], b if ratio == 1 else b * ratio)
            start += part.r
        return found

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The base layer, with scaling * B A added to its weight: rounded as PEFT does it."""
        a = self.lora_A.split([part.r for part in self.parts])
        for part, name, down in zip(self.parts, self._names, a, strict=True):
            up, dtype = self.get_parameter(name), self.lora_A.dtype
            wide = torch.promote_types(dtype, torch.float32) if up.device.type == "cpu" else dtype
            part.scatter(self.base_layer.weight, ((up.to(wide) @ down.to(wide)) * part.scaling).to(dtype))
        return self.base_layer

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


def check_merged(model: nn.Module) -> None:
    """InputError when a model has LoRA layers, whose weights are under other names than a checkpoint's."""
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        raise InputError(
            "the model has LoRA, which is no part of a checkpoint: save it by lm.save_adapter(model, folder), or add "
            "it to the weights by lm.merge_lora(model) first"
        )
