"""LoRA of the experts of a mixture: low-rank updates of `gate_up` and `down`, with an A and a B for each expert."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.convert.mappings import TensorView
from ligermodels.layers.expert_parts import ExpertUpdate, Projection
from ligermodels.layers.lora import LoRA, LoRAPart
from ligermodels.layers.sharding import own_experts

ALIGNMENT = 8
"""torch's grouped product takes sizes that are multiples of this."""


@dataclass(frozen=True)
class ExpertPart(LoRAPart):
    """A part of the rows of `gate_up` or `down` that has an A and a B of its own, for each expert.

    Args:
        name: of the parameter in transformers ("model.layers.0.mlp.experts.gate_up_proj"; of experts without a gate
            "...up_proj"), or with `gate_proj` or `up_proj` in place of `gate_up_proj` for half of its rows.
        views: the part's rows in the native weight of one expert; see `TensorView`.
        r, lora_alpha, use_rslora: see `LoRAPart`.
        projection: "gate_up" or "down".
        stacked: rows of the whole parameter in transformers, in the native weight of one expert.
        layers: names of the linear layers of each expert, for checkpoints with a tensor for each expert: for each of
            gate and up, or for down, one name per expert. Empty if the family has no such checkpoints.
    """

    projection: Projection = "gate_up"
    stacked: tuple[TensorView, ...] = ()
    layers: tuple[tuple[str, ...], ...] = ()

    @property
    def leaf(self) -> str:
        """The last component of the name."""
        return self.name.rpartition(".")[2]

    @property
    def is_whole(self) -> bool:
        """Whether the part has all rows of its projection."""
        return same_rows(self.views, self.stacked)


def same_rows(views: Sequence[TensorView], stacked: Sequence[TensorView]) -> bool:
    """Whether the views of a part are the views of the whole parameter, `stacked`."""
    return [view.source for view in views] == [view.source for view in stacked]


class ExpertLoRA(ExpertUpdate):
    """scaling * B_e A_e dropout(x) for the rows x of each expert e, added to `gate_up`, to `down`, or to both.

    `lora_A_gate_up` (E, sum of r, H) and `lora_A_down` (E, r, size) have the A of all parts, which are one grouped
    product. `lora_B_<part>` (E, rows of the part, r) has its rows in the checkpoint's order. Ranks are filled up with
    zeros to a multiple of 8 in the products. A and B compute in the dtype of x. Each row of an expert has a dropout
    mask of its own.

    Args:
        gate_up, down: sizes (E, out, in) of both weights.
        parts: the updated parts.
        dropout: probability that an element of x is dropped: see `UpdatePart.drops`.
        dtype: dtype of A and B.
        device: device of A and B.
        shared_outer: all experts share A of `gate_up` and B of `down`, whose other side is the hidden size. These
            parameters have one row in place of E.
    """

    unexportable: ClassVar[str | None] = LoRA.unexportable

    def __init__(
        self,
        gate_up: Sequence[int],
        down: Sequence[int],
        parts: Sequence[ExpertPart],
        *,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shared_outer: bool = False,
    ) -> None:
        super().__init__()
        self.sizes = {"gate_up": tuple(gate_up), "down": tuple(down)}
        self.parts, self.dropout, self.shared_outer = tuple(parts), dropout, shared_outer
        self.projections = tuple(dict.fromkeys(part.projection for part in parts))
        options: Any = {"dtype": dtype, "device": device}
        for projection in self.projections:
            experts, out, width = self.sizes[projection]
            own, order = self.parts_of(projection), torch.arange(out)
            shape = (1 if shared_outer and projection == "gate_up" else experts, sum(part.r for part in own), width)
            self.register_parameter(f"lora_A_{projection}", nn.Parameter(torch.empty(shape, **options)))
            for part in own:
                rows = sum(view.view(order).numel() for view in part.views)
                shape = (1 if shared_outer and projection == "down" else experts, rows, part.r)
                self.register_parameter(f"lora_B_{part.leaf}", nn.Parameter(torch.empty(shape, **options)))
        self.init_weights()

    def parts_of(self, projection: Projection) -> list[ExpertPart]:
        """The parts of `gate_up` or `down`, in the order of their columns in A."""
        return [part for part in self.parts if part.projection == projection]

    @torch.no_grad()
    def init_weights(self, std: float = 0.0) -> None:
        """Each A kaiming_uniform(a=sqrt(5)), B zero, as PEFT's linear layers."""
        for name, parameter in self.lora_parameters().items():
            if "_A_" in name:
                bound = 1 / math.sqrt(parameter.shape[-1])
                nn.init.uniform_(parameter, -bound, bound)
            else:
                nn.init.zeros_(parameter)

    def lora_parameters(self) -> dict[str, nn.Parameter]:
        """A of both projections, and B of each part, by name."""
        return dict(self.named_parameters(recurse=False))

    def matrix_rows(self, name: str) -> list[int]:
        """Rows of each matrix in the parameter of this name; A has the matrices of all parts of its projection."""
        for projection in self.projections:
            if name == f"lora_A_{projection}":
                return [part.r for part in self.parts_of(projection)]
        return [self.get_parameter(name).shape[1]]

    def extra_repr(self) -> str:
        parts = ", ".join(f"{part.leaf} (r={part.r})" for part in self.parts)
        return f"{parts}, dropout={self.dropout}" + ", shared_outer=True" * self.shared_outer

    def forward(self, projection: Projection, rows: Tensor, offsets: Tensor) -> Tensor:
        """Rows (R, in), sorted by expert, and the ends of experts (E,) -> scaling * B A dropout(rows), (R, out).

        Args:
            projection: "gate_up" or "down".
            rows: (R, in), sorted by expert.
            offsets: int32 (E,), where the rows of each expert end.
        """
        a, b = self._native(projection)
        filling = -a.shape[1] % ALIGNMENT
        a, b = F.pad(a, (0, 0, 0, filling)).to(rows.dtype), F.pad(b, (0, filling)).to(rows.dtype)
        dropped = F.dropout(rows, self.dropout) if self.drops else rows
        scaling = self.parts_of(projection)[0].scaling
        return _product(_product(dropped, a, offsets), b, offsets) * scaling

    def _native(self, projection: Projection) -> tuple[Tensor, Tensor]:
        """A (E, sum of r, in) and B (E, native out, sum of r), zero off the blocks of the parts, on this rank.

        B is relative to the scaling of the first part."""
        parts = self.parts_of(projection)
        a = own_experts(getattr(self, f"lora_A_{projection}"))
        b = [own_experts(getattr(self, f"lora_B_{part.leaf}")) for part in parts]
        native = b[0].new_zeros(len(b[0]), self.sizes[projection][1], a.shape[1])
        rows_first = native.movedim(0, -1)
        start = 0
        for part, own in zip(parts, b, strict=True):
            ratio = part.scaling / parts[0].scaling
            part.scatter(rows_first[:, start : start + part.r], (own if ratio == 1 else own * ratio).movedim(0, -1))
            start += part.r
        return a, native

    @torch.no_grad()
    def add_to(self, projection: Projection, weight: Tensor) -> None:
        """Add scaling * B A to `weight` (E, out, in) in place: computed in float32 or wider, and rounded once."""
        a, start = self.get_parameter(f"lora_A_{projection}"), 0
        wide = torch.promote_types(a.dtype, torch.float32)
        for part in self.parts_of(projection):
            b, own = self.get_parameter(f"lora_B_{part.leaf}"), a[:, start : start + part.r]
            for expert, native in enumerate(weight):
                down, up = (each[min(expert, len(each) - 1)].to(wide) for each in (own, b))
                part.scatter(native, (up @ down) * part.scaling)
            start += part.r


def _product(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """The grouped product; all experts share a single weight."""
    return ops.dense_linear(rows, weights[0]) if len(weights) == 1 else ops.grouped_mm(rows, weights, offsets)
