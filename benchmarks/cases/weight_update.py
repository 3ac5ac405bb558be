"""`python -m benchmarks weight_update`: new weights for another process, as `update_weights` sends them to vLLM.

The other process stands for the engine's worker: it reads buckets with `read_bucket` and copies them into a second
model with `WeightStream`, which is what the worker does, and answers through a pipe in place of vLLM's calls. On a GPU
both processes use the same one, and buckets go through its memory (CUDA IPC); `host` has them go through shared memory
of the host. `in process` copies into a model of the same process. The time is of a whole update: tensors are
gathered in the layout of the checkpoint, packed and copied, and missing ones are found.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

import ligermodels as lm
from benchmarks.cases.models import CONFIGS
from benchmarks.reporting import recording
from ligermodels.convert.weight_stream import WeightStream
from ligermodels.integrations.vllm.shared_buckets import SharedBuckets, read_bucket, reader_of
from ligermodels.layers.initialization import persistent_tensors
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.families import family_of

COLUMNS = ("way", "bucket", "seconds", "GB", "GB/s")


def _model(config: dict[str, Any], device: str, seed: int) -> CausalLM:
    torch.manual_seed(seed)
    return lm.from_config(config, dtype=torch.bfloat16, device=device)


def _stream(model: CausalLM) -> WeightStream:
    return WeightStream(family_of(model.hf_config).weight_maps(model.config), persistent_tensors(model))


def _finish() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _sum_of_bits(model: CausalLM) -> int:
    """The same for models with the same weights."""
    tensors = persistent_tensors(model).values()
    return sum(int(tensor.detach().view(torch.int16).sum(dtype=torch.int64)) for tensor in tensors)


def _worker(pipe: Connection, config: dict[str, Any], name: str) -> None:
    """The other process: answers each message until None. A message is "begin", "end", "bits", or (handles, table)."""
    model = _model(config, name, 1)
    stream = _stream(model)
    device = next(model.parameters()).device
    pipe.send(reader_of(device))
    while (message := pipe.recv()) is not None:
        if message == "begin":
            stream.begin()
            pipe.send(None)
        elif message == "end":
            pipe.send(stream.missing())
        elif message == "bits":
            pipe.send(_sum_of_bits(model))
        else:
            handles, table = message
            for name, tensor in read_bucket(handles[0], table, device):
                stream.load(name, tensor)
            _finish()
            pipe.send(None)


@contextmanager
def _worker_process(config: dict[str, Any], device: str) -> Iterator[Callable[[Any], Any]]:
    """A function that sends a message to the other process, and returns the answer; with None, the first answer."""
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_worker, args=(theirs, config, device), daemon=True)
    process.start()
    theirs.close()

    def ask(message: Any) -> Any:
        if message is not None:
            pipe.send(message)
        return pipe.recv()

    try:
        yield ask
    finally:
        pipe.send(None)
        process.join()


def _update(model: CausalLM, ask: Callable[[Any], Any], reader: dict[str, Any], bucket: str) -> None:
    ask("begin")
    with SharedBuckets(model.device, [reader]) as shared:
        for part in model.iter_hf_weights(bucket_bytes=bucket):
            ask(shared.pack(part))
    if missing := ask("end"):
        raise RuntimeError(f"not sent: {missing}")


def _update_here(model: CausalLM, stream: WeightStream, bucket: str) -> None:
    stream.begin()
    for part in model.iter_hf_weights(bucket_bytes=bucket):
        for name, tensor in part:
            stream.load(name, tensor)
    if missing := stream.missing():
        raise RuntimeError(f"not sent: {missing}")


def _seconds(update: Callable[[], None], rounds: int) -> list[float]:
    """Seconds of each update, after one that is not counted."""
    times = []
    for _ in range(rounds + 1):
        _finish()
        start = time.perf_counter()
        update()
        _finish()
        times.append(time.perf_counter() - start)
    return times[1:]


def run(config: dict[str, Any], device: str, buckets: list[str], rounds: int) -> list[dict[str, Any]]:
    """Records of each way and size of the buckets.

    Args:
        config: config of the model.
        device: device of both models.
        buckets: largest sizes of a bucket, such as "1GB".
        rounds: number of timed updates of each; the median counts.

    Raises:
        RuntimeError: the weights that arrived are not those that were sent.
    """
    model = _model(config, device, 0)
    nbytes = sum(tensor.nbytes for tensor in persistent_tensors(model).values())
    updates: dict[tuple[str, str], Callable[[], None]] = {}
    records = []
    with _worker_process(config, device) as ask:
        reader = ask(None)
        for bucket in buckets:
            ways = {"cuda ipc": reader, "host": {**reader, "gpus": []}}
            if device == "cpu":
                del ways["cuda ipc"]
            for way, described in ways.items():
                updates[way, bucket] = partial(_update, model, ask, described, bucket)
        times = {key: _seconds(update, rounds) for key, update in updates.items()}
        if ask("bits") != _sum_of_bits(model):
            raise RuntimeError("the other process has other weights")
    here = _model(config, device, 2)
    stream = _stream(here)
    for bucket in buckets:
        times["in process", bucket] = _seconds(partial(_update_here, model, stream, bucket), rounds)
    if _sum_of_bits(here) != _sum_of_bits(model):
        raise RuntimeError("the model of this process has other weights")
    for (way, bucket), seconds in times.items():
        records.append(
            {"way": way, "bucket": bucket, "update_s": median(seconds), "all_update_s": seconds, "model_bytes": nbytes}
        )
    return records


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("--model", default="llama-3-8b", choices=CONFIGS)
    parser.add_argument("--layers", type=int, help="number of layers (all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--buckets", nargs="+", default=["1GB"], help='largest sizes of a bucket, such as "1GB"')
    parser.add_argument("--rounds", type=int, default=5, help="number of timed updates of each; the median counts")
    arguments = parser.parse_args()
    config = dict(CONFIGS[arguments.model])
    if arguments.layers is not None:
        config["num_hidden_layers"] = arguments.layers
    common = {"case": f"{arguments.model} in {config['num_hidden_layers']} layers", **recording.facts()}
    records = [{**record, **common} for record in run(config, arguments.device, arguments.buckets, arguments.rounds)]
    table = Table(*COLUMNS, title=cast(str, common["case"]))
    for record in records:
        size, seconds = record["model_bytes"] / 1e9, record["update_s"]
        table.add_row(record["way"], record["bucket"], f"{seconds:.3f}", f"{size:.2f}", f"{size / seconds:.1f}")
    Console(width=120).print(table)
    recording.write(arguments.out, records)


if __name__ == "__main__":
    main()
