"""New weights for an engine: `update_weights` with engines that stand in for vLLM, of which tests/serving runs the real
one."""

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_two_ranks
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.convert.weight_stream import WeightStream
from ligermodels.errors import CheckpointError, InputError
from ligermodels.integrations.vllm import RECEIVER, update_weights
from ligermodels.integrations.vllm.shared_buckets import read_bucket, reader_of
from ligermodels.layers.initialization import persistent_tensors


class Workers:
    """An engine whose two workers each have a model, and take buckets as `WeightReceiver` does, in this process."""

    def __init__(self, extension: str = RECEIVER, reader: dict[str, Any] | None = None, idle: bool = True) -> None:
        self.models = [lm.from_config(CONFIGS["llama-3"], dtype="float64") for _ in range(2)]
        self.streams = [WeightStream([x.config.weight_map()], persistent_tensors(x)) for x in self.models]
        self.readers = [reader_of(torch.device("cpu")), reader]
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
        if method == "begin_weight_update":
            for stream in self.streams:
                stream.begin()
            return self.readers
        if method == "missing_weights":
            return [stream.missing() for stream in self.streams]
        return [self.load(rank, *args) for rank in range(2)]

    def load(self, rank: int, handles: Any, table: Any) -> str | None:
        try:
            for name, tensor in read_bucket(handles[rank], table, torch.device("cpu")):
                self.streams[rank].load(name, tensor)
        except CheckpointError as error:
            return str(error)
        return None


def test_update_of_workers() -> None:
    """All buckets reach all workers; errors name the tensor, and the prefix cache is emptied in any case."""
    engine = Workers(reader=reader_of(torch.device("cpu")))
    model = lm.from_config(CONFIGS["llama-3"], dtype="float64")
    update_weights(engine, model, bucket_bytes=5000)
    assert engine.emptied == 1 and engine.calls["load_shared_weights"] == len(
        [*model.iter_hf_weights(bucket_bytes=5000)]
    )
    for served in engine.models:
        torch.testing.assert_close(served.state_dict(), model.state_dict(), rtol=0, atol=0)
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
    (Workers, "engine: serves OtherForCausalLM; start it with hf_overrides="),
    (partial(Workers, "collections.Counter"), "engine: worker_extension_cls is collections.Counter; let it inherit"),
    (partial(Workers, reader={"host": "other", "gpus": []}), "engine: a worker runs on another host"),
])  # fmt: skip
def test_engines_that_take_no_weights(engine: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        update_weights(engine() if callable(engine) else engine, lm.from_config(CONFIGS["llama-3"]))


class Executor:
    """Stands for vLLM's executor with the worker in this process, which `external_launcher` inherits from."""


class Launched(Executor):
    """Stands for the executor of `external_launcher`."""


class Served(torch.nn.Module):
    """Stands for the model of a worker: the methods that an update calls."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.native = lm.from_config({**CONFIGS["llama-3"], "num_hidden_layers": layers}, dtype="float64")
        self.stream = WeightStream([self.native.config.weight_map()], persistent_tensors(self.native))
        self.begin_update, self.not_updated = self.stream.begin, self.stream.missing

    def update(self, bucket: list[tuple[str, Tensor]]) -> None:
        for name, tensor in bucket:
            self.stream.load(name, tensor)


@pytest.mark.parametrize(("executor", "world_size"), [(Launched, 2), (Executor, 1), (object, 1), (object, 2)])
def test_the_executor_says_where_the_workers_are(
    executor: type, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, as one of several launched ranks too; or in other processes, as a single one too."""
    monkeypatch.setitem(
        sys.modules,
        "vllm.v1.executor.uniproc_executor",
        SimpleNamespace(UniProcExecutor=Executor),  # type: ignore[arg-type]
    )
    monkeypatch.setitem(
        sys.modules,
        "ligermodels.integrations.vllm.model",
        SimpleNamespace(LigerModelsForCausalLM=Served),  # type: ignore[arg-type]
    )
    engine = Workers(reader=reader_of(torch.device("cpu")))
    engine.vllm_config.parallel_config.world_size = world_size
    here = Served(2)
    engine.model_executor, engine.apply_model = executor(), lambda function: [function(here)]
    model = lm.from_config(CONFIGS["llama-3"], dtype="float64")
    update_weights(engine, model, bucket_bytes=5000)
    assert engine.emptied == 1 and bool(engine.calls) == (executor is object)
    for served in engine.models if executor is object else [here.native]:
        torch.testing.assert_close(served.state_dict(), model.state_dict(), rtol=0, atol=0)


def on_ranks(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    def update(engine: Any, **options: Any) -> str:
        """The error of this rank; "" without one."""
        try:
            update_weights(engine, model, **options)
        except (CheckpointError, InputError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    reader = reader_of(torch.device("cpu"))
    model = lm.from_pretrained(folder / "three-layers", plan=lm.ParallelPlan())
    for broken, message in (
        (
            Workers(reader=reader),
            "CheckpointError: the weights do not fit the model: model.layers.2.",
        ),  # has two layers
        (Workers(reader=reader, idle=False), "InputError: engine: has unfinished requests"),
        (Workers(), "InputError: engine: serves OtherForCausalLM"),
        (None, "InputError: engine: must be a vllm.LLM, got a NoneType"),
    ):
        found = update(broken if rank == 0 else None, bucket_bytes=5000)
        assert found.startswith(message if rank == 0 else f"CheckpointError: update_weights: rank 0 failed: {message}")
    found = update(None, bucket_bytes=0 if rank else 5000)
    assert found.startswith("InputError: bucket_bytes" if rank else "InputError: engine")

    model = lm.from_pretrained(folder / "two-layers", plan=lm.ParallelPlan())
    engine = Workers(reader=reader, idle=rank == 0)  # of its own on each rank
    found = update(engine)
    assert found.startswith("InputError: engine: has unf" if rank else "CheckpointError: update_weights: rank 1 failed")
    engine = Workers(reader=reader)
    assert update(engine if rank == 0 else None) == ""
    whole = lm.from_pretrained(folder / "two-layers")
    for served in engine.models if rank == 0 else ():
        torch.testing.assert_close(served.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_every_rank_learns_of_an_error(tmp_path: Path) -> None:
    """Of a sharded model, whichever rank has the engine; the ranks then update together again."""
    for name, layers in (("two-layers", 2), ("three-layers", 3)):
        config = {**CONFIGS["llama-3"], "num_hidden_layers": layers}
        lm.from_config(config, dtype="float64").save_pretrained(tmp_path / name)
    in_two_ranks(on_ranks, tmp_path)
