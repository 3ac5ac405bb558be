"""Evaluation of a language model on given text: loss, perplexity, and KL divergence from a reference model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch

from ligermodels.data.batches import Batch, count_targets, on_device
from ligermodels.errors import InputError
from ligermodels.generation.eval_mode import evaluating
from ligermodels.layers import Targets
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.native import check_native
from ligermodels.models.prepared_batch import prepare_batch
from ligermodels.models.reference_kl import divergence_and_losses
from ligermodels.parallel.ranks import DataRanks

NO_BATCH = "batches: there is no text to evaluate on; give at least one batch"


@torch.no_grad()
def evaluate(model: CausalLM, batches: Iterable[Batch]) -> float:
    """Mean cross entropy per target, in nats, over all batches; its exponential is the perplexity.

    Losses of the routers of a mixture of experts are not part of it.

    If FSDP2 shards the model, each rank gives its own batches, and the result is the mean over the batches of all
    ranks. Every rank needs the same number of batches; a batch may be without targets.

    Args:
        model: the model.
        batches: arguments of the model's forward, with labels.

    Returns:
        The loss, 0 without any target.

    Raises:
        InputError: there is no batch, or one without labels; or the model is not native.

    Examples:
        >>> ids = torch.arange(3, 40)[None]
        >>> perplexity(evaluate(model, [Batch({"input_ids": ids, "labels": ids})]))
    """
    _check_native(model, "evaluate")
    losses, counts = [], []
    with evaluating(model):
        ranks = DataRanks.of(model)
        for batch in batches:
            inputs: dict[str, Any] = on_device(batch, model.device)
            counts.append(int(count_targets(model, [batch])))
            by_token = model(**inputs, reduction="none")["loss"]  # other reductions include the routers' losses
            losses.append(by_token.double().sum())
    if not losses:
        raise InputError(NO_BATCH)
    sums = torch.stack([torch.stack(losses).sum(), losses[0].new_tensor(sum(counts))])
    loss, count = ranks.sum(sums).tolist()
    return loss / max(1, count)


def perplexity(loss: float) -> float:
    """exp(loss) of a loss in nats; infinity where the result exceeds the range of a float."""
    return math.inf if loss > 700 else math.exp(loss)


@dataclass(frozen=True)
class KLToReference:
    """KL(reference || model) over some text, and the losses of both models, all in nats per target."""

    kl: float
    loss: float
    reference_loss: float

    @property
    def perplexity_change(self) -> float:
        """Relative change of the perplexity: 0.01 is one percent above the reference's perplexity."""
        return perplexity(self.loss - self.reference_loss) - 1


@torch.no_grad()
def evaluate_kl(model: CausalLM, reference: CausalLM, batches: Iterable[Batch]) -> KLToReference:
    """KL divergence of a model's next-token predictions from the predictions of a reference model.

    If FSDP2 shards the models, each rank gives its own batches: see `evaluate`.

    Args:
        model: the model.
        reference: a model with the same vocabulary, on the same device.
        batches: arguments of the models' forward, with labels.

    Returns:
        The KL divergence and the losses of both models, means over all targets.

    Raises:
        InputError: there is no batch, or one without labels; or a model is not native, or has another vocabulary.

    Examples:
        >>> model = lm.from_pretrained(name, dtype=torch.bfloat16, quantize="int4")
        >>> reference = lm.from_pretrained(name, dtype=torch.bfloat16)
        >>> ids = torch.arange(3, 40)[None]
        >>> evaluate_kl(model, reference, [Batch({"input_ids": ids, "labels": ids})]).perplexity_change
    """
    for each in (model, reference):
        _check_native(each, "evaluate_kl")
    sizes = [each.config.vocab_size for each in (model, reference)]
    if sizes[0] != sizes[1]:
        raise InputError(f"reference: has a vocabulary of {sizes[1]:,} tokens, and the model one of {sizes[0]:,}")
    sums, counts = [], []
    with evaluating(model), evaluating(reference):
        ranks = DataRanks.of(model)
        for batch in batches:
            counts.append(int(count_targets(model, [batch])))
            inputs: dict[str, Any] = on_device(batch, model.device)
            prepared = prepare_batch(model, (1,), **inputs)
            hidden, reference_hidden = (m(**prepared.inputs)["last_hidden_state"] for m in (model, reference))
            targets = cast(Targets, prepared.targets)
            labels = targets.take(targets.values[0])
            heads = hidden, model.logits, reference_hidden, reference.logits
            sums.append(divergence_and_losses(*heads, labels, vocab_size=model.config.vocab_size).double())
    if not sums:
        raise InputError(NO_BATCH)
    total = torch.stack(sums).sum(0)
    *totals, count = ranks.sum(torch.cat([total, total.new_tensor([sum(counts)])])).tolist()
    return KLToReference(*(x / max(1, count) for x in totals))


def _check_native(model: Any, function: str) -> None:
    """See `check_native`; the model may be in the wrapper that `torch.compile` returns."""
    check_native(getattr(model, "_orig_mod", model), function)
