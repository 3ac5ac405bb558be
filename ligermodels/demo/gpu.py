"""The demo on a GPU: what Medusa heads gain in wall time, on held-out text, at several batch sizes."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from math import exp
from pathlib import Path
from typing import Any, Literal

import torch

import ligermodels as lm
from ligermodels.console import say, show_table
from ligermodels.data.corpus import Corpus
from ligermodels.data.documents import Documents, TokenDocuments
from ligermodels.demo.corpus import END, installed_sources, train_tokenizer
from ligermodels.demo.report import claim, sample, show_sample, stage, write_results
from ligermodels.demo.steps import TrainingSettings, equally_spaced, learn, learn_jointly, llama_config
from ligermodels.errors import InputError
from ligermodels.speculative.benchmark import GREEDY, benchmark_decoding, evaluate_continuations
from ligermodels.speculative.evaluation import evaluate, evaluate_heads
from ligermodels.speculative.medusa import MedusaModel
from ligermodels.speculative.tree import Tree, grow

STAGES = 6
FOR_TOKENIZER = 10_000_000
"""Bytes of text that the tokenizer is trained on."""
NO_END = {"eos_token_id": None, "pad_token_id": 0}
"""Every row of a batch is decoded to the same length."""
TO_CHOOSE = 4
"""Prompts, or one batch, that are decoded to choose a tree."""
FLOAT32_TOKENS = 128
"""New tokens of each prompt, to compare in float32."""
WARM_UP = 4
"""New tokens of a call that compiles kernels."""


@dataclass(frozen=True, kw_only=True)
class GpuDemoSettings(TrainingSettings):
    """Sizes of the demo on a GPU of 40 GB or more. The defaults take some six minutes on an H200: 272 M
    parameters, of which steps over 16384 tokens take 1.6 to 2.5 GFLOP a token."""

    device: str = "cuda"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    corpus_bytes: int = 80_000_000
    validation_fraction: float = 0.02
    vocab_size: int = 8192
    hidden_size: int = 1536
    num_layers: int = 10
    head_dim: int = 128
    seq_len: int = 1024
    batch_size: int = 16
    steps: int = 1300
    learning_rate: float = 6e-4
    head_steps: int = 500
    head_learning_rate: float = 1e-3
    joint_steps: int = 200
    joint_learning_rate: float = 1e-4
    prompts: int = 32
    prompt_tokens: int = 128
    new_tokens: int = 896
    """With the prompt as long as what the model is trained on."""
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    tree_sizes: tuple[int, ...] = (8, 16, 32, 63)
    """Candidates of a tree."""
    temperature: float = 0.7
    """Of typical acceptance."""


def run_gpu_demo(
    output: str | os.PathLike[str] = "demo-output", settings: GpuDemoSettings | None = None
) -> dict[str, Any]:
    """Train a model and Medusa heads on Python sources, and measure decoding with the heads beside plain decoding.

    The sources are those of the standard library and of installed packages; every fiftieth file is held out. Heads are
    measured after stage 1, on the frozen model, and after stage 2, trained with it. Both kinds of decoding run in CUDA
    graphs; times are wall time, of whole calls of `generate`.

    Greedy decoding with heads is lossless up to rounding, which in bfloat16 decides between tokens that are nearly as
    likely: with heads kernels run over other shapes. So the tokens of stage 1 are also compared in float32.

    Args:
        output: folder for `model`, a Hugging Face checkpoint, `medusa`, the heads of stage 1 in vLLM's format, `joint`,
            the model and heads of stage 2, and demo.json. An earlier demo's is replaced.
        settings: sizes, and the seed of everything random.

    demo.json is written after each part, and after each measurement, which is also printed, a line of JSON: a run that
    is cut off leaves what it has found. It has "finished": false until the end.

    Returns the results, as in demo.json. Raises CheckpointError when `output` holds something else, and InputError when
    there is no such device.
    """
    folder, s = Path(output), settings or GpuDemoSettings()
    if s.device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device {s.device!r}: torch sees no CUDA GPU; the demo of size cpu needs none")
    claim(folder)
    torch.manual_seed(s.seed)
    results: dict[str, Any] = {}
    for part in _main_job(folder, s):
        results |= part
        write_results(folder, {**results, "finished": False})
    results["finished"] = True
    write_results(folder, results)
    _show(results)
    return results


def _main_job(folder: Path, s: GpuDemoSettings) -> Iterator[dict[str, Any]]:
    """The results, part by part."""
    seconds: dict[str, float] = {}
    checkpoint = folder / "model"
    yield {"settings": asdict(s), "seconds": seconds, **_machine(s)}

    with stage("tokenizer", "a tokenizer, and the Python sources on this machine as tokens", seconds, STAGES):
        corpus = Corpus(installed_sources(s.corpus_bytes))
        training_part, validation_part = corpus.split(s.validation_fraction, s.seed)
        texts = (corpus.read(i)[0].decode(errors="replace") for i in training_part)
        tokenizer = train_tokenizer(_first_bytes(texts, FOR_TOKENIZER), s.vocab_size, checkpoint)
        end = tokenizer.backend.token_to_id(END)
        documents = Documents(
            corpus, tokenizer, eos_token_id=end, max_bad_lines=len(corpus), on_bad_line=lambda _: None
        )
        training, validation = (
            TokenDocuments([found.ids for found in documents.read(part) if found])
            for part in (training_part, validation_part)
        )
        counts = [sum(map(len, each.documents)) for each in (training, validation)]
        say(f"  {counts[0]:,} tokens; held out: {counts[1]:,}")
        prompts = equally_spaced(validation.documents, s.prompts, s.prompt_tokens)

    with stage("training", f"a Llama, trained from scratch in {s.dtype}", seconds, STAGES) as update:
        (checkpoint / "config.json").write_text(json.dumps(llama_config(s, end)))
        model = lm.from_config(checkpoint, dtype=getattr(torch, s.dtype), device=s.device)
        rates = [(model.parameters(), s.learning_rate)]
        learn(model, rates, s.batches(training, 0), s.steps, update, weight_decay=0.1)
        loss = evaluate(model, s.validation_batches(validation))
        model.save_pretrained(checkpoint, overwrite=True)
        size = sum(parameter.numel() for parameter in model.parameters())
        say(f"  {size / 1e6:.0f} M parameters; loss {loss:.3f} on held-out text, perplexity {exp(loss):.1f}")
    yield {"parameters": size, "tokens": counts[0], "loss": {"model": loss}}

    with stage("heads", "Medusa heads on the frozen model (stage 1)", seconds, STAGES) as update:
        medusa = MedusaModel.from_base(model, num_heads=s.num_heads)
        rates = [(medusa.head_parameters(), s.head_learning_rate)]
        learn(medusa, rates, s.batches(training, 1), s.head_steps, update)
        medusa.export(folder / "medusa", profile="vllm", overwrite=True)
        accuracy = {"stage 1": evaluate_heads(medusa, s.validation_batches(validation)).accuracy(1).tolist()}
        text = sample(medusa, lm.Tokenizer.from_pretrained(checkpoint), prompts[-1])
    yield {"accuracy": accuracy, "sample": text}

    measured: list[dict[str, Any]] = []
    with stage("decoding", "decoding with the heads of stage 1 and without", seconds, STAGES):
        float32 = _in_float32(medusa, prompts[1::2], s)
        say(f"  in float32 the same tokens for {float32['same']} of {float32['prompts']} prompts as without heads")
        yield {"float32": float32}
        for found in _measured(medusa, prompts, s):
            measured.append(_said({"stage": 1, **found}))
            yield {"decoding": measured}

    with stage("joint", "the model and the heads together (stage 2)", seconds, STAGES) as update:
        joint = learn_jointly(medusa, training, s, update)
        joint.export(folder / "joint", profile="full-hf", overwrite=True)
        accuracy["stage 2"] = evaluate_heads(joint, s.validation_batches(validation)).accuracy(1).tolist()
    yield {"loss": {"model": loss, "stage 2": evaluate(joint.base, s.validation_batches(validation))}}

    with stage("decoding, stage 2", "decoding with the heads of stage 2 and without", seconds, STAGES):
        for found in _measured(joint, prompts, s):
            measured.append(_said({"stage": 2, **found}))
            yield {"decoding": measured}


def _machine(s: GpuDemoSettings) -> dict[str, str]:
    """Where and when."""
    gpu = torch.cuda.get_device_name(s.device) if s.device.startswith("cuda") else "CPU"
    return {"gpu": gpu, "torch": torch.__version__, "date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}


def _said(record: dict[str, Any]) -> dict[str, Any]:
    """The record, printed as a line of JSON."""
    say(f"  {json.dumps(record)}")
    return record


def _first_bytes(texts: Iterable[str], limit: int) -> Iterable[str]:
    """The first of `texts`, up to `limit` characters in all."""
    for text in texts:
        limit -= len(text)
        if limit < 0:
            return
        yield text


def _measured(model: MedusaModel, prompts: Sequence[Sequence[int]], s: GpuDemoSettings) -> Iterator[dict[str, Any]]:
    """For each batch size, greedy and typical: the tree that is fastest on one half of the prompts, on the other."""
    fit, held_out = prompts[::2], prompts[1::2]
    hits = evaluate_continuations(model, fit, max_new_tokens=s.new_tokens).scores.hits
    trees = {size: grow(hits, size) for size in s.tree_sizes}
    for batch in s.batch_sizes:
        plain, sequences = _plain(model, held_out, batch, s)
        few = fit[: max(batch, TO_CHOOSE)]
        for kind, options in (("greedy", {}), ("typical", {"temperature": s.temperature})):
            seconds = {
                size: _speculative(model, few, batch, tree, s, options)["seconds"] for size, tree in trees.items()
            }
            best = min(seconds, key=seconds.__getitem__)
            record = _speculative(model, held_out, batch, trees[best], s, options)
            same = sum(torch.equal(a, b) for a, b in zip(sequences, record.pop("sequences"), strict=True))
            yield {
                "batch": batch,
                "acceptance": kind,
                "tree": best,
                "plain_seconds": plain,
                **record,
                "speed_up": plain / record["seconds"],
                "prompts": len(sequences),
                "new_tokens": s.new_tokens,
                "same": same,
            }


def _in_float32(model: MedusaModel, prompts: Sequence[Sequence[int]], s: GpuDemoSettings) -> dict[str, int]:
    """For how many prompts a copy of the model in float32 gives the same tokens with heads and without, one at a time;
    the tree is the default one."""
    new_tokens, tree = min(FLOAT32_TOKENS, s.new_tokens), model.default_tree()
    found = benchmark_decoding(copy.deepcopy(model).float(), prompts, tree=tree, max_new_tokens=new_tokens)
    return {"prompts": found.prompts, "same": found.same, "tokens": found.tokens, "steps": found.steps}


def _plain(
    model: MedusaModel, prompts: Sequence[Sequence[int]], batch: int, s: GpuDemoSettings
) -> tuple[float, list[torch.Tensor]]:
    """Seconds of greedy decoding without heads, after a warm-up, and the sequences."""
    options: dict[str, Any] = {**GREEDY, **NO_END}
    _warm_up(model.base.generate, prompts[:batch], s, options)
    start, sequences = _now(s), list[torch.Tensor]()
    for first in range(0, len(prompts), batch):
        sequences += model.base.generate(prompts[first : first + batch], s.new_tokens, **options).cpu()
    return _now(s) - start, sequences


def _speculative(
    model: MedusaModel,
    prompts: Sequence[Sequence[int]],
    batch: int,
    tree: Tree,
    s: GpuDemoSettings,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Seconds and tokens per step with the heads, after a warm-up, and the sequences."""
    options = {"tree": tree, "return_stats": True, **options, **NO_END}
    _warm_up(model.generate, prompts[:batch], s, options)
    start, sequences, steps, tokens = _now(s), list[torch.Tensor](), 0, 0
    for first in range(0, len(prompts), batch):
        out = model.generate(prompts[first : first + batch], s.new_tokens, **options)
        sequences += out.sequences.cpu()
        steps, tokens = steps + out.steps, tokens + out.new_tokens
    seconds = _now(s) - start
    per_step = (tokens - len(prompts)) / steps
    return {"seconds": seconds, "steps": steps, "tokens_per_step": per_step, "sequences": sequences}


def _warm_up(
    generate: Callable[..., Any], prompts: Sequence[Sequence[int]], s: GpuDemoSettings, options: Mapping[str, Any]
) -> None:
    """Compile the kernels of calls with these prompts. Those of attention over a cache depend on its size: prompts that
    fill it make it as large in a few steps."""
    for fill in (0, s.new_tokens - WARM_UP):
        generate([[*prompt, *[0] * fill] for prompt in prompts], WARM_UP, **options)


def _now(s: GpuDemoSettings) -> float:
    """Seconds, once the device has nothing left to do."""
    if s.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def _show(results: Mapping[str, Any]) -> None:
    """Print a sample of text, and a table of the speeds."""
    show_sample(results["sample"])
    rows = [
        (
            f"stage {each['stage']}, batch {each['batch']}, {each['acceptance']}",
            f"{each['tree']}",
            f"{each['tokens_per_step']:.2f}",
            f"{each['speed_up']:.2f}",
            f"{each['same']} of {each['prompts']}",
        )
        for each in results["decoding"]
    ]
    show_table(["heads", "tree", "tokens per step", "speed-up", "same tokens"], rows, numbers=range(1, 5))
