"""The plan of a run: its recipe, its inputs and its number of steps, read and checked before anything is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from ligermodels.convert.config_json import dtype_of, read_json
from ligermodels.convert.ranks import Ranks
from ligermodels.data.batches import Batch
from ligermodels.data.corpus import Indices
from ligermodels.data.documents import Documents
from ligermodels.data.mixture import Mixture
from ligermodels.data.packing import PackedBatches, Prefetcher, RankBatches
from ligermodels.errors import ConfigError, InputError
from ligermodels.parallel.ranks import data_share, world_size
from ligermodels.training.base import Base
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.console import Console
from ligermodels.training.extension import check_longer, warmup_steps
from ligermodels.training.folder import require_apart
from ligermodels.training.inputs import (
    Content,
    content_of,
    documents_of,
    length_changes,
    mixture_summary,
    packed,
    require_same_content,
    same_recipe,
    training_order,
)
from ligermodels.training.recipe import TrainingRecipe

B = TypeVar("B", bound=Iterator[Batch])


@dataclass(frozen=True)
class RunPlan:
    """A run before its first step.

    recipe: the settings, with a date.
    base: the files of the model and the tokenizer.
    documents: the data; `training` and `validation` are indices of documents.
    content: fingerprints of all files that the run reads.
    steps, warmup_steps: number of optimizer steps, and of steps of linear warm-up.
    start: step of the checkpoint to resume from; 0 for a new run.
    checkpoint: the content of its run.json; empty for a new run.
    """

    recipe: TrainingRecipe
    base: Base
    documents: Documents
    content: Content
    training: Indices | Mixture
    validation: Indices
    steps: int
    warmup_steps: int
    start: int
    checkpoint: dict[str, Any]

    @property
    def resumes(self) -> bool:
        """Whether the run resumes from a checkpoint."""
        return bool(self.checkpoint)

    @property
    def targets(self) -> int:
        """Number of targets in the steps up to the checkpoint."""
        return int(self.checkpoint.get("targets", 0))

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation split."""
        return len(self.validation) > 0

    @property
    def micro_batches(self) -> tuple[int, int]:
        """Sequences per forward pass, and forward passes per step, of this rank."""
        return self.recipe.micro_batches(data_share(self.recipe.parallel)[1])

    def training_batches(self) -> Prefetcher:
        """Micro-batches of this rank, without end."""
        return Prefetcher(self._share(self._packed(self.training, seed=self.recipe.seed)))

    def validation_batches(self) -> Iterator[Batch]:
        """Micro-batches of this rank from the validation split, or from its first `validation_tokens`."""
        recipe, limit = self.recipe, None
        if recipe.validation_tokens is not None:  # whole micro-batches of one process, for any number of ranks
            size = recipe.micro_batch_size
            sequences = max(1, recipe.validation_tokens // (recipe.seq_len * size)) * size
            limit = max(1, sequences // self.micro_batches[0])
        return self._share(islice(self._packed(self.validation, epochs=1), limit))

    def _packed(self, indices: Indices | Mixture, **options: Any) -> PackedBatches:
        return packed(self.recipe, self.documents, indices, batch_size=self.micro_batches[0], **options)

    def _share(self, batches: B) -> B | RankBatches:
        """The batches of this rank, from the batches of all ranks."""
        rank, size = data_share(self.recipe.parallel)
        return batches if size == 1 else RankBatches(batches, rank, size)


def plan_run(
    recipe: TrainingRecipe, out: Path, checkpoints: Checkpoints, *, resume: bool, ranks: Ranks, console: Console
) -> RunPlan:
    """Read the inputs of a run and count its steps.

    Args:
        recipe: the settings.
        out: folder of the run.
        checkpoints: the checkpoints in this folder.
        resume: resume from the newest checkpoint, if there is one.
        ranks: all ranks; the first rank reads what they share.
        console: where messages and progress go.

    Raises:
        ConfigError, InputError, CheckpointError: see `run_job`.
    """

    def on_first_rank(function: Callable[[], Any]) -> Any:
        return ranks.from_first(str(out), function)

    _check_recipe(recipe)
    start, checkpoint = 0, dict[str, Any]()
    if resume and (newest := on_first_rank(checkpoints.newest)):
        start, checkpoint = newest
    if checkpoint:
        recipe = same_recipe(recipe, checkpoint["recipe"])
    elif recipe.date is None:
        recipe = recipe.model_copy(update={"date": on_first_rank(lambda: datetime.now().date().isoformat())})
    base = Base.find(recipe)
    if base.new_tokens:
        console.say(f"the tokenizer and the embeddings get {', '.join(base.new_tokens)} for the chat template")
    on_first_rank(lambda: require_apart(out, base, recipe))
    if recipe.dtype is None and dtype_of(read_json(base.config)) == torch.float16:
        raise ConfigError(
            "dtype: the checkpoint's is float16, in which gradients and second moments underflow; give bfloat16 or "
            "float32"
        )
    documents = documents_of(recipe, base, console.say)
    content = on_first_rank(lambda: content_of(recipe, base))
    _require_same_data(documents, ranks)
    if checkpoint:
        require_same_content(content, checkpoint["content"])
    split, validation = documents.corpus.split(recipe.validation_fraction, recipe.seed)
    training = training_order(recipe, documents, split)
    if isinstance(training, Mixture):
        console.say(mixture_summary(recipe, documents, training))
    if checkpoint and not length_changes(recipe, checkpoint["recipe"]):
        steps = checkpoint["steps"]
    else:
        steps = _count_steps(recipe, documents, training, validation, console)
        check_longer(steps, checkpoint.get("steps", 0))
    warmup = warmup_steps(recipe.warmup_steps, steps, checkpoint)
    if warmup > steps:
        console.say(f"warmup_steps: {warmup:,} is more than there are steps; all {steps:,} are warm-up")
    return RunPlan(recipe, base, documents, content, training, validation, steps, min(warmup, steps), start, checkpoint)


def _check_recipe(recipe: TrainingRecipe) -> None:
    """Raise ConfigError for a recipe without base or data, and for settings that do not suit the number of ranks."""
    if recipe.base is None or not recipe.data:
        raise ConfigError(f"{'data' if recipe.base else 'base'}: the recipe has none; give it")
    _, data_ranks = data_share(recipe.parallel)
    if world_size() > 1 and recipe.optimizer == "adafactor":
        raise ConfigError("optimizer: adafactor does not work on sharded parameters; use adamw")
    recipe.micro_batches(data_ranks)  # raises if the ranks cannot divide the batch


def _require_same_data(documents: Documents, ranks: Ranks) -> None:
    """Raise InputError on all ranks unless all ranks read the same text: each rank packs it and takes its share."""
    with ranks.step("data", ""):
        fingerprint = documents.fingerprint if ranks.together else None
    fingerprints = ranks.gather(fingerprint)
    if others := [rank for rank, other in enumerate(fingerprints) if other != fingerprints[0]]:
        names = ", ".join(map(str, others))
        raise InputError(f"data: has other content on rank {names} than on rank 0; give all ranks the same files")


def _count_steps(
    recipe: TrainingRecipe, documents: Documents, training: Indices | Mixture, validation: Indices, console: Console
) -> int:
    """Steps of the recipe. The validation split is read in any case, so that errors in it show now."""

    def count(indices: Indices | Mixture, seed: int | None) -> tuple[int, int]:
        """Number of sequences and of tokens in an epoch."""
        batches, sequences, tokens = packed(recipe, documents, indices, batch_size=1, seed=seed, epochs=1), 0, 0
        for sequences, batch in enumerate(batches, start=1):  # noqa: B007 - the number of the last one
            tokens += batch["labels"].numel()
            update(batches.documents_read, batches.num_documents)
        return sequences, tokens

    with console.progress("reading text") as update:
        try:
            if len(validation):
                count(validation, None)
        except InputError as error:
            raise InputError(f"in the validation split: {error}") from None
        if recipe.steps:
            return recipe.steps
        sequences, tokens = count(training, recipe.seed)
    steps = max(1, math.ceil(recipe.epochs * sequences * recipe.seq_len / recipe.batch_tokens))
    console.say(
        f"{len(training):,} documents, {tokens:,} tokens in {sequences:,} sequences of {recipe.seq_len:,}; {steps:,} "
        f"steps of {recipe.batch_tokens // recipe.seq_len:,} sequences"
    )
    return steps
