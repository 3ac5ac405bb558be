"""A native model, not wrapped, in tools that take transformers models: an error that names `wrap`."""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments, pipeline
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import ligermodels as lm

QUIET: dict[str, Any] = {"report_to": [], "max_steps": 1, "use_cpu": True, "bf16": False}


def grpo(model: Any, folder: Path) -> Any:
    options = GRPOConfig(str(folder / "out"), **QUIET)
    data, tokenizer = tiny.preferences().select_columns("prompt"), tiny.tokenizer()
    return GRPOTrainer(model, lambda completions, **_: [0.0], options, data, processing_class=tokenizer)


def dpo(model: Any, folder: Path) -> Any:
    options = DPOConfig(str(folder / "out"), **QUIET)
    return DPOTrainer(model, args=options, train_dataset=tiny.preferences(), processing_class=tiny.tokenizer())


def sft(model: Any, folder: Path) -> Any:
    options = SFTConfig(str(folder / "out"), **QUIET)
    return SFTTrainer(model, options, train_dataset=tiny.texts(), processing_class=tiny.tokenizer())


TOOLS: dict[str, Callable[[Any, Path], Any]] = {
    "Trainer": lambda model, folder: Trainer(model, TrainingArguments(str(folder / "out"), **QUIET)),
    "SFTTrainer": sft,
    "DPOTrainer": dpo,
    "GRPOTrainer": grpo,
    "PEFT, native names": lambda model, _: get_peft_model(model, LoraConfig("CAUSAL_LM", target_modules=["qkv"])),
    "PEFT, all linear": lambda model, _: get_peft_model(model, LoraConfig("CAUSAL_LM", target_modules="all-linear")),
    "pipeline": lambda model, _: pipeline("text-generation", model=model, tokenizer=tiny.tokenizer()),
    "HFLM": lambda model, _: HFLM(model, tokenizer=tiny.tokenizer(), device="cpu"),
}


@pytest.mark.parametrize("name", TOOLS)
def test_the_error_names_wrap(name: str, folder: Path, tmp_path: Path) -> None:
    model = lm.from_pretrained(folder, dtype=torch.float32)
    with pytest.raises((AttributeError, lm.errors.InputError), match=r"give ligermodels.integrations.wrap\(model\)"):
        TOOLS[name](model, tmp_path)


def test_the_model_and_its_config_are_as_before(folder: Path) -> None:
    """Attributes that are not there stay absent, and configs and models can be copied and changed by `replace`."""
    model = lm.from_pretrained(folder, dtype=torch.float32)
    assert not hasattr(model, "can_generate") and not hasattr(model.config, "use_cache")
    again = copy.deepcopy(model)
    assert again.config == model.config and dataclasses.replace(model.config, embed_scale=2.0).embed_scale == 2.0
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"field 'norm' of model.config: dataclasses.replace"):
        model.config.norm = None
    ids = torch.arange(3, 9)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
