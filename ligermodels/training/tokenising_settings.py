"""Settings of how and when data is read and tokenised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, Field

TOKENISING = ("dataset_num_proc", "token_cache")
"""Settings that may change when a run resumes."""


STREAMING: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], bool], str], ...] = (
    (("shuffle_buffer_size",), lambda settings: settings["streaming"], "is for streaming, which is false"),
    (("token_cache",), lambda settings: not settings["streaming"], "is for data with an index; streaming keeps none"),
)
"""Conditions of settings: see `recipe.CONDITIONS`."""


class TokenisingSettings(BaseModel):
    """Settings of tokenising and streaming."""

    streaming: bool = Field(
        False, description="Read the data from start to end, without an index, for data larger than memory."
    )
    shuffle_buffer_size: int = Field(
        10_000, ge=1, le=2**31 - 1, description="Streaming: documents that are shuffled together."
    )

    dataset_num_proc: int | None = Field(
        None,
        ge=0,
        le=1024,
        description="Processes that tokenise; 0: the training process.  [default: one per CPU, at most 16; of ranks on "
        "one machine each gets its share]",
    )
    token_cache: bool = Field(
        True, description="Keep tokens on disk for later runs: in LIGERMODELS_CACHE, or else in ~/.cache/ligermodels."
    )
