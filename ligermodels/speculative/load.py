"""Heads of any kind, found by what their config.json says."""

from __future__ import annotations

import os
from collections.abc import Callable

from ligermodels.archs.causal_lm import CausalLM
from ligermodels.archs.extra_heads import without_heads
from ligermodels.convert import hub
from ligermodels.convert.config_json import read_json
from ligermodels.speculative.medusa import MedusaModel
from ligermodels.speculative.mtp import MTPModel
from ligermodels.speculative.mtp_files import CONFIG
from ligermodels.speculative.multi_head import MultiHeadModel


def load_multi_head(
    base: CausalLM, heads: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
) -> MultiHeadModel:
    """The Medusa heads, or the head of multi-token prediction, in a folder or under a hub id, on the (now frozen) base;
    alone, or in a model's checkpoint. Errors are those of the two models' `from_pretrained`."""
    path = hub.resolve(heads, weights=False) / CONFIG
    config = read_json(path) if path.is_file() else {}
    medusa = config.get("model_type") in (None, "medusa") or without_heads(config)[1]
    kind: type[MedusaModel] | type[MTPModel] = MedusaModel if medusa else MTPModel
    return kind.from_pretrained(base, heads, progress=progress)
