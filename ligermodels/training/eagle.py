"""Training of EAGLE-3: a draft head on a frozen model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from ligermodels.arguments import EAGLE_FLAGS
from ligermodels.data.orders import DocumentOrder, First
from ligermodels.data.packing import counted
from ligermodels.models.causal_lm import CausalLM
from ligermodels.speculative.draft_vocabulary import DraftVocabulary, token_counts
from ligermodels.speculative.eagle3 import Eagle3Model
from ligermodels.speculative.eagle3_formats import read_config
from ligermodels.training.console import Console, Outcome
from ligermodels.training.draft_recipe import EagleRecipe
from ligermodels.training.heads import config_without_weights, draft_metrics, frozen_base_job, initialized_by
from ligermodels.training.inputs import epoch_of
from ligermodels.training.job import Job, RunOptions, quantize_base
from ligermodels.training.run import JobKind
from ligermodels.training.run_plan import RunPlan

if TYPE_CHECKING:
    from typing_extensions import Unpack


def train_eagle(recipe: EagleRecipe, out: str | os.PathLike[str], **options: Unpack[RunOptions]) -> Outcome:
    """Train an EAGLE-3 head by `recipe`, on a frozen model.

    Args:
        recipe: the settings.
        out: folder to write to: the head, in speculators' form.
        options: `device`, `attention`, `resume`, `overwrite`, `console` and `callbacks`: see `RunOptions`.

    Returns:
        The last step and the final evaluation, a `HeadsEvaluation`.

    Raises:
        ConfigError, InputError, CheckpointError, TrainingError, KeyboardInterrupt: see `run_job`. Also the errors of
            `Eagle3Model.from_pretrained` for the head in `start_from`.

    Examples:
        >>> recipe = EagleRecipe(base="meta-llama/Llama-3.1-8B-Instruct", data="chats.jsonl", steps=2000)
        >>> outcome = train_eagle(recipe, "head/", device="cuda")
        >>> outcome.evaluation.metrics()["tau"]  # on the validation split
    """
    return KIND.train(recipe, out, **options)


def _job(recipe: EagleRecipe, model: CausalLM, *, resuming: bool) -> Job:
    """See `JobFactory`. The draft tokens of a new head are placeholders until `choose_vocabulary`; a head in
    `start_from` is read also when the run resumes, for its draft vocabulary. ConfigError if the settings do not fit the
    model."""
    options: dict[str, Any] = {"num_steps": recipe.num_steps, "decay": recipe.decay, "divergence": recipe.divergence}
    if recipe.start_from is not None:
        stored = config_without_weights(recipe.start_from, model)
        if stored is None:
            eagle = Eagle3Model.from_pretrained(model, recipe.start_from, **options)
        else:
            eagle = _planned(model.requires_grad_(False), stored, options)
        return frozen_base_job(eagle, recipe.learning_rate, eagle.save_pretrained, draft_metrics)
    size, whole = recipe.draft_vocab_size, model.config.vocab_size
    unknown = DraftVocabulary(torch.arange(min(size, whole)), whole)
    options |= {"layer": recipe.layer, "lm_head": recipe.lm_head, "boundaries": recipe.boundaries or None}
    options |= {name: getattr(recipe, name) for name in EAGLE_FLAGS}
    with initialized_by(recipe.seed, model):
        eagle = Eagle3Model.from_base(model, vocabulary=unknown, **options)
    return frozen_base_job(eagle, recipe.learning_rate, eagle.save_pretrained, draft_metrics)


def _planned(model: CausalLM, stored: Mapping[str, Any], options: dict[str, Any]) -> Eagle3Model:
    """The head that a config.json describes, with placeholders for its draft tokens."""
    config = read_config(stored, model.config)
    tokens = DraftVocabulary(torch.arange(config.draft_vocab_size), model.config.vocab_size)
    return Eagle3Model(model, config, tokens, **options)


def choose_vocabulary(plan: RunPlan, model: Eagle3Model, console: Console) -> None:
    """Choose the draft tokens of a new head: those that are trained most often in an epoch; of streamed data, in the
    first `shuffle_buffer_size` documents. They are the same on all ranks, and whenever the run resumes.

    Args:
        plan: the run.
        model: the model with the head, which may be sharded.
        console: where messages and progress go.
    """
    recipe, before = cast(EagleRecipe, plan.recipe), model.vocabulary
    if recipe.start_from is not None or before.is_whole:
        return
    documents = plan.training
    if recipe.streaming:
        documents = First(cast(DocumentOrder, documents), recipe.shuffle_buffer_size)
    batches = epoch_of(recipe, plan.documents, documents)
    with console.progress("counting tokens") as update:
        counts = token_counts((batch["labels"] for batch in counted(batches, update)), before.vocab_size)
    vocabulary = DraftVocabulary.of_counts(counts, len(before))
    share = counts[vocabulary.tokens].sum() / counts.sum().clamp(min=1)
    console.say(
        f"draft vocabulary: {len(vocabulary):,} of {before.vocab_size:,} tokens, {share:.2%} of the tokens trained on"
        f"{f' in the first {batches.documents_read:,} documents' if recipe.streaming else ''}"
    )
    model.choose(vocabulary)


KIND = JobKind(EagleRecipe, _job, quantize_base, choose_vocabulary)
