"""Settings of how and when documents become tokens. They do not change the tokens."""

from __future__ import annotations

from pydantic import BaseModel, Field

TOKENISING = ("dataset_num_proc", "token_cache")
"""Settings that may change when a run resumes."""


class TokenisingSettings(BaseModel):
    """Settings of tokenising."""

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
