"""`python -m benchmarks float8_loss [--out FILE]`: loss curves of a Llama trained from scratch, in bf16 and in float8,
or with several optimizers (`--providers adamw adamw8bit muon muon8bit`).

The data are the Python sources of the standard library and of installed packages; `epochs` in a record counts their
repetitions. Every fiftieth file is held out. All providers of a seed start from the same weights, see the same rows in
the same order, and round updates with the same random bits. Training works as in `ligermodels train`: weights and
states of AdamW in bf16, stochastic rounding of updates, warm-up and cosine, gradients clipped to norm 1. A run reports
20 times: the mean training loss since the last report, and the loss on the held-out files. All providers compute the
held-out loss in eval mode, so in bf16, from the weights that a checkpoint would hold.

Each run writes one record when it ends. Processes with other seeds or providers may share the GPU, each with its own
file; `seconds` then includes their load. Run `--prepare --cache FOLDER` once before, to tokenise the data for all.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import ligermodels as lm
from benchmarks.reporting import recording
from benchmarks.timing import measure
from ligermodels.arguments import OptimizerName
from ligermodels.data.batches import Batch
from ligermodels.data.corpus import permutation
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.demo import END, DemoSettings, GpuDemoSettings, installed_sources, llama_config, train_tokenizer
from ligermodels.demo.corpus import TOKENIZER_BYTES
from ligermodels.errors import InputError, TrainingError
from ligermodels.evaluation import evaluate
from ligermodels.models.causal_lm import CausalLM
from ligermodels.training import StepMetrics, train, warmup_cosine
from ligermodels.training.optimizer import optimizer_named
from ligermodels.training.parameter_groups import parameter_groups

SETTINGS = GpuDemoSettings(
    corpus_bytes=250_000_000, vocab_size=8192, hidden_size=512, num_layers=6, head_dim=64, seq_len=1024, batch_size=64,
    learning_rate=1e-3, dtype="bfloat16",
)  # fmt: skip
"""Settings of the GPU demo with a smaller model: 18.9 M parameters and 4.2 M in the tied embedding; 65,536 tokens per
step."""
POINTS = 20
FILES_AT_ONCE = 512


class Provider(NamedTuple):
    """Settings of a run that are compared.

    optimizer: name of the optimizer.
    prepare: changes the model before training; None for no change.
    """

    optimizer: OptimizerName = "adamw"
    prepare: Callable[[CausalLM], object] | None = None


FORMATS = {"bf16": Provider(), "float8": Provider(prepare=lm.float8)}
OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "adamw8bit", "muon", "muon8bit")
PROVIDERS: dict[str, Provider] = FORMATS | {str(name): Provider(name) for name in OPTIMIZERS}


@dataclass(frozen=True)
class Data:
    """Token ids of all files, concatenated, with `end` after each file; `digest` is the hash of the training ids."""

    training: NDArray[np.uint16]
    held_out: NDArray[np.uint16]
    end: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.training.tobytes()).hexdigest()[:16]


def tokenised(s: DemoSettings) -> Data:
    """Tokens of the sources on this machine, by a tokenizer trained on the first files. Skips files not in UTF-8."""
    texts = [text for path in installed_sources(s.corpus_bytes) if (text := _text(path)) is not None]
    apart = round(1 / s.validation_fraction)
    held_out, training = texts[::apart], [text for i, text in enumerate(texts) if i % apart]
    share = min(1.0, TOKENIZER_BYTES / sum(map(len, training)))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_tokenizer(training[: round(share * len(training))], s.vocab_size, Path(folder))
    (end,) = tokenizer.backend.encode(END).ids
    return Data(_ids(tokenizer, training, end), _ids(tokenizer, held_out, end), end)


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        return None


def _ids(tokenizer: Tokenizer, texts: Sequence[str], end: int) -> NDArray[np.uint16]:
    parts = [
        np.array([*encoding.ids, end], np.uint16)
        for first in range(0, len(texts), FILES_AT_ONCE)
        for encoding in tokenizer.backend.encode_batch(texts[first : first + FILES_AT_ONCE])
    ]
    return np.concatenate(parts)


def data_in(cache: Path | None, s: DemoSettings) -> Data:
    """The tokens cached in a folder, created there if they are missing; without a folder they are not cached."""
    if cache is None:
        return tokenised(s)
    path = cache / f"tokens-{s.vocab_size}-{s.corpus_bytes}.npz"
    if not path.exists():
        data = tokenised(s)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
            np.savez(file, training=data.training, held_out=data.held_out, end=data.end)
        os.replace(file.name, path)  # other processes see the whole file or none
    with np.load(path) as arrays:
        return Data(arrays["training"], arrays["held_out"], int(arrays["end"]))


def rows_of(tokens: Tensor, s: DemoSettings) -> Iterator[Batch]:
    """Batches without end of rows of `seq_len` tokens, decided by the seed: each epoch cuts the tokens at another
    offset and shuffles the rows. An incomplete batch is dropped. Batches are on the device of `tokens`.

    Raises InputError when there are too few for a batch.
    """
    if len(tokens) < (s.batch_size + 1) * s.seq_len:
        raise InputError(f"{len(tokens):,} tokens of Python sources do not fill {s.batch_size} rows of {s.seq_len}")
    columns = torch.arange(s.seq_len, device=tokens.device)
    for epoch in itertools.count():
        offset = int(permutation(s.seq_len, s.seed, f"offset {epoch}")[0])
        order = permutation((len(tokens) - offset) // s.seq_len, s.seed, epoch)
        starts = torch.from_numpy(offset + s.seq_len * order).to(tokens.device)
        for first in range(0, len(starts) - s.batch_size + 1, s.batch_size):
            ids = tokens[starts[first : first + s.batch_size, None] + columns]
            yield Batch({"input_ids": ids, "labels": ids})


def held_out_rows(tokens: Tensor, s: DemoSettings) -> list[Batch]:
    """Batches of the tokens in order, without an incomplete last row."""
    rows = tokens[: len(tokens) // s.seq_len * s.seq_len].view(-1, s.seq_len)
    return [Batch({"input_ids": ids, "labels": ids}) for ids in rows.split(s.batch_size)]


def trained(provider: str, s: DemoSettings, data: Data) -> dict[str, Any]:
    """The record of a run of `s.steps` steps; "failed" in place of the losses if a loss was not finite."""
    training, held_out = (
        torch.from_numpy(ids.astype(np.int64)).to(measure.DEVICE) for ids in (data.training, data.held_out)
    )
    torch.manual_seed(s.seed)
    config = {**llama_config(s, data.end), "intermediate_size": 3 * s.hidden_size}  # float8 takes multiples of 16
    model = lm.from_config(config, dtype=getattr(torch, s.dtype), device=measure.DEVICE)
    name, prepare = PROVIDERS[provider]
    if prepare is not None:
        prepare(model)
    groups = parameter_groups([(model.parameters(), s.learning_rate)], weight_decay=0.1)
    optimizer = optimizer_named(name, groups, model=model, betas=(0.9, 0.95), rounding="stochastic", seed=s.seed)
    schedule = warmup_cosine(optimizer, s.steps, warmup_steps=s.steps // 20)
    tests, per_step, points = held_out_rows(held_out, s), s.batch_size * s.seq_len, list[list[float]]()

    def report(at: StepMetrics) -> None:
        points.append([at.step * per_step, at.loss, evaluate(model, tests)])
        loss, speed = f"loss {at.loss:.4f}, held out {points[-1][2]:.4f}", f"{at.tokens_per_second:,.0f} tokens/s"
        print(f"{provider}, seed {s.seed}, step {at.step} of {at.steps}: {loss}, {speed}", flush=True)

    size, start = sum(p.numel() for p in model.parameters()), time.perf_counter()
    tokens = s.steps * per_step
    record = {
        "case": f"{size / 1e6:.1f} M parameters, {tokens / 1e6:.0f} M tokens, seed {s.seed}",
        "provider": f"ligermodels {provider}",
        "seed": s.seed,
        "tokens": tokens,
        "tokens_per_step": per_step,
        "parameters": size,
        "embedding_parameters": s.vocab_size * s.hidden_size,
        "layers": s.num_layers,
        "hidden_size": s.hidden_size,
        "data": data.digest,
        "epochs": tokens / len(training),
        "held_out_tokens": len(held_out),
        "points": points,
    }
    options: dict[str, Any] = {"on_step": report, "report_every": max(1, s.steps // POINTS)}
    try:
        train(model, rows_of(training, s), steps=s.steps, optimizer=optimizer, schedule=schedule, **options)
    except TrainingError as failure:
        return {**record, "failed": str(failure)}
    peak = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if measure.DEVICE == "cuda" else {}
    return {**record, "held_out_loss": points[-1][2], "seconds": time.perf_counter() - start, **peak}


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(FORMATS))
    parser.add_argument("--tokens", type=int, default=300_000_000, help="of each run, rounded up to whole steps")
    parser.add_argument("--layers", type=int, default=SETTINGS.num_layers, help=f"by default {SETTINGS.num_layers}")
    parser.add_argument("--cache", type=Path, help="the folder where the tokens are, or are made and kept")
    parser.add_argument("--prepare", action="store_true", help="make the tokens in --cache, and no run")
    arguments = parser.parse_args()
    if arguments.prepare and arguments.cache is None:
        parser.error("--prepare fills a folder: give it by --cache")
    if not arguments.prepare and measure.DEVICE == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU")
    if min(arguments.tokens, arguments.layers) < 1:
        parser.error("--tokens and --layers must be at least 1")
    start = time.perf_counter()
    data = data_in(arguments.cache, SETTINGS)
    counts = f"{len(data.training):,} tokens to train on, {len(data.held_out):,} held out"
    print(f"{counts}, digest {data.digest}: {time.perf_counter() - start:.0f} s", flush=True)
    if arguments.prepare:
        return
    steps = -(-arguments.tokens // (SETTINGS.batch_size * SETTINGS.seq_len))
    facts, records = recording.facts(), list[dict[str, Any]]()
    for seed, provider in itertools.product(arguments.seeds, arguments.providers):
        settings = replace(SETTINGS, seed=seed, steps=steps, num_layers=arguments.layers)
        records.append({**trained(provider, settings, data), **facts})
        recording.write(arguments.out, records[-1:])
        print(json.dumps(records[-1]), flush=True)
        measure.free()
    recording.end(records)
