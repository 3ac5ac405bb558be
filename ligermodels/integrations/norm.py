"""Native norms with the weights of a transformers model's norms."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ligermodels.integrations.modules import OnModules, attribute_named, is_ours, native_of, part
from ligermodels.layers.norm import AddRMSNorm, NormConfig, RMSNorm, RMSNormAdd


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
