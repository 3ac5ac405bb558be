"""Activations as data: options for `Linear.forward`, and functions that compute the activation alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import ops
from ligermodels.ops import Float8Form, GLUOptions
from ligermodels.ops.runtime.tensors import elementwise


def squared_relu(x: Tensor) -> Tensor:
    """relu(x) ** 2 (So et al., 2021, https://arxiv.org/abs/2109.08668)."""
    return x.relu().square()


ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = {
    "silu": ops.swiglu,
    "clamped_silu": partial(ops.swiglu, limit_activation=True),
    "gelu_tanh": ops.geglu,
    "gelu": partial(ops.geglu, approximate="none"),
}
"""Gate activation -> op on pairs of gate and up (..., 2 I), or on both (..., I), with the result (..., I)."""

UNGATED: Mapping[str, Callable[[Tensor], Tensor]] = {"relu2": squared_relu}
"""Activation of layers without a gate -> function of (..., I)."""


def gate_heads(heads: Tensor, x: Tensor, gate: Callable[[Tensor], Tensor] | None, activation: str | None) -> Tensor:
    """Multiply the output of each attention head by one number per token, an activation of a projection of `x`.

    Args:
        heads: outputs of the heads, (B, T, heads, D).
        x: input of the attention layer, (B, T, H).
        gate: the projection (B, T, H) -> (B, T, heads); None for no gate.
        activation: "sigmoid" or "softplus", which is computed in at least float32; None for no gate.

    Returns:
        (B, T, heads, D).
    """
    if gate is None or activation is None:
        return heads
    logits = gate(x)
    if activation == "sigmoid":
        return heads * elementwise(torch.sigmoid, logits)[..., None]
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return heads * elementwise(F.softplus, exact).to(logits.dtype)[..., None]


@dataclass(frozen=True)
class GatedActivation:
    """activation(gate) * up, of channels that alternate gate and up: (..., 2 I) -> (..., I).

    Args:
        activation: a key of ACTIVATIONS.
        gate_multiplier, down_multiplier, limit, up_offset: see `ops.swiglu`.

    It is no module: a linear layer that is called with it passes `options`, the same as arguments of ops, to its op,
    which may compute the activation in its own kernel.
    """

    activation: str
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    options: GLUOptions = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = self.gate_multiplier, self.down_multiplier, self.limit, self.up_offset
        object.__setattr__(self, "options", GLUOptions(self.activation, *numbers))

    def __call__(self, gate_up: Tensor, *, form: Float8Form | None = None) -> Tensor:
        """gate_up (..., 2 I) -> (..., I) of the same dtype; with a `form` a `Float8Tensor` in that form."""
        if form is None:
            return ops.gated_activation(gate_up, self.options)
        return ops.float8_gated_activation(gate_up, self.options, form.dtype, form.gradient_dtype, tail=form.tail)
