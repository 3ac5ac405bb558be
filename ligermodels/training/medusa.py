"""Medusa training: heads on a frozen model (stage 1), or heads and model together (stage 2)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ligermodels.data.batches import Batch
from ligermodels.errors import ConfigError
from ligermodels.evaluation import evaluate_kl
from ligermodels.models.causal_lm import CausalLM
from ligermodels.speculative.evaluation import evaluate_heads
from ligermodels.speculative.joint import JointMedusa, frozen_copy
from ligermodels.speculative.medusa import MedusaModel
from ligermodels.training.console import Outcome
from ligermodels.training.heads import HeadsEvaluation, frozen_base_job, head_metrics
from ligermodels.training.job import Job, RunOptions
from ligermodels.training.medusa_recipe import MedusaRecipe
from ligermodels.training.run import JobKind

if TYPE_CHECKING:
    from typing_extensions import Unpack


def train_heads(recipe: MedusaRecipe, out: str | os.PathLike[str], **options: Unpack[RunOptions]) -> Outcome:
    """Train Medusa heads by `recipe`: in stage 1 on the frozen model, in stage 2 together with the model.

    Args:
        recipe: the settings.
        out: folder to write to: the heads; in stage 2 a Hugging Face checkpoint of the model with the heads in it.
        options: `device`, `attention`, `resume`, `overwrite`, `console` and `callbacks`: see `RunOptions`.

    Returns:
        The last step and the final evaluation, a `HeadsEvaluation`.

    Raises:
        ConfigError, InputError, CheckpointError, TrainingError, KeyboardInterrupt: see `run_job`. Also ConfigError if
            the heads in `start_from` do not have the shape of the recipe.

    Examples:
        >>> recipe = MedusaRecipe(base="meta-llama/Llama-3.1-8B", data="chats.jsonl", num_heads=3, steps=2000)
        >>> outcome = train_heads(recipe, "heads/", device="cuda")
        >>> outcome.evaluation.scores.accuracy(1)  # of each head, on the validation split
    """
    return KIND.train(recipe, out, **options)


def _job(recipe: MedusaRecipe, model: CausalLM, *, resuming: bool) -> Job:
    """See `JobFactory`. ConfigError if the heads in `start_from` do not have the shape of the recipe."""
    medusa = _heads_on(model, recipe, resuming=resuming)
    if recipe.stage == 1:
        return frozen_base_job(medusa, recipe.learning_rate, medusa.save_pretrained)
    reference: CausalLM | None = None
    if recipe.distill or recipe.kl_to_reference:
        reference = frozen_copy(model, recipe.reference)

    def evaluate(batches: Callable[[], Iterable[Batch]]) -> HeadsEvaluation:
        scores = evaluate_heads(medusa, batches())
        return HeadsEvaluation(scores, evaluate_kl(model, reference, batches()) if reference is not None else None)

    return Job(
        model=medusa,
        trainable=JointMedusa(medusa, reference if recipe.distill else None),
        learning_rates=[
            (model.parameters(), recipe.learning_rate),
            (medusa.head_parameters(), recipe.learning_rate * recipe.head_lr_multiplier),
        ],
        loss_options=lambda step, steps: {"heads_loss_weight": recipe.heads_loss_weight_at(step, steps)},
        output_metrics=head_metrics,
        evaluate=evaluate,
        export=lambda folder: medusa.export(folder, "full-hf", overwrite=True),
        reference=reference,
    )


def _heads_on(model: CausalLM, recipe: MedusaRecipe, *, resuming: bool) -> MedusaModel:
    """New heads on `model`, or the heads in `start_from`."""
    if recipe.start_from is None or resuming:
        return MedusaModel.from_base(model, recipe.num_heads, recipe.num_layers, recipe.lm_head, recipe.decay)
    own_lm_heads = recipe.lm_head == "own"
    medusa = MedusaModel.from_pretrained(model, recipe.start_from, decay=recipe.decay, own_lm_heads=own_lm_heads)
    stored = {"num_heads": medusa.num_heads, "num_layers": medusa.shape.num_layers, "lm_head": medusa.lm_head}
    for name, value in stored.items():
        if value != (wanted := getattr(recipe, name)):
            message = f"{name}: is {wanted}, but {value} in the heads to start from, {recipe.start_from}"
            raise ConfigError(f"{message}; set it to {value}")
    return medusa


KIND = JobKind(MedusaRecipe, _job)
