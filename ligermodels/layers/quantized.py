"""Frozen weights of linear layers in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.convert.shards import fill_shard, is_dtensor
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers.expert_parts import ExpertCompute, Projection
from ligermodels.layers.keeps_dtype import KeepsDtype
from ligermodels.layers.linear_parts import UNSHARDED, Compute, Shard
from ligermodels.layers.sharding import TensorSharding, gathered
from ligermodels.ops import GLUOptions, QuantizedFormat, QuantizedWeight
from ligermodels.ops.quantized.weights import pack_mxfp4, pack_nf4

CHUNK_ELEMENTS = 2**24
"""Elements of a weight that are compared, or dequantised, at a time."""

UNEXPORTABLE = (
    "the model has quantised weights, which neither checkpoints nor models of transformers have: do this before it is "
    "quantised; or with the rounded weights, after lm.dequantize(model)"
)
"""Why a model with quantised weights has no checkpoint."""


class Codes(KeepsDtype):
    """A frozen weight kept as codes and scales: see `ops.quantize_weight`.

    Parameters `codes`, uint8, and `scales`, float32 (of mxfp4 uint8), are not trained, and keep their dtypes where the
    module is cast. As parameters they are sharded by FSDP2 and tensor parallelism like other weights. Gradients of x
    and of the bias are those of a linear layer of the dequantised weight.

    Args:
        in_features, out_features: sizes of the weight.
        kind: "float8", "int4", "nf4" or "mxfp4".
        device: of the codes, which are not filled: see `fill`.
    """

    def __init__(
        self, in_features: int, out_features: int, kind: QuantizedFormat, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.kind = in_features, out_features, kind
        codes, scales = ops.empty_quantized(kind, out_features, in_features, device or torch.device("cpu"))
        # Bytes: process groups exchange no float8.
        self.codes = nn.Parameter(codes.view(torch.uint8), requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.out_features, self.in_features

    def fill(self, weight: Tensor) -> None:
        """Keep a weight of this `shape`, rounded. InputError if it has values that are not finite."""
        self._keep(ops.quantize_weight(weight.flatten(0, -2), self.kind))

    def fill_nf4(self, levels: Tensor, scales: Tensor) -> None:
        """Keep a weight that is rounded to nf4 already.

        Args:
            levels: (..., in_features), uint8, the index of each element's level.
            scales: (..., in_features / 64), float32, of each block.
        """
        self._keep(pack_nf4(levels.flatten(0, -2), scales.flatten(0, -2)))

    def fill_mxfp4(self, codes: Tensor, scales: Tensor) -> None:
        """Keep a weight that is rounded to mxfp4 already.

        Args:
            codes: (..., in_features), uint8, the bits of each element.
            scales: (..., in_features / 32), uint8, of each block.
        """
        self._keep(pack_mxfp4(codes.flatten(0, -2), scales.flatten(0, -2)))

    @torch.no_grad()
    def _keep(self, quantized: QuantizedWeight) -> None:
        if quantized.codes.is_meta:
            return
        for parameter, whole in ((self.codes, quantized.codes.view(torch.uint8)), (self.scales, quantized.scales)):
            if is_dtensor(parameter):
                fill_shard(parameter, whole)
            else:
                parameter.copy_(whole)

    def is_of(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether these are the codes and scales of `weight`, on any device, once it is cast to `dtype`."""
        if weight.shape != self.shape:
            return False
        weight = weight.flatten(0, -2)
        for rows in self._slices():
            numbers = weight[rows].to(self.codes.device, dtype)
            if not numbers.isfinite().all():
                return False
            codes, scales = ops.quantize_weight(numbers, self.kind)
            same = torch.equal(codes.view(torch.uint8), self.codes[rows])
            if not same or not torch.equal(scales, self.scales[rows]):
                return False
        return True

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The rounded weight, of this `shape`, in `dtype`; a few rows at a time are float32."""
        dense = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.codes.device)
        codes, scales = self._coded(gathered(self.codes.detach())), gathered(self.scales.detach())
        for rows in self._slices():
            dense[rows] = ops.dequantize_weight(codes[rows], scales[rows], self.in_features, dtype)
        return dense.view(self.shape)

    def _coded(self, codes: Tensor) -> Tensor:
        """The bytes in the dtype by which the ops tell the formats apart."""
        return codes.view(torch.float8_e4m3fn) if self.kind == "float8" else codes

    def _slices(self) -> Iterator[slice]:
        count = max(1, CHUNK_ELEMENTS // self.in_features)
        return (slice(first, first + count) for first in range(0, self.out_features, count))

    def init_weights(self, std: float) -> None:
        """The weight normal(0, std), rounded."""
        weight = torch.empty(self.out_features, self.in_features, device=self.codes.device)
        self.fill(nn.init.normal_(weight, std=std))

    def extra_repr(self) -> str:
        return self.kind


class QuantizedCompute(Codes, Compute):
    """The frozen weight of a linear layer as `Codes`."""

    holds_weight: ClassVar[bool] = True
    unexportable: ClassVar[str | None] = UNEXPORTABLE

    def named_codes(self) -> Iterable[tuple[str, Codes]]:
        """The codes by the name of the parameter that they replace."""
        return [("weight", self)]

    @classmethod
    def of(cls, weight: Tensor, kind: QuantizedFormat) -> QuantizedCompute:
        """`weight` (out_features, in_features), rounded; on the meta device not filled. InputError for values that are
        not finite."""
        out_features, in_features = weight.shape
        quantized = cls(in_features, out_features, kind, weight.device)
        quantized.fill(weight)
        return quantized

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shard: Shard = UNSHARDED,
        *,
        activation: GLUOptions | None = None,
    ) -> Tensor:
        """See `Compute.forward` for bias, shard and activation; weight is None. InputError for x of another width."""
        codes, scales = shard.local(self.codes), shard.local(self.scales)
        if shard is UNSHARDED and (x.ndim == 0 or x.shape[-1] != self.in_features):
            # Codes in 4 bits alone tell the width only up to a multiple of 128.
            raise InputError(f"x must be floating, of shape (..., {self.in_features}); got {tuple(x.shape)}")
        return ops.quantized_linear(x, self._coded(codes), scales, bias, activation=activation)

    def of_sizes(self, out_features: int, in_features: int) -> QuantizedCompute:
        return QuantizedCompute(in_features, out_features, self.kind, torch.device("meta"))

    def rules(self, split: str, out_features: int, in_features: int) -> Mapping[str, TensorSharding]:
        """By output channels, or for "rows" by input channels, of which the formats in 4 bits need whole groups of
        128 on each rank (ConfigError).

        Args:
            split: how the layer is divided, a key of `tensor_shard.RULES`.
            out_features: rows of a rank's shard.
            in_features: columns of a rank's shard.
        """
        if split == "replicated":
            return {"codes": "replicated", "scales": "replicated"}
        if split != "rows":
            return {"codes": 0, "scales": 0}
        if self.kind == "float8":
            return {"codes": 1, "scales": "replicated"}
        if in_features % 128:
            raise ConfigError(
                f"{self.kind} weights have groups of 128 inputs, and a rank has {in_features} of {self.in_features} "
                "inputs; quantise to float8, or shard by FSDP2 alone"
            )
        return {"codes": 1, "scales": 1}


class ExpertCodes(Codes):
    """A frozen weight (E, out, in) of all experts, kept as codes and scales of a weight (E * out, in).

    Args:
        shape: (E, out, in).
        kind: "float8", "int4", "nf4" or "mxfp4".
        device: of the codes, which are not filled: see `fill`.
    """

    def __init__(self, shape: Sequence[int], kind: QuantizedFormat, device: torch.device | None = None) -> None:
        self.experts, out_features, in_features = shape
        super().__init__(in_features, self.experts * out_features, kind, device)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.experts, self.out_features // self.experts, self.in_features

    def forward(self, rows: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
        """See `ExpertCompute.forward` for rows, offsets and bias."""
        return ops.quantized_grouped_mm(rows, *self.weight, offsets, bias)

    @property
    def weight(self) -> QuantizedWeight:
        """The codes, in the dtype by which the ops tell the formats apart, and the scales."""
        return QuantizedWeight(self._coded(self.codes), self.scales)


class QuantizedExperts(ExpertCompute):
    """The frozen weights of experts as codes and scales.

    Args:
        gate_up, down: shapes (E, out, in) of the weights.
        kind: "float8", "int4", "nf4" or "mxfp4".
        device: of the codes, which are not filled.
    """

    unexportable: ClassVar[str | None] = UNEXPORTABLE

    def __init__(
        self, gate_up: Sequence[int], down: Sequence[int], kind: QuantizedFormat, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.kind = kind
        self.gate_up, self.down = ExpertCodes(gate_up, kind, device), ExpertCodes(down, kind, device)

    @classmethod
    def of(cls, gate_up: Tensor, down: Tensor, kind: QuantizedFormat) -> QuantizedExperts:
        """Weights (E, out, in), rounded; on the meta device not filled. InputError for values that are not finite.

        Args:
            gate_up: (E, 2 I, H).
            down: (E, H, I).
            kind: the format, such as "int4".
        """
        experts = cls(gate_up.shape, down.shape, kind, gate_up.device)
        experts.fill("gate_up", gate_up)
        experts.fill("down", down)
        return experts

    @property
    def codes(self) -> dict[Projection, ExpertCodes]:
        """The codes of each weight."""
        return {"gate_up": self.gate_up, "down": self.down}

    def named_codes(self) -> Iterable[tuple[str, Codes]]:
        """The codes by the name of the parameter that they replace."""
        return cast("Iterable[tuple[str, Codes]]", self.codes.items())

    def forward(self, projection: Projection, rows: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
        return cast(Tensor, self.codes[projection](rows, offsets, bias))

    def mix(
        self, tokens: Tensor, weights: Tensor, experts: Tensor, activation: GLUOptions,
        biases: tuple[Tensor | None, Tensor | None],
    ) -> Tensor | None:  # fmt: skip
        own = self.gate_up.weight, self.down.weight
        return ops.quantized_mix_experts(
            tokens, weights, experts, *own, self.gate_up.shape[0], *biases, activation=activation
        )

    def dense(self, projection: Projection, dtype: torch.dtype) -> Tensor:
        return self.codes[projection].dense(dtype)

    def fill(self, projection: Projection, weight: Tensor) -> None:
        self.codes[projection].fill(weight)


def _compute_of(module: nn.Module) -> Any:
    return getattr(module, "compute", None)


def weight_codes(module: nn.Module) -> QuantizedCompute | None:
    """The quantised weight of a linear layer or a head; None for any other module."""
    compute = _compute_of(module)
    return compute if isinstance(compute, QuantizedCompute) else None


def quantized_layers(module: nn.Module) -> dict[str, Any]:
    """The linear layers, the mixtures, and the head, in `module` whose weights are quantised, by name."""
    named = ((name, layer, _compute_of(layer)) for name, layer in module.named_modules())
    return {name: layer for name, layer, compute in named if isinstance(compute, QuantizedCompute | QuantizedExperts)}


def quantized_weights(module: nn.Module) -> dict[str, Codes]:
    """Name of the parameter that a quantised weight replaces -> its codes, for all quantised weights in `module`."""
    layers = quantized_layers(module).items()
    return {f"{name}.{weight}": codes for name, layer in layers for weight, codes in layer.compute.named_codes()}


def dense_state(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state of a linear layer or a head, with its weight as numbers of `dtype` where the weight is quantised.

    Raises InputError if the layer has an update, whose values are not in its weight."""
    if getattr(module, "update", None) is not None:
        raise InputError("base: its lm_head has trained rows of tokens; lm.merge_lora(base) puts them into the weight")
    codes = weight_codes(module)
    if codes is None:
        return module.state_dict()
    bias = cast("Tensor | None", module.bias)
    return {"weight": codes.dense(dtype), **({} if bias is None else {"bias": bias.detach()})}


def check_unquantized(module: nn.Module, what: str, advice: str) -> None:
    """InputError if there is a quantised layer in the module, which is not for `what`; `advice` says what to do."""
    for name, layer in quantized_layers(module).items():
        raise InputError(f"{what}: {name or 'the module'} has a weight quantised to {layer.compute.kind}; {advice}")
