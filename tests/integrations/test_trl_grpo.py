"""`train --objective grpo` against TRL's GRPOTrainer: both train on the same completions of the same prompts."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

pytest.importorskip("trl", reason="needs ligermodels[integrations]")
from test_trainers import QUIET
from trl import GRPOConfig, GRPOTrainer

import ligermodels as lm
from ligermodels.data.packing import Prefetcher
from ligermodels.data.prompt_batches import PromptBatches, PromptDocuments
from ligermodels.training import FineTuningRecipe, train
from ligermodels.training.objectives import objective_of

PROMPTS, GENERATIONS, LENGTH = 4, 4, 7
SEEN: list[dict[str, Any]] = []
"""The arguments of each call of `lengths`."""


def lengths(prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **fields: Any) -> list[float]:
    fields = {name: value for name, value in fields.items() if name in ("target", "prompt")}
    SEEN.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **fields})
    return [len(ids) + 0.1 * ids[0] for ids in completion_ids]


def near_target(completions: list[Any], target: list[int], **_: Any) -> list[float | None]:
    """None where the record has no target."""
    words = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [None if t is None else float(f"w{t}" in text.split()) for text, t in zip(words, target, strict=True)]


def records(chats: bool) -> list[dict[str, Any]]:
    """Prompts of unequal lengths."""
    texts = [tiny.sentence(i, 2 + 3 * i) for i in range(PROMPTS)]
    prompts: list[Any] = [[{"role": "user", "content": text}] for text in texts] if chats else list(texts)
    targets = [3, 20, None, 7]
    return [{"prompt": prompt, "target": target} for prompt, target in zip(prompts, targets, strict=True)]


NAMES = (
    "loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length",
    "completions/min_length", "completions/max_length", "completions/clipped_ratio", "clip_ratio/low_mean",
    "clip_ratio/high_mean", "clip_ratio/region_mean", "rewards/lengths/mean", "rewards/lengths/std",
)  # fmt: skip
TWO = {"num_iterations": 2}
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "dapo": (False, {"temperature": 0.7, "beta": 0.1, **TWO}),
    "grpo": (
        False,
        {"loss_type": "grpo", "scale_rewards": "batch", "mask_truncated_completions": True, "epsilon": 0.02, **TWO},
    ),
    "dr_grpo chats": (
        True,
        {
            "loss_type": "dr_grpo",
            "scale_rewards": "none",
            "beta": 0.3,
            "use_bias_correction_kl": False,
            "epsilon_high": 0.3,
            **TWO,
        },
    ),
    "bnpo": (False, {"loss_type": "bnpo"}),
    "gspo": (False, {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-3, **TWO}),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_trl(case: str, folder: Path, tmp_path: Path) -> None:
    """Losses, gradients' norms, metrics and trained parameters of two steps by SGD. With `num_iterations` both are on
    the same completions, so that ratios leave 1."""
    chats, options = CASES[case]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base.generation_config.eos_token_id = [2, 6]  # of texts, and of turns
    base.save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    data = records(chats)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in data))
    paths = [f"{__name__}:{function.__name__}" for function in (lengths, near_target)]
    parts = 1 if case == "bnpo" else 2  # its loss depends on the micro-batches, in TRL too
    recipe = FineTuningRecipe(
        base=tmp_path / "base", data=tmp_path / "prompts.jsonl", objective="grpo", reward=paths,
        reward_weights=(1.0, 2.0), num_generations=GENERATIONS, max_completion_length=LENGTH, seq_len=32,
        batch_tokens=32 * GENERATIONS * PROMPTS, micro_batch_tokens=32 * GENERATIONS * PROMPTS // parts, **options,
    )  # fmt: skip
    SEEN.clear()
    model = lm.from_pretrained(tmp_path / "base", dtype=torch.float32)
    documents = PromptDocuments.of_checkpoint(tmp_path / "base", recipe.data, most_tokens=25)
    objective = objective_of(recipe, model)
    prefetcher = Prefetcher(PromptBatches(documents, seq_len=32, batch_size=PROMPTS // parts))  # type: ignore[arg-type]
    reports: list[Any] = []
    train(
        objective.trainable, objective.batches(prefetcher), steps=2, accumulation_steps=parts,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1), on_step=reports.append, report_every=1,
        output_metrics=objective.output_metrics,
    )  # fmt: skip
    prefetcher.close()
    ours = [{"loss": r.loss, "grad_norm": r.grad_norm, **r.means} for r in reports]
    calls, samples = list(SEEN), defaultdict(list)
    SEEN.clear()
    for call in calls:
        for prompt, completion, ids in zip(call["prompts"], call["completions"], call["completion_ids"], strict=True):
            samples[json.dumps(prompt)].append((completion, ids))
    assert len({len(ids) for each in samples.values() for _, ids in each}) > 2

    sizes = {"per_device_train_batch_size": PROMPTS * GENERATIONS, "max_steps": 2, "num_generations": GENERATIONS}
    arguments = GRPOConfig(
        str(tmp_path / "trl"), **{**QUIET, **sizes}, lr_scheduler_type="constant", reward_weights=[1.0, 2.0],
        max_completion_length=LENGTH, **options,
    )  # fmt: skip
    trainer = GRPOTrainer(
        base, [lengths, near_target], args=arguments, train_dataset=Dataset.from_list(data),
        processing_class=tiny.tokenizer(),
    )  # fmt: skip
    left = {name: list(each) for name, each in samples.items()}

    def given(prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
        trainer.prompts_of_call = prompts
        return original(prompts, *args, **kwargs)

    original, trainer._generate = trainer._generate, given
    trainer._generate_single_turn = lambda *_, **__: (
        [left[json.dumps(prompt)].pop(0)[1] for prompt in trainer.prompts_of_call], None
    )  # fmt: skip
    trainer.train()
    theirs = [record for record in trainer.state.log_history if "loss" in record]

    one, other = (
        {json.dumps(pair) for call in each for pair in zip(call["prompts"], call["completions"], strict=True)}
        for each in (calls, SEEN)
    )
    assert one == other
    assert len(theirs) == len(ours) == 2
    for number, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
        # TRL repeats the metrics of the samples in each iteration
        names = [name for name in NAMES if name in found] if number else NAMES
        for name in [*names, *(("kl",) if "beta" in options else ())]:
            assert found[name] == pytest.approx(wanted[name], rel=2e-4, abs=2e-6), (name, number)
    assert ours[1]["grad_norm"] > 1e-3
    if case in ("grpo", "gspo"):
        assert ours[1]["clip_ratio/region_mean"] > 0
    for name, parameter in lm.from_pretrained(_saved(trainer.model, tmp_path / "theirs")).named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)


def _saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
