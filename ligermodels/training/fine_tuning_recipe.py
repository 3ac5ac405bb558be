"""Recipes for whole language models: fine-tuning, and pre-training from a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ligermodels.arguments import QuantizedFormat
from ligermodels.training import lm_eval_settings as harness
from ligermodels.training.recipe import CONDITIONS, Condition, TrainingRecipe


class FineTuningRecipe(TrainingRecipe):
    """Settings of a run that trains a whole language model, or LoRA on it.

    Examples:
        >>> recipe = FineTuningRecipe(base="Qwen/Qwen2.5-0.5B-Instruct", data="chats.jsonl", lora_rank=16)
    """

    kind: ClassVar[str] = "train"
    conditions: ClassVar[tuple[Condition, ...]] = (
        (
            ("lora_alpha", "lora_dropout", "lora_targets"),
            lambda settings: settings["lora_rank"] is not None,
            "is for LoRA; give lora_rank too",
        ),
        (
            ("quantize",),
            lambda settings: settings["lora_rank"] is not None,
            "freezes the weights, which only LoRA then trains; give lora_rank too",
        ),
        (
            ("quantize_exclude",),
            lambda settings: settings["quantize"] is not None,
            "is for quantised weights; give quantize too",
        ),
        (("float8",), lambda settings: settings["quantize"] is None, "is for weights that quantize does not round"),
        *harness.CONDITIONS,
        *CONDITIONS,
    )

    may_change: ClassVar[frozenset[str]] = TrainingRecipe.may_change | harness.MAY_CHANGE

    lora_rank: int | None = Field(
        None, ge=1, description="Train LoRA of this rank, and write an adapter.  [default: all parameters are trained]"
    )
    lora_alpha: float | None = Field(
        None, gt=0, description="LoRA: the update is scaled by alpha / rank.  [default: 2 rank]"
    )
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="LoRA: dropout of the inputs of A.")
    lora_targets: tuple[str, ...] = Field(
        (), description="LoRA: names of linear layers in transformers, such as q_proj.  [default: all in the blocks]"
    )

    quantize: QuantizedFormat | None = Field(
        None, description="LoRA: keep the frozen weights of the blocks in 4 or 8 bits (QLoRA).  [default: in `dtype`]"
    )
    quantize_exclude: tuple[str, ...] = Field(
        (), description="LoRA: patterns of layers that are not quantised, such as mlp.experts or mlp.down."
    )

    lm_eval: harness.Tasks = ()
    lm_eval_every: harness.Every = None
    lm_eval_limit: harness.Limit = None
    lm_eval_num_fewshot: harness.NumFewshot = None
    lm_eval_batch_size: harness.BatchSize = 1
    lm_eval_include_path: harness.IncludePath = None

    if TYPE_CHECKING:  # the constructor that type checkers derive would ask for every setting

        def __init__(self, **settings: Any) -> None: ...

    @property
    def trains_configs(self) -> bool:
        return self.lora_rank is None
