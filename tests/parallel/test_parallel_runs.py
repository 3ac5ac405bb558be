"""Runs on several processes: the same as on one, resumed by other numbers of ranks, killed, and by torchrun."""

import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from children import Command
from runs import STAGE_2, losses, recipe_for
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_ranks
from typer.testing import CliRunner
from zoo import make_checkpoint

from ligermodels.cli import app
from ligermodels.errors import ConfigError
from ligermodels.training import (
    Console,
    DSparkRecipe,
    EagleRecipe,
    FineTuningRecipe,
    MedusaRecipe,
    MTPRecipe,
    TrainingRecipe,
    fine_tune,
    train_dspark,
    train_eagle,
    train_heads,
    train_mtp,
)
from ligermodels.training.checkpoints import Checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")

DRAFT = {"num_steps": 3, "draft_vocab_size": 60}
BLOCKS = {"block_size": 3, "num_layers": 1, "num_anchors": 5, "markov_rank": 8}
EXACT = {"dtype": "float64", "evaluate_every": None, "steps": 2, "checkpoint_every": None}


def common(recipe: TrainingRecipe, kind: type[TrainingRecipe]) -> dict[str, Any]:
    """Settings that recipes of another kind have too."""
    return {name: value for name, value in recipe.settings().items() if name in kind.model_fields}


def tuning(base: Path, data: Path, **changes: Any) -> FineTuningRecipe:
    return FineTuningRecipe().changed({**common(recipe_for(base, data), FineTuningRecipe), **changes})


def recipes(base: Path, data: Path) -> dict[str, TrainingRecipe]:
    """Of each kind of training. Micro-batches are given, or a rank's share of the batch."""
    share = {"micro_batch_tokens": None}
    eagle = EagleRecipe().changed({**common(recipe_for(base, data), EagleRecipe), **EXACT, **DRAFT})
    return {
        "fine-tuning": tuning(base, data, **EXACT, **share, validation_tokens=150),
        "lora": tuning(base, data, **EXACT, lora_rank=3, micro_batch_tokens=16),
        "muon": tuning(base, data, **EXACT, optimizer="muon", learning_rate_patterns={"mlp": 1e-3}),
        "in the backward pass": tuning(base, data, **EXACT, **share, optimizer_in_bwd=True, max_grad_norm=None),
        "config": tuning(base / "config.json", data, **EXACT, tokenizer=str(base)),
        "stage 1": recipe_for(base, data, **EXACT),
        "stage 2": recipe_for(base, data, **{**STAGE_2, **EXACT}),
        "eagle": eagle,
        "eagle, shared lm_head": eagle.changed({"lm_head": "shared"}),
        "dspark": DSparkRecipe().changed({**common(recipe_for(base, data), DSparkRecipe), **EXACT, **BLOCKS}),
        "mtp": MTPRecipe().changed({**common(recipe_for(base, data), MTPRecipe), **EXACT, "num_steps": 2}),
    }


KINDS = ("fine-tuning", "muon", "in the backward pass", "config", "stage 2", "eagle, shared lm_head", "dspark", "mtp")
"""Of these, one of each kind of trained parameters and of start; the others are in tests of other plans."""

TRAIN: dict[type, Any] = {
    FineTuningRecipe: fine_tune,
    MedusaRecipe: train_heads,
    MTPRecipe: train_mtp,
    EagleRecipe: train_eagle,
    DSparkRecipe: train_dspark,
}


def run(recipe: TrainingRecipe, out: Path, **options: Any) -> Any:
    return TRAIN[type(recipe)](recipe, out, **options)


def validation(out: Path) -> list[Any]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [value for line in lines for key, value in line.items() if key.startswith("validation_")]


def flat(values: Any) -> list[float]:
    """Numbers of nested lists, in order; null (a slot without targets) is NaN."""
    if isinstance(values, list | tuple):
        return [number for each in values for number in flat(each)]
    return [math.nan if values is None else values]


def check_same(found: Path, wanted: Path, rel: float = 1e-9) -> None:
    assert flat(losses(found)) == pytest.approx(flat(losses(wanted)), rel=rel, nan_ok=True)
    assert flat(validation(found)) == pytest.approx(flat(validation(wanted)), rel=rel, nan_ok=True)
    names = {path.name for path in wanted.iterdir() if not path.name.startswith(".")}
    assert {path.name for path in found.iterdir()} == names
    for name in names:
        if name.endswith(".safetensors"):
            a, b = load_file(found / name), load_file(wanted / name)
            assert a.keys() == b.keys()
            for key, tensor in b.items():
                torch.testing.assert_close(a[key], tensor, rtol=1e-7, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")
        elif name.endswith("config.json"):
            assert (found / name).read_bytes() == (wanted / name).read_bytes()


# -- what the ranks do -------------------------------------------------------------------------------------------------


def all_kinds(rank: int, folder: Path, mesh: DeviceMesh, base: Path, data: Path) -> None:
    exact = recipes(base, data)
    for name in KINDS:
        said: list[str] = []
        outcome = run(exact[name], folder / name, console=Console(said.append))
        assert outcome.finished and outcome.evaluation is not None
    with pytest.raises(ConfigError, match=r"micro_batch_tokens \(64\) times 2 ranks must divide batch_tokens \(64\)"):
        run(tuning(base, data, micro_batch_tokens=64), folder / "none")
    with pytest.raises(ConfigError, match=r"batch_tokens .* is 3 sequences, which 2 ranks cannot divide"):
        run(tuning(base, data, batch_tokens=48, micro_batch_tokens=None), folder / "none")
    with pytest.raises(ConfigError, match="optimizer: adafactor does not work on sharded"):
        run(tuning(base, data, optimizer="adafactor"), folder / "none")
    for kind in (MedusaRecipe, MTPRecipe, EagleRecipe, DSparkRecipe):
        with pytest.raises(ConfigError, match=r"parallel\.tensor: is for whole models"):
            kind(parallel={"tensor": 2})
    with pytest.raises(ConfigError, match="shard: 3, times 1, is 3 ranks, and there are 2"):
        run(tuning(base, data, parallel={"shard": 3}), folder / "none")


def up_to(rank: int, folder: Path, mesh: DeviceMesh, recipe: TrainingRecipe, last: int, first: int) -> None:
    """Resume and, after step `last`, stop, by a signal to one rank."""
    if rank == 1:
        count = 0

        def load(*args: Any, save: Any = Checkpoints.save, **options: Any) -> None:
            nonlocal count
            save(*args, **options)
            count += 1
            if count == last - first:
                os.kill(os.getpid(), signal.SIGTERM)

        Checkpoints.save = load  # type: ignore[method-assign]
    outcome = run(recipe, folder, resume=True, overwrite=True)  # the ranks have a file of their own in it
    assert outcome.stopped and last <= outcome.step <= last + 2


def by_plan(rank: int, folder: Path, mesh: DeviceMesh, recipe: TrainingRecipe) -> None:
    assert run(recipe, folder / "lora").finished


# -- tests -------------------------------------------------------------------------------------------------------------


def test_two_ranks_train_as_one(base: Path, data: Path, tmp_path: Path) -> None:
    in_ranks(2, all_kinds, tmp_path / "two", base, data)
    assert not (tmp_path / "two/none").exists()
    exact = recipes(base, data)
    for name in KINDS:
        run(exact[name], tmp_path / "one" / name)
        check_same(tmp_path / "two" / name, tmp_path / "one" / name)


def test_a_run_goes_on_with_other_numbers_of_ranks(base: Path, data: Path, tmp_path: Path) -> None:
    """With LoRA, of whose three rows one of four ranks has none."""
    recipe = recipes(base, data)["lora"].changed({"steps": 8, "checkpoint_every": 1, "micro_batch_tokens": 16})
    out = tmp_path / "moved"
    in_ranks(2, up_to, out, recipe, 1, 0)
    (out / "rendezvous").unlink(missing_ok=True)
    (middle,) = Checkpoints(out / "checkpoints").steps()[-1:]
    in_ranks(4, up_to, out, recipe.changed({"parallel": {"replicate": 2}}), middle + 1, middle)
    (out / "rendezvous").unlink(missing_ok=True)
    (last,) = Checkpoints(out / "checkpoints").steps()[-1:]
    assert middle < last < 8
    assert run(recipe, out, resume=True).finished
    run(recipe, tmp_path / "whole")
    check_same(out, tmp_path / "whole")


def test_runs_by_tensor_parallelism(base: Path, data: Path, tmp_path: Path) -> None:
    """On four ranks, and resumed by one; and LoRA."""
    config = json.loads((base / "config.json").read_text())
    shutil.copytree(base, tmp_path / "base")
    make_checkpoint(tmp_path / "base", {**config, "intermediate_size": 96})
    exact, plan = recipes(tmp_path / "base", data), {"parallel": {"tensor": 2}}
    recipe = exact["fine-tuning"].changed({"steps": 5, "checkpoint_every": 1, "micro_batch_tokens": 16})
    in_ranks(4, up_to, tmp_path / "moved", recipe.changed(plan), 1, 0)
    (tmp_path / "moved/rendezvous").unlink()
    assert run(recipe, tmp_path / "moved", resume=True).finished
    in_ranks(2, by_plan, tmp_path / "several", exact["lora"].changed(plan))
    for name, each in (("moved", recipe), ("several/lora", exact["lora"])):
        run(each, tmp_path / "whole" / name)
        check_same(tmp_path / name, tmp_path / "whole" / name)


def until_a_rank_ends(rank: int, folder: Path, mesh: DeviceMesh, arguments: tuple[str, ...]) -> None:
    """The second rank ends at its second checkpoint as a killed one does, without a word to the first."""
    if rank == 1:
        saves = iter([Checkpoints.save])

        def save(*args: Any, **options: Any) -> None:
            next(saves, lambda *_, **__: os._exit(0))(*args, **options)

        Checkpoints.save = save  # type: ignore[method-assign]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == 1 and "rank 0: error: another rank has ended, or cannot be reached" in result.output
    os._exit(0)  # without waiting for the other


def test_a_rank_is_killed_and_torchrun_goes_on(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others end with a message, and the run comes out as if nothing had been."""
    import yaml

    recipe = tuning(base, data, **{**EXACT, "steps": 5, "checkpoint_every": 2, "report_every": 1})
    file, out = tmp_path / "recipe.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(recipe.settings()))
    arguments = ("--recipe", str(file), "--out", str(out), "--device", "cpu", "--shard", "2")
    arguments += ("--resume",)  # the same command starts the run and continues it
    began = time.monotonic()
    in_ranks(2, until_a_rank_ends, tmp_path / "two", arguments)
    assert time.monotonic() - began < 60
    assert 0 < losses(out)[-1][0] < 5 and not (out / "model.safetensors").exists()

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "ligermodels", "train", *arguments]
    monkeypatch.chdir(tmp_path)
    # torchrun itself is a fork; the ranks that it starts are processes as users have them.
    launcher = Command(command, {**os.environ, "OMP_NUM_THREADS": "1"}, out=tmp_path / "said")
    code, said = launcher.wait(), (tmp_path / "said").read_text()
    assert code == 0, said
    assert said.count(f"wrote {out}") == said.count("\nvalidation loss") == 1, said
    run(recipe, tmp_path / "whole")
    check_same(out, tmp_path / "whole", rel=1e-6)
