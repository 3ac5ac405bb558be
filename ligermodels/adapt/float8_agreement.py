"""How far the gradients of a model in float8 are from those that it has without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ligermodels.adapt.float8 import float8
from ligermodels.errors import InputError
from ligermodels.models.causal_lm import CausalLM
from ligermodels.ops import Float8Recipe


@dataclass(frozen=True)
class Agreement:
    """A parameter's gradient in float8 beside that without: the cosine between them, and the ratio of their norms.

    Both are nan where one of the two gradients is zero, or not finite."""

    name: str
    cosine: float
    norm_ratio: float

    @property
    def error(self) -> float:
        """The larger one of 1 - cosine and |norm_ratio - 1|."""
        return max(1 - self.cosine, abs(self.norm_ratio - 1))


@dataclass(frozen=True)
class Float8Report:
    """The losses, and the agreement of each parameter's gradient, in the order of the model."""

    loss: float
    float8_loss: float
    gradients: Sequence[Agreement]

    @property
    def worst(self) -> Agreement:
        """That of the largest error; one of nan before all."""
        return max(self.gradients, key=lambda each: float("inf") if each.error != each.error else each.error)


def float8_agreement(
    model: CausalLM, input_ids: Tensor, recipe: Float8Recipe | None = None, *, exclude: Sequence[str] = ()
) -> Float8Report:
    """Gradients of the loss of predicting `input_ids`, in the model's dtype and in float8.

    The model needs memory for its gradients twice. It is in float8 afterwards, in training mode, without gradients.

    Args:
        model: whose trainable parameters are compared.
        input_ids: long (B, T).
        recipe, exclude: as of `float8`.

    Raises InputError when no parameter gets a gradient, and as `float8`.
    """
    model.train()
    loss, wanted = _gradients(model, input_ids)
    float8(model, recipe, exclude=exclude)
    float8_loss, found = _gradients(model, input_ids)
    if not wanted:
        raise InputError("model: no parameter requires a gradient, so that there are none to compare")
    pairs = ((name, found[name], gradient) for name, gradient in wanted.items())
    return Float8Report(loss, float8_loss, [Agreement(name, *_compared(a, b)) for name, a, b in pairs])


def _gradients(model: CausalLM, input_ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids, labels=input_ids).loss
    assert loss is not None
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), found


def _compared(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Cosine and ratio of norms. Scaled first: squares of small gradients vanish in float32."""
    a, b = (each.flatten().float() for each in (found, wanted))
    largest = b.abs().max()
    a, b = a / largest, b / largest
    norms = a.norm(), b.norm()
    return float(torch.dot(a, b) / (norms[0] * norms[1])), float(norms[0] / norms[1])
