"""`python -m benchmarks grpo [--model NAME] [--providers NAME ...] [--out FILE]`: steps of GRPO on one GPU, beside TRL.

`fine_tune` samples with our decoding, from the weights or from a copy in 4 or 8 bits, TRL's GRPOTrainer with
transformers' `generate`. All train the same random weights in bf16 with AdamW on the same prompts, and sample as many
tokens: random weights hardly ever write an EOS.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import ligermodels as lm
from benchmarks.cases.command_line import prepare
from benchmarks.cases.models import CONFIGS
from benchmarks.reporting import recording
from benchmarks.timing import measure
from ligermodels.training import Callback, FineTuningRecipe, fine_tune

REWARD = "def sum_mod_7(completion_ids, **columns):\n    return [float(sum(ids) % 7) for ids in completion_ids]\n"


@dataclass(frozen=True)
class Case:
    """A model, the prompts of a step, the completions of a prompt, and the tokens of a completion."""

    model: str = "qwen3-0.6b"
    prompts: int = 8
    generations: int = 8
    tokens: int = 256
    steps: int = 4

    @property
    def name(self) -> str:
        """Model and sizes."""
        return f"{self.model} {self.prompts} prompts x {self.generations} completions x {self.tokens} tokens"


class _Clock(Callback):
    """Times when steps have ended, on the device too."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, event: Any) -> None:
        measure.synchronize()
        self.times.append(time.perf_counter())


def files(case: Case, folder: Path) -> None:
    """Write a model, its tokenizer, prompts of unequal lengths and a module of rewards."""
    torch.manual_seed(0)
    lm.from_config(CONFIGS[case.model], dtype=torch.bfloat16).save_pretrained(folder / "model")
    prepare(folder / "model")
    text = (folder / "model" / "text.txt").read_text()
    prompts = [text[400 * i : 400 * i + 300 + 7 * (i % 9)] for i in range(400)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (folder / "grpo_rewards.py").write_text(REWARD)


def ours(case: Case, folder: Path, **settings: Any) -> list[float]:
    """Times of the ends of our steps, in seconds. `settings`: more settings of the recipe."""
    clock, length = _Clock(), 2 * case.tokens
    recipe = FineTuningRecipe(
        base=str(folder / "model"),
        data=str(folder / "prompts.jsonl"),
        objective="grpo",
        reward="grpo_rewards:sum_mod_7",
        num_generations=case.generations,
        max_completion_length=case.tokens,
        seq_len=length,
        batch_tokens=length * case.generations * case.prompts,
        learning_rate=1e-6,
        steps=case.steps,
        checkpoint_every=None,
        validation_tokens=1,
        **settings,
    )
    fine_tune(recipe, folder / "run", overwrite=True, callbacks=[clock])
    return clock.times


def trl(case: Case, folder: Path) -> list[float]:
    """Times of the ends of TRL's steps, in seconds."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            measure.synchronize()
            times.append(time.perf_counter())

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "model" / "tokenizer.json"))
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.decode([0])
    on_gpu = torch.cuda.is_available()
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=case.prompts * case.generations,
        num_generations=case.generations,
        max_completion_length=case.tokens,
        max_steps=case.steps,
        learning_rate=1e-6,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    records = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16),
        [importlib.import_module("grpo_rewards").sum_mod_7],
        args=settings,
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    return times


PROVIDERS: dict[str, Callable[[Case, Path], list[float]]] = {
    "ligermodels": ours,
    "ligermodels, float8 sampling": partial(ours, sampling_quantize="float8"),
    "ligermodels, int4 sampling": partial(ours, sampling_quantize="int4"),
    "trl": trl,
}


def run(case: Case, provider: str, folder: Path) -> dict[str, Any]:
    """Median seconds of a step, without the first, and completion tokens per second.

    Args:
        case: The case.
        provider: One of PROVIDERS.
        folder: Folder that `files` has filled.
    """
    ends = PROVIDERS[provider](case, folder)
    step_s = statistics.median(b - a for a, b in pairwise(ends))
    return {"step_s": step_s, "tokens_per_s": case.prompts * case.generations * case.tokens / step_s}


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("--model", default=Case.model, choices=CONFIGS)
    parser.add_argument("--providers", nargs="+", default=list(PROVIDERS), choices=PROVIDERS)
    arguments = parser.parse_args()
    case = Case(arguments.model)
    with tempfile.TemporaryDirectory() as temporary:
        files(case, Path(temporary))
        sys.path.insert(0, temporary)  # the module of rewards
        for provider in arguments.providers:
            record = {"case": case.name, "provider": provider, **asdict(case), **run(case, provider, Path(temporary))}
            recording.write(arguments.out, [{**record, **recording.facts()}])
            print(f"{case.name}: {provider}: {record['step_s']:.3f} s a step", flush=True)
