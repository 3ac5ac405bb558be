"""Training on several processes: `torchrun ranks.py CHECKPOINT OUT HOW`, HOW of DISTRIBUTED or TRAINERS.

Trains each kind of model, saves it in OUT, and prints its losses and the number of its native passes.
"""

import os
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from test_others import batches
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
from two_processes import deepspeed_on_cpu

from ligermodels.integrations import use_native_head
from ligermodels.integrations.decoder import HFDecoder

MODELS = {"theirs": tiny.theirs, **tiny.NATIVE}


def zero3() -> dict[str, Any]:
    """DeepSpeed's ZeRO of stage 3, in float32."""
    deepspeed_on_cpu()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    }
    return {"deepspeed_plugin": DeepSpeedPlugin({**config, "zero_allow_untested_optimizer": True})}


def fsdp2() -> dict[str, Any]:
    """FSDP2, a shard for each block."""
    options = {"auto_wrap_policy": "transformer_based_wrap", "state_dict_type": "FULL_STATE_DICT"}
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, **options)}


DISTRIBUTED: dict[str, Any] = {"ddp": lambda: {"gradient_accumulation_steps": 2}, "fsdp2": fsdp2, "zero3": zero3}
FSDP2: dict[str, Any] = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"version": 2, "activation_checkpointing": True},
}
TRAINERS: dict[str, dict[str, Any]] = {"trainer fsdp2": FSDP2, "sft fsdp2": FSDP2}


def by_accelerator(how: str, model: Any, out: Path) -> list[float]:
    """Four steps by `Accelerator.prepare`."""
    accelerator = Accelerator(**DISTRIBUTED[how]())
    assert accelerator.distributed_type.value == {"ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED"}[how]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    half = slice(2 * accelerator.process_index, 2 * accelerator.process_index + 2)
    losses = []
    for batch in batches(4):
        with accelerator.accumulate(model):
            loss = model(**{name: x[half] for name, x in batch.items()}).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        out, is_main_process=accelerator.is_main_process, state_dict=state, save_function=accelerator.save
    )
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    return losses


def by_trainer(how: str, model: Any, out: Path) -> list[float]:
    """Four steps by transformers' Trainer, or by TRL's SFTTrainer, on the native head where the model is native."""
    common: dict[str, Any] = {"report_to": [], "use_cpu": True, "bf16": False, "seed": 7, "save_strategy": "no"}
    steps: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 3, "learning_rate": 0.1, "optim": "sgd"}
    common |= {"logging_steps": 1, **steps, **TRAINERS[how]}
    tokenizer = tiny.tokenizer()
    if how.startswith("sft"):
        arguments = SFTConfig(str(out), gradient_checkpointing=False, **common)
        trainer = SFTTrainer(model, arguments, train_dataset=tiny.texts(), processing_class=tokenizer)
        if "native" in vars(model):
            use_native_head(trainer)
    else:
        data = tiny.texts().map(lambda row: tokenizer(row["text"]), remove_columns=["text"])
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        trainer = Trainer(model, TrainingArguments(str(out), **common), collator, data)
    assert trainer.accelerator.is_fsdp2
    trainer.train()
    trainer.save_model(str(out))
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def main(checkpoint: str, out: str, how: str) -> None:
    """Each kind of model, one after the other."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ["ACCELERATE_USE_FSDP"] = str(how == "fsdp2").lower()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(how.startswith("zero")).lower()
    os.environ["DS_ACCELERATOR"] = "cpu"
    through, passes = HFDecoder.forward, []
    HFDecoder.forward = lambda *args, **inputs: passes.append(1) or through(*args, **inputs)  # type: ignore
    for kind, make in MODELS.items():
        losses = (by_trainer if how in TRAINERS else by_accelerator)(how, make(Path(checkpoint)), Path(out) / kind)
        if os.environ["RANK"] == "0":
            print("\nRESULT", kind, len(passes), *losses, flush=True)
        passes.clear()


if __name__ == "__main__":
    main(*sys.argv[1:])
