"""Loading draft heads of the kind that a checkpoint holds: Medusa, MTP, EAGLE-3, DFlash or DSpark."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ligermodels.convert import hub
from ligermodels.convert.files import ADAPTER_CONFIG
from ligermodels.errors import CheckpointError, ConfigError, HubError, short
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.extra_heads import DFLASH_TYPE, DSPARK_TYPE, EAGLE_TYPE, MTP_TYPE, draft_type, without_heads
from ligermodels.speculative.dspark import DFlashModel, DSparkModel
from ligermodels.speculative.eagle3 import Eagle3Model
from ligermodels.speculative.hub import config_of_heads
from ligermodels.speculative.medusa import MedusaModel
from ligermodels.speculative.medusa_files import NoHeadsError
from ligermodels.speculative.mtp import MTPModel
from ligermodels.speculative.mtp_files import holds_head
from ligermodels.speculative.multi_head import MultiHeadModel

DRAFT_HEADS: dict[str, Any] = {EAGLE_TYPE: Eagle3Model, DFLASH_TYPE: DFlashModel, DSPARK_TYPE: DSparkModel}
"""Type of a head with a network beside the model -> its class."""


def load_multi_head(
    base: CausalLM, heads: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
) -> MultiHeadModel:
    """Load Medusa heads, or an MTP, EAGLE-3, DFlash or DSpark head, and freeze the base model's parameters.

    Args:
        base: the base model.
        heads: folder or hub id of heads alone, or of a model's checkpoint with heads in it.
        progress: called with (bytes loaded, bytes in total) of the heads.

    Returns:
        A `MedusaModel`, `MTPModel`, `Eagle3Model`, `DFlashModel` or `DSparkModel`.

    Raises:
        CheckpointError: there are no heads; or files or tensors are missing, damaged, or made for another base model.
        HubError: the files cannot be fetched.
        ConfigError: MTP is not implemented for this base model, or the heads are of a kind that is not implemented.

    Examples:
        >>> model = load_multi_head(base, "heads/")
        >>> model.generate([[1, 5, 9]], max_new_tokens=64)
    """
    config = config_of_heads(heads)
    if (kind := draft_type(config)) is not None:
        return DRAFT_HEADS[kind].from_pretrained(base, heads, progress=progress)
    refuse_others(config, heads)
    if _is_mtp(base, heads):
        return MTPModel.from_pretrained(base, heads, progress=progress)
    try:
        return MedusaModel.from_pretrained(base, heads, progress=progress)
    except NoHeadsError as error:
        if os.path.isfile(os.path.join(heads, ADAPTER_CONFIG)):
            raise NoHeadsError(
                f"{heads}: holds a LoRA adapter and no draft heads; load_adapter opens it, and --adapter in commands"
            ) from None
        raise NoHeadsError(f"{error}; and no MTP head for this model") from None


def refuse_others(config: Mapping[str, Any], heads: object) -> None:
    """ConfigError if the `config` of `heads`, whose kind is not in DRAFT_HEADS, names a kind in speculators' form."""
    if (other := config.get("speculators_model_type")) is not None:
        raise ConfigError(
            f"{heads}: speculators_model_type: {short(other)} heads are not implemented; give {', '.join(DRAFT_HEADS)}"
        )


def _is_mtp(base: CausalLM, heads: str | os.PathLike[str]) -> bool:
    config = config_of_heads(heads)
    if config.get("model_type") in (None, "medusa", MTP_TYPE) or without_heads(config)[1]:
        return config.get("model_type") == MTP_TYPE
    try:
        return holds_head(base, hub.resolve(heads))
    except (CheckpointError, HubError):  # not a model's checkpoint; MedusaModel.from_pretrained raises the clear error
        return False
