"""Medusa heads within a model's own checkpoint (`full-hf`): how its config and its tensors' names tell of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MEDUSA_PREFIX = "medusa_head."
"""Of the tensors' names."""
MEDUSA_COUNTS = ("medusa_num_heads", "medusa_num_layers")
"""Fields of config.json."""


def without_heads(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The base model's part of a checkpoint's config, and patterns of the tensors that are none of it.

    A checkpoint that holds the model and heads says so in its config.
    """
    if not set(MEDUSA_COUNTS) <= set(config):
        return dict(config), []
    return {key: value for key, value in config.items() if key not in MEDUSA_COUNTS}, [f"^{re.escape(MEDUSA_PREFIX)}"]
