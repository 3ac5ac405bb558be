"""Saves that are killed, that fail, or that meet others: a folder holds the old checkpoint whole, or the new one, or is
refused by name; and the next save succeeds and leaves nothing behind."""

import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Fault, faulty, moments
from named_exports import export_named
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from zoo import LLAMA

import ligermodels as lm
from ligermodels.adapt.lora import lora_layers
from ligermodels.convert import journal
from ligermodels.convert.files import INDEX
from ligermodels.convert.journal import JOURNAL, PLAN
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError, LigerModelsError
from ligermodels.speculative.mtp_files import load_head
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
    return int(model.weight[0, 0]), json.loads((checkpoints.path(steps[-1]) / "run.json").read_text())["seed"]


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
    export_named(with_heads(seed, files), folder, profile, "base", **options)


def save_mtp(seed: int, files: Path, folder: Path, **options: Any) -> None:
    with_mtp(seed, files).save_head(folder, **options)


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


# -- several at once ---------------------------------------------------------------------------------------------------


def write_again_and_again(folder: Path, files: Path, sizes: list[str], stop: Any) -> None:
    """In a process of its own: the model of OLD, then that of NEW, and so on."""
    torch.set_num_threads(1)
    for i in itertools.count():
        if stop.is_set():
            return
        save_model(sizes[i % len(sizes)], (OLD, NEW)[i % 2], files, folder, overwrite=True)


@pytest.fixture
def spawned(children: Any) -> Iterator[Callable[..., Any]]:
    """Starts a process; those that are left are killed."""
    found = []

    def start(work: Callable[..., None], *arguments: Any) -> Any:
        found.append(children.Process(target=work, args=arguments))
        found[-1].start()
        return found[-1]

    yield start
    for process in found:
        process.kill()
        process.join()


@pytest.mark.parametrize("openings", [15, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sizes", [[SHARDED], [SHARDED, "5GB", "9KB"]], ids=["shards", "shards and one file"])
def test_a_reader_gets_the_old_or_the_new(
    openings: int, sizes: list[str], tmp_path: Path, children: Any, spawned: Any
) -> None:
    whole = []
    for seed in (OLD, NEW):
        sharded(seed, tmp_path / "files", tmp_path / f"{seed}")
        whole.append(contents(tmp_path / f"{seed}"))
    out = Path(shutil.copytree(tmp_path / f"{OLD}", tmp_path / "out"))
    stop = children.Event()
    writer = spawned(write_again_and_again, out, tmp_path / "files", sizes, stop)
    found = []
    deadline = time.monotonic() + 120
    while (len(found) < openings or len(set(found)) < 2) and time.monotonic() < deadline:
        found.append(whole.index(weights_and_config(out)))
    stop.set()
    writer.join(60)
    assert writer.exitcode == 0 and set(found) == {0, 1} and len(found) >= openings
    assert everything(out) >= {"config.json", "tokenizer.json"} and not list(out.glob(".*"))


def weights_and_config(folder: Path) -> Any:
    """`contents`, but for files that are read when the model is open already."""
    model = lm.from_pretrained(folder)
    seed = model.export_spec.generation_config["eos_token_id"]
    return model.hf_config["rope_theta"], {"eos_token_id": seed}, json.dumps({"seed": seed}), digest(model.state_dict())


def hold(folder: Path, files: Path, started: Any, go: Any) -> None:
    """Save the model of NEW, and pause while its last tensor is read."""
    model = made(NEW, files)
    export = type(model.export_spec.weight_map).export

    def slow(self: Any, state: Any) -> Any:
        *tensors, last = export(self, state)

        def read() -> Tensor:
            started.set()
            go.wait(60)
            return last.read()

        return [*tensors, last._replace(read=read)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.export_spec.weight_map), "export", slow)
        model.save_pretrained(folder, max_shard_size=SHARDED, overwrite=True)


@pytest.mark.parametrize("there", [True, False], ids=["over another", "no folder"])
def test_of_two_saves_at_once_one_is_refused(there: bool, tmp_path: Path, children: Any, spawned: Any) -> None:
    """And not when the first was killed."""
    out, files = tmp_path / "out", tmp_path / "files"
    if there:
        sharded(OLD, files, out)
    made(OLD, files), made(NEW, files)
    started, go = children.Event(), children.Event()
    process = spawned(hold, out, files, started, go)
    assert started.wait(60)
    with pytest.raises(CheckpointError, match="out: another process is saving into it"):
        sharded(OLD, files, out, overwrite=True)
    go.set()
    process.join(60)
    assert process.exitcode == 0 and contents(out)[0] == 1e4 * NEW and not list(tmp_path.glob("**/.*"))
    if not there:
        shutil.rmtree(out)
    go.clear(), started.clear()
    process = spawned(hold, out, files, started, go)
    assert started.wait(60)
    process.kill()
    process.join()
    assert list(tmp_path.glob("**/.*.partial"))
    sharded(OLD, files, out, overwrite=True)
    assert contents(out)[0] == 1e4 * OLD and not list(tmp_path.glob("**/.*"))


@pytest.mark.parametrize("wanted", [4, pytest.param(None, marks=pytest.mark.slow)], ids=["sample", "all"])
@pytest.mark.parametrize("sizes", [(SHARDED, SHARDED), ("5GB", SHARDED), (SHARDED, "5GB"), ("5GB", "5GB")], ids=str)
def test_transformers_finds_the_old_or_the_new_or_none(
    sizes: tuple[str, str], wanted: int | None, tmp_path: Path
) -> None:
    """Of a folder in which a save was killed while it replaced files, and that nothing here has opened since."""
    files, out = tmp_path / "files", tmp_path / "out"
    save_model(sizes[0], OLD, files, tmp_path / "old")
    shutil.copytree(tmp_path / "old", out)
    kept = {}
    before = theirs(out)
    for at in itertools.count(1):
        shutil.copytree(tmp_path / "old", tmp_path / f"{at}")
        with faulty(tmp_path / f"{at}", at) as disk:
            save_model(sizes[1], NEW, files, tmp_path / f"{at}", overwrite=True)
        if (tmp_path / f"{at}" / JOURNAL).exists():
            kept[len(kept) + 1] = tmp_path / f"{at}"
        if not disk.struck:
            break
    after = theirs(tmp_path / f"{at}")
    assert None not in (before, after) and before != after and len(kept) > 8
    found = [theirs(kept[i]) for i in moments(len(kept), wanted)]
    assert set(found) <= {before, after, None} and found[0] == before and found[-1] == after


def theirs(folder: Path) -> Any:
    """What transformers loads, None where it finds no checkpoint."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):
        return None
    eos = model.generation_config.eos_token_id
    return model.config.rope_parameters["rope_theta"], eos, digest(model.state_dict())


@pytest.mark.parametrize("first", [Tokenizer, lm.from_pretrained, lm.from_config, Checkpoint])
def test_whoever_opens_a_folder_first_finishes_a_save_that_was_killed(first: Any, tmp_path: Path) -> None:
    files, left = tmp_path / "files", []
    sharded(OLD, files, tmp_path / "old")
    for at in range(1, 100):
        out = Path(shutil.copytree(tmp_path / "old", tmp_path / f"{at}"))
        with faulty(out, at) as disk:
            whole(NEW, files, out, overwrite=True)
        if not disk.struck:
            break
        if (out / JOURNAL).exists():
            missing = [name for name in ("config.json", "tokenizer.json", INDEX) if not (out / name).exists()]
            left.append(len(missing))
            with suppress(CheckpointError):  # What is there in place of a tokenizer is none.
                first(out)
            assert not (out / JOURNAL).exists() and contents(out)[0] == 1e4 * NEW
    assert {0, 1, 2, 3} <= set(left)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that takes too long counts as killed. What may be another's who is alive is not removed."""

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(journal, "WAIT", 0.1)
    out, files = tmp_path / "out", tmp_path / "files"
    whole(OLD, files, out)
    for at in itertools.count(1):
        with faulty(out, at) as disk:
            whole(NEW, files, out, overwrite=True)
        if (out / JOURNAL).exists() or not disk.struck:
            break
        assert contents(out)[0] == 1e4 * OLD
    left = {path.name for path in out.glob("*.partial")}
    began = time.monotonic()
    assert contents(out)[0] == 1e4 * NEW and time.monotonic() - began > 0.1 and left
    sharded(OLD, files, out, overwrite=True)
    assert contents(out)[0] == 1e4 * OLD and {path.name for path in out.glob(".*")} == left


def test_a_journal_of_another_moves_nothing(tmp_path: Path) -> None:
    """Nor does one that is a link, for the files would come from anywhere."""
    out, files = tmp_path / "out", tmp_path / "files"
    sharded(OLD, files, out)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for names in (["../elsewhere/mine"], [".."], [1], "config.json/..", {}, [["a"]]):
        (elsewhere / PLAN).write_text(json.dumps({"old": [], "new": names}))
        (elsewhere / "mine").write_text("mine")
        shutil.copytree(elsewhere, out / JOURNAL)
        before = everything(tmp_path)
        with pytest.raises(
            CheckpointError, match=r"a plan that cannot be followed: .*plan\.json: does not name the files"
        ):
            lm.from_pretrained(out)
        assert everything(tmp_path) == before
        shutil.rmtree(out / JOURNAL)
    (elsewhere / PLAN).write_text(json.dumps({"old": ["config.json"], "new": ["mine"]}))
    (out / JOURNAL).symlink_to(elsewhere)
    assert contents(out)[0] == 1e4 * OLD and (elsewhere / "mine").exists()


def test_what_others_keep_there_stays(tmp_path: Path) -> None:
    """Folders that other tools use as locks, beside a checkpoint and in it, are not what a killed save has left."""
    out, files = tmp_path / "out", tmp_path / "files"
    kept = [tmp_path / ".other.lock/mine", tmp_path / ".out.lock.d/mine", tmp_path / ".else.0a1b2c3d.partial/mine"]
    for path in kept:
        path.parent.mkdir()
        path.write_text("mine")
    sharded(OLD, files, out)
    (out / ".git.lock").mkdir()
    (out / ".git.lock/mine").write_text("mine")
    sharded(NEW, files, out, overwrite=True)
    assert contents(out)[0] == 1e4 * NEW
    assert all(path.read_text() == "mine" for path in (*kept, out / ".git.lock/mine"))
    (tmp_path / "locked/.git.lock").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="is not empty"):
        sharded(NEW, files, tmp_path / "locked")


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("out")
    with pytest.raises(CheckpointError, match="out: "):
        sharded(OLD, tmp_path / "files", tmp_path / "out")
