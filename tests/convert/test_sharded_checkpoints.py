"""Checkpoints of DTensors, read and written by two ranks."""

import itertools
import re
import resource
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import faulty
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_two_ranks
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.convert.config_json import read_json
from ligermodels.convert.export_spec import ExportSpec
from ligermodels.convert.files import SINGLE
from ligermodels.convert.mappings import concat, grouped_qkv, interleaved_gate_up, rename
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.reading import reading
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.safetensors_writer import save_checkpoint
from ligermodels.convert.weight_map import LazyTensor, WeightMap, in_buckets
from ligermodels.errors import CheckpointError, ConfigError

WEIGHTS = WeightMap(
    [
        rename("embed", "embed"),
        grouped_qkv("qkv", "q", "k", "v", 3, 2, 3),
        interleaved_gate_up("gate_up", "gate", "up"),
        concat("columns", ["c0", "c1"], [2, 3], dim=1),
        rename("bias", "bias"),
        rename("norm", "norm"),
        rename("counts", "counts"),
    ]
)
SHAPES = {"embed": (7, 4), "qkv": (36, 4), "gate_up": (10, 4), "columns": (4, 5), "bias": (1,), "norm": (5,)}


def whole_state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {**{name: torch.randn(shape) for name, shape in SHAPES.items()}, "counts": torch.arange(3)}


def sharded(mesh: DeviceMesh, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows uneven, a single row, columns, all of it; and plain tensors, one of them a buffer of whole numbers."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = {"columns": Shard(1), "norm": Replicate()}
    return {
        name: tensor
        if name == "counts"
        else torch.nn.Parameter(distribute_tensor(tensor, mesh, [placements.get(name, Shard(0))]))
        for name, tensor in state.items()
    }


# -- what the two ranks do ---------------------------------------------------------------------------------------------


def save_and_load(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    whole = whole_state()
    state = sharded(mesh, whole)
    for size in ("5GB", 100):  # One file; and shards between which q, k and v of a weight are divided.
        spec = ExportSpec({"model_type": "none"}, WEIGHTS)
        spec.save(folder / f"out-{size}", state, max_shard_size=size)
        new = sharded(mesh, {name: torch.full_like(tensor, -1) for name, tensor in whole.items()})
        seen: list[tuple[int, int]] = []
        with Checkpoint(folder / f"out-{size}") as checkpoint:
            WEIGHTS.load(checkpoint, new, progress=lambda *done, seen=seen: seen.append(done))
        for name, tensor in new.items():
            found = tensor if name == "counts" else tensor.full_tensor()
            assert torch.equal(found, whole[name]), name
        # Each byte once, but for columns, and for what is on every rank.
        each = torch.tensor(seen[-1])
        assert each[0] == each[1] and seen == sorted(seen)
        distributed.all_reduce(each)
        total = sum(
            tensor.nbytes * (2 if name in ("columns", "norm", "counts") else 1) for name, tensor in whole.items()
        )
        assert each[0] == total


def cannot_be_loaded(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import DTensor, Partial

    partial = DTensor.from_local(torch.zeros(5), mesh, [Partial()])
    with Checkpoint(folder) as checkpoint, pytest.raises(CheckpointError, match=r"norm: .*placement P.*load, then sh"):
        WeightMap([rename("norm", "norm")]).load(checkpoint, {"norm": partial})


def save_model(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    model = lm.from_pretrained(folder / "model")
    for block in model.decoder.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.save_pretrained(folder / "out", max_shard_size="20KB")
    assert (folder / "out" / "config.json").is_file()  # For every rank, once it is out of the call.


def failing_tensors(state: dict[str, Tensor], fails: bool, gathers: bool) -> list[LazyTensor]:
    """The tensors of a checkpoint, of which the second cannot be read: if `fails`, and after it was gathered or not."""
    tensors = WEIGHTS.export(state)
    second = tensors[1]

    def read() -> Tensor:
        if fails:
            if gathers:
                second.read()
            raise MemoryError("on the host")
        return second.read()

    tensors[1] = second._replace(read=read)
    return tensors


def fails(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    state = sharded(mesh, whole_state())
    spec, out = ExportSpec({"model_type": "none"}, WEIGHTS), folder / "out"
    own = "" if rank == 0 else "rank 0 failed: "

    # A folder in use; then a disk that is full at some file.
    (folder / "used").mkdir(exist_ok=True)
    (folder / "used" / "mine").write_text("mine")
    distributed.barrier()
    with pytest.raises(CheckpointError, match=f"{own}.*used: is not empty"):
        spec.save(folder / "used", state)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
    wanted = "nothing was written" if rank == 0 else "out: not written, rank 0 failed: OSError: .*File too large"
    with pytest.raises(CheckpointError, match=wanted):
        spec.save(out, state, max_shard_size=300)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    # A rank that writes or does not, in the middle of a shard, after it has gathered a tensor or before.
    for failing, gathers in itertools.product((0, 1), (True, False)):
        error, wanted = (MemoryError, "on the host") if rank == failing else (CheckpointError, f"rank {failing} failed")
        ranks = Ranks(state.values())
        with pytest.raises(error, match=wanted):
            save_checkpoint(out, failing_tensors(state, rank == failing, gathers), ranks=ranks)
        with pytest.raises(error, match=wanted):
            for _ in in_buckets(failing_tensors(state, rank == failing, gathers), 100, None, ranks):
                pass
        with pytest.raises(error, match=wanted), ranks.step("around", ""):  # the other rank is in a step within it
            if rank == failing:
                raise MemoryError("on the host")
            with ranks.step("within", ""):
                pass

    assert not out.exists()
    spec.save(out, state)  # Ranks are still in step.


def some_gather(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """A model on rank 0 of two: rank 1 calls nothing."""
    from torch.distributed.device_mesh import DeviceMesh

    of_one = DeviceMesh("cpu", [0])
    if rank == 0:
        state = sharded(of_one, whole_state())
        ranks = Ranks.that_hold(state.values())
        found = dict(itertools.chain(*in_buckets(WEIGHTS.export(state), 100, None, ranks)))
        assert found.keys() == WEIGHTS.sources()


def overwrites(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """A disk that fails at any of some changes on the rank that writes: all raise, and what was there stays."""
    new = sharded(mesh, {name: tensor + 1 for name, tensor in whole_state().items()})
    spec = ExportSpec({"model_type": "new"}, WEIGHTS)
    before = {path: path.read_bytes() for path in (folder / "out").iterdir()}
    distributed.barrier()
    struck = torch.zeros(1)
    for at in (3, 12, 16, 20, 24, 28):
        wanted = "out: cannot be written" if rank == 0 else "out: not written, rank 0 failed: "
        with faulty(folder / "out" if rank == 0 else folder / "none", at, "error") as disk:
            try:
                spec.save(folder / "out", new, max_shard_size=100, overwrite=True)
                failed = False
            except CheckpointError as error:
                failed = re.search(wanted, str(error)) is not None
        assert failed == (rank != 0 or disk.struck)
        struck += failed
        distributed.barrier()
        assert {path: path.read_bytes() for path in (folder / "out").iterdir()} == before
        distributed.barrier()
    assert struck == 6


def read_together(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """A save between what one rank reads and what the other does: both read again, and get the new one."""
    ranks, turns = Ranks.of_group(), 0

    def open_files(opened: ExitStack) -> Any:
        nonlocal turns
        turns += 1
        if turns == 1 and rank == 1:
            distributed.barrier()  # Rank 0 has read the old one.
            ExportSpec({"model_type": "new"}, WEIGHTS).save(folder / "out", whole_state(), overwrite=True)
        found = read_json(folder / "out" / "config.json")["model_type"]
        if turns == 1 and rank == 0:
            distributed.barrier()
        return found

    with reading(folder / "out", open_files, ranks) as found:
        assert (found, turns) == ("new", 2)
    lost = reading(folder / "out", lambda _: read_json(folder / "none.json") if rank == 0 else None, ranks)
    error, wanted = (ConfigError, "no such file") if rank == 0 else (CheckpointError, "rank 0 failed: .*no such file")
    with pytest.raises(error, match=wanted), lost:
        pass


# -- tests -------------------------------------------------------------------------------------------------------------


def test_shards_are_written_and_read(tmp_path: Path) -> None:
    in_two_ranks(save_and_load, tmp_path)
    wanted = {each.name: each.read() for each in WEIGHTS.export(whole_state())}
    for size in ("5GB", 100):
        shards = list((tmp_path / f"out-{size}").glob("*.safetensors"))
        found = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
        assert (len(shards) > 1) == (size == 100)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_model_under_fsdp(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", CONFIGS["llama-3.2"])
    in_two_ranks(save_model, tmp_path)
    lm.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    found, wanted = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("out", "plain"))
    assert found == wanted


def test_placements_that_cannot_be_loaded(tmp_path: Path) -> None:
    save_file({"norm": torch.randn(5)}, tmp_path / SINGLE)
    in_two_ranks(cannot_be_loaded, tmp_path)


def test_a_failure_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    in_two_ranks(fails, tmp_path)
    assert load_file(tmp_path / "out" / SINGLE).keys() == WEIGHTS.sources()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "used", "rendezvous"}


def test_ranks_without_the_model_need_not_call_anything(tmp_path: Path) -> None:
    in_two_ranks(some_gather, tmp_path)


def test_ranks_overwrite_a_checkpoint_or_leave_it(tmp_path: Path) -> None:
    ExportSpec({"model_type": "old"}, WEIGHTS).save(tmp_path / "out", whole_state(), max_shard_size=100)
    in_two_ranks(overwrites, tmp_path)


def test_ranks_read_the_same_save(tmp_path: Path) -> None:
    ExportSpec({"model_type": "old"}, WEIGHTS).save(tmp_path / "out", whole_state())
    in_two_ranks(read_together, tmp_path)
