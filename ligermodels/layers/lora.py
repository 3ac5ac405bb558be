"""LoRA (Hu et al., 2021, https://arxiv.org/abs/2106.09685): the low-rank update of a linear layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.convert.mappings import TensorView, WeightMapping, concat, rename
from ligermodels.layers.linear_parts import UNSHARDED, Shard, Update

MOST_RANKS = 65536
"""Highest rank: no layer of a language model has a larger side that ranks could make use of."""


@dataclass(frozen=True)
class LoRAPart:
    """A linear layer of the checkpoint, which is a native layer or a part of one (q, k or v of a fused weight).

    Args:
        name: of the module in transformers, such as "model.layers.0.self_attn.q_proj".
        views: its rows in the native weight, from first to last; see `TensorView`.
        r: rank of the update.
        lora_alpha: numerator of the scaling.
        use_rslora: scale by lora_alpha / sqrt(r) (Kalajdzievski, 2023, https://arxiv.org/abs/2312.03732) in place of
            lora_alpha / r.
    """

    name: str
    views: tuple[TensorView, ...]
    r: int
    lora_alpha: float
    use_rslora: bool = False

    @property
    def scaling(self) -> float:
        """The factor of B A."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def scatter(self, native: Tensor, rows: Tensor) -> None:
        """Add rows in the checkpoint's order to the rows of a native tensor, in place.

        Args:
            native: (out_features of the native layer, ...).
            rows: (out_features of this part, ...), the other dimensions as in `native`.
        """
        for view in self.views:
            target = view.view(native)
            count = target.numel() // math.prod(native.shape[1:])
            target.add_(rows[view.start : view.start + count].view(target.shape))

    def gather(self, native: Tensor) -> Tensor:
        """The rows of a native tensor (out_features of the native layer, ...) in the checkpoint's order."""
        parts = (view.view(native).reshape(-1, *native.shape[1:]) for view in self.views)
        return torch.cat(list(parts))


class LoRA(Update):
    """scaling * B A dropout(x), for one or several parts of the rows of a weight.

    Each part has an A (r, in) and a B (out, r) of its own, as a layer of the checkpoint has them. All A are one
    parameter, `lora_A` (sum of r, in), and one GEMM. `lora_B_<part>` has its rows in the checkpoint's order; forward
    puts them into the native order, in a matrix (native out, sum of r) that is zero off the blocks of the parts. The
    parts share a dropout mask. A and B compute in the dtype of x.

    Args:
        linear: the layer to update; sizes and device are taken from it.
        parts: the updated parts of the layer.
        dropout: probability that an element of x is dropped: see `UpdatePart.drops`.
        dtype: of A and B, by default the dtype of the weight, or `default_dtype` where the weight is kept as codes.
        default_dtype: see `dtype`.
    """

    unexportable: ClassVar[str | None] = (
        "the model has LoRA, which is no part of a checkpoint: save it by lm.save_adapter(model, folder), or add "
        "it to the weights by lm.merge_lora(model) first"
    )

    def __init__(
        self,
        linear: nn.Linear,
        parts: Sequence[LoRAPart],
        *,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
        default_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.parts, self.dropout = tuple(parts), dropout
        weight = cast("Tensor | None", linear.weight)
        device = next(linear.parameters()).device
        dtype = dtype or (default_dtype if weight is None else weight.dtype)
        order = torch.arange(self.out_features, device="cpu")
        sizes = [sum(view.view(order).numel() for view in part.views) for part in self.parts]
        only = self.parts[0].views
        # Where a weight is one layer of the checkpoint, in its order, B is used as it is.
        self._whole = len(parts) == len(only) == 1 and torch.equal(only[0].view(order), order)
        self._names = [f"lora_B_{name}" for name in _short([part.name for part in self.parts])]
        options: Any = {"dtype": dtype, "device": device}
        self.lora_A = nn.Parameter(torch.empty(sum(part.r for part in self.parts), self.in_features, **options))
        for name, part, size in zip(self._names, self.parts, sizes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(size, part.r, **options)))
        self.init_weights()
        self.train(linear.training)

    @torch.no_grad()
    def init_weights(self, std: float = 0.0) -> None:
        """A kaiming_uniform(a=sqrt(5)), B zero, as in PEFT."""
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        for name in self._names:
            nn.init.zeros_(self.get_parameter(name))

    def lora_parameters(self) -> dict[str, nn.Parameter]:
        """A, and B of each part, by name."""
        return {name: self.get_parameter(name) for name in ("lora_A", *self._names)}

    def matrix_rows(self, name: str) -> list[int]:
        """Rows of each matrix in the parameter of this name: A has those of all parts, one below the other."""
        return [part.r for part in self.parts] if name == "lora_A" else [self.get_parameter(name).shape[0]]

    @property
    def rank(self) -> int:
        """The sum of the ranks of all parts."""
        return self.lora_A.shape[0]

    def extra_repr(self) -> str:
        parts = ", ".join(f"{part.name.rpartition('.')[2]} (r={part.r})" for part in self.parts)
        return f"{parts}, dropout={self.dropout}"

    def operands(self, x: Tensor, shard: Shard = UNSHARDED) -> dict[str, Any]:
        """What the ops take: a (r, in) and b (out, r) of a rank's `shard` in the dtype of x, scaling and dropped x."""
        a, b = shard.inputs(self.lora_A), shard.outputs(self._native_b(shard))
        dropped = shard.dropout(x, self.dropout) if self.drops else None
        return {"a": a.to(x.dtype), "b": b.to(x.dtype), "scaling": self.parts[0].scaling, "dropped": dropped}

    def forward(self, x: Tensor, shard: Shard = UNSHARDED) -> Tensor:
        """x (..., in) -> scaling * B A dropout(x), (..., out), in the dtype of x."""
        given = self.operands(x, shard)
        down = ops.dense_linear(x if given["dropped"] is None else given["dropped"], given["a"])
        y = ops.dense_linear(down, given["b"])
        return y * given["scaling"]

    def _native_b(self, shard: Shard) -> Tensor:
        """B of all parts, (native out, sum of r), zero off the blocks; relative to the first part's scaling."""
        if self._whole:
            return cast(Tensor, getattr(self, self._names[0]))
        b = [shard.local(getattr(self, name)) for name in self._names]
        native = b[0].new_zeros(self.out_features, self.rank)
        start = 0
        for part, rows in zip(self.parts, b, strict=True):
            ratio = part.scaling / self.parts[0].scaling
            part.scatter(native[:, start : start + part.r], rows if ratio == 1 else rows * ratio)
            start += part.r
        return native

    @torch.no_grad()
    def add_to(self, weight: Tensor) -> None:
        """Add scaling * B A to `weight` (out, in) in place: computed in float32 or wider, and rounded once."""
        a = self.lora_A.split([part.r for part in self.parts])
        wide = torch.promote_types(self.lora_A.dtype, torch.float32)
        for part, name, down in zip(self.parts, self._names, a, strict=True):
            part.scatter(weight, (self.get_parameter(name).to(wide) @ down.to(wide)) * part.scaling)

    def weight_mappings(self, native: str) -> list[WeightMapping]:
        """Where PEFT's files have the parameters of the update that the model calls `native`."""
        stored = [f"base_model.model.{part.name}.lora_" for part in self.parts]
        sizes = [part.r for part in self.parts]
        mappings = [concat(f"{native}.lora_A", [f"{name}A.weight" for name in stored], sizes)]
        pairs = zip(self._names, stored, strict=True)
        return mappings + [rename(f"{native}.{name}", f"{source}B.weight") for name, source in pairs]


def lora(compute: None, update: LoRA, x: Tensor, weight: Tensor, bias: Tensor | None, shard: Shard) -> Tensor:
    """`ops.lora_linear`: product and LoRA of a weight that is kept as numbers, in one op.

    Args:
        compute: None: this is of weights without a part.
        update: the LoRA.
        x: (..., in_features).
        weight: (out_features, in_features), this rank's.
        bias: (out_features,), this rank's, or None.
        shard: this rank's shard of the layer.
    """
    return ops.lora_linear(x, weight, bias=bias, **update.operands(x, shard))


def _short(names: Sequence[str]) -> list[str]:
    """The last component of each dotted name; where two are the same, all components."""
    last = [name.rpartition(".")[2] for name in names]
    twice = max(Counter(last).values()) > 1
    return [name.replace(".", "_") for name in names] if twice else last
