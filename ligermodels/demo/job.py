"""From a tokenizer to exports: the steps of the demo, and the checks on what comes out."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import exp
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Optimizer

import ligermodels as lm
from ligermodels.console import Update, say
from ligermodels.demo.corpus import END, python_sources, train_tokenizer
from ligermodels.demo.report import claim, reported, show, stage, write_results
from ligermodels.errors import LigerModelsError
from ligermodels.training import (
    Batch,
    Joint,
    Rows,
    adamw,
    batches,
    encode,
    evaluate,
    evaluate_drift,
    evaluate_heads,
    hold_out,
    pack,
    read_documents,
    train,
    trial,
    warmup_cosine,
)
from ligermodels.training.loop import Trainable
from ligermodels.training.optimizer import optimizer_named, parameter_groups

TOP_K = (1, 5)


@dataclass(frozen=True)
class DemoSettings:
    """Sizes of the demo. Those given need about four minutes."""

    seed: int = 0
    corpus_bytes: int = 8_000_000
    held_out: float = 0.06
    held_out_tokens: int = 4096
    """At most so many of a held-out file are scored."""
    vocab_size: int = 512
    hidden_size: int = 128
    layers: int = 2
    length: int = 256
    rows_per_batch: int = 4
    steps: int = 1600
    learning_rate: float = 4e-3
    heads: int = 4
    head_steps: int = 500
    head_learning_rate: float = 3e-3
    joint_steps: int = 150
    joint_learning_rate: float = 1e-3
    """Of the model; the heads learn four times as fast."""
    joint_lambda0: float = 0.2
    """What the heads' loss counts beside KL(untouched model || model)."""
    tree_nodes: int = 24
    prompts: int = 384
    """Half of them to grow the tree and predict from, half to measure: with few, luck moves tokens a step by more than
    5 %."""
    prompt_tokens: int = 48
    new_tokens: int = 24
    tokens_per_step: float = 1.5
    """Below this the demo fails."""
    is_trained: bool = True
    """Whether these sizes let the heads learn enough to be held to it."""


def run_demo(output: str | os.PathLike[str] = "demo-output", settings: DemoSettings | None = None) -> dict[str, Any]:
    """Do the main job on Python's own sources, show how it goes, and check it.

    Args:
        output: folder for what is made: `model` (a Hugging Face checkpoint), `exported` (the same, loaded and written
            again), `medusa` (the heads, in vLLM's format), `joint` (model and heads of stage 2) and demo.json. The
            folder of an earlier demo is replaced.
        settings: sizes, and the seed that decides every random choice.

    Returns the results, as in demo.json.
    Raises CheckpointError when `output` holds something else, and LigerModelsError when a check fails: the tokens with
    Medusa are not those without, too few of them a step or not as many as other prompts let expect; the exported
    checkpoint is not the loaded one; accuracies do not fall from head to head; head 0 is not right 3 times, or another
    not 1.5 times, as often as the most frequent token, or one not a tenth more often than the best guess from the
    current token alone; or stage 2 does not better head 0 by more than as many further steps of stage 1, or makes the
    model more than a hundredth worse.
    """
    folder, settings = Path(output), settings or DemoSettings()
    claim(folder)
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(settings.seed)
        results = _main_job(folder, settings)
    write_results(folder, results)
    show(folder, results)
    if failed := [check for check, passed in results["checks"].items() if not passed]:
        raise LigerModelsError(f"the demo failed: it is not so that {'; nor that '.join(failed)}")
    return results


def _learn(
    model: Trainable,
    optimizer: Optimizer,
    data: Iterable[Batch],
    steps: int,
    update: Update,
    *,
    warmup: int = 20,
    **options: Any,
) -> None:
    """Train for `steps`, the first of every `warmup` of which the learning rate rises."""
    train(
        model,
        data,
        steps=steps,
        optimizer=optimizer,
        schedule=warmup_cosine(optimizer, steps, warmup=steps // warmup),
        on_step=reported(update),
        report_every=max(1, steps // 20),
        **options,
    )


def _main_job(folder: Path, s: DemoSettings) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    checkpoint = folder / "model"

    with stage("tokenizer", "a tokenizer, trained on Python's standard library", seconds):
        files, held = hold_out(python_sources(s.corpus_bytes), s.held_out, seed=s.seed)
        tokenizer = train_tokenizer(files, s.vocab_size, checkpoint)
        end = tokenizer.backend.token_to_id(END)
        rows = pack(encode(read_documents(files), tokenizer, eos_token_id=end), s.length)
        held_documents = list(encode(read_documents(held), tokenizer, eos_token_id=end))
        held_rows = pack((document[: s.held_out_tokens] for document in held_documents), s.length)
        say(
            f"  {len(files)} files, {len(rows.tokens):,} tokens; held out: {len(held)} files, {len(held_rows.tokens):,}"
        )

    with stage("training", "a Llama, trained from scratch", seconds) as update:
        (checkpoint / "config.json").write_text(json.dumps(llama_config(s, end)))
        trained = lm.from_config(checkpoint)
        optimizer = adamw(trained.parameters(), s.learning_rate)
        _learn(trained, optimizer, batches(rows, s.rows_per_batch, seed=s.seed), s.steps, update)

    with stage("checkpoint", "a Hugging Face checkpoint, written and loaded", seconds):
        trained.save_pretrained(checkpoint, overwrite=True)
        model = lm.from_pretrained(checkpoint)
        loss = evaluate(model, batches(held_rows, s.rows_per_batch, epochs=1))
        say(f"  loss on held-out text {loss:.3f}, perplexity {exp(loss):.1f} (untrained: {s.vocab_size})")

    with stage("heads", "Medusa heads, trained on the frozen model", seconds) as update:
        medusa = lm.MedusaModel.from_base(model, num_heads=s.heads)
        optimizer = adamw(medusa.head_parameters(), s.head_learning_rate, weight_decay=0.0)
        _learn(medusa, optimizer, batches(rows, s.rows_per_batch, seed=s.seed + 1), s.head_steps, update)
        scores = evaluate_heads(medusa, batches(held_rows, s.rows_per_batch, epochs=1))

    with stage("longer", "as many more steps of stage 1 as stage 2 has, to compare with", seconds) as update:
        longer = copy.deepcopy(medusa)
        optimizer = adamw(longer.head_parameters(), s.head_learning_rate, weight_decay=0.0)
        data = batches(rows, s.rows_per_batch, seed=s.seed + 2)
        _learn(longer, optimizer, data, s.joint_steps, update, warmup=10)
        longer_scores = evaluate_heads(longer, batches(held_rows, s.rows_per_batch, epochs=1))

    with stage("joint", "stage 2: the model and the heads, trained together", seconds) as update:
        joint = copy.deepcopy(medusa)
        together = Joint(joint, model)
        rates = [(joint.base.parameters(), s.joint_learning_rate), (joint.head_parameters(), 4 * s.joint_learning_rate)]
        two_rates = optimizer_named("adamw", parameter_groups(rates, 0.0), betas=(0.9, 0.95))
        data = batches(rows, s.rows_per_batch, seed=s.seed + 2)
        scale = {"heads_scale": s.joint_lambda0}
        _learn(together, two_rates, data, s.joint_steps, update, warmup=10, loss_options=lambda step: scale)
        joint_scores = evaluate_heads(joint, batches(held_rows, s.rows_per_batch, epochs=1))
        drift = evaluate_drift(joint.base, model, batches(held_rows, s.rows_per_batch, epochs=1))

    with stage("decoding", "text, with the heads of stage 1 and without", seconds) as update:
        decoded = trial(
            medusa, _prompts(held_documents, s), nodes=s.tree_nodes, max_new_tokens=s.new_tokens, progress=update
        )

    with stage("export", "exports, for Hugging Face and for vLLM", seconds):
        medusa.base.save_pretrained(folder / "exported", overwrite=True)
        medusa.export(folder / "medusa", profile="vllm", overwrite=True)
        joint.export(folder / "joint", profile="full-hf", overwrite=True)
        written, again = (load_file(folder / name / "model.safetensors") for name in ("model", "exported"))

    accuracy, raced = scores.accuracy(1).tolist(), decoded.race
    frequent = {f"top-{k}": frequency_baseline(rows, held_rows, k) for k in TOP_K}
    following = {f"top-{k}": [follower_baseline(rows, held_rows, i + 2, k) for i in range(s.heads)] for k in TOP_K}
    gain, control = (float(each.accuracy(1)[0]) for each in (joint_scores, longer_scores))
    learned = {
        "tokens a step are within 5 % of what was predicted from other prompts": (
            abs(raced.tokens_per_step / decoded.predicted - 1) <= 0.05
        ),
        "accuracy falls from head to head": all(a > b for a, b in pairwise(accuracy)),
        "head 0 is right more than 3 times as often as the most frequent token, the others more than 1.5 times": (
            accuracy[0] > 3 * frequent["top-1"] and min(accuracy) > 1.5 * frequent["top-1"]
        ),
        "each head is right a tenth more often than the best guess from the current token alone": all(
            head > 1.1 * guess for head, guess in zip(accuracy, following["top-1"], strict=True)
        ),
        "stage 2 betters head 0, and by more than as many further steps of stage 1": gain > max(control, accuracy[0]),
        "stage 2 costs the model no more than 1 % of its perplexity": drift.perplexity_change <= 0.01,
    }
    return {
        "settings": asdict(s),
        "seconds": seconds,
        "loss": loss,
        "accuracy": {f"top-{k}": scores.accuracy(k).tolist() for k in TOP_K},
        "baseline": frequent,
        "follower_baseline": following,
        "longer": {f"top-{k}": longer_scores.accuracy(k).tolist() for k in TOP_K},
        "joint": {
            **{f"top-{k}": joint_scores.accuracy(k).tolist() for k in TOP_K},
            "perplexity_change": drift.perplexity_change,
            "kl": drift.kl,
        },
        "decoding": {
            **asdict(raced),
            "predicted_tokens_per_step": decoded.predicted,
            "expected_tokens_per_step": decoded.expected,
        },
        "checks": {
            "decoding with the heads gives the same tokens": raced.same == raced.prompts,
            f"it gives more than {s.tokens_per_step} tokens a step": raced.tokens_per_step > s.tokens_per_step,
            "the exported checkpoint is the one loaded, to the bit": written.keys() == again.keys()
            and all(torch.equal(tensor, again[name]) for name, tensor in written.items()),
            **(learned if s.is_trained else {}),
        },
    }


def _prompts(documents: list[list[int]], s: DemoSettings) -> list[list[int]]:
    """Pieces of the documents, from places that are equally far apart."""
    texts = [document[: s.held_out_tokens] for document in documents]
    starts = [(text, at) for text in texts for at in range(len(text) - s.prompt_tokens)]
    apart = max(1, len(starts) // s.prompts)
    return [text[at : at + s.prompt_tokens] for text, at in starts[::apart][: s.prompts]]


def llama_config(s: DemoSettings, end: int | None) -> dict[str, Any]:
    """A Hugging Face config of a small Llama: two query heads to a key/value head, tied embeddings."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "intermediate_size": 8 * s.hidden_size // 3,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.hidden_size // 32,
        "num_key_value_heads": s.hidden_size // 64,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.06,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end,
        "torch_dtype": "float32",
    }


def frequency_baseline(rows: Rows, held_rows: Rows, k: int) -> float:
    """Top-k accuracy on `held_rows` of always guessing the k most frequent tokens of `rows`."""
    frequent = rows.tokens.bincount().topk(k).indices
    return float(torch.isin(held_rows.tokens, frequent).double().mean())


def follower_baseline(rows: Rows, held_rows: Rows, ahead: int, k: int) -> float:
    """Top-k accuracy on `held_rows` of guessing, of the token `ahead` of another, those that in `rows` most often stand
    so far after the same token: what can be known without reading on from it."""
    size = 1 + int(max(rows.tokens.max(), held_rows.tokens.max()))
    (first, last), (held_first, held_last) = (_pairs(each, ahead) for each in (rows, held_rows))
    table = torch.bincount(first * size + last, minlength=size * size).view(size, size)
    best = table.argsort(descending=True, stable=True)[:, :k][held_first]
    return float((best == held_last[:, None]).any(1).double().mean())


def _pairs(rows: Rows, ahead: int) -> tuple[Tensor, Tensor]:
    """Tokens, long (N,), and those `ahead` of them in the same piece, which is what a head is asked for."""
    piece = torch.zeros(len(rows.tokens), dtype=torch.long)
    piece[rows.starts] = 1
    piece, tokens = piece.cumsum(0), rows.tokens.long()
    together = piece[:-ahead] == piece[ahead:]
    return tokens[:-ahead][together], tokens[ahead:][together]


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch on one thread: matrices this small gain little from more, which on a busy machine wait for one another (ten
    times slower, when measured), and sums keep one order on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
