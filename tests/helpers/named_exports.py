"""Exports of draft heads by any profile: each gets the arguments that it has a place for."""

from pathlib import Path
from typing import Any

import ligermodels as lm
from ligermodels.speculative.profiles import PROFILES


def export_named(model: Any, folder: Path, profile: str, base_model: str, **options: Any) -> None:
    """`model.export`, with `base_model` if the profile names it, and `max_shard_size` if it may have several files."""
    is_medusa = isinstance(model, lm.MedusaModel)
    profiles: Any = PROFILES if is_medusa else model.formats.PROFILES[model.head_type]
    if profile in profiles and profiles[profile].names_base:
        options["base_model"] = base_model
    if is_medusa and not PROFILES[profile].prefix:
        options.pop("max_shard_size", None)
    model.export(folder, profile, **options)
