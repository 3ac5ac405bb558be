"""Native norms and blocks on the modules of a transformers layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ligermodels.integrations.mlp import HFDenseMoE, MLPCall
from ligermodels.integrations.modules import (
    OnModules,
    attribute_named,
    is_as_composed,
    is_ours,
    native_of,
    part,
    part_named,
)
from ligermodels.layers import Block, BlockConfig, DenseMoEConfig, PerLayerInputConfig
from ligermodels.layers.layer import Layer, declared
from ligermodels.layers.norm import AddRMSNorm, NormConfig, RMSNorm, RMSNormAdd
from ligermodels.layers.per_layer_inputs import PerLayerInput


class HFRMSNorm(OnModules, RMSNorm):
    """`RMSNorm` with the weight of its source."""

    weight = attribute_named("weight")


class HFAddRMSNorm(OnModules, AddRMSNorm):
    """`AddRMSNorm` with the weight of its source."""

    weight = attribute_named("weight")


class HFRMSNormAdd(OnModules, RMSNormAdd):
    """`RMSNormAdd` with the weight of its source."""

    weight = attribute_named("weight")


def native_norms(source: nn.Module, config: NormConfig) -> nn.ModuleDict:
    """The native norms of a transformers norm, by the `addition` that they are fused with: see `norm_forward`."""
    return nn.ModuleDict({
        "none": HFRMSNorm(source, config),
        "before": HFAddRMSNorm(source, config),
        "after": HFRMSNormAdd(source, config),
    })  # fmt: skip


def norm_forward(module: nn.Module, *inputs: Tensor | None, addition: str = "none") -> Any:
    """Forward of a transformers norm.

    Args:
        module: the norm.
        inputs: x (..., N), and the other operand of an addition.
        addition: "none", "before" the norm (see `AddRMSNorm`) or "after" it (see `RMSNormAdd`).

    Returns:
        The result of the native norm.
    """
    if addition == "none" and not is_as_composed(module):
        return type(module).forward(module, *inputs)
    return native_of(module).layer[addition](*inputs)


class NormCall(nn.Module):
    """Calls a norm of a transformers layer in the place of a native norm of a block.

    Args:
        layer: the transformers layer.
        name: name of the norm in `Native.names`.
        addition: "before" or "after".
    """

    def __init__(self, layer: nn.Module, name: str, addition: str) -> None:
        super().__init__()
        self.__dict__["layer"] = layer
        self.name, self.addition = name, addition

    @property
    def fused_add(self) -> bool:
        """Whether the norm adds too; a norm of another library does not."""
        return is_ours(part(self.__dict__["layer"], self.name), norm_forward)

    def forward(self, *inputs: Tensor | None) -> Any:
        """See `norm_forward`."""
        norm = part(self.__dict__["layer"], self.name)
        return norm(*inputs, addition=self.addition) if is_ours(norm, norm_forward) else norm(*inputs)


class HFPerLayerInput(OnModules, PerLayerInput):
    """`PerLayerInput` on a transformers layer."""

    gate, projection = part_named("after.gate"), part_named("after.projection")

    def __init__(self, source: nn.Module, config: PerLayerInputConfig) -> None:
        super().__init__(source, config)
        self.norm = NormCall(source, "norm.after", "after")


class HFBlock(OnModules, Block):
    """`Block` on a transformers layer.

    Args:
        source: the transformers layer.
        config: config of the block.
        norms: names of the norms that the layer has, such as "mixer_norm".
    """

    mlp_has_extra_output = False
    mixer = part_named("mixer")

    def __init__(self, source: nn.Module, config: BlockConfig, norms: frozenset[str]) -> None:
        super().__init__(source, config)

        def norm(name: str, addition: str, default: nn.Module | None) -> Any:
            return NormCall(source, f"norm.{name}", addition) if name in norms else default

        self.residual_scale = config.residual_scale
        self.mixer_has_extra_output = config.mixer is not None and config.mixer.has_extra_output
        self.mixer_norm, self.mlp_norm = (norm(f"{part}_norm", "before", nn.Identity()) for part in ("mixer", "mlp"))
        self.mixer_post_norm, self.mlp_post_norm = (
            norm(f"{part}_post_norm", "after", None) for part in ("mixer", "mlp")
        )
        self.mlp = HFDenseMoE(source, config.mlp) if isinstance(config.mlp, DenseMoEConfig) else MLPCall(source)
        # `nativize` refuses blocks that have another layer there.
        self.after = None if config.after is None else HFPerLayerInput(source, config.after)  # type: ignore[arg-type]

    @property
    def layer_scalar(self) -> Tensor | None:  # type: ignore[override]
        """Buffer (1,), or None."""
        return self.source.layer_scalar if self.config.layer_scalar else None

    def declarations(self) -> dict[str, Layer]:
        mixer = native_of(self.mixer).layer
        layers = {"mixer": mixer, "mlp": self.mlp, "after": self.after}
        return {name: declared(layer) for name, layer in layers.items() if layer is not None}
