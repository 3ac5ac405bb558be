"""Losses of users, by import path."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import Tensor

from ligermodels.errors import ConfigError, InputError, short
from ligermodels.layers import IGNORE_INDEX
from ligermodels.layers.targets import shift_labels
from ligermodels.models.causal_lm import CausalLM
from ligermodels.training.import_path import function_at
from ligermodels.training.objective_evaluation import ObjectiveModel, ObjectiveOutput
from ligermodels.training.objective_losses import ItemLosses, PreferenceObjective, Scores
from ligermodels.training.preference import CUSTOM

CustomLoss = Callable[[Mapping[str, Any]], Any]
"""Fields by name -> the result of the loss."""

TOKEN_FIELDS = ("log_probs", "mask", "input_ids", "labels", "cu_seqlens")
"""Fields of a batch of texts and chats: log-probabilities of the next tokens of a row (1, n), a mask of those that are
trained on, and the batch."""

OF_RUNS = ("step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "peak_memory")
"""Metrics of every run, whose names a user's loss may not give to its own."""


class TokenLossModel(ObjectiveModel):
    """A model whose forward computes a user's loss of texts and chats.

    Args:
        model: the model.
        path: MODULE:FUNCTION.
    """

    unrecordable: ClassVar[str] = CUSTOM

    def __init__(self, model: CausalLM, path: str) -> None:
        super().__init__(model)
        self.path, self._loss = path, load_loss(path, TOKEN_FIELDS)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> ObjectiveOutput:
        """The losses of the tokens with a target, summed.

        Args:
            input_ids: (1, n).
            labels: (1, n).
            cu_seqlens: bounds of the documents.
            num_items_in_batch: divides the sum. Default: the number of targets.
        """
        out = self.model.log_probs(input_ids, labels, cu_seqlens=cu_seqlens)
        mask = shift_labels(labels, 1, cu_seqlens) != IGNORE_INDEX
        fields = dict(zip(TOKEN_FIELDS, (out.log_probs, mask, input_ids, labels, cu_seqlens), strict=True))
        losses, metrics = item_losses(self.path, self._loss(fields), mask.shape)
        count = mask.sum()
        num_items = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        means = {name: (torch.where(mask, value, 0.0).sum(), count.float()) for name, value in metrics.items()}
        loss = torch.where(mask, losses, 0.0).sum() / num_items
        return ObjectiveOutput.of(self.model, loss, count / num_items, out, means)


def with_loss(objective: PreferenceObjective, path: str, settings: Collection[str]) -> PreferenceObjective:
    """An objective on the same data, with a user's loss.

    Args:
        objective: the objective; its reference is computed too.
        path: MODULE:FUNCTION.
        settings: names of the settings of the objective.

    Raises:
        ConfigError: there is no such function, or it has a parameter that is no field.
    """
    function = load_loss(path, (*Scores._fields, *settings))

    def losses(scores: Scores, given: Mapping[str, Any]) -> ItemLosses:
        count = len(scores.log_probs) if scores.desirable is not None else len(scores.log_probs) // 2
        found, metrics = item_losses(path, function({**scores._asdict(), **given}), torch.Size((count,)))
        return ItemLosses(found, metrics=metrics)

    return objective._replace(losses=losses, is_custom=True)


def check_given(path: str, settings: Collection[str]) -> None:
    """Raise ConfigError for a setting of the objective that has no effect with a user's loss.

    Args:
        path: MODULE:FUNCTION.
        settings: names of the settings that are given.
    """
    function = function_at(path, "loss")
    if unused := [name for name in settings if name not in function.parameters and not function.takes_all]:
        raise ConfigError(
            f"{unused[0]}: has no effect with the loss {path}, which has no parameter of this name; leave it out, or "
            "add the parameter"
        )


def load_loss(path: str, fields: Collection[str]) -> CustomLoss:
    """A function that calls the loss at `path` with the fields that it asks for.

    Args:
        path: MODULE:FUNCTION; a module that is installed, or in the current folder.
        fields: names of the fields that there are.

    Returns:
        A function (fields by name) -> the result of the loss.

    Raises:
        ConfigError: there is no such module or function, or it has a parameter that is no field and has no default.
    """
    function = function_at(path, "loss")
    for name, has_default in function.parameters.items():
        if name not in fields and not has_default:
            raise ConfigError(f"loss: {path} has a parameter {name!r}; it is called by name with {', '.join(fields)}")

    def call(values: Mapping[str, Any]) -> Any:
        names = values if function.takes_all else values.keys() & function.parameters
        return function.call(**{name: values[name] for name in names})

    return call


def item_losses(path: str, result: Any, shape: torch.Size) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses in the result of a loss, and its metrics.

    Args:
        path: MODULE:FUNCTION, for messages.
        result: a tensor of `shape`; or a scalar, the mean over them; or one of these and a dict of metrics.
        shape: shape of the items.

    Returns:
        The losses, of `shape`; and the metrics without a gradient, floating, of `shape` or ().

    Raises:
        InputError: another type or shape, a loss without a gradient, or a metric with a name of the run's own.
    """
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(loss, Tensor) or not isinstance(metrics, Mapping):
        raise InputError(f"loss: {path} must return a tensor, or a tensor and a dict; got {type(result).__name__}")
    if loss.shape not in (shape, torch.Size()):
        raise InputError(
            f"loss: {path} must return a loss for each item, {tuple(shape)}, or their mean, (); got shape "
            f"{tuple(loss.shape)}"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise InputError(f"loss: {path} returns a loss without a gradient; compute it from log_probs")
    if taken := [name for name in metrics if name in OF_RUNS]:
        raise InputError(f"loss: {path} returns a metric {taken[0]!r}, a name of the run's own; give it another name")
    return loss.expand(shape), {name: _metric(path, name, value, loss, shape) for name, value in metrics.items()}


def _metric(path: str, name: str, value: Any, loss: Tensor, shape: torch.Size) -> Tensor:
    """A metric as a floating tensor without a gradient. InputError unless it fits: see `item_losses`."""
    dtype = torch.promote_types(loss.dtype, torch.float32)
    found: Tensor | None = None
    with suppress(TypeError, ValueError, RuntimeError):  # for text, None, or lists of unequal lengths
        found = torch.as_tensor(value, device=loss.device).detach().to(dtype)
    if found is None or found.shape not in (shape, torch.Size()):
        given = short(value) if found is None else f"shape {tuple(found.shape)}"
        raise InputError(
            f"loss: {path}: the metric {name!r} must be a number, or one for each item, {tuple(shape)}; got {given}"
        )
    return found
