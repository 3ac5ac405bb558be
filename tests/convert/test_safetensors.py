"""Reading and writing checkpoint folders: exact to the byte, and nothing half-written or half-read on any failure."""

import errno
import hashlib
import json
import os
import re
import resource
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ligermodels.convert import saving
from ligermodels.convert.digests import check_digests
from ligermodels.convert.files import INDEX, SINGLE
from ligermodels.convert.safetensors_reader import DTYPES, Checkpoint
from ligermodels.convert.safetensors_writer import Lazy, parse_size, save_checkpoint
from ligermodels.errors import CheckpointError, InputError


def lazy(tensors: dict[str, Tensor]) -> list[Lazy]:
    return [(name, tuple(each.shape), each.dtype, lambda each=each: each) for name, each in tensors.items()]


def floats(*names: str, size: int = 10) -> dict[str, Tensor]:
    return {name: torch.randn(size) for name in names}


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below `folder`, with the files' content."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def digest_by_itself(path: Path) -> str:
    """SHA-256 of the file with zeros in place of the digest in its header."""
    content = path.read_bytes()
    head = content[: int.from_bytes(content[:8], "little") + 8]
    return hashlib.sha256(re.sub(rb"[0-9a-f]{64}", b"0" * 64, head) + content[len(head) :]).hexdigest()


def same_bytes(a: Tensor, b: Tensor) -> bool:
    raw = [each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


# -- what is written is read back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["5GB", 50, 1])
def test_round_trip_of_every_dtype(tmp_path: Path, limit: int | str) -> None:
    dtypes = [each for each in DTYPES.values() if each != getattr(torch, "float8_e8m0fnu", None)]  # Not written by all.
    tensors = {
        f"t{i}": torch.randint(0, 2, (3, 5 * dtype.itemsize), dtype=torch.uint8).view(dtype)
        for i, dtype in enumerate(dtypes)
    }
    tensors |= {"scalar": torch.tensor(1.5), "none": torch.zeros(0, 3), "nan": torch.tensor([torch.nan, -0.0])}
    tensors |= {"strided": torch.randn(4, 6)[::2, 1:].T, "repeated": tensors["t0"], "expanded": torch.ones(1).expand(3)}
    save_checkpoint(tmp_path / "out", lazy(tensors), max_shard_size=limit)
    with Checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.headers.keys() == tensors.keys()
        for name, tensor in tensors.items():
            header = checkpoint.headers[name]
            assert (header.dtype, header.shape) == (tensor.dtype, tensor.shape)
            assert same_bytes(checkpoint.read(name), tensor)
            assert same_bytes(load_file(tmp_path / "out" / header.file)[name], tensor)


@pytest.mark.parametrize(
    ("limit", "shards"),
    [
        (120, [["a", "b", "c"]]),
        (119, [["a", "b"], ["c"]]),
        (80, [["a", "b"], ["c"]]),
        (79, [["a"], ["b"], ["c"]]),
        (39, [["a"], ["b"], ["c"]]),  # Each is larger than a shard may be.
        ("0.1KB", [["a", "b"], ["c"]]),
    ],
)
def test_shards_are_named_as_transformers_does(tmp_path: Path, limit: int | str, shards: list[list[str]]) -> None:
    save_checkpoint(tmp_path / "out", lazy(floats("a", "b", "c")), max_shard_size=limit)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*names, *([INDEX] if count > 1 else [])}
    for name, wanted in zip(names, shards, strict=True):
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            assert sorted(file.keys()) == wanted
            alone = {"ligermodels.sha256": digest_by_itself(tmp_path / "out" / name)} if count == 1 else {}
            assert file.metadata() == {"format": "pt", **alone}
    if count > 1:
        digests = {name: hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() for name in names}
        assert json.loads((tmp_path / "out" / INDEX).read_text()) == {
            "metadata": {"total_size": 120, "sha256": digests},
            "weight_map": {each: name for name, wanted in zip(names, shards, strict=True) for each in wanted},
        }


def test_one_shard_is_fetched_at_a_time(tmp_path: Path) -> None:
    written: list[int] = []

    def read(i: int) -> Tensor:
        written.append(len(list(tmp_path.glob("**/model-*"))))
        return torch.zeros(10)

    save_checkpoint(
        tmp_path / "out", [(f"t{i}", (10,), torch.float32, lambda i=i: read(i)) for i in range(6)], max_shard_size=80
    )
    assert written == [0, 0, 1, 1, 2, 2]


def test_files_and_permissions(tmp_path: Path) -> None:
    (tmp_path / "vocab").write_bytes(b"\x00v")
    (tmp_path / "link").symlink_to("vocab")  # As in huggingface_hub's cache.
    out = tmp_path / "new" / "parents" / "out"
    files: dict[str, bytes | str | Path] = {
        "config.json": '{"é": 1}',
        "merges.txt": b"\xff",
        "vocab.json": tmp_path / "link",
    }
    previous = os.umask(0o027)
    try:
        save_checkpoint(out, lazy(floats("a")), files=files)
    finally:
        os.umask(previous)
    found = tree(out)
    assert found.keys() == {*files, SINGLE}
    assert (found["config.json"], found["merges.txt"], found["vocab.json"]) == ('{"é": 1}'.encode(), b"\xff", b"\x00v")
    assert not (out / "vocab.json").is_symlink()
    assert {stat.S_IMODE((out / name).stat().st_mode) for name in ("config.json", SINGLE)} == {0o640}
    assert stat.S_IMODE(out.stat().st_mode) == 0o750


def test_overwriting_replaces_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    save_checkpoint(
        out, lazy(floats("a", "b", "c")), max_shard_size=40, files={"tokenizer.json": "old", "config.json": "1"}
    )
    (out / "runs").mkdir()
    for mine in ("runs/log", "optimizer.safetensors", "notes.txt"):
        (out / mine).write_text("mine")
    inode, before, new = out.stat().st_ino, tree(tmp_path), floats("a")
    with pytest.raises(CheckpointError, match=r"out: is not empty.*overwrite"):
        save_checkpoint(out, lazy(new))
    assert tree(tmp_path) == before
    # A file of the old checkpoint may be copied into the new one; what is a link stays one.
    (tmp_path / "link").symlink_to(out)
    files: dict[str, Any] = {"config.json": "2", "merges.txt": out / "tokenizer.json"}
    save_checkpoint(tmp_path / "link", lazy(new), files=files, overwrite=True)
    assert (tmp_path / "link").is_symlink() and out.stat().st_ino == inode
    found = tree(out)
    assert found.keys() == {
        SINGLE,
        "config.json",
        "merges.txt",
        "runs",
        "runs/log",
        "optimizer.safetensors",
        "notes.txt",
    }
    assert (found["config.json"], found["merges.txt"], found["runs/log"]) == (b"2", b"old", b"mine")
    assert torch.equal(load_file(out / SINGLE)["a"], new["a"])


# -- failures of writing -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["absent", "empty", "checkpoint", "deep"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder to write, in several states; whatever the test does, all must be as before when it ends."""
    out = tmp_path / "deep" / "er" / "out" if request.param == "deep" else tmp_path / "out"
    if request.param in ("empty", "checkpoint"):
        out.mkdir()
    if request.param == "checkpoint":
        save_checkpoint(
            out, lazy(floats("old", "older")), max_shard_size=40, files={"config.json": "1"}, overwrite=True
        )
    before = tree(tmp_path)
    yield out
    assert tree(tmp_path) == before


def write(target: Path, tensors: list[Lazy], **options: Any) -> None:
    save_checkpoint(target, tensors, overwrite=True, files={"config.json": "2"}, **options)


def test_full_disk_is_noticed_before_writing(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(1000, 900, 100)  # type: ignore[attr-defined]
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: usage)
    unread: Lazy = ("a", (1000,), torch.float32, lambda: pytest.fail("was read"))
    with pytest.raises(CheckpointError, match=r"disk is too full; it needs 4,001 bytes, 100 are free"):
        write(target, [unread])


def test_disk_that_fills_up_while_writing(target: Path) -> None:
    # The kernel refuses to write more than so many bytes to a file, as it would on a full disk.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(
            CheckpointError, match=rf"{os.strerror(errno.EFBIG)}.*needs 44,4\d\d bytes.*nothing was written"
        ):
            write(target, [*lazy(floats("a", size=1000)), *lazy(floats("b", size=10_000))], max_shard_size=20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interruption_while_writing(target: Path, error: type[BaseException]) -> None:
    def fail() -> Tensor:
        raise error("while reading a tensor")

    with pytest.raises(error, match="while reading"):
        write(target, [*lazy(floats("a")), ("b", (10,), torch.float32, fail)], max_shard_size=40)


def test_file_to_copy_that_is_not_there(target: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"out: cannot be written: .*lost\.json"):
        save_checkpoint(target, lazy(floats("a")), files={"vocab.json": tmp_path / "lost.json"}, overwrite=True)


def test_arguments_that_cannot_be_written(target: Path) -> None:
    for size in ("5XB", "many", "", "0", 0, -1, "-5GB", True, "GB", "1I"):
        with pytest.raises(InputError, match=r"max_shard_size: .* is not a size"):
            write(target, lazy(floats("a")), max_shard_size=size)
    with pytest.raises(CheckpointError, match="no tensors"):
        write(target, [])
    with pytest.raises(CheckpointError, match="same name"):
        write(target, [*lazy(floats("a")), *lazy(floats("a"))])


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "used" / "config.json").mkdir(parents=True)
    before = tree(tmp_path)
    for path, message in [
        ("file", "file: is a file"),
        ("file/out", "cannot be written: .*exists: '.*file'; .*nothing was written"),
        ("used", "config.json is a folder"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            write(tmp_path / path, lazy(floats("a")))
    assert tree(tmp_path) == before


def test_sizes() -> None:
    found = {text: parse_size(text) for text in ("5GB", "500mb", "1.5 KB", "2KiB", "1GiB", "7", "7B", 9, 2**63 - 1)}
    assert list(found.values()) == [5 * 10**9, 5 * 10**8, 1500, 2048, 2**30, 7, 7, 9, 2**63 - 1]


# -- failures of reading -----------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Tensors a and b in the first of two shards, c in the second."""
    save_checkpoint(tmp_path / "model", lazy(floats("a", "b", "c")), max_shard_size=80)
    return tmp_path / "model"


FIRST, SECOND = (f"model-{i:05d}-of-00002.safetensors" for i in (1, 2))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(folder)
    assert str(folder) in str(caught.value)


def test_folder_without_weights(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such folder")
    refused(tmp_path, r"no model\.safetensors and no model\.safetensors\.index\.json$")
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"\x80")
    refused(tmp_path, r"only pytorch_model-00001.*pickles are not loaded.*save_pretrained")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'"weight_map"',
        b'{"metadata": {}}',
        b'{"weight_map": {}}',
        b'{"weight_map": ["a"]}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "../model.safetensors"}}',
        b'{"weight_map": {"a": "/etc/passwd"}}',
        b'{"weight_map": {"a": "pytorch_model.bin"}}',
    ],
)
def test_index_that_is_none(sharded: Path, content: bytes) -> None:
    (sharded / INDEX).write_bytes(content)
    refused(sharded, r"index\.json: (is not JSON whose 'weight_map'|not JSON|holds a (list|str), not an object)")


def test_index_and_shards_that_disagree(sharded: Path) -> None:
    good = json.loads((sharded / INDEX).read_text())
    for name, file in [("d", FIRST), ("c", FIRST), ("a", SECOND)]:
        (sharded / INDEX).write_text(json.dumps({**good, "weight_map": {**good["weight_map"], name: file}}))
        refused(sharded, rf"index\.json: says that {file} holds '{name}', but it does not")
    (sharded / INDEX).write_text(json.dumps(good))
    save_file(floats("c", "a"), sharded / SECOND)
    refused(sharded, rf"{SECOND}: holds 'a', but so does {FIRST}")
    save_file(floats("c", "extra"), sharded / SECOND)  # The weight map of the model will say that it expects none.
    assert "extra" in Checkpoint(sharded).headers


def test_damaged_files(sharded: Path) -> None:
    path = sharded / SECOND
    good = path.read_bytes()
    header = int.from_bytes(good[:8], "little")
    damaged = {
        "empty": b"",
        "shorter by one byte": good[:-1],
        "cut in the header": good[: header // 2],
        "cut in the length": good[:3],
        "longer": good + b"\0",
        "length of nonsense": b"\xff" * 8 + good[8:],
        "header of nonsense": good[:8] + b"\xff" * header + good[8 + header :],
        "a page of the hub": b"<!DOCTYPE html><html>not found</html>",
        "a pointer of git": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    }
    for content in damaged.values():
        path.write_bytes(content)
        refused(sharded, rf"{SECOND}: cannot be read: .+; if truncated or damaged, fetch it again")
    path.unlink()
    refused(sharded, rf"1 of 2 shards are missing: {SECOND}")
    path.mkdir()
    refused(sharded, rf"{SECOND}: is a folder, not a file")


def test_digests_name_what_is_not_as_it_was_written(sharded: Path, tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    assert check_digests(sharded, lambda *each: done.append(each)) == [FIRST, SECOND]
    size = sum((sharded / name).stat().st_size for name in (FIRST, SECOND))
    assert done[-1] == (size, size)
    good = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    Checkpoint(sharded).close()  # It has the right size.
    with pytest.raises(CheckpointError, match=rf"model: 1 of 2 weight files do not match their SHA-256: {SECOND};"):
        check_digests(sharded)
    (sharded / SECOND).unlink()
    with pytest.raises(CheckpointError, match=rf"{SECOND} \(No such file"):
        check_digests(sharded)
    index = json.loads((sharded / INDEX).read_text())
    for digests in ({}, None):
        (sharded / INDEX).write_text(json.dumps({**index, "metadata": {"sha256": digests}}))
        assert check_digests(sharded) == []
    for digests in ([], {"../model.safetensors": ""}, {FIRST: 1}):
        (sharded / INDEX).write_text(json.dumps({**index, "metadata": {"sha256": digests}}))
        with pytest.raises(CheckpointError, match=r"index\.json: metadata: sha256: must have a digest"):
            check_digests(sharded)


@pytest.mark.parametrize("name", ["model", "adapter_model"])
def test_a_file_by_itself_holds_its_digest(tmp_path: Path, name: str) -> None:
    tensors, file = floats('é"ligermodels.sha256":"', "b"), f"{name}.safetensors"
    contents = set()
    for i in range(12):  # The library writes metadata in an order of its own.
        save_checkpoint(tmp_path / f"{i}", lazy(tensors), name=name)
        contents.add((tmp_path / f"{i}" / file).read_bytes())
        assert check_digests(tmp_path / f"{i}") == [file]
    assert len(contents) == 1
    good = contents.pop()
    out, header = tmp_path / "0", int.from_bytes(good[:8], "little")
    inside = good.index(b'"ligermodels.sha256":"') + 25
    damaged = {
        "first bit of the data": (8 + header, good[8 + header] ^ 1),
        "last": (len(good) - 1, good[-1] ^ 128),
        "a name": (good.index(b'"b"') + 1, ord("c")),
        "the digest": (inside, ord("0") if good[inside] != ord("0") else ord("1")),
        "the digest, no digit": (inside, ord("-")),
        "the length of the header": (7, 1),
        "the length, shorter": (0, 20),
    }
    contents = [good[:at] + bytes([byte]) + good[at + 1 :] for at, byte in damaged.values()]
    for content in (*contents, b"", bytes(len(good))):
        (out / file).write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"1 of 1 weight files do not match their SHA-256: {file}"):
            check_digests(out)
    (out / file).write_bytes(good[:-1])
    with pytest.raises(CheckpointError, match="1 of 1 weight files"):
        check_digests(out)
    (out / file).write_bytes(good)
    (out / file).rename(out / "renamed.safetensors")
    save_file(load_file(out / "renamed.safetensors"), out / file)  # Another program's has none.
    assert check_digests(out) == ["renamed.safetensors"]


def test_dtype_that_torch_lacks(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    refused(tmp_path, r"model\.safetensors: ('a' has dtype F4, which this torch does not have|cannot be read)")


def test_single_file_wins_over_an_index_as_in_transformers(sharded: Path) -> None:
    save_file(floats("single"), sharded / SINGLE)
    assert list(Checkpoint(sharded).headers) == ["single"]


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 9), (7, 2), (9, 1)])
def test_a_tensor_does_not_have_the_elements_of_another(tmp_path: Path, start: int, count: int) -> None:
    save_file({"a": torch.ones(4, 2), "b": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read_slice("a", 6, 2).tolist() == [1, 1] and not len(checkpoint.read_slice("a", 8, 0))
        with pytest.raises(
            CheckpointError, match=rf"model.safetensors: 'a' does not have {count} elements from {start} on"
        ):
            checkpoint.read_slice("a", start, count)


def test_tensors_outlive_the_checkpoint(sharded: Path) -> None:
    with Checkpoint(sharded) as checkpoint:
        assert checkpoint.headers["c"].file == SECOND
        found = checkpoint.read("c")
        with pytest.raises(CheckpointError, match="holds no tensor 'd'"):
            checkpoint.read("d")
    wanted = load_file(sharded / SECOND)["c"].clone()
    shutil.rmtree(sharded)
    assert torch.equal(found, wanted)
