"""`python -m benchmarks.float8_loss [--out FILE]`: loss curves of a Llama trained from scratch, in bf16 and in float8.

The data are the Python sources on the machine (the standard library's and those of installed packages), repeated as
often as `epochs` in a record says; every fiftieth file is held out. Both formats of a seed start from the same weights
and see the same rows in the same order, and their updates are rounded with the same random bits. Training is as
`ligermodels train` does it: weights and states of AdamW in bf16, updates rounded stochastically, warm-up and cosine,
gradients clipped to norm 1. Every twentieth of the way: the training loss, the mean since the last point, and the loss
on the held-out files, which both formats compute in eval mode, so in bf16, from the weights as a checkpoint has them.

Each run gives one record, written when it ends. Processes with other seeds or formats may share the GPU, each with a
file of its own; `seconds` are then of all together. `--prepare --cache FOLDER`, once before, makes the tokens for all.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import ligermodels as lm
from benchmarks import measure
from ligermodels.data.batches import Batch
from ligermodels.data.corpus import permutation
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.demo import END, DemoSettings, GpuDemoSettings, installed_sources, llama_config, train_tokenizer
from ligermodels.demo.corpus import TOKENIZER_BYTES
from ligermodels.errors import InputError, TrainingError
from ligermodels.models.causal_lm import CausalLM
from ligermodels.speculative.evaluation import evaluate
from ligermodels.training import StepMetrics, train, warmup_cosine
from ligermodels.training.optimizer import optimizer_named, parameter_groups

SETTINGS = GpuDemoSettings(
    corpus_bytes=250_000_000, vocab_size=8192, hidden_size=512, num_layers=6, head_dim=64, seq_len=1024, batch_size=64,
    learning_rate=1e-3, dtype="bfloat16",
)  # fmt: skip
"""Of the demo on a GPU, with a smaller model: 18.9 M parameters beside 4.2 M of the embedding, which is the head too;
65,536 tokens a step."""
POINTS = 20
FILES_AT_ONCE = 512
PROVIDERS: dict[str, Callable[[CausalLM], object]] = {"bf16": lambda model: model, "float8": lm.float8}
"""What is done to the model before it is trained."""


@dataclass(frozen=True)
class Data:
    """Token ids of all files, one after another, each closed by `end`; `digest` is of the ids to train on."""

    training: NDArray[np.uint16]
    held_out: NDArray[np.uint16]
    end: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.training.tobytes()).hexdigest()[:16]


def tokenised(s: DemoSettings) -> Data:
    """The sources on this machine, by a tokenizer that is trained on the first of them. Files that are not UTF-8 are
    left out."""
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
    """The tokens in a folder, made there if they are not; without a folder they are not kept."""
    if cache is None:
        return tokenised(s)
    path = cache / f"tokens-{s.vocab_size}-{s.corpus_bytes}.npz"
    if not path.exists():
        made = tokenised(s)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
            np.savez(file, training=made.training, held_out=made.held_out, end=made.end)
        os.replace(file.name, path)  # Another process sees all of it or nothing.
    with np.load(path) as found:
        return Data(found["training"], found["held_out"], int(found["end"]))


def rows_of(tokens: Tensor, s: DemoSettings) -> Iterator[Batch]:
    """Batches without end of rows of `seq_len` tokens, decided by the seed: each epoch cuts the tokens at another
    offset, and takes the rows in another order; what does not fill a batch is left out. All on the device of `tokens`.

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
    """Batches of the tokens in order, the last row left out where they do not fill it."""
    rows = tokens[: len(tokens) // s.seq_len * s.seq_len].view(-1, s.seq_len)
    return [Batch({"input_ids": ids, "labels": ids}) for ids in rows.split(s.batch_size)]


def trained(provider: str, s: DemoSettings, data: Data) -> dict[str, Any]:
    """The record of a run of `s.steps` steps; "failed" in place of the losses where one was not finite."""
    training, held_out = (
        torch.from_numpy(ids.astype(np.int64)).to(measure.DEVICE) for ids in (data.training, data.held_out)
    )
    torch.manual_seed(s.seed)
    config = {**llama_config(s, data.end), "intermediate_size": 3 * s.hidden_size}  # float8 takes multiples of 16
    model = lm.from_config(config, dtype=getattr(torch, s.dtype), device=measure.DEVICE)
    PROVIDERS[provider](model)
    groups = parameter_groups([(model.parameters(), s.learning_rate)], weight_decay=0.1)
    optimizer = optimizer_named("adamw", groups, betas=(0.9, 0.95), rounding="stochastic", seed=s.seed)
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.float8_loss", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--tokens", type=int, default=300_000_000, help="of each run, rounded up to whole steps")
    parser.add_argument("--layers", type=int, default=SETTINGS.num_layers, help=f"by default {SETTINGS.num_layers}")
    parser.add_argument("--cache", type=Path, help="the folder where the tokens are, or are made and kept")
    parser.add_argument("--prepare", action="store_true", help="make the tokens in --cache, and no run")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
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
    facts, records = measure.facts(), list[dict[str, Any]]()
    for seed, provider in itertools.product(arguments.seeds, arguments.providers):
        settings = replace(SETTINGS, seed=seed, steps=steps, num_layers=arguments.layers)
        records.append({**trained(provider, settings, data), **facts})
        measure.write(arguments.out, records[-1:])
        print(json.dumps(records[-1]), flush=True)
        measure.free()
    measure.end(records)


if __name__ == "__main__":
    main()
