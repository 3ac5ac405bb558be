"""Feed-forward layers on the modules of a transformers layer."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, cast

from torch import Tensor, nn

from ligermodels.integrations.modules import (
    OnModules,
    first_of,
    is_as_composed,
    is_ours,
    native_of,
    part,
    part_named,
    projected,
)
from ligermodels.layers import DenseMoEConfig, ForwardContext, MLPConfig
from ligermodels.layers.activation import ACTIVATIONS, GatedActivation
from ligermodels.layers.dense_moe import DenseMoE
from ligermodels.layers.expert_mix import mix_experts
from ligermodels.layers.layer import Layer
from ligermodels.layers.moe import MoEConfig


def mlp_forward(module: nn.Module, x: Tensor) -> Tensor:
    """Forward of a gated feed-forward layer: down(activation(gate(x)) * up(x)), x (..., H), with the multipliers of its
    config. In `GatedMLP` gate and up are one projection."""
    if not is_as_composed(module):  # such as another activation
        return cast(Tensor, type(module).forward(module, x))
    native = native_of(module)
    config: MLPConfig = native.config
    activation: Callable[..., Tensor] = ACTIVATIONS[config.activation]
    if "mlp.gate_up" in native.names:
        gate, up = projected(module, "mlp.gate_up", x).chunk(2, dim=-1)
    else:
        gate, up = projected(module, "mlp.gate", x), projected(module, "mlp.up", x)
    y: Tensor = part(module, "mlp.down")(
        activation(gate, up, gate_multiplier=config.gate_multiplier, limit=config.limit)
    )
    return y if config.down_multiplier == 1 else y * config.down_multiplier


def experts_forward(module: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: Any) -> Any:
    """Forward of the experts of a layer.

    A rank's share of the experts runs the class's own forward, as does an implementation that was chosen since
    `nativize`, by `set_experts_implementation` or in the config.

    Args:
        module: the experts.
        x: tokens (N, H).
        top_k_index: experts of each token, long (N, top_k).
        top_k_weights: their weights, (N, top_k).
        args: further arguments; with any, the class's own forward runs.

    Returns:
        (N, H).
    """
    native = native_of(module)
    config: MoEConfig = native.config
    names = [native.names[name] for name in ("experts.gate_up", "experts.down")]
    gate_up, down = (attrgetter(name)(module) for name in names)
    plain = all(type(weight) in (Tensor, nn.Parameter) for weight in (gate_up, down))
    changed = _chosen_since(module) or not is_as_composed(module)
    if args or not plain or len(gate_up) != config.router.num_experts or changed:
        return type(module).forward(module, x, top_k_index, top_k_weights, *args)
    pairs = "experts.gate_up_pairs" in native.names  # gate and up alternate, and the weights are transposed
    if pairs:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    gate_up_bias, down_bias = (getattr(module, f"{name}_bias") if config.bias else None for name in names)

    def of_halves(rows: Tensor) -> Tensor:
        return ACTIVATIONS[config.activation](*rows.chunk(2, dim=-1), **config.activation_options)

    activation = GatedActivation(config.activation, **config.activation_options) if pairs else of_halves
    return mix_experts(x, top_k_weights, top_k_index, gate_up, down, activation, (gate_up_bias, down_bias))


class _BeforeNativize(str):
    """The name of the experts' implementation in a config: the name from before `nativize`, until another is chosen."""


def _implementation(experts: Any) -> Any:
    config = getattr(experts, "config", None)  # some classes have one implementation, and no config
    return getattr(config, "_experts_implementation", None)


def _chosen_since(experts: Any) -> bool:
    """Whether an implementation was chosen since `nativize`."""
    name = _implementation(experts)
    return name is not None and not isinstance(name, _BeforeNativize)


def keep_implementation(experts: Any) -> None:
    """Mark the implementation in the config of experts as the one from before `nativize`."""
    if name := _implementation(experts):
        experts.config._experts_implementation_internal = _BeforeNativize(name)


class MLPCall(Layer):
    """Calls the feed-forward layer of a transformers layer in the place of a native one. A mixture of experts has the
    router of transformers, and may return its logits too. A shared expert may be a module beside it (Granite 4).

    Args:
        layer: the transformers layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer

    @property
    def token_wise(self) -> bool:  # type: ignore[override]
        return is_ours(part(self.__dict__["layer"], "mlp"), mlp_forward)

    def forward(self, x: Tensor, context: ForwardContext | None = None) -> Tensor:
        """x (..., H) -> (..., H); `context` is not used."""
        layer = self.__dict__["layer"]
        y = first_of(part(layer, "mlp")(x))
        return y if "mlp.shared" not in native_of(layer).names else y + part(layer, "mlp.shared")(x)


class HFDenseMoE(OnModules, DenseMoE):
    """`DenseMoE` on a transformers layer."""

    dense_norm, dense_post_norm, experts_norm, experts_post_norm = map(part_named, DenseMoEConfig.NAMES)

    def __init__(self, source: nn.Module, config: DenseMoEConfig) -> None:
        super().__init__(source, config)
        self.dense = MLPCall(source)

    def forward(self, x: Tensor, context: ForwardContext | None = None) -> Tensor:  # type: ignore[override]
        """x (..., H), the residual stream -> (..., H); `context` is not used."""
        y = self.dense_post_norm(self.dense(self.dense_norm(x)))
        return cast(Tensor, y + self.experts_post_norm(self.experts(self.experts_norm(x), routed_by=x)))

    def experts(self, x: Tensor, routed_by: Tensor) -> Tensor:  # type: ignore[override]
        """The mixture of experts of x (..., H); the input of its router, `routed_by`, has the same shape.

        Returns:
            (..., H).
        """
        _, weights, experts = part(self.source, "experts.router")(routed_by.flatten(0, -2))
        return cast(Tensor, part(self.source, "experts")(x.flatten(0, -2), experts, weights).view(x.shape))
