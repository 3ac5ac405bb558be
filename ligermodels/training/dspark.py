"""Training of DFlash and DSpark: a draft head that proposes blocks, on a frozen model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.ranks import data_share
from ligermodels.speculative.block_draft import BlockDraftModel
from ligermodels.speculative.dspark import DFlashModel, DSparkModel
from ligermodels.training.console import Outcome
from ligermodels.training.draft_recipe import DFLASH, DSPARK, TRAINING, BlockRecipe, DFlashRecipe, DSparkRecipe
from ligermodels.training.heads import draft_metrics, frozen_base_job, initialized_by
from ligermodels.training.job import Job, RunOptions, quantize_base
from ligermodels.training.run import JobKind

if TYPE_CHECKING:
    from typing_extensions import Unpack

MODELS: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    DFlashRecipe.kind: (DFlashModel, DFLASH, TRAINING),
    DSparkRecipe.kind: (DSparkModel, DSPARK, (*TRAINING, "confidence_weight")),
}
"""Kind of recipe -> its model, the settings of a new head, and the settings of `BlockTraining`."""


def train_dflash(recipe: DFlashRecipe, out: str | os.PathLike[str], **options: Unpack[RunOptions]) -> Outcome:
    """Train a DFlash head by `recipe`, on a frozen model.

    Args:
        recipe: the settings.
        out: folder to write to: the head, in speculators' form.
        options: `device`, `attention`, `resume`, `overwrite`, `console` and `callbacks`: see `RunOptions`.

    Returns:
        The last step and the final evaluation, a `HeadsEvaluation`.

    Raises:
        ConfigError, InputError, CheckpointError, TrainingError, KeyboardInterrupt: see `run_job`. Also the errors of
            `DFlashModel.from_pretrained` for the head in `start_from`.

    Examples:
        >>> recipe = DFlashRecipe(base="Qwen/Qwen3-8B", data="chats.jsonl", steps=2000)
        >>> outcome = train_dflash(recipe, "head/", device="cuda")
        >>> outcome.evaluation.metrics()["greedy_tau"]  # on the validation split
    """
    return DFLASH_KIND.train(recipe, out, **options)


def train_dspark(recipe: DSparkRecipe, out: str | os.PathLike[str], **options: Unpack[RunOptions]) -> Outcome:
    """Train a DSpark head by `recipe`, on a frozen model.

    Args:
        recipe: the settings.
        out: folder to write to: the head, in speculators' form.
        options: `device`, `attention`, `resume`, `overwrite`, `console` and `callbacks`: see `RunOptions`.

    Returns:
        The last step and the final evaluation, a `HeadsEvaluation`.

    Raises:
        ConfigError, InputError, CheckpointError, TrainingError, KeyboardInterrupt: see `run_job`. Also the errors of
            `DSparkModel.from_pretrained` for the head in `start_from`.

    Examples:
        >>> recipe = DSparkRecipe(base="Qwen/Qwen3-8B", data="chats.jsonl", steps=2000)
        >>> outcome = train_dspark(recipe, "head/", device="cuda")
        >>> outcome.evaluation.metrics()["tau"]  # on the validation split
    """
    return DSPARK_KIND.train(recipe, out, **options)


class PackedBlocks(nn.Module):
    """A model with a head, trained on up to `num_anchors` blocks of each sequence of a packed row.

    A run has all sequences of a micro-batch in one row, of which the model alone takes as many blocks as of a single
    sequence.

    Args:
        model: the model with the head.
        sequences: sequences of a packed row.
    """

    def __init__(self, model: BlockDraftModel, sequences: int) -> None:
        super().__init__()
        self.model, self._sequences = model, sequences

    @property
    def trained_model(self) -> BlockDraftModel:
        """The model with its head, for callbacks."""
        return self.model

    def forward(self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None, **options: Any) -> Any:
        """The output of the model.

        Args:
            input_ids: (B, T), or (1, n) of packed documents.
            labels: of the same shape.
            cu_seqlens: bounds of packed documents. Default: each row is a sequence.
            options: other arguments of the model's forward.
        """
        options["num_anchors"] = self._num_anchors(cu_seqlens)
        return self.model(input_ids, labels=labels, cu_seqlens=cu_seqlens, **options)

    def num_targets(
        self,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The numbers of targets of each slot, long (K,), of the blocks that `forward` samples. See
        `MultiHeadModel.num_targets` for labels, position_ids, cu_seqlens and attention_mask."""
        num_anchors = self._num_anchors(cu_seqlens)
        return self.model.num_targets(labels, position_ids, cu_seqlens, attention_mask, num_anchors=num_anchors)

    def _num_anchors(self, cu_seqlens: Tensor | None) -> int:
        """Most blocks of a row: the blocks of all sequences in it."""
        return self.model.training_options.num_anchors * (1 if cu_seqlens is None else self._sequences)


def _job(recipe: BlockRecipe, model: CausalLM, *, resuming: bool) -> Job:
    """See `JobFactory`. A head in `start_from` is read also when the run resumes, for its sizes. ConfigError if the
    settings do not fit the model."""
    model_class, shape, how = MODELS[recipe.kind]
    training = {name: getattr(recipe, name) for name in how} | {"seed": recipe.seed}
    if recipe.start_from is not None:
        head = model_class.from_pretrained(model, recipe.start_from, **training)
    else:
        network = {name: getattr(recipe, name) for name in shape} | {"boundaries": recipe.boundaries or None}
        with initialized_by(recipe.seed, model):
            head = model_class.from_base(model, **network, **training)
    packed = PackedBlocks(head, recipe.micro_batches(data_share(recipe.parallel)[1])[0])
    options: dict[str, Any] = {
        "trainable": packed,
        "validation_batch_size": 1,
    }  # the blocks of a row depend on its labels
    return frozen_base_job(head, recipe.learning_rate, head.save_pretrained, draft_metrics, **options)


DFLASH_KIND = JobKind(DFlashRecipe, _job, quantize_base)
DSPARK_KIND = JobKind(DSparkRecipe, _job, quantize_base)
