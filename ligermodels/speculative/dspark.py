"""DFlash (arXiv 2602.06036) and DSpark (https://github.com/deepseek-ai/DeepSpec): draft heads that propose a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ligermodels.models.extra_heads import DFLASH_TYPE, DSPARK_TYPE
from ligermodels.speculative.block_draft import BlockDraftModel


class DFlashModel(BlockDraftModel):
    """A base model with a DFlash head. Slot j of a block, from 1 on, predicts the token at its own position.

    It is trained by cross entropy to the text. Slots do not see one another's tokens.

    Examples:
        >>> dflash = lm.DFlashModel.from_base(model, block_size=8, num_layers=2)
        >>> dflash(input_ids, labels=input_ids).loss.backward()  # gradients of the head only
    """

    kind, head_type = "DFlash", DFLASH_TYPE
    from_anchor, block_size = False, 16
    training_defaults: ClassVar[Mapping[str, Any]] = {"gamma": 7.0}


class DSparkModel(BlockDraftModel):
    """A base model with a DSpark head. Slot k of a block predicts the token after its position, from the anchor's own
    slot on. A Markov head corrects its logits by the token before; a confidence head estimates its acceptance.

    It is trained by 0.1 times the cross entropy to the text, 0.9 times the L1 distance from the model's distribution,
    and the confidence head's cross entropy.

    Examples:
        >>> dspark = lm.DSparkModel.from_base(model, block_size=7, num_layers=2, markov_rank=128)
        >>> dspark(input_ids, labels=input_ids).loss.backward()  # gradients of the head only
    """

    kind, head_type = "DSpark", DSPARK_TYPE
    from_anchor, block_size = True, 7
    head_defaults: ClassVar[Mapping[str, Any]] = {
        "markov_rank": 256, "markov_head_type": "vanilla", "confidence": True, "confidence_with_markov": True,
    }  # fmt: skip
    training_defaults: ClassVar[Mapping[str, Any]] = {"ce_weight": 0.1, "divergence_weight": 0.9}

    @classmethod
    def _network_fields(cls, **network: Any) -> dict[str, Any]:
        rank = network["markov_rank"]
        return {
            "markov_rank": rank,
            "markov_head_type": network["markov_head_type"],
            "enable_confidence_head": network["confidence"],
            "confidence_head_with_markov": network["confidence_with_markov"] and rank > 0,
        }
