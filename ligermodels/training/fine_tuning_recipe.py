"""Recipes for whole language models: fine-tuning, and pre-training from a config."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from ligermodels.arguments import Condition, QuantizedFormat
from ligermodels.training.objective_recipe import ObjectiveRecipe
from ligermodels.training.settings import QUANTIZED, Integers, Names, PathName

LM_EVAL = ("lm_eval_every", "lm_eval_limit", "lm_eval_num_fewshot", "lm_eval_batch_size", "lm_eval_include_path")
"""Options of lm-eval. After `lm_eval_` come names of lm-eval's command line."""
LORA_LEARNING_RATE = 2e-4
"""Peak learning rate of LoRA if none is given."""
PREFERENCE_LEARNING_RATE = 1e-6
"""Peak learning rate on preference data if none is given, as TRL's; for LoRA ten times as much."""


class FineTuningRecipe(ObjectiveRecipe, init=False):
    """Settings of a run that trains a whole language model, or LoRA on it, by an objective.

    Examples:
        >>> recipe = FineTuningRecipe(base="Qwen/Qwen2.5-0.5B-Instruct", data="chats.jsonl", lora_rank=16)
    """

    kind: ClassVar[str] = "train"
    conditions: ClassVar[tuple[Condition, ...]] = (
        (
            ("lora_alpha", "lora_dropout", "lora_targets", "lora_modules_to_save", "lora_trainable_token_indices"),
            lambda settings: settings["lora_rank"] is not None,
            "is for LoRA; give lora_rank too",
        ),
        (
            ("quantize",),
            lambda settings: settings["lora_rank"] is not None,
            "freezes the weights, which only LoRA then trains; give lora_rank too",
        ),
        (
            ("router_bias_update_rate",),
            lambda settings: settings["lora_rank"] is None,
            "changes the routers of the model, and LoRA trains an adapter, which has none",
        ),
        *QUANTIZED,
        (LM_EVAL, lambda settings: bool(settings["lm_eval"]), "is for tasks of lm-eval; give lm_eval too"),
        *ObjectiveRecipe.conditions,
    )

    may_change: ClassVar[frozenset[str]] = ObjectiveRecipe.may_change | {"lm_eval", *LM_EVAL}

    learning_rate: float = Field(
        2e-5,
        ge=0,
        description="Peak learning rate.  [default: 2e-5, for LoRA 2e-4; on preference data and for grpo 1e-6, there "
        "for LoRA 1e-5]",
    )
    lora_rank: int | None = Field(
        None, ge=1, description="Train LoRA of this rank, and write an adapter.  [default: all parameters are trained]"
    )
    lora_alpha: float | None = Field(
        None, gt=0, description="LoRA: the update is scaled by alpha / rank.  [default: 2 rank]"
    )
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="LoRA: dropout of the inputs of A.")
    lora_targets: Names = Field(
        (),
        description="LoRA: names of linear layers in transformers, such as q_proj; experts; all-linear.  [default: "
        "all-linear, the linear layers of the blocks without experts]",
    )
    lora_modules_to_save: Names = Field(
        (), description="LoRA: names of modules that are trained whole, such as embed_tokens and lm_head, or norm."
    )
    lora_trainable_token_indices: Integers = Field(
        (),
        description="LoRA: ids of tokens whose rows of the embedding and the LM head are trained.  [default: the ids "
        "that the chat template adds]",
    )

    quantize: QuantizedFormat | None = Field(
        None, description="LoRA: keep the frozen weights of the blocks in 4 or 8 bits (QLoRA).  [default: in `dtype`]"
    )
    quantize_exclude: Names = Field(
        (), description="quantize, sampling_quantize: patterns of layers that are not quantised, such as mlp.down."
    )

    router_z_loss_coef: float = Field(
        0.0, ge=0, description="Mixtures of experts: weight of the routers' z-loss, such as 0.001."
    )
    router_bias_update_rate: float = Field(
        0.0,
        ge=0,
        description="Mixtures with selection biases (DeepSeek-V3, GLM-4.5 and others): change of the biases after each "
        "step, towards an even load, such as 0.001.",
    )

    lm_eval: Names = Field(
        (), description="Tasks of lm-evaluation-harness, also as a,b: evaluated on the model while it is trained."
    )
    lm_eval_every: int | None = Field(
        None, ge=1, description="Steps between evaluations of these tasks.  [default: on the result only]"
    )
    lm_eval_limit: float | None = Field(
        None, gt=0, description="lm-eval: examples per task, or below 1 a fraction of them.  [default: all]"
    )
    lm_eval_num_fewshot: int | None = Field(
        None, ge=0, description="lm-eval: examples in the prompt.  [default: the task's]"
    )
    lm_eval_batch_size: int = Field(1, ge=1, description="lm-eval: sequences per batch.")
    lm_eval_include_path: PathName = Field(None, description="lm-eval: a folder with further tasks.")

    @model_validator(mode="after")
    def _default_learning_rate(self) -> FineTuningRecipe:
        if "learning_rate" not in self.model_fields_set:  # nor is it afterwards: it is a default
            is_lora = self.lora_rank is not None
            if self.data_form.name != "documents":
                self.__dict__["learning_rate"] = PREFERENCE_LEARNING_RATE * (10 if is_lora else 1)
            elif is_lora:
                self.__dict__["learning_rate"] = LORA_LEARNING_RATE
        return self

    @property
    def trains_configs(self) -> bool:
        return self.lora_rank is None

    @property
    def trains_embeddings(self) -> bool:
        whole = {name.rpartition(".")[2] for name in self.lora_modules_to_save}
        return self.trains_configs or ("lm_head" in whole and any("embed" in name for name in whole))
