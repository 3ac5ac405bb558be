"""TRL's SFTTrainer on the folder of a `command_line` case: the command's peer, in a process of its own.

`python -m benchmarks.cases.sft_peer FOLDER BATCH LENGTH STEPS SETTING` prints tokens per second: the median of five
reports except the first, as for `ligermodels train`. Packed rows without padding, random weights in bf16, torch's fused
AdamW, clipping at 1, no gradient checkpointing.
"""

from __future__ import annotations

import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import measure

SETTINGS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "transformers + torch.compile": {"torch_compile": True},
    "transformers + liger": {"use_liger_kernel": True},
}
"""Name -> arguments of SFTConfig. Fused norms, rotations, MLPs and loss on transformers' model are the kernels that
unsloth has too; its package runs only where it may patch transformers at import."""


def tokens_per_s(folder: Path, batch: int, length: int, steps: int, setting: str) -> float:
    """Tokens per second.

    Args:
        folder: A config.json, a tokenizer.json and text.txt.
        batch: Rows of a step.
        length: Tokens of a row.
        steps: Steps of the run, reported in five parts.
        setting: One of SETTINGS.
    """
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    every, times = max(1, steps // 5), []

    class Clock(TrainerCallback):
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % every == 0:
                measure.synchronize()
                times.append(time.perf_counter())

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.decode([0])
    total = steps * batch * length
    ids = tokenizer((folder / "text.txt").read_text()[: 4 * total])["input_ids"]
    ids = (ids * -(-total // len(ids)))[:total]
    rows = [ids[i : i + length] for i in range(0, len(ids), length)]
    on_gpu = torch.cuda.is_available()
    arguments = SFTConfig(
        output_dir=str(folder / "peer"),
        per_device_train_batch_size=batch,
        max_length=length,
        max_steps=steps,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        logging_steps=every,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **SETTINGS[setting],
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    data = Dataset.from_dict({"input_ids": rows})
    SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]).train()
    return every * batch * length / statistics.median(later - earlier for earlier, later in pairwise(times))


if __name__ == "__main__":
    batch, length, steps = map(int, sys.argv[2:5])
    print(tokens_per_s(Path(sys.argv[1]), batch, length, steps, sys.argv[5]))
