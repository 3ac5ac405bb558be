"""Recipes for EAGLE-3 heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from ligermodels.arguments import QuantizedFormat
from ligermodels.errors import ConfigError
from ligermodels.training.recipe import CONDITIONS, Condition, TrainingRecipe

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Settings with the names of published heads' fields; see `Eagle3Config`."""


class EagleRecipe(TrainingRecipe):
    """Settings of a run that trains an EAGLE-3 head. The defaults are SpecForge's.

    Examples:
        >>> recipe = EagleRecipe(base="meta-llama/Llama-3.1-8B-Instruct", data="chats.jsonl", num_steps=7)
    """

    kind: ClassVar[str] = "eagle"
    trains_heads: ClassVar[bool] = True
    conditions: ClassVar[tuple[Condition, ...]] = (
        (
            ("layer", "boundaries", "draft_vocab_size", "lm_head", *FLAGS),
            lambda settings: settings["start_from"] is None,
            "is for a new head; the head in start_from has its own",
        ),
        (
            ("quantize_exclude",),
            lambda settings: settings["quantize"] is not None,
            "is for quantised weights; give quantize too",
        ),
        (("float8",), lambda settings: settings["quantize"] is None, "is for weights that quantize does not round"),
        (
            ("activation_checkpointing",),
            lambda settings: False,
            "is for the backward pass of the model, which is frozen",
        ),
        *CONDITIONS,
    )
    kept: ClassVar[frozenset[str]] = frozenset({"start_from"})

    num_steps: int = Field(
        7, ge=1, description="How often the head is applied: tokens predicted beyond the next one. The file names it."
    )
    decay: float = Field(0.8, ge=0, description="Loss weight of step k, from 0: decay ** k.")
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "tv", "l1", "nla", "lk"] = Field(
        "forward_kl", description="Loss: divergence of the head's distribution from the model's."
    )
    start_from: str | None = Field(None, description="Head to start from: a folder or a hub id.  [default: a new head]")

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

    quantize: QuantizedFormat | None = Field(
        None, description="Keep the frozen weights of the model's blocks in 4 or 8 bits.  [default: in `dtype`]"
    )
    quantize_exclude: tuple[str, ...] = Field(
        (), description="Patterns of layers that are not quantised, such as mlp.experts or mlp.down."
    )

    learning_rate: float = Field(1e-4, ge=0, description="Peak learning rate.")

    if TYPE_CHECKING:  # the constructor that type checkers derive would ask for every setting

        def __init__(self, **settings: Any) -> None: ...

    @field_validator("boundaries", mode="before")
    @classmethod
    def _several_numbers(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    def check(self) -> None:
        if self.seq_len < self.num_steps + 2:
            raise ConfigError(
                f"seq_len: sequences of {self.seq_len} tokens have no target for the last of {self.num_steps} steps; "
                f"it must be at least {self.num_steps + 2}"
            )
        super().check()
