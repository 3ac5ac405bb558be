"""Models that compute natively in transformers' Trainer and TRL's: the same losses, step by step, as without."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny import NATIVE, theirs
from torch.testing import assert_close

pytest.importorskip("trl", reason="needs ligermodels[integrations]")
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

QUIET: dict[str, Any] = {
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "max_steps": 4,
    "per_device_train_batch_size": 3,
    "learning_rate": 0.1,
    "optim": "sgd",  # AdamW divides gradients that are nearly zero by themselves
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "seed": 7,
}


def logged(trainer: Trainer, **options: Any) -> list[dict[str, float]]:
    """What the trainer logs of its steps."""
    trainer.train(**options)
    return trainer.state.log_history


def compare(
    found: list[dict[str, float]], wanted: list[dict[str, float]], *keys: str, rtol: float = 1e-4, native: str = ""
) -> None:
    """The same records for these keys."""
    for key in ("loss", "grad_norm", *keys):
        pair = [[record[key] for record in log if key in record] for log in (found, wanted)]
        assert pair[1], key
        where = f"{native} {key}"
        assert_close(
            torch.tensor(pair[0]), torch.tensor(pair[1]), rtol=rtol, atol=1e-5, msg=lambda m, w=where: f"{w}: {m}"
        )


def tokenized() -> Any:
    tokenizer = tiny.tokenizer()
    return tiny.texts().map(lambda row: tokenizer(row["text"]), remove_columns=["text"])


def accuracy(prediction: Any) -> dict[str, float]:
    """Of the next tokens."""
    logits, labels = prediction
    assert logits.shape[:2] == labels.shape
    labels, found = labels[:, 1:], np.argmax(logits, -1)[:, :-1]
    return {"accuracy": float((found == labels)[labels != -100].mean())}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_trainer(options: dict[str, Any], passes: list[int], folder: Path, tmp_path: Path) -> None:
    """Padded batches; evaluation has logits and the same metrics."""

    def run(hf: Any) -> list[dict[str, float]]:
        arguments = TrainingArguments(
            str(tmp_path), **{**QUIET, **options}, eval_strategy="steps", eval_steps=2, eval_do_concat_batches=True
        )
        collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
        data = tokenized()
        trainer = Trainer(
            hf, arguments, collator, data, data.select(range(7)), compute_metrics=accuracy,
        )  # fmt: skip
        return logged(trainer)

    wanted = run(theirs(folder))
    assert not passes
    for native, make in NATIVE.items():
        passes.clear()
        found = run(make(folder))
        assert passes, native
        rtol = 2e-2 if "bf16" in options else 1e-4
        compare(found, wanted, "eval_loss", "eval_accuracy", rtol=rtol, native=native)


def test_a_resumed_run_is_the_uninterrupted_one(folder: Path, tmp_path: Path) -> None:
    def trainer(out: str) -> Trainer:
        arguments = TrainingArguments(str(tmp_path / out), **{**QUIET, "save_strategy": "steps", "save_steps": 2})
        collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
        return Trainer(NATIVE["wrap"](folder), arguments, collator, tokenized())

    whole = logged(trainer("one"))
    resumed = logged(trainer("two"), resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))
    compare([r for r in resumed if r["step"] > 2], [r for r in whole if r["step"] > 2], rtol=1e-6)


def sft(hf: Any, folder: Path, data: Any, **options: Any) -> SFTTrainer:
    peft = options.pop("peft_config", None)
    arguments = SFTConfig(str(folder), **{**QUIET, "max_length": 32, **options})
    return SFTTrainer(
        hf, arguments, train_dataset=data, eval_dataset=data.select(range(5)), processing_class=tiny.tokenizer(),
        peft_config=peft,
    )  # fmt: skip


def dpo(hf: Any, folder: Path, data: Any, **options: Any) -> DPOTrainer:
    peft = options.pop("peft_config", None)
    arguments = DPOConfig(str(folder), **{**QUIET, "max_length": 32, **options})
    return DPOTrainer(hf, args=arguments, train_dataset=data, processing_class=tiny.tokenizer(), peft_config=peft)


def kto(hf: Any, folder: Path, data: Any, **options: Any) -> KTOTrainer:
    arguments = KTOConfig(str(folder), **{**QUIET, "max_length": 32, **options})
    return KTOTrainer(hf, args=arguments, train_dataset=data, processing_class=tiny.tokenizer())


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def online(kind: type, config: type, hf: Any, folder: Path, data: Any, **options: Any) -> Any:
    peft = options.pop("peft_config", None)
    settings = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "beta": 0.1}
    arguments = config(str(folder), **{**QUIET, **settings, "temperature": 1.0, **options})
    return kind(
        hf, reward, args=arguments, train_dataset=data, processing_class=tiny.tokenizer(), peft_config=peft
    )  # fmt: skip


grpo, rloo = partial(online, GRPOTrainer, GRPOConfig), partial(online, RLOOTrainer, RLOOConfig)


def prompts() -> Any:
    return tiny.preferences().select_columns(["prompt"])


CASES: dict[str, tuple[Callable[..., Any], Callable[[], Any], dict[str, Any]]] = {
    "sft": (sft, tiny.texts, {}),
    "sft packed": (sft, tiny.texts, {"packing": True}),
    "sft padding-free": (sft, tiny.texts, {"padding_free": True, "max_length": None}),
    "sft assistant only": (sft, tiny.chats, {"assistant_only_loss": True}),
    "dpo": (dpo, tiny.preferences, {}),
    "grpo": (grpo, prompts, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_trl(case: str, passes: list[int], folder: Path, tmp_path: Path) -> None:
    train, data, options = CASES[case]
    wanted = logged(train(theirs(folder), tmp_path / "theirs", data(), **options))
    assert not passes
    for native, make in NATIVE.items():
        passes.clear()
        found = logged(train(make(folder), tmp_path / native, data(), **options))
        assert passes, native
        compare(found, wanted, native=native)
