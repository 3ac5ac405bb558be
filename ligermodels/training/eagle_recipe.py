"""Recipes for EAGLE-3 heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ligermodels.errors import ConfigError
from ligermodels.training.draft_recipe import DraftRecipe, draft_conditions
from ligermodels.training.recipe import Condition

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Settings with the names of published heads' fields; see `Eagle3Config`."""


class EagleRecipe(DraftRecipe):
    """Settings of a run that trains an EAGLE-3 head. The defaults are SpecForge's.

    Examples:
        >>> recipe = EagleRecipe(base="meta-llama/Llama-3.1-8B-Instruct", data="chats.jsonl", num_steps=7)
    """

    kind: ClassVar[str] = "eagle"
    conditions: ClassVar[tuple[Condition, ...]] = draft_conditions(
        "layer", "boundaries", "draft_vocab_size", "lm_head", *FLAGS
    )

    num_steps: int = Field(
        7, ge=1, description="How often the head is applied: tokens predicted beyond the next one. The file names it."
    )
    decay: float = Field(0.8, ge=0, description="Loss weight of step k, from 0: decay ** k.")
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "tv", "l1", "nla", "lk"] = Field(
        "forward_kl", description="Loss: divergence of the head's distribution from the model's."
    )
    draft_vocab_size: int = Field(
        32000,
        ge=1,
        description="Tokens that the head can propose: the most frequent ones in the training data; at most all.",
    )
    layer: Literal["llama", "qwen3"] = Field("llama", description="Kind of the head's layer.")
    boundaries: tuple[int, ...] = Field(
        (),
        description="States that the head reads, each by the number of layers before it.  "
        "[default: 2, half, and all but 3 of the layers]",
    )
    lm_head: Literal["own", "shared"] = Field(
        "own", description="own: a trained lm_head, from the model's; shared: the rows of the model's lm_head."
    )
    norm_before_residual: bool = Field(False, description="The residual stream starts from the normalised features.")
    norm_before_fc: bool = Field(False, description="One norm over all states that the head reads.")
    fc_norm: bool = Field(False, description="A norm over each state that the head reads (EAGLE-3.1).")
    norm_output: bool = Field(False, description="The next step reads the result after the final norm (EAGLE-3.1).")

    learning_rate: float = Field(1e-4, ge=0, description="Peak learning rate.")

    if TYPE_CHECKING:  # the constructor that type checkers derive would ask for every setting

        def __init__(self, **settings: Any) -> None: ...

    def check(self) -> None:
        if self.seq_len < self.num_steps + 2:
            raise ConfigError(
                f"seq_len: sequences of {self.seq_len} tokens have no target for the last of {self.num_steps} steps; "
                f"it must be at least {self.num_steps + 2}"
            )
        super().check()
