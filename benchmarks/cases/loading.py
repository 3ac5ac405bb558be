"""`python -m benchmarks loading FOLDER`: loading a Llama checkpoint, beside transformers: time and host memory.

If FOLDER has no checkpoint, one with random bfloat16 weights is created there, by default with the sizes of Llama 3 8B.
Its files are read once into the page cache. The providers then load it in turns, each time in a new process. On the CPU
a loader may map the weights and read them on first use, so the time includes reading one value of every page.

Only anonymous memory of the host counts, sampled every 2 ms. Pages of mapped files are resident too, but belong to the
page cache, which shrinks when memory is short. A buffer of some hundred MB takes far longer than 2 ms to fill.
"""

from __future__ import annotations

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

from benchmarks.reporting import recording
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
    """Write a checkpoint with random weights, shard by shard.

    Args:
        folder: Folder of the checkpoint.
        config: Config of the model.
        max_shard_size: Size of a shard, such as "5GB".
    """
    model = from_config(config, device="meta", dtype=torch.bfloat16)
    assert model.export_spec is not None

    def weights(shape: tuple[int, ...]) -> torch.Tensor:
        bits = torch.empty(shape, dtype=torch.int16)
        return bits.random_(0x3C00, 0x3F00).view(torch.bfloat16)  # 2^-7 to 2^-1: float16 can represent the values too

    tensors = [
        (name, shape, dtype, lambda shape=shape: weights(shape))
        for name, shape, dtype, _ in model.export_spec.weight_map.export(dict(model.named_parameters()))
    ]
    save_checkpoint(folder, tensors, max_shard_size=max_shard_size, files={"config.json": json.dumps(config)})


def load(provider: str, folder: Path, device: str, dtype: str) -> dict[str, Any]:
    """Load the checkpoint in this process and measure it; `bits`, the sum of all weights' bits, checks the weights.

    Args:
        provider: "ligermodels" or "transformers".
        folder: Folder of the checkpoint.
        device: Device of the model.
        dtype: Name of the dtype of the model.
    """
    loader = _loader(provider, folder, device, getattr(torch, dtype))
    _finish(device)  # create the CUDA context before the timing
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
    if find_spec("accelerate"):  # transformers needs it for a device_map
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
    """Load in turns with each provider; returns a record for each, of the fastest round, with the times of all rounds.

    Args:
        folder: Folder of the checkpoint.
        device: Device of the model.
        dtype: Name of the dtype of the model.
        rounds: Number of loads per provider.
    """
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
        return recording.facts()
    versions = {package: metadata.version(package) for package in ("torch", "transformers", "safetensors")}
    return {**versions, "cpus": os.cpu_count(), "machine": platform.machine()}


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-shard-size", default="5GB")
    parser.add_argument("--tied", action="store_true", help="one matrix for the embedding and the head")
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
        raise SystemExit("the two providers loaded different weights")
    recording.write(arguments.out, records)
