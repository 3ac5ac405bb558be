"""Heads of any kind, found by what their config.json says."""

from __future__ import annotations

import os
from collections.abc import Callable

from ligermodels.convert import hub
from ligermodels.convert.config_json import read_json
from ligermodels.errors import CheckpointError, HubError
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.extra_heads import without_heads
from ligermodels.speculative.files import NoHeadsError
from ligermodels.speculative.medusa import MedusaModel
from ligermodels.speculative.mtp import MTPModel
from ligermodels.speculative.mtp_files import CONFIG, MODEL_TYPE, holds_head
from ligermodels.speculative.multi_head import MultiHeadModel


def load_multi_head(
    base: CausalLM, heads: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
) -> MultiHeadModel:
    """The Medusa heads, or the head of multi-token prediction, in a folder or under a hub id, on the (now frozen) base;
    alone, or in a model's checkpoint. Errors are those of the two models' `from_pretrained`."""
    if _is_mtp(base, heads):
        return MTPModel.from_pretrained(base, heads, progress=progress)
    try:
        return MedusaModel.from_pretrained(base, heads, progress=progress)
    except NoHeadsError as error:
        raise NoHeadsError(f"{error}; and no MTP head for this model") from None


def _is_mtp(base: CausalLM, heads: str | os.PathLike[str]) -> bool:
    path = hub.resolve(heads, weights=False) / CONFIG
    config = read_json(path) if path.is_file() else {}
    if config.get("model_type") in (None, "medusa", MODEL_TYPE) or without_heads(config)[1]:
        return config.get("model_type") == MODEL_TYPE
    try:
        return holds_head(base, hub.resolve(heads))
    except (CheckpointError, HubError):  # Medusa heads in files of their own; or they say what is wrong
        return False
