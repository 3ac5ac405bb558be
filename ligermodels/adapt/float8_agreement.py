"""Compare the gradients of a model in float8 with its gradients in the model's dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ligermodels.adapt.float8 import float8
from ligermodels.errors import InputError
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.native import check_native
from ligermodels.ops import Float8Recipe


@dataclass(frozen=True)
class Agreement:
    """A parameter's gradient in float8, compared with its gradient in the model's dtype.

    Args:
        name: native name of the parameter.
        cosine: cosine between the two gradients; nan if one of them is zero or not finite.
        norm_ratio: norm of the float8 gradient, divided by the norm of the other; nan likewise.
    """

    name: str
    cosine: float
    norm_ratio: float

    @property
    def error(self) -> float:
        """The maximum of 1 - cosine and |norm_ratio - 1|."""
        return max(1 - self.cosine, abs(self.norm_ratio - 1))


@dataclass(frozen=True)
class Float8Report:
    """Result of `float8_agreement`.

    Args:
        loss: loss in the model's dtype.
        float8_loss: loss in float8.
        gradients: comparison of each parameter's gradients, in the order of the model.
    """

    loss: float
    float8_loss: float
    gradients: Sequence[Agreement]

    @property
    def worst(self) -> Agreement:
        """The comparison with the largest error; nan counts as the largest."""
        return max(self.gradients, key=lambda agreement: math.inf if math.isnan(agreement.error) else agreement.error)


def float8_agreement(
    model: CausalLM, input_ids: Tensor, recipe: Float8Recipe | None = None, *, exclude: Sequence[str] = ()
) -> Float8Report:
    """Compare gradients of the language-modelling loss on `input_ids` in float8 and in the model's dtype. Dropout drops
    the same elements in both.

    Needs memory for two copies of the gradients. Afterwards the model is in float8, in training mode and without
    gradients.

    Args:
        model: the gradients of its trainable parameters are compared.
        input_ids: long (B, T).
        recipe: formats and accumulation. Default: `Float8Recipe()`.
        exclude: `fnmatch` patterns for names of layers that stay in the model's dtype, see `float8`. Default: none.

    Returns:
        A `Float8Report`.

    Raises:
        InputError: no parameter requires a gradient, or `float8` refuses the model or an argument.
        BackendError: the model is on a GPU without float8.
    """
    check_native(model, "float8_agreement")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("model: no parameter requires a gradient, so that there are none to compare")
    model.train()
    loss, gradients = _gradients(model, input_ids)
    float8(model, recipe, exclude=exclude)
    float8_loss, float8_gradients = _gradients(model, input_ids)
    pairs = ((name, float8_gradients[name], gradient) for name, gradient in gradients.items())
    return Float8Report(loss, float8_loss, [Agreement(name, *_compared(a, b)) for name, a, b in pairs])


def _gradients(model: CausalLM, input_ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # the next pass begins with the same random state
        loss = model(input_ids, labels=input_ids).loss
        assert loss is not None
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), gradients


def _compared(float8_gradient: Tensor, gradient: Tensor) -> tuple[float, float]:
    """Cosine and ratio of norms. Both gradients are scaled first: squares of small numbers are zero in float32."""
    a, b = float8_gradient.flatten().float(), gradient.flatten().float()
    largest = b.abs().max()
    a, b = a / largest, b / largest
    norms = a.norm(), b.norm()
    return float(torch.dot(a, b) / (norms[0] * norms[1])), float(norms[0] / norms[1])
