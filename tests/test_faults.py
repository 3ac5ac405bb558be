"""A save that is killed, or fails, at any change of the disk leaves the old checkpoint whole, or the new one, or one that
is refused by name; and the next save succeeds and leaves nothing behind."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Fault, faulty, moments
from torch import Tensor, nn
from zoo import LLAMA

import ligermodels as lm
from ligermodels.archs.lora import lora_layers
from ligermodels.errors import CheckpointError, LigerModelsError
from ligermodels.speculative.mtp_files import load_head, save_head
from ligermodels.training import adamw
from ligermodels.training.checkpoints import Checkpoints

SMALL = {**LLAMA, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 30}
SHARDED = "5KB"
OLD, NEW = 1, 2


def digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@cache
def made(seed: int, files: Path) -> Any:
    """A model of which the weights, config.json, generation_config.json and tokenizer are those of `seed` alone."""
    torch.manual_seed(seed)
    model = lm.from_config({**SMALL, "rope_theta": 1e4 * seed})
    files.mkdir(exist_ok=True)
    (tokenizer := files / f"tokenizer-{seed}.json").write_text(json.dumps({"seed": seed}))
    model.export_spec = replace(
        model.export_spec, generation_config={"eos_token_id": seed}, files={"tokenizer.json": tokenizer}
    )
    return model


@cache
def with_heads(seed: int, files: Path, **options: Any) -> lm.MedusaModel:
    torch.manual_seed(seed)
    model = lm.MedusaModel.from_base(made(OLD, files), num_heads=seed, **options)
    for parameter in model.head_parameters():
        nn.init.normal_(parameter)
    return model


@cache
def with_mtp(seed: int, files: Path) -> lm.MTPModel:
    torch.manual_seed(seed)
    return lm.MTPModel.from_base(made(OLD, files))


@cache
def with_lora(seed: int, files: Path) -> Any:
    torch.manual_seed(seed)
    model = lm.add_lora(lm.from_config(SMALL), r=seed)
    for layer in lora_layers(model).values():
        for parameter in layer.lora_parameters().values():
            nn.init.normal_(parameter)
    return model


def contents(folder: Path) -> Any:
    """What a checkpoint is loaded as: each part says which it is of."""
    model = lm.from_pretrained(folder)
    spec = model.export_spec
    tokenizer = spec.files["tokenizer.json"].read_text()
    return model.hf_config["rope_theta"], spec.generation_config, tokenizer, digest(model.state_dict())


def heads(base: Any, folder: Path) -> str:
    return digest(dict(lm.MedusaModel.from_pretrained(base, folder).heads.state_dict()))


def mtp_head(base: Any, folder: Path) -> str:
    model = lm.MTPModel.from_base(base)
    load_head(base, model.head, folder)
    return digest(dict(model.head.state_dict()))


def adapter(folder: Path) -> Any:
    model = lm.load_adapter(lm.from_config(SMALL), folder)
    layers = lora_layers(model)
    return [(layer.parts[0].r, digest(layer.lora_parameters())) for layer in layers.values()]


def save_training(seed: int, files: Path, folder: Path, **_: Any) -> None:
    """Two checkpoints of a run, where another may have been."""
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, seed)
    checkpoints, optimizer = Checkpoints(folder, keep=1), adamw(model.parameters(), 1e-2)
    for step in (2 * seed, 2 * seed + 1):
        checkpoints.save(step, model, optimizer, {"seed": seed})
        checkpoints.wait()


def load_training(folder: Path) -> Any:
    checkpoints, model = Checkpoints(folder), nn.Linear(2, 2)
    if not (steps := checkpoints.steps()):
        raise CheckpointError(f"{folder}: no checkpoints")
    checkpoints.load(steps[-1], model, adamw(model.parameters(), 1e-2))
    return int(model.weight[0, 0]), checkpoints.about(steps[-1])["seed"]


Save = Callable[..., None]


@dataclass(frozen=True)
class Scene:
    """`save(seed, files, folder, overwrite=True)` where `before(OLD, files, folder)` has saved, and what is loaded."""

    save: Save
    load: Callable[[Path], Any]
    before: Save | None = None


def save_model(size: str, seed: int, files: Path, folder: Path, **options: Any) -> None:
    made(seed, files).save_pretrained(folder, max_shard_size=size, **options)


def save_medusa(profile: str, seed: int, files: Path, folder: Path, **options: Any) -> None:
    with_heads(seed, files).export(folder, profile, base_model="base", **options)


def save_mtp(seed: int, files: Path, folder: Path, **options: Any) -> None:
    model = with_mtp(seed, files)
    save_head(model.base, model.head, model.layout, folder, **options)


def save_lora(seed: int, files: Path, folder: Path, **options: Any) -> None:
    lm.save_adapter(with_lora(seed, files), folder, **options)


def empty(seed: int, files: Path, folder: Path, **_: Any) -> None:
    folder.mkdir()


def nothing(seed: int, files: Path, folder: Path, **_: Any) -> None:
    pass


sharded, whole = partial(save_model, SHARDED), partial(save_model, "5GB")


def scenes(files: Path) -> dict[str, Scene]:
    load_heads = partial(heads, made(OLD, files))
    return {
        "shards over shards": Scene(sharded, contents),
        "fewer shards over shards": Scene(partial(save_model, "9KB"), contents, sharded),
        "one file over shards": Scene(whole, contents, sharded),
        "shards over one file": Scene(sharded, contents, whole),
        "one file over one file": Scene(whole, contents),
        "no folder": Scene(sharded, contents, nothing),
        "an empty folder": Scene(sharded, contents, empty),
        "heads": Scene(partial(save_medusa, "vllm"), load_heads),
        "heads in torch's format": Scene(partial(save_medusa, "fasterdecoding"), load_heads),
        "model with heads": Scene(partial(save_medusa, "full-hf"), load_heads),
        "mtp": Scene(save_mtp, partial(mtp_head, made(OLD, files))),
        "adapter": Scene(save_lora, adapter),
        "training": Scene(save_training, load_training),
    }


NAMES = [
    "shards over shards", "fewer shards over shards", "one file over shards", "shards over one file",
    "one file over one file", "no folder", "an empty folder", "heads", "heads in torch's format", "model with heads",
    "mtp", "adapter", "training",
]  # fmt: skip


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("wanted", [5, pytest.param(None, marks=pytest.mark.slow)], ids=["sample", "all"])
@pytest.mark.parametrize("fault", ["kill", "error"])
@pytest.mark.parametrize("name", NAMES)
def test_a_save_is_whole_or_not_at_all(name: str, fault: Fault, wanted: int | None, tmp_path: Path) -> None:
    files = tmp_path / "files"
    scene = scenes(files)[name]
    before = scene.before or scene.save
    (tmp_path / "clean").mkdir()
    before(OLD, files, tmp_path / "clean" / "out")
    shutil.copytree(tmp_path / "clean", tmp_path / "old")
    old = loaded(scene, tmp_path / "clean" / "out")
    with faulty(tmp_path / "clean") as disk:
        scene.save(NEW, files, tmp_path / "clean" / "out", overwrite=True)
    new, tree = loaded(scene, tmp_path / "clean" / "out"), everything(tmp_path / "clean")
    assert new != old and disk.changes > 5
    bad = []
    for at in moments(disk.changes, wanted):
        root = tmp_path / f"{at}"
        shutil.copytree(tmp_path / "old", root)
        raised = None
        try:
            with faulty(root, at, fault) as struck:
                scene.save(NEW, files, root / "out", overwrite=True)
        except LigerModelsError as error:
            raised = error
        assert struck.struck, f"change {at} of {disk.changes} did not come"
        found = loaded(scene, root / "out")
        if found not in (old, new) and "refused" not in found:
            bad.append((at, "a mixture"))
        if raised is not None and name != "training" and found != old:
            bad.append((at, f"{raised}, but the folder is not as it was"))
        scene.save(NEW, files, root / "out", overwrite=True)
        if loaded(scene, root / "out") != new:
            bad.append((at, "the next save is not read back"))
        if everything(root) != tree:
            bad.append((at, f"left behind: {everything(root) ^ tree}"))
        shutil.rmtree(root)
    assert not bad, f"{len(bad)} faults in {disk.changes} changes: {bad[:8]}"


def loaded(scene: Scene, folder: Path) -> Any:
    """What is loaded, or why not: a message that names the folder."""
    try:
        return scene.load(folder)
    except LigerModelsError as error:
        assert str(folder) in str(error), error
        return "refused", str(error).replace(str(folder), "")
