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
    "gelu_tanh": ops.geglu,
    "gelu": partial(ops.geglu, approximate="none"),
}
"""Gate activation -> op on pairs of gate and up (..., 2 I), or on both (..., I), with the result (..., I)."""

UNGATED: Mapping[str, Callable[[Tensor], Tensor]] = {"relu2": squared_relu}
"""Activation of layers without a gate -> function of (..., I)."""

_FLOAT8: Mapping[str, Callable[..., Tensor]] = {
    "silu": ops.float8_swiglu,
    "gelu_tanh": ops.float8_geglu,
    "gelu": partial(ops.float8_geglu, approximate="none"),
}


def head_gates(logits: Tensor, activation: str) -> Tensor:
    """The factors of heads' outputs, from a projection of a layer's input.

    Args:
        logits: the projection, (B, T, heads).
        activation: "sigmoid" or "softplus", which is computed in at least float32.

    Returns:
        (B, T, heads), of the dtype of `logits`.
    """
    if activation == "sigmoid":
        return elementwise(torch.sigmoid, logits)
    return elementwise(F.softplus, logits.to(torch.promote_types(logits.dtype, torch.float32))).to(logits.dtype)


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
        options = self.options._asdict()
        return _FLOAT8[options.pop("activation")](gate_up, *form[:2], **form.layouts, **options)
