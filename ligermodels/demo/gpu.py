"""The demo on a GPU: what Medusa heads gain in wall time, on held-out text, at several batch sizes."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp
from pathlib import Path
from typing import Any

import torch

import ligermodels as lm
from ligermodels.console import say, show_table
from ligermodels.data.batches import Batch
from ligermodels.data.corpus import Corpus
from ligermodels.data.documents import Documents, TokenDocuments
from ligermodels.data.packing import PackedBatches
from ligermodels.demo.corpus import END, installed_sources, train_tokenizer
from ligermodels.demo.job import equally_spaced, learn
from ligermodels.demo.report import claim, sample, show_sample, stage, write_results
from ligermodels.errors import InputError
from ligermodels.speculative.benchmark import evaluate_continuations
from ligermodels.speculative.evaluation import evaluate, evaluate_heads
from ligermodels.speculative.joint import JointMedusa
from ligermodels.speculative.medusa import MedusaModel
from ligermodels.speculative.tree import Tree, grow
from ligermodels.training.medusa import WEIGHT_ARGUMENT

STAGES = 5
FOR_TOKENIZER = 10_000_000
"""Bytes of text that the tokenizer is trained on."""
NO_END = {"eos_token_id": None, "pad_token_id": 0}
"""Every row of a batch is decoded to the same length."""


@dataclass(frozen=True)
class GpuDemoSettings:
    """Sizes of the demo on a GPU. The defaults are for one of 40 GB or more, and take about five minutes on an H200."""

    device: str = "cuda"
    seed: int = 0
    corpus_bytes: int = 60_000_000
    validation_fraction: float = 0.02
    vocab_size: int = 8192
    hidden_size: int = 1536
    num_layers: int = 10
    head_dim: int = 128
    seq_len: int = 1024
    batch_size: int = 32
    steps: int = 900
    learning_rate: float = 1e-3
    num_heads: int = 4
    head_steps: int = 400
    head_learning_rate: float = 1e-3
    joint_steps: int = 200
    joint_learning_rate: float = 1e-4
    """Of the model; that of the heads is four times as high."""
    joint_heads_loss_weight: float = 0.2
    prompts: int = 64
    """Half of them to fit trees and to choose one for each batch size, half to measure."""
    prompt_tokens: int = 128
    new_tokens: int = 256
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

    Args:
        output: folder for `model`, a Hugging Face checkpoint, `medusa`, the heads of stage 1 in vLLM's format, `joint`,
            the model and heads of stage 2, and demo.json. An earlier demo's is replaced.
        settings: sizes, and the seed of everything random.

    Returns the results, as in demo.json. Raises CheckpointError when `output` holds something else, and InputError when
    there is no such device.
    """
    folder, s = Path(output), settings or GpuDemoSettings()
    if s.device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device {s.device!r}: torch sees no CUDA GPU; the demo of size cpu needs none")
    claim(folder)
    torch.manual_seed(s.seed)
    results = _main_job(folder, s)
    write_results(folder, results)
    _show(results)
    return results


def _main_job(folder: Path, s: GpuDemoSettings) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    checkpoint = folder / "model"

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

    def batches(seed: int) -> Iterable[Batch]:
        return PackedBatches(training, seq_len=s.seq_len, batch_size=s.batch_size, seed=seed)

    def held_out() -> Iterable[Batch]:
        return PackedBatches(validation, seq_len=s.seq_len, batch_size=s.batch_size, epochs=1)

    with stage("training", "a Llama, trained from scratch in bfloat16", seconds, STAGES) as update:
        (checkpoint / "config.json").write_text(json.dumps(_config(s, end)))
        model = lm.from_config(checkpoint, dtype=torch.bfloat16, device=s.device)
        rates = [(model.parameters(), s.learning_rate)]
        learn(model, rates, batches(s.seed), s.steps, update, weight_decay=0.1, rounding="stochastic")
        loss = evaluate(model, held_out())
        model.save_pretrained(checkpoint, overwrite=True)
        size = sum(parameter.numel() for parameter in model.parameters())
        say(f"  {size / 1e6:.0f} M parameters; loss {loss:.3f} on held-out text, perplexity {exp(loss):.1f}")

    with stage("heads", "Medusa heads on the frozen model (stage 1)", seconds, STAGES) as update:
        medusa = MedusaModel.from_base(model, num_heads=s.num_heads)
        rates = [(medusa.head_parameters(), s.head_learning_rate)]
        learn(medusa, rates, batches(s.seed + 1), s.head_steps, update, rounding="stochastic")
        medusa.export(folder / "medusa", profile="vllm", overwrite=True)

    with stage("joint", "the model and the heads together (stage 2)", seconds, STAGES) as update:
        joint = copy.deepcopy(medusa)
        rates = [(joint.base.parameters(), s.joint_learning_rate), (joint.head_parameters(), 4 * s.joint_learning_rate)]
        options: dict[str, Any] = {"loss_options": lambda step: {WEIGHT_ARGUMENT: s.joint_heads_loss_weight}}
        whole = JointMedusa(joint, model)
        learn(whole, rates, batches(s.seed + 2), s.joint_steps, update, rounding="stochastic", **options)
        joint.export(folder / "joint", profile="full-hf", overwrite=True)

    with stage("decoding", "decoding with the heads and without", seconds, STAGES):
        prompts = equally_spaced(validation.documents, s.prompts, s.prompt_tokens)
        measured = [
            {"stage": number, **found}
            for number, heads in ((1, medusa), (2, joint))
            for found in _measured(heads, prompts, s)
        ]
    text = sample(medusa, lm.Tokenizer.from_pretrained(checkpoint), prompts[-1])
    accuracy = {name: evaluate_heads(each, held_out()).accuracy(1).tolist() for name, each in _named(medusa, joint)}
    return {
        "settings": asdict(s),
        "seconds": seconds,
        "parameters": size,
        "tokens": counts[0],
        "loss": {"model": loss, "stage 2": evaluate(joint.base, held_out())},
        "accuracy": accuracy,
        "decoding": measured,
        "sample": text,
    }


def _named(medusa: MedusaModel, joint: MedusaModel) -> list[tuple[str, MedusaModel]]:
    return [("stage 1", medusa), ("stage 2", joint)]


def _first_bytes(texts: Iterable[str], limit: int) -> Iterable[str]:
    """The first of `texts`, up to `limit` characters in all."""
    for text in texts:
        limit -= len(text)
        if limit < 0:
            return
        yield text


def _measured(model: MedusaModel, prompts: Sequence[Sequence[int]], s: GpuDemoSettings) -> list[dict[str, Any]]:
    """For each batch size, greedy and typical: the tree that is fastest on one half of the prompts, on the other."""
    fit, held_out = prompts[::2], prompts[1::2]
    hits = evaluate_continuations(model, fit, max_new_tokens=s.new_tokens).scores.hits
    trees = {size: grow(hits, size) for size in s.tree_sizes}
    found = []
    for batch in s.batch_sizes:
        plain, sequences = _plain(model, held_out, batch, s)
        for kind, options in (("greedy", {}), ("typical", {"temperature": s.temperature})):
            best = min(trees, key=lambda size: _speculative(model, fit, batch, trees[size], s, options)["seconds"])
            record = _speculative(model, held_out, batch, trees[best], s, options)
            same = sum(torch.equal(a, b) for a, b in zip(sequences, record.pop("sequences"), strict=True))
            found.append(
                {
                    "batch": batch,
                    "acceptance": kind,
                    "tree": best,
                    "plain_seconds": plain,
                    **record,
                    "speed_up": plain / record["seconds"],
                    "prompts": len(sequences),
                    "same": same,
                }
            )
    return found


def _plain(
    model: MedusaModel, prompts: Sequence[Sequence[int]], batch: int, s: GpuDemoSettings
) -> tuple[float, list[torch.Tensor]]:
    """Seconds of greedy decoding without heads, after a warm-up, and the sequences."""
    options: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0, **NO_END}
    model.base.generate(prompts[:batch], 4, **options)
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
    model.generate(prompts[:batch], 4, **options)
    start, sequences, steps, tokens = _now(s), list[torch.Tensor](), 0, 0
    for first in range(0, len(prompts), batch):
        out = model.generate(prompts[first : first + batch], s.new_tokens, **options)
        sequences += out.sequences.cpu()
        steps, tokens = steps + out.steps, tokens + out.new_tokens
    seconds = _now(s) - start
    return {"seconds": seconds, "tokens_per_step": (tokens - len(prompts)) / steps, "sequences": sequences}


def _now(s: GpuDemoSettings) -> float:
    """Seconds, once the device has nothing left to do."""
    if s.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def _config(s: GpuDemoSettings, end: int | None) -> dict[str, Any]:
    """A Hugging Face config of a Llama with two query heads to a key/value head, and tied embeddings."""
    heads = s.hidden_size // s.head_dim
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "intermediate_size": 8 * s.hidden_size // 3,
        "num_hidden_layers": s.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": s.head_dim,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end,
        "torch_dtype": "bfloat16",
    }


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
