"""Recipes for DFlash and DSpark heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ligermodels.errors import ConfigError
from ligermodels.training.draft_recipe import DraftRecipe, draft_conditions
from ligermodels.training.recipe import Condition

TRAINING = ("num_anchors", "gamma", "ce_weight", "divergence", "divergence_weight", "dpace_alpha")
"""Settings of `BlockTraining`."""
DFLASH = ("block_size", "num_layers", "mask_token_id")
"""Settings of a new head, beside `boundaries`."""
DSPARK = (*DFLASH, "markov_rank", "markov_head_type", "confidence", "confidence_with_markov")


class BlockRecipe(DraftRecipe):
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
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "tv", "l1", "nla", "lk"] = Field(
        "l1", description="Divergence of the head's distribution from the model's."
    )
    divergence_weight: float = Field(0.0, ge=0, description="Weight of the divergence.")

    learning_rate: float = Field(6e-4, ge=0, description="Peak learning rate.")

    if TYPE_CHECKING:  # the constructor that type checkers derive would ask for every setting

        def __init__(self, **settings: Any) -> None: ...

    def check(self) -> None:
        if self.seq_len < (least := self.block_size + self.from_anchor):
            raise ConfigError(
                f"seq_len: sequences of {self.seq_len} tokens have no target for the last slot of a block; it must be "
                f"at least {least}"
            )
        if self.dpace_alpha is not None and (self.divergence_weight or not self.ce_weight):
            raise ConfigError("dpace_alpha: D-PACE weighs the cross entropy; give ce_weight, no divergence_weight")
        if not (self.ce_weight or self.divergence_weight or self.settings().get("confidence_weight")):
            raise ConfigError("ce_weight, divergence_weight: both are 0, so nothing trains the head; give one above 0")
        super().check()


_REPLACED: Condition = (
    ("gamma",), lambda settings: settings["dpace_alpha"] is None, "is for weights that dpace_alpha replaces",
)  # fmt: skip


class DFlashRecipe(BlockRecipe):
    """Settings of a run that trains a DFlash head. The defaults are the published settings.

    Examples:
        >>> recipe = DFlashRecipe(base="Qwen/Qwen3-8B", data="chats.jsonl", block_size=16)
    """

    kind: ClassVar[str] = "dflash"
    from_anchor: ClassVar[bool] = False
    conditions: ClassVar[tuple[Condition, ...]] = (*draft_conditions("boundaries", *DFLASH), _REPLACED)

    block_size: int = Field(16, ge=2, description="Slots of a block; one token fewer is proposed.")
    gamma: float | None = Field(7.0, gt=0, description="Draft k, from 0, has the weight exp(-k / gamma); null: 1.")

    if TYPE_CHECKING:

        def __init__(self, **settings: Any) -> None: ...


class DSparkRecipe(BlockRecipe):
    """Settings of a run that trains a DSpark head. The defaults are the published settings.

    Examples:
        >>> recipe = DSparkRecipe(base="Qwen/Qwen3-8B", data="chats.jsonl", block_size=7)
    """

    kind: ClassVar[str] = "dspark"
    conditions: ClassVar[tuple[Condition, ...]] = (*draft_conditions("boundaries", *DSPARK), _REPLACED)

    block_size: int = Field(7, ge=1, description="Slots of a block, each of which proposes a token.")
    markov_rank: int = Field(256, ge=0, description="Rank of the Markov head; 0: none.")
    markov_head_type: Literal["vanilla", "gated", "rnn"] = Field("vanilla", description="Kind of the Markov head.")
    confidence: bool = Field(True, description="A head that estimates the acceptance of each slot.")
    confidence_with_markov: bool = Field(True, description="It reads the Markov head's embeddings too.")
    ce_weight: float = Field(0.1, ge=0, description="Weight of the cross entropy to the text.")
    divergence_weight: float = Field(0.9, ge=0, description="Weight of the divergence.")
    confidence_weight: float = Field(1.0, ge=0, description="Weight of the confidence head's loss.")

    if TYPE_CHECKING:

        def __init__(self, **settings: Any) -> None: ...
