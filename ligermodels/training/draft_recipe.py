"""Recipes of draft heads on a frozen model: EAGLE-3, DFlash and DSpark."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ligermodels.arguments import (
    BLOCK_LOSS,
    CONFIDENCE,
    EAGLE_DECAY,
    EAGLE_FLAGS,
    EAGLE_STEPS,
    MARKOV,
    Condition,
    Divergence,
    QuantizedFormat,
)
from ligermodels.errors import ConfigError
from ligermodels.training.recipe import CONDITIONS, TrainingRecipe
from ligermodels.training.settings import QUANTIZED, Integers, Names, PathName


def draft_conditions(*new_head: str) -> tuple[Condition, ...]:
    """The conditions of a recipe of draft heads; `new_head` are the settings that describe a new head."""
    return (
        (
            new_head,
            lambda settings: settings["start_from"] is None,
            "is for a new head; the head in start_from has its own",
        ),
        *QUANTIZED,
        (
            ("activation_checkpointing",),
            lambda settings: False,
            "is for the backward pass of the model, which is frozen",
        ),
        *CONDITIONS,
    )


class DraftRecipe(TrainingRecipe, init=False):
    """Settings of a run that trains a draft head on a frozen model."""

    trains_heads: ClassVar[bool] = True
    reads_start: ClassVar[bool] = True
    kept: ClassVar[frozenset[str]] = frozenset({"start_from"})

    start_from: PathName = Field(None, description="Head to start from: a folder or a hub id.  [default: a new head]")
    quantize: QuantizedFormat | None = Field(
        None, description="Keep the frozen weights of the model's blocks in 4 or 8 bits.  [default: in `dtype`]"
    )
    quantize_exclude: Names = Field(
        (), description="Patterns of layers that are not quantised, such as mlp.experts or mlp.down."
    )
    boundaries: Integers = Field(
        (),
        description="States that the head reads, each by the number of layers before it.  "
        "[default: a few layers spread over the model]",
    )


class EagleRecipe(DraftRecipe, init=False):
    """Settings of a run that trains an EAGLE-3 head. The defaults are SpecForge's.

    Examples:
        >>> recipe = EagleRecipe(base="meta-llama/Llama-3.1-8B-Instruct", data="chats.jsonl", num_steps=7)
    """

    kind: ClassVar[str] = "eagle"
    conditions: ClassVar[tuple[Condition, ...]] = draft_conditions(
        "layer", "boundaries", "draft_vocab_size", "lm_head", *EAGLE_FLAGS
    )

    num_steps: int = Field(
        EAGLE_STEPS,
        ge=1,
        description="How often the head is applied: tokens predicted beyond the next one. The file names it.",
    )
    decay: float = Field(EAGLE_DECAY, ge=0, description="Loss weight of step k, from 0: decay ** k.")
    divergence: Divergence = Field(
        "forward_kl", description="Loss: divergence of the head's distribution from the model's."
    )
    draft_vocab_size: int = Field(
        32000,
        ge=1,
        description="Tokens that the head can propose: the most frequent ones in the training data; at most all.",
    )
    layer: Literal["llama", "qwen3"] = Field("llama", description="Kind of the head's layer.")
    boundaries: Integers = Field(
        (),
        description="States that the head reads, each by the number of layers before it.  "
        "[default: 2, half, and all but 3 of the layers]",
    )
    lm_head: Literal["own", "shared"] = Field(
        "own", description="own: a trained lm_head, from the model's; shared: the rows of the model's lm_head."
    )
    norm_before_residual: bool = Field(False, description="The residual stream starts from the normalised features.")
    norm_before_fc: bool = Field(False, description="One norm over all states that the head reads.")
    fc_norm: bool = Field(False, description="A norm over each state that the head reads (EAGLE-3.1).")
    norm_output: bool = Field(False, description="The next step reads the result after the final norm (EAGLE-3.1).")

    learning_rate: float = Field(1e-4, ge=0, description="Peak learning rate.")

    @property
    def shortest_sequence(self) -> tuple[int, str]:
        return self.num_steps + 2, f"of {self.num_steps} steps"


TRAINING = ("num_anchors", "gamma", "ce_weight", "divergence", "divergence_weight", "dpace_alpha")
"""Settings of `BlockTraining`."""
DFLASH = ("block_size", "num_layers", "mask_token_id")
"""Settings of a new head, beside `boundaries`."""
DSPARK = (*DFLASH, "markov_rank", "markov_head_type", "confidence", "confidence_with_markov")


class BlockRecipe(DraftRecipe, init=False):
    """Settings of a run that trains a head on blocks of a text."""

    from_anchor: ClassVar[bool] = True
    """Whether the anchor's own slot proposes a token too."""

    block_size: int = Field(2, ge=1, description="Slots of a block, of which the first holds the last verified token.")
    num_layers: int = Field(5, ge=1, description="Layers of the head.")
    mask_token_id: int | None = Field(
        None, ge=0, description="Token of the empty slots, one that texts do not have.  [default: the last id]"
    )
    num_anchors: int = Field(512, ge=1, description="Most blocks that a sequence is trained on.")
    gamma: float | None = Field(4.0, gt=0, description="Slot k, from 0, has the weight exp(-k / gamma); null: 1.")
    dpace_alpha: float | None = Field(
        None, ge=0, le=1, description="Weights of D-PACE with this constant, such as 0.5.  [default: those of gamma]"
    )
    ce_weight: float = Field(1.0, ge=0, description="Weight of the cross entropy to the text.")
    divergence: Divergence = Field("l1", description="Divergence of the head's distribution from the model's.")
    divergence_weight: float = Field(0.0, ge=0, description="Weight of the divergence.")

    learning_rate: float = Field(6e-4, ge=0, description="Peak learning rate.")

    @property
    def shortest_sequence(self) -> tuple[int, str]:
        return self.block_size + self.from_anchor, "slot of a block"

    def check(self) -> None:
        if self.dpace_alpha is not None and (self.divergence_weight or not self.ce_weight):
            raise ConfigError("dpace_alpha: D-PACE weighs the cross entropy; give ce_weight, no divergence_weight")
        own = self.settings()
        confidence_weight = own["confidence_weight"] if own.get("confidence") else 0
        if not (self.ce_weight or self.divergence_weight or confidence_weight):
            raise ConfigError("ce_weight, divergence_weight: both are 0, so nothing trains the head; give one above 0")
        super().check()


class DFlashRecipe(BlockRecipe, init=False):
    """Settings of a run that trains a DFlash head. The defaults are the published settings.

    Examples:
        >>> recipe = DFlashRecipe(base="Qwen/Qwen3-8B", data="chats.jsonl", block_size=16)
    """

    kind: ClassVar[str] = "dflash"
    from_anchor: ClassVar[bool] = False
    conditions: ClassVar[tuple[Condition, ...]] = (*draft_conditions("boundaries", *DFLASH), *BLOCK_LOSS)

    block_size: int = Field(16, ge=2, description="Slots of a block; one token fewer is proposed.")
    gamma: float | None = Field(7.0, gt=0, description="Draft k, from 0, has the weight exp(-k / gamma); null: 1.")


class DSparkRecipe(BlockRecipe, init=False):
    """Settings of a run that trains a DSpark head. The defaults are the published settings.

    Examples:
        >>> recipe = DSparkRecipe(base="Qwen/Qwen3-8B", data="chats.jsonl", block_size=7)
    """

    kind: ClassVar[str] = "dspark"
    conditions: ClassVar[tuple[Condition, ...]] = (
        *draft_conditions("boundaries", *DSPARK),
        *BLOCK_LOSS,
        *CONFIDENCE,
        *MARKOV,
    )

    block_size: int = Field(7, ge=1, description="Slots of a block, each of which proposes a token.")
    markov_rank: int = Field(256, ge=0, description="Rank of the Markov head; 0: none.")
    markov_head_type: Literal["vanilla", "gated", "rnn"] = Field("vanilla", description="Kind of the Markov head.")
    confidence: bool = Field(True, description="A head that estimates the acceptance of each slot.")
    confidence_with_markov: bool = Field(True, description="It reads the Markov head's embeddings too.")
    ce_weight: float = Field(0.1, ge=0, description="Weight of the cross entropy to the text.")
    divergence_weight: float = Field(0.9, ge=0, description="Weight of the divergence.")
    confidence_weight: float = Field(1.0, ge=0, description="Weight of the confidence head's loss.")
