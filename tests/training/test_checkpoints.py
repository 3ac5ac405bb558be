"""Checkpoints bring all of a run back or say what is wrong with them; metrics, in lines and for TensorBoard."""

import json
import re
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from ligermodels.arguments import OptimizerName
from ligermodels.convert.input_files import JSON_BYTES
from ligermodels.errors import CheckpointError
from ligermodels.training import adamw, metrics
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.optimizer import optimizer_named
from ligermodels.training.parameter_groups import parameter_groups


def small(seed: int, width: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2).double())
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("kind", get_args(OptimizerName))
def test_a_checkpoint_brings_all_of_the_state_back(kind: str, tmp_path: Path) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        groups = parameter_groups([(model.parameters(), 1e-2)], 0.1)
        return optimizer_named(kind, groups, model=model, betas=(0.8, 0.99))

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for _ in range(3):
            loss = model[1](model[0](torch.randn(4, 3)).double()).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    model, checkpoints = small(0), Checkpoints(tmp_path / "there", keep=2)
    optimizer = optimizer_of(model)
    assert checkpoints.steps() == []
    for step in (3, 6, 10):
        steps(model, optimizer)
        checkpoints.save(step, model, optimizer, {"data": {"place": step}})
        if step == 6:
            after_six = steps(model, optimizer)  # While it is written.
    checkpoints.wait()
    assert checkpoints.steps() == [6, 10]
    other = small(1)
    other[0].load_state_dict(model[0].state_dict())
    for at in (optimizer_of(other), optimizer_of(other)):
        checkpoints.load(6, other, at)
        assert steps(other, at) == after_six
    run = json.loads((checkpoints.path(6) / "run.json").read_text())
    assert run["data"] == {"place": 6} and checkpoints.steps() == [6, 10]
    with pytest.raises(CheckpointError, match=r"step-6: is of another model, or of another version"):
        checkpoints.load(6, small(0, width=4), optimizer)
    message = r"1\.bias is \(torch\.float64, \(2,\)\) and \(torch\.float32, \(2,\)\) in the model; 1 more"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(6, small(0).float(), optimizer)
    if kind == "adamw":
        with pytest.raises(CheckpointError, match="of another optimizer"):
            checkpoints.load(6, other, adamw([other[1].weight], 1e-2))
    shutil.copytree(tmp_path / "there" / "step-6", tmp_path / "there" / "step-3")  # as if killed before it was removed
    checkpoints.load(10, other, at)
    assert checkpoints.steps() == [6, 10]


def test_checkpoints_of_torchs_adamw_and_of_ours_fit_either(tmp_path: Path) -> None:
    def made(ours: bool, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small(seed).float()
        groups = parameter_groups([(model.parameters(), 1e-2)], 0.1)
        betas = (0.8, 0.99)
        own = optimizer_named("adamw", groups, model=model, betas=betas)
        return model, own if ours else torch.optim.AdamW(groups, betas=betas)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for i in range(3):
            for p in model[1].parameters():
                p.grad = torch.cos(p.detach() * 10 + i)
            optimizer.step()

    for ours in (True, False):
        checkpoints = Checkpoints(tmp_path / str(ours))
        model, optimizer = made(ours, 0)
        steps(model, optimizer)
        checkpoints.save(3, model, optimizer, {})
        checkpoints.wait()
        steps(model, optimizer)
        other, another = made(not ours, 1)
        checkpoints.load(3, other, another)
        steps(other, another)
        for a, b in zip(model[1].parameters(), other[1].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_checkpoint_with_many_completions_is_read(tmp_path: Path) -> None:
    """Those that GRPO uses for further steps may be larger than any JSON file of a model."""
    model, checkpoints = small(0), Checkpoints(tmp_path)
    optimizer = adamw(model.parameters(), 1e-2)
    checkpoints.save(1, model, optimizer, {"data": "x" * JSON_BYTES})
    checkpoints.wait()
    step, about = checkpoints.newest() or (0, {})
    assert step == 1 and len(about["data"]) == JSON_BYTES
    checkpoints.load(1, model, optimizer)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    model = small(0)
    optimizer, checkpoints = adamw(model.parameters(), 1e-2), Checkpoints(tmp_path)
    (tmp_path / ".abc.partial").mkdir()
    checkpoints.save(1, model, optimizer, {})
    checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    names = [".metadata", "__0_0.distcp", "run.json"]
    assert sorted(path.name for path in (tmp_path / "step-1").iterdir()) == sorted([*names, "manifest.json"])
    for name in names:  # A byte that is another, in any of the files.
        path = tmp_path / "step-1" / name
        kept = path.read_bytes()
        for content in (kept[:-9] + bytes([kept[-9] ^ 4]) + kept[-8:], b""):
            path.write_bytes(content)
            with pytest.raises(
                CheckpointError, match=rf"step-1/{re.escape(name)}: is damaged.*; remove .*step-1 to resume"
            ):
                checkpoints.load(1, model, optimizer)
        path.unlink()
        with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: cannot be read"):
            checkpoints.load(1, model, optimizer)
        path.write_bytes(kept)
    checkpoints.load(1, model, optimizer)
    (tmp_path / "step-1" / "run.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"run\.json: is damaged"):
        checkpoints.newest()
    for text, words in (
        ('{"format": 9}', "format 9"),
        ('{"format": 2}', "names no files"),
        ("", "not JSON"),
        ("[]", "a list, not an object"),
    ):
        (tmp_path / "step-1" / "manifest.json").write_text(text)
        with pytest.raises(CheckpointError, match=rf"manifest\.json: .*{words}"):
            checkpoints.newest()
    (tmp_path / "taken").write_text("")
    blocked = Checkpoints(tmp_path / "taken" / "below")
    blocked.save(1, model, optimizer, {})
    with pytest.raises(CheckpointError, match="cannot be written"):
        blocked.wait()


def test_metrics_begin_after_a_step(tmp_path: Path) -> None:
    first = metrics.Metrics(tmp_path)
    for step in (1, 2, 3):
        first.write(step, {"loss": step / 3})
    first.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + 'no json\n{"step": 2, "loss"')
    second = metrics.Metrics(tmp_path, after=2)
    second.write(3, {"loss": 9.0})
    second.close()
    assert losses_of(path) == [(1, 1 / 3), (2, 2 / 3), (3, 9.0)]
    metrics.Metrics(tmp_path).close()
    assert path.read_text() == ""


def losses_of(path: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in map(json.loads, path.read_text().splitlines())]
