"""Objectives on several processes: the losses, metrics and parameters of one process."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import make_pairs
from test_parallel_runs import EXACT, check_same, run, tuning
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_ranks

import ligermodels as lm
from ligermodels.errors import ConfigError
from ligermodels.training import FineTuningRecipe

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "excess_length_strategy": "truncate",
    "seq_len": 96,
    "batch_tokens": 384,
    "max_bad_lines": 0,
    **EXACT,
    "steps": 2,
    "learning_rate": 1e-3,
}
PLANS = {"dpo micro": {"tensor": 2}, "kto": {"context": 2}}


def recipes(base: Path, folder: Path, data: Path) -> dict[str, FineTuningRecipe]:
    """Micro-batches of the same total, because KTO's estimate of the KL divergence is of a micro-batch of all ranks."""
    pairs = {**SIZES, "micro_batch_tokens": None}
    common: dict[str, Any] = {"base": base, "data": folder / "pairs.jsonl"}

    def objective(name: str, **changes: Any) -> FineTuningRecipe:
        return tuning(common["base"], common["data"], **{**pairs, "objective": name, **changes})

    return {
        "dpo micro": objective(
            "dpo", batch_tokens=768, micro_batch_tokens=192, loss_type=("sigmoid", "sft"), loss_weights=(1.0, 0.5)
        ),
        "dpo lora": objective("dpo", lora_rank=3),
        "kto": objective("kto", desirable_weight=1.5),
        "orpo": objective("orpo", micro_batch_tokens=192),
        "loss": objective("ipo", loss="losses_of_a_user:margin"),
        "distill": tuning(
            base, data, **{**SIZES, "max_bad_lines": 1, "micro_batch_tokens": 96}, objective="distill",
            teacher=str(folder / "teacher"), temperature=2.0,
        ),
    }  # fmt: skip


def with_even_sizes(base: Path, folder: Path) -> Path:
    """A copy of `base` that tensor parallelism can divide."""
    shutil.copytree(base, folder)
    config = json.loads((base / "config.json").read_text()) | {"intermediate_size": 96}
    lm.from_config(config).save_pretrained(folder, overwrite=True)
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"), dirs_exist_ok=True)
    return folder


def on_two_ranks(rank: int, folder: Path, mesh: DeviceMesh, base: Path, shared: Path, data: Path) -> None:
    exact = recipes(base, shared, data)
    for name, recipe in exact.items():
        assert run(recipe, folder / name).finished
    for name, plan in PLANS.items():
        assert run(exact[name].changed({"parallel": plan}), folder / f"{name} {min(plan)}").finished
    with pytest.raises(ConfigError, match=r"parallel\.tensor: is not supported with the objective distill"):
        run(exact["distill"].changed({"parallel": {"tensor": 2}}), folder / "none")


def test_two_ranks_train_as_one(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pairs(tmp_path / "pairs.jsonl")
    (tmp_path / "losses_of_a_user.py").write_text(
        "def margin(log_probs, mask, ref_log_probs, beta=0.2):\n"
        "    chosen, rejected = ((log_probs * mask).sum(1) - ref_log_probs).chunk(2)\n"
        "    return (beta * (chosen - rejected) - 1) ** 2, {'margin': chosen - rejected}\n"
    )
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    base = with_even_sizes(base, tmp_path / "base")
    teacher = lm.from_pretrained(base)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight += 0.1 * torch.randn_like(weight)
    teacher.save_pretrained(tmp_path / "teacher")
    in_ranks(2, on_two_ranks, tmp_path / "two", base, tmp_path, data)
    for name, recipe in recipes(base, tmp_path, data).items():
        run(recipe, tmp_path / "one" / name)
        check_same(tmp_path / "two" / name, tmp_path / "one" / name)
        if plan := PLANS.get(name):
            check_same(tmp_path / f"two/{name} {min(plan)}", tmp_path / "one" / name)
