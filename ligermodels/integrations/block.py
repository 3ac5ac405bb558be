"""A native block on the modules of a transformers layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ligermodels.integrations.mlp import HFDenseMoE, MLPCall
from ligermodels.integrations.modules import OnModules, native_of, part_named
from ligermodels.integrations.norm import NormCall
from ligermodels.layers import Block, BlockConfig, DenseMoEConfig, PerLayerInputConfig
from ligermodels.layers.layer import Layer, declared
from ligermodels.layers.per_layer_inputs import PerLayerInput


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
        self.mixer_has_extra_output = config.mixer.has_extra_output
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
