"""`python -m benchmarks loading FOLDER`: loading a Llama checkpoint, beside transformers: time and host memory.

FOLDER gets a checkpoint of random bfloat16 weights, by default of Llama 3 8B's sizes, unless there is one. Its files
are read once, so that they lie in the page cache; then it is loaded in turns, each time by a new process. On the CPU a
loader may map weights, to be read when they are first used: timed there is loading and reading a value of every page.

Of the host's memory only the anonymous part counts, sampled every 2 ms: pages of mapped files are resident too, but are
the page cache's, given up whenever memory is short. A buffer of some hundred MB takes far longer than 2 ms to fill.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.reporting.recording import facts, write
from ligermodels import from_config
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.safetensors_writer import save_checkpoint
from ligermodels.pretrained import from_pretrained

SIZES = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
PROVIDERS = ("ligermodels", "transformers")
COLUMNS = ("load_s", "ready_s", "host_peak_bytes", "host_after_bytes", "model_bytes")


def make(folder: Path, config: Mapping[str, Any], max_shard_size: str) -> None:
    """Write a checkpoint of `config` with random weights, shard by shard."""
    model = from_config(config, device="meta", dtype=torch.bfloat16)
    assert model.export_spec is not None

    def weights(shape: tuple[int, ...]) -> torch.Tensor:
        bits = torch.empty(shape, dtype=torch.int16)
        return bits.random_(0x3C00, 0x3F00).view(torch.bfloat16)  # 2^-7 to 2^-1, which float16 has as well.

    tensors = [
        (name, shape, dtype, lambda shape=shape: weights(shape))
        for name, shape, dtype, _ in model.export_spec.weight_map.export(dict(model.named_parameters()))
    ]
    save_checkpoint(folder, tensors, max_shard_size=max_shard_size, files={"config.json": json.dumps(config)})


def load(provider: str, folder: Path, device: str, dtype: str) -> dict[str, Any]:
    """Load the checkpoint in this process. Of what is found, `bits`, a sum, tells whether the weights are right."""
    loader = _loader(provider, folder, device, getattr(torch, dtype))
    _finish(device)  # So that no loader pays for the context.
    before = _anonymous()
    with _sampled() as samples:
        start = time.perf_counter()
        model = loader()
        _finish(device)
        seconds = time.perf_counter() - start
    after = _anonymous()
    weights = [parameter.detach().view(-1).view(torch.int16) for parameter in model.parameters()]
    start = time.perf_counter()
    if device == "cpu":
        for each in weights:
            each[::2048].sum()
    return {
        "load_s": seconds,
        "ready_s": seconds + time.perf_counter() - start,
        "host_peak_bytes": max(*samples, after) - before,
        "host_after_bytes": after - before,
        "model_bytes": sum(each.nbytes for each in weights),
        "bits": sum(int(each.sum(dtype=torch.int64)) for each in weights),
    }


def _loader(provider: str, folder: Path, device: str, dtype: torch.dtype) -> Callable[[], torch.nn.Module]:
    if provider == "ligermodels":
        return partial(from_pretrained, folder, device=device, dtype=dtype)
    from transformers import LlamaForCausalLM

    plain = partial(LlamaForCausalLM.from_pretrained, folder, dtype=dtype)
    if device == "cpu":
        return plain
    if find_spec("accelerate"):  # Which transformers needs for a device_map.
        return partial(plain, device_map=device)
    return lambda: plain().to(device)


def _finish(device: str) -> None:
    if device != "cpu":
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)


@contextmanager
def _sampled() -> Iterator[list[int]]:
    samples, done = [_anonymous()], threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            samples.append(_anonymous())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield samples
    finally:
        done.set()
        sampler.join()


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def run(folder: Path, device: str, dtype: str, rounds: int) -> list[dict[str, Any]]:
    """Load `rounds` times with each provider, in turns; a record each, of its fastest round and all of its times."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.read(2**24):
                pass
    with Checkpoint(folder) as checkpoint:
        largest = max(header.end - header.start for header in checkpoint.headers.values())
    found: dict[str, list[dict[str, Any]]] = {provider: [] for provider in PROVIDERS}
    spawn = multiprocessing.get_context("spawn")
    for _ in range(rounds):
        for provider, runs in found.items():
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                runs.append(process.submit(load, provider, folder, device, dtype).result())
    common = {"device": device, "dtype": dtype, "largest_bytes": largest, **_facts(device)}
    records = []
    for provider, runs in found.items():
        best = min(runs, key=lambda each: each["ready_s"])
        peak = max(each["host_peak_bytes"] for each in runs)
        times = [each["ready_s"] for each in runs]
        records.append({"provider": provider, **best, "host_peak_bytes": peak, "all_ready_s": times, **common})
    return records


def _facts(device: str) -> Mapping[str, Any]:
    if device != "cpu":
        return facts()
    versions = {package: metadata.version(package) for package in ("torch", "transformers", "safetensors")}
    return {**versions, "cpus": os.cpu_count(), "machine": platform.machine()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks loading", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-shard-size", default="5GB")
    parser.add_argument("--tied", action="store_true", help="one matrix for the embedding and the head")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default: {default}")
    arguments = parser.parse_args()
    if not (arguments.folder / "config.json").is_file():
        sizes = {name: getattr(arguments, name) for name in SIZES}
        fixed = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
        config = {**fixed, **sizes, "rms_norm_eps": 1e-5, "tie_word_embeddings": arguments.tied}
        make(arguments.folder, config, arguments.max_shard_size)
    records = run(arguments.folder, arguments.device, arguments.dtype, arguments.rounds)
    table = Table("provider", *COLUMNS, title=f"to {arguments.dtype} on {arguments.device}")
    for record in records:
        table.add_row(record["provider"], *(f"{record[column]:.4g}" for column in COLUMNS))
    Console(width=120).print(table)
    ours, theirs = records
    print(f"ligermodels / transformers: load {ours['load_s'] / theirs['load_s']:.2f}, ", end="")
    print(f"ready {ours['ready_s'] / theirs['ready_s']:.2f}")
    if ours["bits"] != theirs["bits"]:
        raise SystemExit("the two loaded different weights")
    write(arguments.out, records)
