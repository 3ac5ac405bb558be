"""The plan of a run: its recipe, its inputs and its number of steps, read and checked before anything is written."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from ligermodels.convert.config_json import dtype_of, read_json
from ligermodels.convert.ranks import Ranks
from ligermodels.data.batches import Batch
from ligermodels.data.documents import Documents
from ligermodels.data.orders import DocumentOrder, Indices, Mixture
from ligermodels.data.packing import PackedBatches, Prefetcher, RankBatches
from ligermodels.data.survey import Epoch
from ligermodels.errors import ConfigError, InputError
from ligermodels.models.extra_heads import require_command
from ligermodels.parallel.ranks import check_precision, data_share, is_sharded
from ligermodels.speculative.hub import config_of_heads
from ligermodels.training.base import Base
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.console import Console
from ligermodels.training.counting import count_steps, data_messages, num_documents
from ligermodels.training.extension import check_schedule, warmup_steps
from ligermodels.training.folder import require_apart
from ligermodels.training.inputs import (
    START,
    TEACHER,
    Content,
    content_of,
    documents_of,
    length_changes,
    mixture_summary,
    packed,
    require_same_content,
    same_recipe,
    split,
    start_tokenising,
)
from ligermodels.training.recipe import TrainingRecipe

B = TypeVar("B", bound=Iterator[Batch])


@dataclass(frozen=True)
class RunPlan:
    """A run before its first step.

    recipe: the settings, with a date.
    base: the files of the model and the tokenizer.
    documents: the data; `training` and `validation` are its documents in the two splits.
    content: fingerprints of all files that the run reads.
    steps, warmup_steps: number of optimizer steps, and of steps of linear warm-up.
    start: step of the checkpoint to resume from; 0 for a new run.
    checkpoint: the content of its run.json; empty for a new run.
    keeps_learning_rates: whether all steps up to the checkpoint had the learning rates, and the losses, of this plan.
    folder: folder of the run.
    counts: "training" and "validation" -> counts of an epoch of the splits that were read.
    """

    recipe: TrainingRecipe
    base: Base
    documents: Documents
    content: Content
    training: Indices | DocumentOrder
    validation: Indices
    steps: int
    warmup_steps: int
    start: int
    checkpoint: dict[str, Any]
    keeps_learning_rates: bool
    folder: Path
    counts: dict[str, Epoch]

    @property
    def resumes(self) -> bool:
        """Whether the run resumes from a checkpoint."""
        return bool(self.checkpoint)

    @property
    def targets(self) -> int:
        """Number of targets in the steps up to the checkpoint."""
        return int(self.checkpoint.get("targets", 0))

    @cached_property
    def run_id(self) -> str:
        """Identifies the run in trackers; a resumed run keeps it."""
        return str(self.checkpoint.get("run_id") or secrets.token_hex(8))

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation split."""
        return len(self.validation) > 0

    @property
    def micro_batches(self) -> tuple[int, int]:
        """Sequences per forward pass, and forward passes per step, of this rank."""
        return self.recipe.micro_batches(data_share(self.recipe.parallel)[1])

    def training_batches(self, device: str = "cpu") -> Prefetcher:
        """Micro-batches of this rank, without end, in page-locked memory if `device` is a GPU."""
        batches = self._share(self._packed(self.training, self.micro_batches[0], seed=self.recipe.seed))
        return Prefetcher(batches, pin_memory=torch.device(device).type == "cuda")

    def validation_batches(self, batch_size: int | None = None) -> Iterator[Batch]:
        """Batches of this rank from the validation split, or from its first `validation_tokens`.

        Args:
            batch_size: rows of a batch. Default: None, those of a micro-batch.
        """
        tokens, rows = self.recipe.validation_tokens, batch_size or self.micro_batches[0]
        most = None if tokens is None else max(1, tokens // self.recipe.row_tokens)
        return self._share(self._packed(self.validation, rows, epochs=1, max_sequences=most))

    def all_batches(self) -> Iterator[Batch]:
        """Micro-batches of this rank with the documents of both splits, once each."""
        return self._share(self._packed(None, self.micro_batches[0], epochs=1))

    def _packed(self, indices: Indices | DocumentOrder | None, batch_size: int, **options: Any) -> PackedBatches:
        return packed(self.recipe, self.documents, indices, batch_size=batch_size, **options)

    def _share(self, batches: B) -> B | RankBatches:
        """The batches of this rank, from the batches of all ranks."""
        rank, size = data_share(self.recipe.parallel)
        return batches if size == 1 else RankBatches(batches, rank, size)


def plan_run(
    recipe: TrainingRecipe,
    out: Path,
    checkpoints: Checkpoints,
    *,
    resume: bool,
    ranks: Ranks,
    console: Console,
    on_meta: bool = False,
) -> RunPlan:
    """Read the inputs of a run and count its steps.

    Args:
        recipe: the settings.
        out: folder of the run.
        checkpoints: the checkpoints in this folder.
        resume: resume from the newest checkpoint; without one the run starts at step 1.
        ranks: all ranks; the first rank reads what they share.
        console: where messages and progress go.
        on_meta: whether the model is only loaded on the meta device, see `Base.find`.

    Raises:
        ConfigError, InputError, CheckpointError: see `run_job`.
    """

    def on_first_rank(function: Callable[[], Any]) -> Any:
        return ranks.from_first(str(out), function)

    _check_recipe(recipe)
    base = Base.find(recipe, on_meta=on_meta)
    start, checkpoint = 0, dict[str, Any]()
    if resume and (newest := on_first_rank(checkpoints.newest)):
        start, checkpoint = newest
    elif resume:
        console.say(f"{out}: has no checkpoint to resume from; the run starts at step 1")
    recipe = base.with_token_rows(recipe, checkpoint.get("recipe", {}))
    if checkpoint:
        recipe = same_recipe(recipe, checkpoint["recipe"])
    else:
        _check_start(recipe)
        date = recipe.date or on_first_rank(lambda: datetime.now().date().isoformat())
        recipe = recipe.model_copy(update={"date": date})
    _tell_of_new_tokens(recipe, base, console)
    on_first_rank(lambda: require_apart(out, base, recipe))
    if recipe.dtype is None and dtype_of(read_json(base.config)) == torch.float16:
        raise ConfigError(
            "dtype: the checkpoint's is float16, in which gradients and second moments underflow; give bfloat16 or "
            "float32"
        )
    documents = documents_of(recipe, base, console.say)
    with ExitStack() as opened:
        opened.callback(documents.close)  # in case of an error
        content = on_first_rank(lambda: content_of(recipe, base, on_meta=on_meta))
        _require_same_data(documents, ranks)
        if checkpoint:
            weightless = {TEACHER: on_meta, START: on_meta, "base": not base.reads_weights}
            require_same_content(
                content, checkpoint["content"], weightless={name for name in weightless if weightless[name]}
            )
        training, validation = split(recipe, documents)
        if isinstance(training, Mixture):
            console.say(mixture_summary(recipe, documents, training))
        start_tokenising(recipe, documents, console)
        counts = dict[str, Epoch]()
        if checkpoint and not length_changes(recipe, checkpoint["recipe"]):
            steps = checkpoint["steps"]
        else:
            steps, counts = count_steps(recipe, documents, training, validation, console)
        for message in data_messages(recipe, steps, num_documents(training), len(validation), counts):
            console.say(message)
        warmup = warmup_steps(recipe.warmup_steps, steps, checkpoint)
        if warmup > steps:
            console.say(f"warmup_steps: {warmup:,} is more than there are steps; all {steps:,} are warm-up")
        warmup = min(warmup, steps)
        is_same = check_schedule(recipe, steps, warmup, start, checkpoint)
        opened.pop_all()
    return RunPlan(
        recipe, base, documents, content, training, validation, steps, warmup, start, checkpoint, is_same, out, counts
    )


def _tell_of_new_tokens(recipe: TrainingRecipe, base: Base, console: Console) -> None:
    """Say which tokens the chat template adds, and which rows or whole modules LoRA trains for them."""
    if base.new_tokens:
        console.say(f"the tokenizer and the embeddings get {', '.join(base.new_tokens)} for the chat template")
        settings = recipe.settings()
        names = ("lora_trainable_token_indices", "lora_modules_to_save")
        if name := next((name for name in names if settings.get(name)), None):
            console.say(f"{name}: is {', '.join(map(str, settings[name]))}, which trains the rows of the new tokens")


def _check_start(recipe: TrainingRecipe) -> None:
    """ConfigError if the recipe starts from draft heads of another kind."""
    if recipe.start:
        require_command(config_of_heads(recipe.start), recipe.kind, recipe.start)


def _check_recipe(recipe: TrainingRecipe) -> None:
    """Raise ConfigError for a recipe without base or data; and, or InputError, for settings that do not suit the number
    of ranks."""
    if recipe.base is None or not recipe.data:
        raise ConfigError(f"{'data' if recipe.base else 'base'}: the recipe has none; give it")
    check_precision(recipe.parallel)
    _, data_ranks = data_share(recipe.parallel)
    _, passes = recipe.micro_batches(data_ranks)  # raises if the ranks cannot divide the batch
    recipe.check_optimizer(passes, is_sharded=is_sharded(recipe.parallel))


def _require_same_data(documents: Documents, ranks: Ranks) -> None:
    """Raise InputError on all ranks unless all ranks read the same text: each rank packs it and takes its share."""
    with ranks.step("data", ""):
        fingerprint = documents.fingerprint if ranks.together else None
    fingerprints = ranks.gather(fingerprint)
    if others := [rank for rank, other in enumerate(fingerprints) if other != fingerprints[0]]:
        names = ", ".join(map(str, others))
        raise InputError(f"data: has other content on rank {names} than on rank 0; give all ranks the same files")
