"""Loading: what of a checkpoint is mapped, what is copied, and how much memory and time a large one takes."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.convert import loading
from ligermodels.convert.files import SINGLE
from ligermodels.convert.mappings import TensorView, WeightMapping
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import CheckpointError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("large") / "model"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_memory_and_time_beside_transformers(
    large: Path, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two layers and the embedding of Llama 3 8B, 1.9 GB in shards; as stored, where both map what they can, and cast.

    As stored, ours copies what is one weight here and several in the files: of each layer q, k and v, and gate and up.
    `python -m benchmarks loading --help` says what is measured, and how.
    """
    command = [sys.executable, "-m", "benchmarks", "loading", large, "--device=cpu", "--dtype", dtype, "--rounds=3"]
    command += ["--num-hidden-layers=2", "--tied", "--max-shard-size=500MB", "--out", tmp_path / "out"]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    with capsys.disabled():
        print(f"\n{child.stdout}", end="")
    ours, theirs = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert ours["model_bytes"] == theirs["model_bytes"] > 1.9e9
    above = 1.3 * ours["largest_bytes"]
    assert ours["host_peak_bytes"] <= ours["host_after_bytes"] + above <= ours["model_bytes"] * 1.01 + above
    copies = 0.0
    if dtype == "bfloat16":
        copied = 2 * torch.bfloat16.itemsize * 4096 * (4096 + 2 * 1024 + 2 * 14336)
        assert 0.99 * copied < ours["host_after_bytes"] < 1.05 * copied
        copies = 3 * seconds_to_copy(copied)
    assert ours["ready_s"] <= 1.1 * theirs["ready_s"] + copies


def seconds_to_copy(size: int) -> float:
    """The fastest of three copies of `size` bytes into new memory."""
    source, found = torch.ones(size, dtype=torch.uint8), []
    for _ in range(3):
        start = time.perf_counter()
        source.clone()
        found.append(time.perf_counter() - start)
    return min(found)


def mapped(model: lm.CausalLM, path: Path) -> set[str]:
    """Parameters whose memory is that of the file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    ranges = [[int(end, 16) for end in line[0].split("-")] for line in lines]
    return {n for n, p in model.named_parameters() if any(a <= p.data_ptr() < b for a, b in ranges)}


def test_what_lies_in_the_file_as_it_is_wanted_is_mapped(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama-3.2"])
    file = tmp_path / SINGLE
    before = file.read_bytes()
    model = lm.from_pretrained(tmp_path)
    names = dict(model.named_parameters())
    assert mapped(model, file) == {name for name in names if "qkv" not in name and "gate_up" not in name}
    assert model.head.weight is model.decoder.embed.weight
    assert not mapped(lm.from_pretrained(tmp_path, dtype=torch.bfloat16), file)
    assert not mapped(lm.from_pretrained(tmp_path, mapped=False), file)

    # Writing to the weights changes no file; and a checkpoint that takes the place of theirs does not change them.
    with torch.no_grad():
        model.decoder.norm.weight.fill_(3)
    kept = {name: parameter.detach().clone() for name, parameter in names.items()}
    assert file.read_bytes() == before
    model.save_pretrained(tmp_path, overwrite=True)
    again = dict(lm.from_pretrained(tmp_path).named_parameters())
    for parameter in names.values():
        parameter.data.mul_(2)
    file.unlink()
    assert all(torch.equal(again[name], kept[name]) for name in kept)
    assert all(torch.equal(names[name], kept[name] * 2) for name in kept)


def test_parts_that_are_apart_or_misaligned_are_copied(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama-3"])
    file = tmp_path / SINGLE
    wanted = lm.from_pretrained(tmp_path, mapped=False).state_dict()
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    # Gate and up change places, and all is put one byte further on: the format allows both.
    order = sorted(
        header.keys() - {"__metadata__"}, key=lambda name: name.replace("gate_proj", "z").replace("up_proj", "a")
    )
    data = b""
    for name in order:
        start, end = header[name]["data_offsets"]
        header[name]["data_offsets"] = [len(data), len(data) + end - start]
        data += raw[8 + length + start : 8 + length + end]
    for shift, expected in ((0, {"decoder.embed.weight", "decoder.blocks.1.mlp.down.weight"}), (1, set())):
        text = json.dumps(header).encode()
        text += b" " * ((shift - len(text)) % 8)
        file.write_bytes(len(text).to_bytes(8, "little") + text + data)
        model = lm.from_pretrained(tmp_path)
        found = mapped(model, file)
        assert found >= expected and not any("gate_up" in name for name in found) and bool(found) == bool(expected)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_parts_in_another_order_than_in_the_file(tmp_path: Path) -> None:
    """Neighbours in the file whose places in a tensor are swapped; and one that is two tensors."""
    tensors = {name: torch.randn(4, 3) for name in "abc"}
    save_file(tensors, tmp_path / SINGLE)

    def rows(start: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: tensor[start : start + 4]

    mappings = [
        WeightMapping("swapped", (TensorView("a", rows(4)), TensorView("b", rows(0)))),
        WeightMapping("first", (TensorView("c", lambda tensor: tensor),)),
        WeightMapping("second", (TensorView("c", lambda tensor: tensor, start=1),)),
    ]
    state = {"swapped": torch.zeros(8, 3), "first": torch.zeros(1, 3), "second": torch.zeros(3, 3)}
    with Checkpoint(tmp_path) as checkpoint:
        WeightMap(mappings).load(checkpoint, state, mapped=True)
    assert torch.equal(state["swapped"], torch.cat([tensors["b"], tensors["a"]]))
    assert torch.equal(torch.cat([state["first"], state["second"]]), tensors["c"])


def test_reading_bytes(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5), "b": torch.randn(2, 3), "c": torch.randn(0, 3), "d": torch.randn(())}
    save_file(tensors, tmp_path / SINGLE)

    def raw(*names: str) -> bytes:
        return b"".join(tensors[name].numpy().tobytes() for name in names)

    with Checkpoint(tmp_path) as checkpoint:
        order = sorted(tensors, key=lambda name: (checkpoint.headers[name].start, name != "c"))
        together = checkpoint.read_together(order)
        assert together is not None and together.numpy().tobytes() == raw(*order)
        assert checkpoint.read_together(order[::-1]) is None
        assert checkpoint.read_together([order[0], order[-1]]) is None
        buffer = bytearray(9)
        checkpoint.read_into("b", 7, memoryview(buffer))
        assert buffer == raw("b")[7:16]
        for start, size in ((0, 25), (24, 1), (-1, 1)):
            with pytest.raises(CheckpointError, match=f"'b' does not have {size} bytes from {start} on"):
                checkpoint.read_into("b", start, memoryview(bytearray(size)))
        with (tmp_path / SINGLE).open("r+b") as file:
            file.truncate(20)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: is shorter than it was"):
            checkpoint.read_into("b", 0, memoryview(buffer))
    for read in (checkpoint.read, lambda name: checkpoint.read_into(name, 0, memoryview(b""))):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: was closed"):
            read("a")


@pytest.mark.parametrize("mapped", [True, False])
def test_loading_under_inference_mode_or_another_default_device(mapped: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama-3"])
    wanted = lm.from_pretrained(tmp_path).state_dict()
    with torch.inference_mode():
        found = lm.from_pretrained(tmp_path, mapped=mapped)
    with torch.device("meta"):
        other = lm.from_pretrained(tmp_path, device="cpu", mapped=mapped)
    for model in (found, other):
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


class Standin:
    """In place of CUDA's streams and events on the host, where all is done at once."""

    def __init__(self, *_: object) -> None:
        pass

    def record(self, stream: object) -> None:
        pass

    synchronize = __init__


def upload_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `loading.upload` fill tensors on the CPU, by buffers of 60 bytes."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", Standin)
    monkeypatch.setattr(torch.cuda, "Event", Standin)
    monkeypatch.setattr(loading, "BUFFER_BYTES", 60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uploading_in_pieces(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code as for a GPU; what is in a row or not, of other dtypes, smaller and larger than a buffer."""
    upload_on_the_host(monkeypatch)
    wide = torch.zeros(5, 4, 9, dtype=dtype)
    targets = [wide[:, 1:3], wide[:, 0], torch.zeros(15), torch.zeros(16), torch.zeros(()), torch.zeros(0, 3)]
    sources = [torch.randn(target.shape) for target in targets]

    class Stored:
        read = read_together = None

        def read_into(self, name: str, start: int, buffer: memoryview) -> None:
            assert 0 < len(buffer) <= 60
            buffer[:] = (b"skip" + sources[int(name)].numpy().tobytes())[start : start + len(buffer)]

    pieces = [loading.Piece(target, str(i), 1, torch.float32, False) for i, target in enumerate(targets)]
    done = list(loading.upload(Stored(), pieces, torch.device("cpu")))
    assert done == sorted((source.nbytes for source in sources), reverse=True)
    assert all(torch.equal(t, s.to(t.dtype)) for t, s in zip(targets, sources, strict=True))
    assert not wide[:, 3].any()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama-3.2", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_to_a_gpu(family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes as on the host, with buffers that hold a fraction of a tensor."""
    monkeypatch.setattr(loading, "BUFFER_BYTES", 1000)
    make_checkpoint(tmp_path, CONFIGS[family])
    wanted = lm.from_pretrained(tmp_path, dtype=dtype).state_dict()
    seen: list[tuple[int, int]] = []
    model = lm.from_pretrained(tmp_path, dtype=dtype, device="cuda", progress=lambda *done: seen.append(done))
    found: dict[str, Tensor] = model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(found[name].is_cuda and torch.equal(found[name].cpu(), wanted[name]) for name in wanted)
    total = sum(tensor.nbytes for tensor in load_file(tmp_path / SINGLE).values())
    assert seen[-1] == (total, total) and seen == sorted(seen)
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cannot be read"):
        lm.from_pretrained(tmp_path, device="cuda")
