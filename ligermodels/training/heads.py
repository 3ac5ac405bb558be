"""Metrics and evaluations of heads: Medusa and multi-token prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ligermodels.convert import hub
from ligermodels.convert.config_json import read_json
from ligermodels.errors import ConfigError, InputError
from ligermodels.evaluation import KLToReference, perplexity
from ligermodels.models.causal_lm import CausalLM
from ligermodels.ops.runtime.devices import own_random_numbers
from ligermodels.speculative.evaluation import HeadScores, evaluate_heads
from ligermodels.speculative.head_files import CONFIG
from ligermodels.speculative.multi_head import MultiHeadModel
from ligermodels.training.job import Job
from ligermodels.training.reports import OutputMetrics, Value

CHAINS = {"acceptance": "tau", "agreement": "greedy_tau"}
"""How often the tokens of a head are accepted, by sampling and greedily -> the tokens per step that follow from it."""


@dataclass(frozen=True)
class HeadsEvaluation:
    """Scores of the heads on the validation split and, if the recipe asks for it, the KL to the initial model."""

    scores: HeadScores
    kl: KLToReference | None = None

    def metrics(self) -> dict[str, Value]:
        """The mean loss of the heads and their accuracies, NaN for a head without a target.

        Of heads that learn the model's distribution also their acceptance, agreement, and the tokens per step that
        follow from them. With a `kl`, the KL in nats per token, the perplexity and its relative change.
        """
        values: dict[str, Value] = {"loss": float(self.scores.losses.nanmean())}
        values |= {f"top{k}": self.scores.accuracy(k).tolist() for k in (1, 5)}
        values |= {name: share.tolist() for name, share in self.scores.accepted.items()}
        values |= {CHAINS[name]: tokens for name, tokens in self.scores.tokens_per_step().items()}
        if self.kl is not None:
            values |= {"kl_to_reference": self.kl.kl, "perplexity": perplexity(self.kl.loss)}
            values["perplexity_change"] = self.kl.perplexity_change
        return values


def config_without_weights(name: str, model: CausalLM) -> dict[str, Any] | None:
    """config.json of a head on the hub, for a plan on the meta device: its weights are not fetched. None if the head's
    tensors are to be read: it is in a folder, or the model is on another device."""
    if model.device.type != "meta" or Path(name).expanduser().is_dir():
        return None
    return read_json(hub.resolve(name, weights=False) / CONFIG)


@contextmanager
def initialized_by(seed: int, model: CausalLM) -> Iterator[None]:
    """Draw the parameters of a new head on `model` from `seed`, without a change to the global random generators.

    Raises:
        ConfigError: instead of an InputError, which is about the recipe's settings here.
    """
    with own_random_numbers(model.device, seed):
        try:
            yield
        except InputError as error:
            raise ConfigError(str(error)) from None


def frozen_base_job(
    model: MultiHeadModel,
    learning_rate: float,
    save: Callable[..., object],
    output_metrics: Callable[[Any], OutputMetrics] | None = None,
    **further: Any,
) -> Job:
    """The `Job` that trains heads on a frozen model.

    Args:
        model: the model with the heads.
        learning_rate: peak learning rate of the heads.
        save: writes the result: (folder, overwrite=True).
        output_metrics: metrics to log, from an output of the model; None for `head_metrics`.
        further: other fields of the job; `trainable` is the model by default.
    """
    return Job(
        model=model,
        learning_rates=[(model.head_parameters(), learning_rate)],
        output_metrics=output_metrics or head_metrics,
        evaluate=lambda batches: HeadsEvaluation(evaluate_heads(model, batches())),
        export=partial(save, overwrite=True),
        **{"trainable": model, **further},
    )


def head_metrics(out: Any) -> OutputMetrics:
    """Losses of the base model (if it is trained) and of each head, and the accuracy of each head."""
    losses = {"head_losses": out.head_losses}
    if out.base_loss is not None:
        losses["base_loss"] = out.base_loss
    return OutputMetrics(losses, {"head_accuracy": (out.accuracy[1] * out.counts, out.counts)})


def draft_metrics(out: Any) -> OutputMetrics:
    """Losses of the steps, their acceptance and agreement, and the tokens per step that follow from these."""
    losses = {"head_losses": out.head_losses}
    if out.confidence_loss is not None:
        losses["confidence_loss"] = out.confidence_loss
    return OutputMetrics(losses, out.accepted(), chains={chain: name for name, chain in CHAINS.items()})
