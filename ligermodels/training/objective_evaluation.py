"""The output of a model with an objective, and its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.data.batches import Batch, count_targets, on_device
from ligermodels.errors import InputError
from ligermodels.evaluation import NO_BATCH
from ligermodels.generation.eval_mode import evaluating
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.routing import RouterResults, router_loss
from ligermodels.parallel.ranks import DataRanks

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Name -> a sum, and the number of its terms."""


@dataclass(frozen=True)
class ObjectiveOutput:
    """The output of a pass.

    loss: the losses of this batch, summed and divided by the number of items in the whole batch; in training mode with
        the share of the routers' losses.
    metrics: metrics to log.
    routers: results of the routers of a mixture of experts: an object with the fields of `RouterResults`.
    """

    loss: Tensor
    metrics: Metrics = field(default_factory=dict)
    routers: Any = field(default_factory=RouterResults)

    @classmethod
    def of(
        cls, model: CausalLM, loss: Tensor, share: Tensor, routers: Any, metrics: Metrics | None = None
    ) -> ObjectiveOutput:
        """The output of `model`.

        Args:
            model: the model.
            loss: the loss of the objective.
            share: this batch's fraction of the items of the whole batch.
            routers: results of the routers: an output of the model, or `RouterResults`.
            metrics: metrics to log.
        """
        of_routers = router_loss(model, routers) if model.training else None
        if of_routers is not None:
            loss = loss + share * of_routers
        return cls(loss, metrics or {}, routers)


class ObjectiveModel(nn.Module):
    """A model with an objective; its forward returns an `ObjectiveOutput`. Its items are the targets of the model."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model

    @property
    def trained_model(self) -> CausalLM:
        """The model, for callbacks."""
        return self.model

    def num_targets(self, labels: Tensor, *bounds: Any, **named_bounds: Any) -> Tensor:
        """Number of targets of a batch: see `CausalLM.num_targets`."""
        return self.model.num_targets(labels, *bounds, **named_bounds)


@dataclass(frozen=True)
class ObjectiveEvaluation:
    """The loss of an objective on the validation split, a mean over its items, and its metrics."""

    loss: float
    values: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        return {"loss": self.loss, **self.values}


@torch.no_grad()
def evaluate_objective(model: ObjectiveModel, batches: Callable[[], Iterable[Batch]]) -> ObjectiveEvaluation:
    """Evaluate an objective. If FSDP2 shards the model, each rank gives its own batches, as many as every other rank.

    Args:
        model: the model with its objective.
        batches: returns the batches; it is called twice.

    Raises:
        InputError: there is no batch.
    """
    device, ranks = model.model.device, DataRanks.of(model)
    with evaluating(model.model):
        counts = [count_targets(model, [batch]) for batch in batches()]
        if not counts:
            raise InputError(NO_BATCH)
        num_items = ranks.sum(torch.stack(counts).sum(0).to(device)).clamp(min=1)
        loss, totals = torch.zeros((), dtype=torch.float64, device=device), dict[str, Tensor]()
        for batch in batches():
            out = model(**on_device(batch, device), num_items_in_batch=num_items)
            loss += out.loss.double()
            for name, (value, count) in out.metrics.items():
                totals[name] = totals.get(name, 0) + torch.stack([value.double(), count.double()])
    sums = ranks.sum(torch.stack([torch.stack([loss, loss]), *totals.values()])).tolist()
    values = {name: total / count for name, (total, count) in zip(totals, sums[1:], strict=True) if count}
    if "rewards/margins" not in values and {"rewards/chosen", "rewards/rejected"} <= values.keys():
        values["rewards/margins"] = values["rewards/chosen"] - values["rewards/rejected"]
    return ObjectiveEvaluation(sums[0][0], values)
