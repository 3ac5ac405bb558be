"""New weights for an engine: `update_weights` with engines that stand in for vLLM, of which tests/serving runs the real
one."""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from two_ranks import in_two_ranks
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.convert import ranks
from ligermodels.convert.weight_stream import WeightStream
from ligermodels.errors import CheckpointError, InputError
from ligermodels.integrations.vllm import RECEIVER, update_weights, weights
from ligermodels.integrations.vllm.shared_buckets import SharedBuckets, reader_of
from ligermodels.layers.initialization import persistent_tensors


class Executor:
    """Stands for vLLM's executor with the worker in this process, which `external_launcher` inherits from."""


class Launched(Executor):
    """Stands for the executor of `external_launcher`."""


class Served(torch.nn.Module):
    """Stands for `LigerModelsForCausalLM`: the methods that an update calls."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.native = lm.from_config({**CONFIGS["llama-3"], "num_hidden_layers": layers}, dtype="float64")
        self.stream = WeightStream([self.native.config.weight_map()], persistent_tensors(self.native))
        self.begin_update, self.not_updated = self.stream.begin, self.stream.missing

    def update(self, bucket: list[tuple[str, Tensor]]) -> None:
        for name, tensor in bucket:
            self.stream.load(name, tensor)


PARALLEL_STATE = SimpleNamespace(
    model_parallel_is_initialized=torch.distributed.is_initialized,
    get_world_group=lambda: SimpleNamespace(world_size=torch.distributed.get_world_size()),
)
"""vLLM's process groups in a process that has a worker."""
MODULES: dict[str, Any] = {
    "vllm.v1.executor.uniproc_executor": SimpleNamespace(UniProcExecutor=Executor),
    "ligermodels.integrations.vllm.model": SimpleNamespace(LigerModelsForCausalLM=Served),
}


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    sys.modules.pop("ligermodels.integrations.vllm.receiver", None)  # it knows the class above


class Workers:
    """An engine whose two workers take buckets by `WeightReceiver`, in this process."""

    def __init__(self, extension: str = RECEIVER, idle: bool = True) -> None:
        from ligermodels.integrations.vllm.receiver import WeightReceiver

        self.models: list[torch.nn.Module] = [Served(), Served()]
        self.workers: list[Any] = [WeightReceiver(), WeightReceiver()]
        for rank, worker in enumerate(self.workers):
            worker.rank, worker.device, worker.get_model = (
                rank,
                torch.device("cpu"),
                partial(self.models.__getitem__, rank),
            )
        self.model_executor: Any = None
        self.apply_model: Any = None
        self.llm_engine, self.emptied, self.calls, self.empties = self, 0, Counter[str](), True
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=2, worker_extension_cls=extension),
            model_config=SimpleNamespace(architecture="OtherForCausalLM"),
        )
        self.has_unfinished_requests = lambda: not idle

    def reset_prefix_cache(self) -> bool:
        self.emptied += 1
        return self.empties

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls[method] += 1
        return [getattr(worker, method)(*args) for worker in self.workers]

    def check(self, model: lm.CausalLM) -> None:
        """The workers have the weights of `model`."""
        for served in cast(list[Served], self.models):
            torch.testing.assert_close(served.native.state_dict(), model.state_dict(), rtol=0, atol=0)


def serves_another_class() -> Workers:
    engine = Workers()
    engine.models[1] = torch.nn.Identity()
    return engine


def elsewhere() -> Workers:
    """An engine with a worker on another host."""
    engine = Workers()
    engine.workers[1].begin_weight_update = lambda: {"host": "other", "gpus": []}
    return engine


def test_update_of_workers() -> None:
    """All buckets reach all workers; errors name the tensor, and the prefix cache is emptied in any case."""
    engine = Workers()
    model = lm.from_config(CONFIGS["llama-3"], dtype="float64")
    update_weights(engine, model, bucket_bytes=5000)
    assert engine.emptied == 1 and engine.calls["load_shared_weights"] == len(
        [*model.iter_hf_weights(bucket_bytes=5000)]
    )
    engine.check(model)
    for layers, message in (
        (1, "the served model has tensors that the update does not: "),
        (3, r"layers\.2\..* not exp"),
    ):
        with pytest.raises(CheckpointError, match=message):
            update_weights(engine, lm.from_config({**CONFIGS["llama-3"], "num_hidden_layers": layers}, dtype="float64"))
    assert engine.emptied == 3
    engine.empties = False
    with pytest.raises(InputError, match="engine: did not empty its prefix cache"):
        update_weights(engine, model)


@pytest.mark.parametrize(("engine", "message"), [
    (None, "engine: must be a vllm.LLM, got a NoneType"),
    (SimpleNamespace(), "engine: must be a vllm.LLM, got a SimpleNamespace"),
    (partial(Workers, idle=False), "engine: has unfinished requests"),
    (partial(Workers, ""), "engine: serves OtherForCausalLM; start it with hf_overrides="),
    (serves_another_class, "engine: serves OtherForCausalLM; start it with hf_overrides="),
    (partial(Workers, "collections.Counter"), "engine: worker_extension_cls is collections.Counter; let it inherit"),
    (elsewhere, "engine: a worker runs on another host"),
])  # fmt: skip
def test_engines_that_take_no_weights(engine: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        update_weights(engine() if callable(engine) else engine, lm.from_config(CONFIGS["llama-3"]))


@pytest.mark.parametrize(("executor", "world_size"), [(Launched, 2), (Executor, 1), (object, 1), (object, 2)])
def test_the_executor_says_where_the_workers_are(executor: type, world_size: int) -> None:
    """In this process, as one of several launched ranks too; or in other processes, as a single one too."""
    engine = Workers()
    engine.vllm_config.parallel_config.world_size = world_size
    here = Served()
    engine.model_executor, engine.apply_model = executor(), lambda function: [function(here)]
    model = lm.from_config(CONFIGS["llama-3"], dtype="float64")
    update_weights(engine, model, bucket_bytes=5000)
    assert engine.emptied == 1 and bool(engine.calls) == (executor is object)
    if executor is not object:
        engine.models = [here]
    engine.check(model)


def test_errors_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep their class and message."""
    engine, model = Workers(), lm.from_config(CONFIGS["llama-3"], dtype="float64")
    monkeypatch.setattr(os, "getpid", lambda: 2**30)  # the path in the handle is not there
    with pytest.raises(InputError, match=r"^engine: a worker cannot open the trainer's shared memory, /proc/"):
        update_weights(engine, model)


class OnGPU(SharedBuckets):
    """Believes that its buffer is in a GPU's memory, which all readers open."""

    def __init__(self, device: torch.device, readers: Any) -> None:
        super().__init__(device, readers)
        self.device = torch.device("cuda:0")

    def _allocate(self, nbytes: int) -> Tensor:
        if self.device.type == "cpu":
            return super()._allocate(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)


HANDLE = (0, b"memory", 1, 0, b"counter", 0, b"event", True)
"""What torch gives for a storage: the last value asks the reader to wait for the event."""


def refused(*_: Any) -> Any:
    raise RuntimeError("pidfd_getfd: Operation not permitted\nof many lines")


@pytest.mark.parametrize("refuses", ["trainer", "worker"])
def test_without_cuda_ipc(refuses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA IPC is forbidden, weights go through shared memory. An engine tries it once, and a warning says so."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refused)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", refused if refuses == "trainer" else lambda _: HANDLE)
    monkeypatch.setattr(weights, "SharedBuckets", OnGPU)
    engine, other, model = Workers(), Workers(), lm.from_config(CONFIGS["llama-3"], dtype="float64")
    for worker in engine.workers + other.workers:
        worker.device = torch.device("cpu", 0)  # the number of a GPU
    for each in (engine, engine, other):
        before = each.calls["load_shared_weights"]
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            update_weights(each, model)
        each.check(model)
        is_first = before == 0
        assert each.calls["load_shared_weights"] - before == 1 + (is_first and refuses == "worker")
        verb = "share" if refuses == "trainer" else "open"
        assert [str(warning.message) for warning in found] == is_first * [
            f"engine: CUDA IPC cannot {verb} the trainer's GPU memory (pidfd_getfd: Operation not permitted); "
            "containers need the right to it, as by docker's --ipc=host and --cap-add=SYS_PTRACE. New weights go "
            "through shared memory of the host."
        ]
        assert all(warning.filename == __file__ for warning in found)


def test_handles_of_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage has one for each reader, without events, and is gone when the next bucket is packed: torch keeps memory
    and an event for each handle of a storage as long as the storage, and a reader never closes the event."""
    storages: list[StorageWeakRef] = []

    def shared(storage: torch.UntypedStorage) -> tuple[Any, ...]:
        storages.append(StorageWeakRef(storage))
        return HANDLE

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", shared)
    readers = [reader_of(torch.device("cpu"))] * 2
    with OnGPU(torch.device("cpu"), readers) as buckets:
        for size in (3, 70, 5, 0):
            handles, _ = buckets.pack([("large", torch.zeros(size, 17))])
            assert handles == [["cuda", *HANDLE[1:-1], False]] * 2
            assert [storage.expired() for storage in storages] == [True] * (len(storages) - 2) + [False] * 2
    assert len(storages) == 8 and all(storage.expired() for storage in storages)


def on_ranks(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    def update(engine: Any, weights: lm.CausalLM | None = None, **options: Any) -> str:
        """The error of this rank; "" without one."""
        try:
            update_weights(engine, weights or model, **options)
        except (CheckpointError, InputError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    sys.modules.update(MODULES)
    model = lm.from_pretrained(folder / "three-layers", plan=lm.ParallelPlan())
    for broken, message in (
        (Workers(), "CheckpointError: the weights do not fit the model: model.layers.2."),  # has two layers
        (Workers(idle=False), "InputError: engine: has unfinished requests"),
        (serves_another_class(), "InputError: engine: serves OtherForCausalLM"),
        (None, "InputError: engine: must be a vllm.LLM, got a NoneType"),
    ):
        found = update(broken if rank == 0 else None, bucket_bytes=5000)
        assert found.startswith(message if rank == 0 else f"CheckpointError: update_weights: rank 0 failed: {message}")
    found = update(None, bucket_bytes=0 if rank else 5000)
    assert found.startswith("InputError: bucket_bytes" if rank else "InputError: engine")

    model = lm.from_pretrained(folder / "two-layers", plan=lm.ParallelPlan())
    engine = Workers(idle=rank == 0)  # of its own on each rank
    found = update(engine)
    assert found.startswith("InputError: engine: has unf" if rank else "CheckpointError: update_weights: rank 1 failed")
    engine = Workers()
    assert update(engine if rank == 0 else None) == ""
    if rank == 0:
        engine.check(lm.from_pretrained(folder / "two-layers"))
    gather_fails(rank, model, update)

    whole, engine = lm.from_pretrained(folder / "two-layers"), launched()
    assert update(engine, whole) == ""
    engine.check(whole)
    sys.modules["vllm.distributed.parallel_state"] = PARALLEL_STATE  # type: ignore[assignment]
    for broken, message in (
        (launched(idle=False), "InputError: engine: has unfinished requests"),
        (None, "InputError: engine: with external_launcher each rank gives its engine; got None"),
    ):
        found = update(broken if rank == 1 else engine, whole)
        assert found.startswith(message if rank == 1 else f"CheckpointError: update_weights: rank 1 failed: {message}")


def launched(**options: Any) -> Workers:
    """The engine of one rank with `external_launcher`, whose worker is this process."""
    engine, served = Workers(**options), Served()
    engine.vllm_config.parallel_config.distributed_executor_backend = "external_launcher"
    engine.model_executor, engine.apply_model, engine.models = Launched(), lambda function: [function(served)], [served]
    return engine


def gather_fails(rank: int, model: lm.CausalLM, update: Callable[..., str]) -> None:
    """On one rank, with an engine or without, in the middle of a bucket: no rank waits for it."""
    gathers = ranks.Gather.__call__
    for failing in (0, 1):
        engine, calls = Workers(), Counter[str]()

        def gather(self: ranks.Gather, tensor: Tensor, failing: int = failing, calls: Counter[str] = calls) -> Tensor:
            calls["gather"] += 1
            if rank == failing and calls["gather"] == 5:
                raise InputError("no memory")
            return gathers(self, tensor)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranks.Gather, "__call__", gather)
            found = update(engine if rank == 0 else None)
        assert found == (
            "InputError: no memory"
            if rank == failing
            else f"CheckpointError: gathering the weights: rank {failing} failed: InputError: no memory"
        )
        assert update(engine if rank == 0 else None) == ""


def test_every_rank_learns_of_an_error(tmp_path: Path) -> None:
    """Of a sharded model, whichever rank has the engine; the ranks then update together again."""
    for name, layers in (("two-layers", 2), ("three-layers", 3)):
        config = {**CONFIGS["llama-3"], "num_hidden_layers": layers}
        lm.from_config(config, dtype="float64").save_pretrained(tmp_path / name)
    in_two_ranks(on_ranks, tmp_path)
