"""The form of a run's data: texts and chats, or preference data, and its parts that an objective needs."""

from __future__ import annotations

from typing import Literal, NamedTuple


class DataForm(NamedTuple):
    """The form of a run's records.

    name: "documents", texts and chats; "pairs" of a chosen and a rejected completion; or "unpaired" completions with a
        label.
    row_sequences: sequences that a row of a batch must hold.
    mismatched: whether unpaired completions come with mismatched ones, for KTO's estimate of the KL divergence.
    prompt_targets: whether the likelihood of chosen sequences counts their prompts.
    """

    name: Literal["documents", "pairs", "unpaired"] = "documents"
    row_sequences: int = 1
    mismatched: bool = False
    prompt_targets: bool = False
